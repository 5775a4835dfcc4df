"""Hosts that share nothing but a network: cuts, stops and deaths, each within its bound."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fleet import hosts
from tests.fleet.hosts import HUB, Host, Hub
from tests.fleet.nodes import Server
from tests.fleet.sides import learn
from tests.kit.machine import Machine
from tests.kit.until import DEADLINE_S, until

pytestmark = [pytest.mark.process, pytest.mark.thorough]

TTL_S, LEASE_S = 2.0, 5.0


@pytest.fixture
def hub() -> Iterator[Hub]:
    reason = hosts.why_not()
    if reason:
        pytest.skip(reason)
    one = Hub()
    yield one
    one.close()


@pytest.fixture
def server(hub: Hub, tmp_path: Path) -> Iterator[Server]:
    one = Server(tmp_path, prefix=hub.prefix, host=HUB)
    yield one
    one.kill()


@pytest.fixture
def new_host(hub: Hub, server: Server) -> Iterator[Callable[..., Host]]:
    made: list[Host] = []

    def start(node: str, *arguments: str, expects: bool = True) -> Host:
        host = Host(hub, len(made))
        made.append(host)
        host.begin(hosts.serve, host.directory, node, [server.url], "--link-ttl", str(TTL_S), *arguments)
        return host

    yield start
    for host in made:
        if host.status is None:
            host.heal()
        try:
            host.call(hosts.end)
        finally:
            host.close()


@pytest.fixture
def pair(new_host: Callable[..., Host]) -> tuple[Host, Host]:
    """Hosts `a` and `b`, of which b follows a's event kv, of which the first generation is complete there."""
    a, b = new_host("a"), new_host("b")
    for host in (a, b):
        host.result()
    a.call(hosts.record, "kv")
    b.call(hosts.follow, "kv", "a")
    assert b.call(hosts.outcome, "kv", "a", 1, DEADLINE_S)[0] == "complete"
    return a, b


def lost(host: Host, name: str = "kv") -> tuple[str, str]:
    return host.call(hosts.outcome, name, "a", 2, DEADLINE_S)[:2]


def good(host: Host, name: str, generation: int) -> bool:
    return bool(host.call(hosts.outcome, name, "a", generation, DEADLINE_S)[0] == "complete")


def known_complete_stays_good(host: Host, name: str, node: str) -> None:
    """The first generation was known complete before the loss, the second is lost; also for those who ask later."""
    for ask in (hosts.outcome, hosts.outcome_later):
        assert host.call(ask, name, node, 1, DEADLINE_S)[0] == "complete"
        assert host.call(ask, name, node, 2, DEADLINE_S)[:2] == ("NodeLost", "silent")


def test_record_on_a_releases_stream_on_b_with_nothing_shared(pair: tuple[Host, Host]) -> None:
    a, b = pair
    a.call(hosts.record_gated, "kv")
    b.call(hosts.gate_a_stream, "kv", "a", 2)
    assert not b.call(hosts.stream_is_done)
    a.call(hosts.open_gate)
    b.call(hosts.await_stream)
    data = a.call(hosts.record, "kv")
    assert b.call(hosts.point_of, data) == (data, "a")


def test_row_04_a_host_that_is_cut_off_is_silent_and_row_13_what_is_lost_stays_lost(
    pair: tuple[Host, Host], machine: Machine
) -> None:
    a, b = pair
    b.call(hosts.wait_everywhere, "kv", "a", 2)
    began = time.monotonic()
    a.cut()
    learn(b.call(hosts.ends), "NodeLost", "silent", machine.bound(TTL_S + 0.5, began), began)
    known_complete_stays_good(b, "kv", "a")
    a.call(hosts.record, "kv")  # a's own life never depends on the network
    a.heal()
    a.call(hosts.record, "new")
    b.call(hosts.follow, "new", "a")
    assert good(b, "new", 1)
    known_complete_stays_good(b, "kv", "a")


@pytest.mark.parametrize("hook", ["input", "output"])
def test_row_12_a_partition_of_one_way_is_one(pair: tuple[Host, Host], hook: str, machine: Machine) -> None:
    a, b = pair
    b.call(hosts.record, "theirs")
    a.call(hosts.follow, "theirs", "b")
    for host, name, node in ((b, "kv", "a"), (a, "theirs", "b")):
        host.call(hosts.wait_everywhere, name, node, 2)
    began = time.monotonic()
    a.drop(hook)
    for host in (b, a):  # each side that does not hear the other, which a ping's way and back makes both
        learn(host.call(hosts.ends), "NodeLost", "silent", machine.bound(TTL_S + 0.5, began), began)
    a.undrop()
    known_complete_stays_good(b, "kv", "a")
    known_complete_stays_good(a, "theirs", "b")


