"""Sampling the coordinator once a period, on a thread; the data for the page, and the metrics in Prometheus's form."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import accumulate
from typing import Any, TypeAlias, cast

from msgspec import UNSET, Struct
from msgspec.structs import replace
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ipcsync import AttachmentInfo, BridgeInfo, IpcSyncError, SessionInfo
from ipcsync._board.layout import REASONS
from ipcsync._logs import fields
from ipcsync._rates import Event, Tracks
from ipcsync._session.handshake import Reader
from ipcsync.typing import CoordinatorStats

log = logging.getLogger("ipcsync.observer")

READY_S = 1.0  # within which a coordinator that is ready answers
_BRIDGE_S = 0.25  # within which a bridge answers
_LANE_S = 60.0
_ROWS = 300  # events, and sessions, in one answer; the rest is counted
_LINKS = 2000
_NO_SAMPLE = "no sample was taken yet"


class State(Struct, frozen=True):
    """What the page shows, `at` seconds after the observer began.

    While `ready` is false, `problem` says why, and the other fields are of the last answers; before the first of a
    coordinator, `stats` and the lists are empty. `bridge` is null if there is none, or it did not answer.
    """

    at: float
    problem: str
    ready: bool
    period_s: float
    endpoint: str
    epoch: str
    stats: CoordinatorStats
    sessions: list[SessionInfo]
    sessions_total: int
    events: list[Event]
    events_found: int
    events_total: int
    links: list[AttachmentInfo]
    bridge: BridgeInfo | None


class Sampler(Collector):
    """A thread that takes a sample every `period_s` seconds, of whichever coordinator serves then: `latest`.

    Ready if every answer came within a second. `connects` counts those with other events and sessions than before.
    """

    def __init__(self, endpoint: str, period_s: float = 1.0) -> None:
        self._reader = Reader(endpoint, READY_S)
        self.period_s = period_s
        self._began = time.monotonic()
        self._tracks = Tracks(max(2, min(240, round(_LANE_S / period_s))))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ipcsync-observer", daemon=True)
        stats = cast("CoordinatorStats", {})
        self.latest = State(0.0, _NO_SAMPLE, False, period_s, "", "", stats, [], 0, [], 0, 0, [], None)
        self.connects = 0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop, within a few seconds also if the coordinator does not answer."""
        self._stop.set()
        self._thread.join()
        self._reader.close()

    def state(self, contains: str = "", *, with_lanes: bool = True) -> State:
        """All data of the page.

        If more than 300 events have `contains` in their names (in any case), the broken, stuck and busiest ones.
        """
        latest = self.latest
        wanted = contains.casefold()
        events = [row for row in latest.events if wanted in row.name.casefold()]
        found = len(events) if wanted else latest.events_total
        if found > _ROWS:
            events.sort(key=lambda row: (row.state != "broken", -row.pending_s, -(row.rate or 0.0), row.name))
            del events[_ROWS:]
        places = {(row.slot, row.incarnation) for row in events}
        return replace(
            latest,
            sessions=latest.sessions[:_ROWS],
            events=events if with_lanes else [replace(row, lane=UNSET) for row in events],
            events_found=found,
            links=[link for link in latest.links if (link.slot, link.incarnation) in places],
        )

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._take()
            except IpcSyncError as error:
                self._fail(str(error))
            except Exception as error:  # the next sample may succeed; the page and /healthz show the failure
                log.exception("sample failed")
                self._fail(f"{type(error).__name__}: {error}")
            self._stop.wait(self.period_s)

    def _take(self) -> None:
        reader = self._reader
        stats = reader.stats()
        epoch = stats["epoch"]
        infos = reader.list_events()
        now = time.monotonic() - self._began
        sessions, links = reader.list_sessions(), reader.list_attachments(_LINKS)
        events = self._tracks.see(epoch, infos, now)
        bridge = None
        with suppress(IpcSyncError):  # there is none, or it does not answer; no other figure depends on it
            bridge = reader.bridge(_BRIDGE_S)
        if epoch != self.latest.epoch:
            self.connects += 1
            log.info("connected", extra=fields(endpoint=reader.endpoint, epoch=epoch[:8], version=stats["version"]))
        self.latest = replace(
            self.latest,
            at=round(now, 2),
            problem="",
            ready=True,
            endpoint=reader.endpoint,
            epoch=epoch,
            stats=stats,
            sessions=sessions,
            sessions_total=stats["sessions"],
            events=events,
            events_total=sum(sum(states.values()) for states in stats["states"].values()),
            links=links,
            bridge=bridge,
        )

    def _fail(self, problem: str) -> None:
        if self.latest.problem in ("", _NO_SAMPLE):
            log.warning("coordinator not ready", extra=fields(why=problem))
        self.latest = replace(self.latest, problem=problem, ready=False)

    def collect(self) -> Iterator[Metric]:
        """The metrics of the last sample. While there is no coordinator, only its own: old values mislead."""
        state = self.latest
        yield _gauge("up", "Whether the coordinator answers within a second.", state.ready)
        yield _counter("observer_connects", "Coordinators of which the observer took a sample.", self.connects)
        if state.ready:
            yield from _coordinator(cast("dict[str, Any]", state.stats))
            yield from _bridge(state.bridge)


