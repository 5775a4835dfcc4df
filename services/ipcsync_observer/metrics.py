"""The coordinator's figures, and those of the bridge beside it, in Prometheus's form."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any, TypeAlias, cast

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ipcsync import BridgeInfo
from ipcsync._board.layout import REASONS
from ipcsync_observer.sampler import Sampler, State

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


class CoordinatorCollector(Collector):
    """The metrics of the last sample. While there is no coordinator, only the observer's own: old values mislead."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def collect(self) -> Iterator[Metric]:
        state = self._sampler.latest
        yield _gauge("up", "Whether the coordinator answers within a second.", state.ready)
        yield _counter("observer_connects", "Times the observer connected to a coordinator.", self._sampler.connects)
        if state.ready:
            yield from _coordinator(state, cast("dict[str, Any]", state.stats))
            yield from _bridge(state.bridge)


def _coordinator(state: State, stats: dict[str, Any]) -> Iterator[Metric]:
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
    events = dict(sorted(Tally((row.engine, row.state) for row in state.events).items()))
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
