"""The figures in Prometheus's form, from one look: what there is, what its names mean, and nothing old."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import to_builtins
from msgspec.structs import asdict, replace
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

import ipcsync
from ipcsync import EventInfo
from ipcsync._rates import Tracks
from ipcsync._wire.messages import BridgeInfo, PeerInfo
from ipcsync_bridge.wire import Counters
from ipcsync_coordinator.questions import BOUNDS_S, Metrics
from ipcsync_observer import sampler as sampling
from ipcsync_observer.app import _dumped
from ipcsync_observer.sampler import Sampler


def _info(name: str = "e", generation: int = 0, completed: int = 0, **other: object) -> EventInfo:
    options = {"engine": "event", "state": "open", "attached": 1, "recorder": "r", "slot": 0, "incarnation": 1, **other}
    return EventInfo(name=name, device="gpu", generation=generation, completed=completed, **options)  # type: ignore[arg-type] # each is of its kind


@pytest.fixture
def counted() -> Metrics:
    """Three requests, one of them refused; two connections refused, and a death."""
    made = Metrics()
    made.refusals["uid"] += 2
    made.deaths["pidfd"] += 1
    made.resyncs += 1
    made.results["open"]["ok"] += 1
    made.results["open"]["RecorderTaken"] += 1
    made.results["stats"]["ok"] += 1
    for seconds in (1e-6, BOUNDS_S[0], 0.0009, 7.0):
        made.observe(seconds)
    return made


@pytest.fixture
def sampler(counted: Metrics) -> Sampler:
    """One that has seen a coordinator just now."""
    stats = {
        "version": "1.2", "driver": "cuda", "sessions": 3, "max_sessions": 9,
        "pool_size": 10, "pool_in_use": 2, "pool_high_water": 4, "cuda_events": 8, "quarantined": 1,
        "states": {"event": {"open": 2, "broken": 1}},
        "kept": {"timeline": 2, "event": 16}, "kept_limit": {"timeline": 5, "event": 100},
        "quarantine_oldest_s": 1.5, "oldest_lease_s": 60.5, "attachments": 5, "feed_number": 12, "uptime_s": 99.5,
        "starts": 2, "start_s": 0.25, "pause_s": 0.125, "restarts": {"died": 1, "hung": 0, "reloaded": 3},
        "pid": 8, "keeper_pid": 7, "memory_bytes": 40e6, "keeper_memory_bytes": 30e6,
        **counted.stats(),
    }  # fmt: skip
    made = Sampler("ipc:///nowhere")
    bridge = BridgeInfo(
        node="here", fleet="f", pid=9, server="nats://there:4222", mirrors=2, exports=1,
        peers=[PeerInfo("there", "linked")], counts={"remote_requests": 4},
        nodes_lost={"silent": 1}, refusals={"NodeLost": 3},
    )  # fmt: skip
    made.latest = replace(made.latest, at=1.0, problem="", ready=True, stats=stats, bridge=bridge)
    return made


def _samples(sampler: Sampler) -> dict[tuple[str, tuple[str, ...]], float]:
    text = generate_latest(sampler).decode()
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_every_gauge_is_there_with_its_value(sampler: Sampler) -> None:
    samples = _samples(sampler)
    for name, (key, _) in sampling.GAUGES.items():
        assert samples[f"ipcsync_{name}", ()] == to_builtins(sampler.latest.stats)[key], name
    assert samples["ipcsync_up", ()] == 1
    assert samples["ipcsync_info", ("cuda", "1.2")] == 1


def test_counters_have_their_labels(sampler: Sampler) -> None:
    samples = _samples(sampler)
    assert samples["ipcsync_requests_total", ("open", "ok")] == 1
    assert samples["ipcsync_requests_total", ("open", "RecorderTaken")] == 1
    assert samples["ipcsync_refusals_total", ("uid",)] == 2
    assert samples["ipcsync_deaths_total", ("pidfd",)] == 1
    assert (samples["ipcsync_kept", ("event",)], samples["ipcsync_kept_limit", ("timeline",)]) == (16, 5)
    assert samples["ipcsync_resyncs_total", ()] == 1
    assert samples["ipcsync_restarts_total", ("died",)] == 1
    assert samples["ipcsync_restarts_total", ("reloaded",)] == 3
    assert samples["ipcsync_events", ("event", "open")] == 2
    assert samples["ipcsync_events", ("event", "broken")] == 1


def test_memory_is_told_of_each_process_and_without_a_keeper_of_one(sampler: Sampler) -> None:
    samples = _samples(sampler)
    assert samples["ipcsync_memory_bytes", ("coordinator",)] == 40e6
    assert samples["ipcsync_memory_bytes", ("keeper",)] == 30e6
    sampler.latest.stats["keeper_pid"] = sampler.latest.stats["pid"]
    assert [key for key in _samples(sampler) if key[0] == "ipcsync_memory_bytes"] == [
        ("ipcsync_memory_bytes", ("coordinator",))
    ]


def test_the_bridge_is_told_of_only_while_it_answers(sampler: Sampler) -> None:
    samples = _samples(sampler)
    assert samples["ipcsync_bridge_up", ()] == 1
    assert samples["ipcsync_bridge_links", ("mirrored",)] == 2
    assert samples["ipcsync_bridge_remote_requests_total", ()] == 4
    assert samples["ipcsync_bridge_nodes_lost_total", ("silent",)] == 1
    assert samples["ipcsync_bridge_refusals_total", ("NodeLost",)] == 3
    sampler.latest = replace(sampler.latest, bridge=None)
    told = {key: value for key, value in _samples(sampler).items() if key[0].startswith("ipcsync_bridge")}
    assert told == {("ipcsync_bridge_up", ()): 0}


def test_the_page_gets_every_field_of_another_node_also_those_that_no_message_has(sampler: Sampler) -> None:
    (there,) = json.loads(_dumped(sampler.state()))["bridge"]["peers"]
    assert there == {**asdict(PeerInfo("there", "linked")), "mirrored": 0, "last_heard_s": None, "reason": ""}


def test_the_histograms_buckets_are_cumulative_and_hold_their_bound(sampler: Sampler) -> None:
    samples = _samples(sampler)
    buckets = [value for (name, _), value in samples.items() if name == "ipcsync_request_seconds_bucket"]
    assert buckets == sorted(buckets)
    assert samples["ipcsync_request_seconds_bucket", (str(BOUNDS_S[0]),)] == 2
    assert samples["ipcsync_request_seconds_bucket", ("0.001",)] == 3
    assert samples["ipcsync_request_seconds_bucket", ("1.0",)] == 3
    assert samples["ipcsync_request_seconds_bucket", ("+Inf",)] == samples["ipcsync_request_seconds_count", ()] == 4
    assert samples["ipcsync_request_seconds_sum", ()] == pytest.approx(7.000926)


def test_while_the_coordinator_is_not_ready_nothing_old_is_told(sampler: Sampler) -> None:
    sampler._fail("gone")
    assert (sampler.latest.problem, sampler.latest.ready) == ("gone", False)
    assert _samples(sampler) == {("ipcsync_up", ()): 0.0, ("ipcsync_observer_connects_total", ()): 0.0}


def test_every_metric_is_told_of_in_the_documentation(sampler: Sampler) -> None:
    text = (Path(__file__).parents[2] / "docs" / "observer.md").read_text()
    names = {re.sub(r"_(bucket|sum|count)$", "", name) for name, _ in _samples(sampler)}
    cells = re.findall(r"^\| (`ipcsync_[^|]+)\|", text, re.MULTILINE)  # the first of each row, with one name or several
    assert {name for cell in cells for name in re.findall(r"`(ipcsync_\w+)`", cell)} == names


@pytest.mark.process
@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool not found (Debian: apt-get install prometheus)")
def test_promtool_finds_nothing_to_say(sampler: Sampler) -> None:
    text = generate_latest(sampler)
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, timeout=30, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")


# --- what follows from several looks ----------------------------------------------------------------------------------


@pytest.fixture
def see() -> Callable[[EventInfo, float], tuple[float | None, float]]:
    """Takes in a look at one event, and gives its rate and for how long it is pending."""
    tracks = Tracks(8)

    def look(info: EventInfo, now: float) -> tuple[float | None, float]:
        (track,) = tracks.see("", [info], now)
        return track.rate, track.pending_s

    return look


Seen = Callable[[EventInfo, float], tuple[float | None, float]]


def test_a_rate_needs_two_looks_and_is_of_the_last_seconds(see: Seen) -> None:
    assert see(_info(generation=100, completed=100), 10.0)[0] is None
    assert see(_info(generation=110, completed=110), 11.0)[0] == 10.0
    for now in (14.0, 17.0, 20.0):
        rate, _ = see(_info(generation=110, completed=110), now)
    assert rate == 0.0
    assert see(_info(generation=112, completed=112), 30.0)[0] == 0.2  # looks further apart than that: the last two


def test_an_event_that_nobody_records_on_any_more_has_no_rate(see: Seen) -> None:
    for now in (10.0, 11.0):
        see(_info(generation=int(now), completed=1), now)
    assert see(_info(generation=12, completed=1), 12.0)[0] == 1.0
    assert see(_info(generation=12, completed=1, state="broken"), 12.5)[0] is None
    assert see(_info(generation=12, completed=1, state="closed"), 13.0)[0] is None


def test_work_is_pending_since_something_last_completed(see: Seen) -> None:
    assert see(_info(generation=1, completed=0), 10.0)[1] == 0.0
    assert see(_info(generation=2, completed=0), 13.0)[1] == 3.0
    assert see(_info(generation=3, completed=1), 14.0)[1] == 0.0
    assert see(_info(generation=3, completed=1), 16.0)[1] == 2.0
    assert see(_info(generation=3, completed=3), 17.0)[1] == 0.0
    assert see(_info(generation=4, completed=3), 18.0)[1] == 0.0
    assert see(_info(generation=4, completed=3, state="broken"), 30.0)[1] == 0.0  # nobody will complete it


def test_a_slots_next_use_begins_anew(see: Seen) -> None:
    see(_info(generation=50, completed=40), 10.0)
    assert see(_info(generation=1, completed=1, incarnation=2), 11.0) == (None, 0.0)


@pytest.mark.parametrize("refusal", [ipcsync.NoBridge("none"), ipcsync.QuotaExceeded("the answer is too large")])
def test_a_bridge_that_does_not_answer_takes_no_other_figure_away(
    sampler: Sampler, refusal: ipcsync.IpcSyncError, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_seconds: float) -> None:
        raise refusal

    rows: dict[str, Any] = dict.fromkeys(("list_events", "list_sessions", "list_attachments"), lambda *_: [])
    stats = {**sampler.latest.stats, "epoch": "e"}
    asked = SimpleNamespace(**rows, endpoint="ipc:///somewhere", stats=lambda: stats, bridge=refuse)
    monkeypatch.setattr(sampler, "_reader", asked)
    sampler._take()
    assert (sampler.latest.ready, sampler.latest.endpoint, sampler.latest.bridge) == (True, "ipc:///somewhere", None)


def test_the_page_shows_counts_that_a_bridge_has() -> None:
    script = (Path(sampling.__file__).parent / "static" / "app.js").read_text()
    shown = set(re.findall(r"\bcounts\.(\w+)", script))
    assert "news_sent" in shown
    assert shown <= Counters().counts().keys()