# --- the metrics ------------------------------------------------------------------------------------------------------


GAUGES = {
    "sessions": ("sessions", "Live sessions."),
    "max_sessions": ("max_sessions", "The most sessions there may be."),
    "pool_size": ("pool_size", "The most shared events there may be."),
    "pool_in_use": ("pool_in_use", "Shared events in use, those in quarantine included."),
    "pool_high_water": ("pool_high_water", "The most shared events that were in use at once."),
    "cuda_events": ("cuda_events", "CUDA events that the coordinator holds."),
    "quarantined": ("quarantined", "Slots in quarantine: not released yet by every session that used them."),
    "quarantine_oldest_seconds": ("quarantine_oldest_s", "Age of the oldest slot in quarantine; 0 if there is none."),
    "oldest_lease_seconds": ("oldest_lease_s", "Age of the oldest session's lease."),
    "attachments": ("attachments", "Uses of shared events by sessions, those whose work is still in flight included."),
    "feed_number": ("feed_number", "Number of the feed's last announcement."),
    "uptime_seconds": ("uptime_s", "Seconds since the coordinator started, or its keeper."),
    "starts": ("starts", "Coordinators that have served the same events; above 1 only with a keeper."),
    "start_seconds": ("start_s", "Seconds since the last of them began to serve."),
    "pause_seconds": ("pause_s", "Seconds for which none served before it; 0 for the first."),
}
"""Name of the metric, after `ipcsync_`: key in `Client.stats()`, and its description."""

Values: TypeAlias = float | Mapping[Any, float]
"""One value, or one for each value of the label, or of the labels."""

BRIDGE_COUNTS = {
    "remote_requests": "Requests of sessions about other nodes.",
    "news_sent": "News sent to other nodes.",
    "rows_sent": "States of events in them.",
    "conflated": "States that were replaced by newer ones before they were sent.",
    "news_received": "News of other nodes.",
    "acks": "News of other nodes acknowledged.",
    "resyncs": "Times all that is mirrored of a node was asked for, because news may have been missed.",
    "pings": "Pings sent to other nodes.",
    "pings_lost": "Pings that were not answered.",
    "invalid_messages": "Messages that no bridge sends.",
    "store_failures": "Times the store of names did not answer, or refused.",
    "names_lost": "Names of the fleet that another node has by now, though their events are open here.",
    "handovers": "Upgrades of the bridge since it was started.",
}
"""Name of a bridge's counter, after `ipcsync_bridge_`, and in `BridgeInfo.counts`: what it means."""