def test_late_news_is_harmless_after_a_short_cut_and_after_a_long_one(pair: tuple[Host, Host]) -> None:
    a, b = pair
    b.call(hosts.gate_a_stream, "kv", "a", 40)
    a.cut()
    a.call(hosts.record, "kv", 39)
    time.sleep(0.5)  # the length is tested: less than the TTL, and more than news need
    a.heal()
    assert good(b, "kv", 40)
    b.call(hosts.await_stream)
    a.cut()
    a.call(hosts.record, "kv", 10)
    assert b.call(hosts.outcome, "kv", "a", 50, DEADLINE_S)[:2] == ("NodeLost", "silent")
    a.heal()
    a.call(hosts.record, "kv", 10)
    a.call(hosts.record, "new")
    b.call(hosts.follow, "new", "a")
    assert good(b, "new", 1)
    assert good(b, "kv", 40)
    assert b.call(hosts.outcome, "kv", "a", 50, DEADLINE_S)[:2] == ("NodeLost", "silent")


def test_row_10_a_server_that_stays_away_loses_the_nodes_to_each_other_and_nothing_at_home(
    pair: tuple[Host, Host], server: Server, machine: Machine
) -> None:
    a, b = pair
    b.call(hosts.record, "theirs")
    a.call(hosts.follow, "theirs", "b")
    for host, name, node in ((b, "kv", "a"), (a, "theirs", "b")):
        host.call(hosts.wait_everywhere, name, node, 2)
    began = time.monotonic()
    server.kill()
    for host in (b, a):
        learn(host.call(hosts.ends), "NodeLost", "silent", machine.bound(TTL_S + 0.5, began), began)
    a.call(hosts.record, "kv")
    server.start()
    a.call(hosts.record, "new")
    until(lambda: _follows(b, "new"), "the servers to be back")
    assert good(b, "new", 1)
    known_complete_stays_good(b, "kv", "a")
    known_complete_stays_good(a, "theirs", "b")


def _follows(host: Host, name: str) -> bool:
    try:
        host.call(hosts.follow, name, "a")
    except AssertionError:  # of the peer's kind: lost, or no store
        return False
    return True


def test_row_19_a_bridge_that_is_stopped_past_its_lease_loses_what_it_mirrors(
    pair: tuple[Host, Host], machine: Machine
) -> None:
    _, b = pair
    b.call(hosts.wait_everywhere, "kv", "a", 2)
    began = time.monotonic()
    b.call(hosts.signal_bridge, signal.SIGSTOP)
    learn(b.call(hosts.ends), "NodeLost", "bridge", machine.bound(LEASE_S + 0.5, began), began)
    b.call(hosts.signal_bridge, signal.SIGCONT)
    assert b.call(hosts.bridge_status, DEADLINE_S) == 1
    assert lost(b) == ("NodeLost", "bridge")


def test_row_18_fenced_sleeper(pair: tuple[Host, Host], new_host: Callable[..., Host]) -> None:
    a, b = pair
    b.call(hosts.wait_everywhere, "kv", "a", 2)
    a.call(hosts.signal_bridge, signal.SIGSTOP)
    second = new_host("a")
    second.result()
    ends = b.call(hosts.ends)
    why = ends["host"].why
    assert why in ("silent", "replaced")  # whichever was seen first
    learn(ends, "NodeLost", why)
    second.call(hosts.record, "kv2")
    b.call(hosts.follow, "kv2", "a")
    assert good(b, "kv2", 1)
    a.call(hosts.signal_bridge, signal.SIGCONT)
    assert a.call(hosts.bridge_status, DEADLINE_S) in (1, 3)  # its lease has run out, too, if it slept for so long
    assert good(b, "kv2", 1)


def test_one_of_eight_racing_nodes_gets_a_name(hub: Hub, new_host: Callable[..., Host]) -> None:
    racing = [new_host(f"n{number}") for number in range(8)]
    for host in racing:
        host.result(120)
    for host in racing:
        host.begin(hosts.claim, "weights/v")
    outcomes = sorted(host.result() for host in racing)
    assert outcomes == ["", *7 * ["RecorderTaken"]]
