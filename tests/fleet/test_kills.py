"""Bridges and servers that are killed again and again under load."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import ipcsync
from tests.fleet.cluster import Cluster
from tests.fleet.cluster import leader as leader_of
from tests.fleet.nodes import Node
from tests.kit.machine import Machine
from tests.kit.until import DEADLINE_S, until

pytestmark = [pytest.mark.process, pytest.mark.thorough]


def _recorded(client: ipcsync.Client, name: str) -> ipcsync.SharedEvent:
    return client.event(name, recorder=True, engine="timeline")


class Stream:
    """A thread on one node that records at a pace, and one on another that waits for each record in turn."""

    def __init__(self, recorder: ipcsync.Client, waiter: ipcsync.Client, pace_s: float) -> None:
        self.event = _recorded(recorder, "kv")
        self.seen = waiter.event("kv", node="a")
        self._pace_s = pace_s
        self._is_over, self._all_is_recorded = threading.Event(), threading.Event()
        self._began: dict[int, float] = {}
        self.recorded = self.waited = 0
        self.gaps: list[tuple[float, float]] = []
        """When each generation was seen, and how long after its record had begun."""
        self.problem: BaseException | None = None
        self._threads = [threading.Thread(target=self._guarded, args=(work,)) for work in (self._record, self._wait)]
        for thread in self._threads:
            thread.start()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - the test raises it
            self.problem = error

    def _record(self) -> None:
        stream = ipcsync.Stream()
        try:
            while not self._is_over.wait(self._pace_s):
                self._began[self.recorded + 1] = time.monotonic()
                self.recorded = self.event.record(stream).generation
        finally:
            self._all_is_recorded.set()

    def _wait(self) -> None:
        while not self._all_is_recorded.is_set() or self.waited < self.recorded:
            if self.waited == self.recorded:
                self._all_is_recorded.wait(self._pace_s)
                continue
            self.seen.at(self.waited + 1).synchronize(2 * DEADLINE_S)
            assert self.event.at(self.waited + 1).query(), "seen on the other node before it was complete"
            self.waited += 1
            now = time.monotonic()
            self.gaps.append((now, now - self._began.pop(self.waited)))

    def longest_gap(self, since: float) -> float:
        """Of all generations that were seen since then."""
        return max((gap for seen, gap in self.gaps if seen >= since), default=0.0)

    def end(self) -> None:
        """All that was recorded was waited for."""
        self._is_over.set()
        for thread in self._threads:
            thread.join()
        if self.problem is not None:
            raise self.problem
        assert self.waited == self.recorded
        assert self.seen.state == "open"


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("kills", "records"), [(3, 100), (20, 2_000)])
def test_bridge_restart_heals(patient_pair: tuple[Node, Node], kills: int, records: int) -> None:
    """No error on the waiting node, no generation missed, and none seen before it is complete."""
    a, b = (node.client() for node in patient_pair)
    load = Stream(a, b, 0.002)
    try:
        for _ in range(kills):
            patient_pair[0].end_bridge(signal.SIGKILL)
            patient_pair[0].start_bridge()
            wanted = load.recorded + 1
            until(lambda: load.problem or load.waited >= wanted, "news after the restart", 60)  # noqa: B023 - at once
        until(lambda: load.problem or load.recorded >= records, "the records", 120)
    finally:
        load.end()
    assert load.waited >= records


def _claims(client: ipcsync.Client, name: str) -> ipcsync.SharedEvent | None:
    try:
        return client.event(name, recorder=True, fleet=True, timeout=2.0)  # soon again: it is back once one succeeds
    except (ipcsync.FleetUnavailable, ipcsync.WaitTimeout, ipcsync.RecorderTaken):
        return None


def _elected(cluster: Cluster, killed: int) -> float:
    """When another server led the store of names, as another client sees it: 4 to 9 s, and again if votes split."""
    urls = [url for number, url in enumerate(cluster.urls) if number != killed]
    until(lambda: leader_of(urls) not in (-1, killed), "a leader in its place", 120)
    return time.monotonic()


@pytest.mark.alone  # an election and a retry have their times, which other tests' processes would stretch
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("kills", "period_s"), [(2, 0.0), (6, 10.0)])
def test_leader_kill_does_not_touch_links(cluster: Cluster, machine: Machine, kills: int, period_s: float) -> None:
    """Links hardly notice that the leader of the three servers is killed; names are back soon after an election."""
    with cluster.nodes("a", "b") as pair, ThreadPoolExecutor(1) as thread:
        a, b = (node.client() for node in pair)
        load = Stream(a, b, 0.01)
        try:
            until(lambda: load.problem or load.waited > 10, "the first records")
            for number in range(kills):
                leader = until(lambda: leader_of(cluster.urls) + 1, "a leader", 60) - 1
                began = time.monotonic()
                cluster.servers[leader].kill()
                elected = thread.submit(_elected, cluster, leader)
                claimed: Any = until(lambda: _claims(a, f"w{number}"), "names to be back", 60)  # noqa: B023 - at once
                back = time.monotonic()
                cluster.servers[leader].start()
                claimed.close()
                until(lambda: load.problem or time.monotonic() - began >= period_s, "the period")  # noqa: B023 - at once
                assert load.longest_gap(began) <= machine.bound(1.0, began)
                assert back <= elected.result() + machine.bound(6.0, began)
        finally:
            load.end()