def _coordinator(stats: dict[str, Any]) -> Iterator[Metric]:
    what = {(stats["version"], stats["driver"]): 1.0}
    yield _gauge("info", "1; the labels say what serves.", what, "version", "driver")
    for name, (key, text) in GAUGES.items():
        yield _gauge(name, text, stats[key])
    text = "Words (timeline) and CUDA events (event) of dead recorders that their GPU work may still touch."
    yield _gauge("kept", text, stats["kept"], "engine")
    text = "From how many of them on new events of that engine are refused."
    yield _gauge("kept_limit", text, stats["kept_limit"], "engine")
    memory = {"coordinator": stats["memory_bytes"]}
    if stats["pid"] != stats["keeper_pid"]:
        memory["keeper"] = stats["keeper_memory_bytes"]
    yield _gauge("memory_bytes", "Memory in RAM, by process.", memory, "process")
    text = "Coordinators that followed another: it died, hung and was killed, or was reloaded."
    yield _counter("restarts", text, stats["restarts"], "reason")
    text = "Requests by operation, and by result: ok, late, or the error's name."
    requests = {(op, result): count for op, results in stats["results"].items() for result, count in results.items()}
    yield _counter("requests", text, requests, "op", "result")
    yield _counter("refusals", "Refusals, by reason.", stats["refusals"], "reason")
    text = "Sessions lost: seen by the process's death, or by its silence."
    yield _counter("deaths", text, stats["deaths"], "how")
    yield _counter("resyncs", "Snapshots asked for again, because of a gap in the feed.", stats["resyncs"])
    events = {(engine, name): count for engine, found in stats["states"].items() for name, count in found.items()}
    yield _gauge("events", "Shared events, by engine and state.", events, "engine", "state")
    latency = stats["latency"]
    text = "Time from a request's arrival to its reply, inside of the coordinator."
    bounds = [*(str(float(bound)) for bound in latency["bounds_s"]), "+Inf"]
    buckets = list(zip(bounds, accumulate(latency["counts"]), strict=True))
    yield HistogramMetricFamily("ipcsync_request_seconds", text, buckets, latency["sum_s"])


def _bridge(bridge: BridgeInfo | None) -> Iterator[Metric]:
    text = "Whether a bridge to other nodes answers within a quarter of a second."
    yield _gauge("bridge_up", text, bridge is not None)
    if bridge is None:
        return
    yield _gauge("bridge_connected", "Whether it is connected to a NATS server.", bool(bridge.server))
    text = "Events that are waited for on another node than their own."
    yield _gauge("bridge_links", text, {"mirrored": bridge.mirrors, "exported": bridge.exports}, "direction")
    nodes = {state: sum(peer.state == state for peer in bridge.peers) for state in ("linked", "lost")}
    yield _gauge("bridge_nodes", "Other nodes that it speaks with, by state.", nodes, "state")
    for name, text in BRIDGE_COUNTS.items():
        yield _counter(f"bridge_{name}", text, bridge.counts.get(name, 0))
    lost = {reason: bridge.nodes_lost.get(reason, 0) for reason in filter(None, REASONS)}
    yield _counter("bridge_nodes_lost", "Nodes that were lost, and why.", lost, "reason")
    text = "What sessions asked of other nodes and did not get, by error."
    yield _counter("bridge_refusals", text, bridge.refusals, "error")


def _gauge(name: str, text: str, values: Values, *labels: str) -> Metric:
    return _filled(GaugeMetricFamily(f"ipcsync_{name}", text, labels=labels), values)


def _counter(name: str, text: str, values: Values, *labels: str) -> Metric:
    return _filled(CounterMetricFamily(f"ipcsync_{name}", text, labels=labels), values)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, values: Values) -> Metric:
    for key, value in values.items() if isinstance(values, Mapping) else [((), values)]:
        family.add_metric([key] if isinstance(key, str) else key, float(value))
    return family
