"""The observer as a service: what it serves, and what it survives."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest

import ipcsync
from ipcsync.testing import StreamGate
from ipcsync_observer.sampler import Sampler
from tests.faults import fixtures
from tests.kit.machine import Machine
from tests.kit.peer import Peer
from tests.kit.until import until
from tests.observer.healthy import assert_no_alert
from tests.observer.observing import DIRECT, PERIOD_S, Observer

pytestmark = [pytest.mark.own_coordinator, pytest.mark.process]

_kept: list[object] = []


def _row(state: Any, name: str) -> Any:
    (row,) = [row for row in state["events"] if row["name"] == name]
    return row


def _record_and_hold(endpoint: str, name: str) -> None:
    """In a peer: one record that completes, then one that does not."""
    client = ipcsync.connect(endpoint, name="holder")
    stream = ipcsync.Stream()
    event = client.event(name, recorder=True, engine="event")
    event.record(stream).synchronize(10)
    gate = StreamGate(stream)
    gate.__enter__()
    event.record(stream)
    _kept.extend([client, stream, event, gate])


def _let_go() -> None:
    gate = _kept[-1]
    assert isinstance(gate, StreamGate)
    gate.open()


# --- what it shows ----------------------------------------------------------------------------------------------------


def test_the_state_tells_who_records_who_waits_and_how_fast(
    observer: Observer, new_client: Callable[..., ipcsync.Client]
) -> None:
    recorder, waiter = new_client("prefill"), new_client("decode")
    stream = ipcsync.Stream()
    with recorder.event("kv/a", recorder=True) as event, waiter.event("kv/a"):

        def has_grown(state: Any) -> bool:
            event.record(stream).synchronize(10)
            return bool(state["events"]) and len({generation for _, generation, _ in _row(state, "kv/a")["lane"]}) > 4

        observer.until(has_grown, "several samples")
        state = observer.until(
            lambda state: state["events"] and _row(state, "kv/a")["completed"] == event.generation, "the last record"
        )
        row = _row(state, "kv/a")
        assert (row["state"], row["completed"], row["recorder"]) == ("open", event.generation, "prefill")
        assert row["attached"] == 2
        assert row["rate"] > 0
        generations = [generation for _, generation, _ in row["lane"]]
        assert len(generations) > 1
        assert generations == sorted(generations)
        links = {(link["session"], link["role"], link["event"], link["state"]) for link in state["links"]}
        assert links == {("prefill", "records", "kv/a", "active"), ("decode", "waits", "kv/a", "active")}
        assert sorted(session["name"] for session in state["sessions"]) == ["decode", "prefill"]  # not its own
    observer.until(lambda state: not state["events"], "the event is gone")


def test_work_that_does_not_complete_is_shown_with_its_age(
    observer: Observer, coordinator: ipcsync.Coordinator, peer: Peer
) -> None:
    peer.call(_record_and_hold, coordinator.endpoint, "stuck")
    state = observer.until(
        lambda state: state["events"] and _row(state, "stuck")["pending_s"] >= 3 * PERIOD_S, "it is pending"
    )
    assert (_row(state, "stuck")["generation"], _row(state, "stuck")["completed"]) == (2, 1)


def test_the_last_recorder_of_a_broken_event_is_told(
    observer: Observer, coordinator: ipcsync.Coordinator, client: ipcsync.Client, peer: Peer
) -> None:
    peer.call(_record_and_hold, coordinator.endpoint, "lost")
    with client.event("lost"):
        observer.until(lambda state: state["events"] and _row(state, "lost")["generation"] == 2, "both records")
        peer.kill()
        state = observer.until(lambda state: _row(state, "lost")["state"] == "broken", "it is broken")
        row = _row(state, "lost")
        assert (row["recorder"], row["completed"], row["pending_s"]) == ("holder", 1, 0.0)
        # A look counts before it lists: the next one counts what this one listed.
        until(lambda: observer.metrics()["ipcsync_quarantined", ()] == 1, "it is counted")
        metrics = observer.metrics()
        assert metrics["ipcsync_quarantine_oldest_seconds", ()] >= 0
        assert metrics["ipcsync_deaths_total", ("pidfd",)] == 1


def test_unnamed_events_of_one_session_are_told_apart(observer: Observer, client: ipcsync.Client) -> None:
    streams = [ipcsync.Stream() for _ in range(3)]
    for count, stream in enumerate(streams, 1):
        for _ in range(count):
            client.record(stream)
    state = observer.until(
        lambda state: sorted(row["generation"] for row in state["events"]) == [1, 2, 3], "three events"
    )
    assert len({(row["slot"], row["incarnation"]) for row in state["events"]}) == 3


def test_who_closed_an_event_lingers_until_its_work_is_done(
    observer: Observer, coordinator: ipcsync.Coordinator, client: ipcsync.Client, peer: Peer
) -> None:
    peer.call(_record_and_hold, coordinator.endpoint, "held")
    stream = ipcsync.Stream()
    event = client.event("held")
    event.at(2).wait(stream)
    event.close()
    found = {
        (link["session"], link["role"], link["state"])
        for link in observer.until(
            lambda state: any(link["state"] == "draining" for link in state["links"]), "the wait lingers"
        )["links"]
    }
    assert found == {("holder", "records", "active"), ("main", "waits", "draining")}
    assert {(row.event, row.role, row.state) for row in client.list_attachments("he")} == {
        ("held", "records", "active"),
        ("held", "waits", "draining"),
    }
    assert len(client.list_attachments(limit=1)) == 1
    assert client.list_attachments("other") == []
    peer.call(_let_go)
    observer.until(lambda state: len(state["links"]) == 1, "its work is done")


def test_of_many_events_it_shows_those_asked_for_and_counts_the_rest(
    observer: Observer, client: ipcsync.Client
) -> None:
    events = [client.event(f"many/{number}", depth=1) for number in range(320)]
    state = observer.until(lambda state: state["events_total"] == len(events), "all are seen")
    assert (len(state["events"]), state["events_found"]) == (300, 320)
    state = observer.state("?contains=MANY/31")
    assert sorted(row["name"] for row in state["events"]) == sorted(["many/31", *(f"many/31{n}" for n in range(10))])
    assert {link["event"] for link in state["links"]} == {row["name"] for row in state["events"]}


def test_of_more_events_and_sessions_than_a_list_has_all_are_counted(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.events(["a", "b", "c"], recorder=True, engine="timeline")
    with ipcsync.connect(coordinator.endpoint):
        sampler = Sampler(coordinator.endpoint)
        for name in ("list_events", "list_sessions"):
            everything = getattr(sampler._reader, name)
            monkeypatch.setattr(sampler._reader, name, lambda all_=everything: all_()[:1])
        sampler._take()
        sampler._reader.close()
    state = sampler.state()
    assert (state.events_total, state.events_found, state.sessions_total) == (3, 3, 2)
    metrics = generate_latest(sampler).decode()
    assert 'ipcsync_events{engine="timeline",state="open"} 3.0' in metrics


# --- metrics ----------------------------------------------------------------------------------------------------------


def test_metrics_say_what_the_coordinator_counts(
    observer: Observer, coordinator: ipcsync.Coordinator, client: ipcsync.Client
) -> None:
    with client.event("a", recorder=True, engine="event"), client.event("b", engine="timeline"):
        observer.until(lambda state: state["events_total"] == 2, "both are seen")
        with pytest.raises(ipcsync.EngineMismatch):
            client.event("a", engine="timeline")
        state = observer.until(lambda state: state["stats"]["refusals"].get("EngineMismatch"), "the refusal is seen")
        metrics = observer.metrics()
        stats = client.stats()
    assert metrics["ipcsync_up", ()] == 1
    assert metrics["ipcsync_sessions", ()] == 1
    assert metrics["ipcsync_info", (ipcsync.driver_name(), ipcsync.__version__)] == 1
    assert metrics["ipcsync_attachments", ()] == 2
    assert metrics["ipcsync_events", ("event", "open")] == 1
    assert metrics["ipcsync_events", ("timeline", "open")] == 1
    assert metrics["ipcsync_pool_in_use", ()] == 2
    assert metrics["ipcsync_pool_high_water", ()] == 2
    assert metrics["ipcsync_pool_size", ()] == stats["pool_size"]
    assert metrics["ipcsync_requests_total", ("open", "ok")] == 2
    assert metrics["ipcsync_requests_total", ("open", "EngineMismatch")] == 1
    assert metrics["ipcsync_refusals_total", ("EngineMismatch",)] == 1
    assert metrics["ipcsync_deaths_total", ("ttl",)] == 0
    assert metrics["ipcsync_resyncs_total", ()] == 0
    assert metrics["ipcsync_feed_number", ()] == state["stats"]["feed_number"]
    assert 0 < metrics["ipcsync_oldest_lease_seconds", ()] <= metrics["ipcsync_uptime_seconds", ()]
    count = metrics["ipcsync_request_seconds_count", ()]
    assert metrics["ipcsync_request_seconds_bucket", ("+Inf",)] == count > 0
    assert metrics["ipcsync_request_seconds_sum", ()] > 0


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool not found (Debian: apt-get install prometheus)")
def test_no_alert_fires_on_a_healthy_coordinator(observer: Observer, client: ipcsync.Client, tmp_path: Path) -> None:
    with client.event("e", recorder=True) as event:
        event.record().synchronize(10)
        observer.until(lambda state: state["events"], "what there is, is seen: the rest goes on as between two looks")
        assert_no_alert(observer, tmp_path)
    refused = set(client.stats()["refusals"]) - {"late", "handshake"}  # of a machine that stood still
    assert not refused, "who only asks for a bridge is refused nothing"


# --- health, and the coordinator's life -------------------------------------------------------------------------------


def test_it_survives_the_coordinators_restart_and_says_so_meanwhile(
    new_coordinator: Callable[..., ipcsync.Coordinator], new_observer: Callable[..., Observer], tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    first = new_coordinator(runtime_dir=str(directory))
    one = new_observer("--endpoint", first.endpoint)
    epoch = one.until_ready()["epoch"]
    first.stop()
    state = one.until(lambda state: not state["ready"], "the loss is seen")
    assert state["problem"]
    assert one.get("/healthz")[0] == 200
    assert one.get("/healthz/ready")[0] == 503
    metrics = one.metrics()
    assert metrics == {("ipcsync_up", ()): 0.0, ("ipcsync_observer_connects_total", ()): 1.0}
    second = new_coordinator(runtime_dir=str(directory))
    assert second.endpoint == first.endpoint
    state = one.until_ready()
    assert state["epoch"] != epoch
    assert one.get("/healthz/ready")[0] == 200
    assert one.metrics()["ipcsync_observer_connects_total", ()] == 2


def test_a_coordinator_that_does_not_answer_is_not_ready_and_then_is_again(
    observer: Observer, coordinator: ipcsync.Coordinator
) -> None:
    assert json.loads(observer.get("/healthz")[1]) == {"live": True, "ready": True, "problem": ""}
    fixtures.stop(coordinator.pid)
    try:
        observer.until(lambda state: not state["ready"], "the silence is seen")
        health = json.loads(observer.get("/healthz")[1])
        assert health["live"]
        assert not health["ready"]
        assert health["problem"]
    finally:
        fixtures.resume(coordinator.pid)
    observer.until_ready()


def test_it_starts_before_any_coordinator(new_observer: Callable[..., Observer], tmp_path: Path) -> None:
    one = new_observer("--endpoint", f"ipc://{tmp_path}/nobody.sock")
    state = one.until(lambda state: "no coordinator at" in state["problem"], "nobody is there")
    assert not state["ready"]
    assert one.log.read_text().count('event="coordinator not ready"') == 1
    assert one.stop() == 0


def test_sigterm_ends_it_with_an_open_page_and_leaves_no_session(
    observer: Observer, client: ipcsync.Client, machine: Machine
) -> None:
    with DIRECT.open(f"{observer.url}/api/stream", timeout=10) as stream:
        assert any(json.loads(line.removeprefix(b"data: "))["ready"] for line in stream if line != b"\n")
        began = time.monotonic()
        assert observer.stop() == 0
        assert time.monotonic() - began < machine.limit(5, began)
    assert [session.name for session in client.list_sessions()] == ["main"]
    assert client.stats()["deaths"] == {"pidfd": 0, "ttl": 0}
    assert "event=stopped" in observer.log.read_text()


def test_the_stream_sends_lanes_once(observer: Observer, client: ipcsync.Client) -> None:
    with client.event("e"):
        observer.until(lambda state: state["events"], "the event is seen")
        with DIRECT.open(f"{observer.url}/api/stream", timeout=10) as stream:
            first = json.loads(stream.readline().removeprefix(b"data: "))
            assert stream.readline() == b"\n"
            second = json.loads(stream.readline().removeprefix(b"data: "))
    assert first["events"][0]["lane"]
    assert "lane" not in second["events"][0]
