"""The failure table (docs/fleet.md), row by row with real signals, as each way to wait sees it.

The rows that need hosts of their own, with wires to cut, are in test_hosts.py; that the wall clock, which may jump (row
15), is read nowhere, is in tests/unit/bridge/test_config.py.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import ipcsync
from ipcsync.testing import StreamGate
from ipcsync_bridge import wire
from tests.fleet.cluster import Cluster
from tests.fleet.nodes import Node, Server, listening, with_client
from tests.fleet.sides import WAYS, Sides, end_of, learn
from tests.kit.machine import Machine
from tests.kit.peer import Peer
from tests.kit.until import DEADLINE_S, until

pytestmark = [pytest.mark.process, pytest.mark.driver]

PING_S, TTL_S, LEASE_S = 1.0, 5.0, 5.0
_LOOK_S = 0.25  # between two looks of a coordinator at the leases
NO_STREAM = tuple(way for way in WAYS if way != "stream")
thorough = pytest.mark.thorough


def recorded(client: ipcsync.Client, name: str) -> ipcsync.SharedEvent:
    return client.event(name, recorder=True, engine="timeline")


def followed(
    pair: tuple[Node, Node], ways: tuple[str, ...] = WAYS
) -> tuple[ipcsync.SharedEvent, ipcsync.SharedEvent, Sides]:
    """An event of `a`, the same on `b`, where its first generation is complete, and waits there for the second."""
    a, b = pair[0].client(), pair[1].client()
    event = recorded(a, "kv")
    seen = b.event("kv", node="a")
    event.record(ipcsync.Stream())
    seen.at(1).synchronize(DEADLINE_S)
    return event, seen, Sides(b, seen, 2, ways)


def known_complete_stays_good(seen: ipcsync.SharedEvent, node: Node, what: str, why: str) -> None:
    """What was known complete is good, what is lost is lost: also for a client that comes later."""
    assert seen.at(1).query()
    late = node.client("late").point(bytes(seen.at(2)))
    assert end_of(late.query)[:2] == (what, why)
    assert node.client("late").point(bytes(seen.at(1))).query()


_kept: list[object] = []


def _record_on(endpoint: str, name: str) -> None:
    """In a peer: record once."""
    client = ipcsync.connect(endpoint, name="prefill")
    event = recorded(client, name)
    event.record(ipcsync.Stream()).synchronize(DEADLINE_S)
    _kept.extend((client, event))


@thorough
def test_row_01_a_recorder_that_dies_is_a_recorder_lost(
    pair: tuple[Node, Node], new_peer: Callable[..., Peer], machine: Machine
) -> None:
    peer = new_peer()
    peer.call(_record_on, pair[0].coordinator.endpoint, "kv")
    b = pair[1].client()
    seen = b.event("kv", node="a")
    seen.at(1).synchronize(DEADLINE_S)
    sides = Sides(b, seen, 2)
    began = time.monotonic()
    os.kill(peer.pid, signal.SIGKILL)
    learn(sides.ends(), "RecorderLost", "died", machine.bound(0.25, began), began)
    with pytest.raises(ipcsync.RecorderLost, match="on node 'a' died"):
        seen.at(2).query()
    known_complete_stays_good(seen, pair[1], "RecorderLost", "died")


@thorough
def test_row_02_a_recorder_that_closes_leaves_what_it_recorded(pair: tuple[Node, Node], machine: Machine) -> None:
    a, b = pair[0].client(), pair[1].client()
    event = recorded(a, "kv")
    seen = b.event("kv", node="a")
    stream = ipcsync.Stream()
    with StreamGate(stream) as gate:
        event.record(stream)
        until(lambda: seen.generation == 1, "the record to be told")
        good, lost = Sides(b, seen, 1), Sides(b, seen, 2, NO_STREAM)
        began = time.monotonic()
        event.close()
        learn(lost.ends(), "RecorderLost", "closed", machine.bound(0.25, began), began)
        assert not seen.at(1).query()
        gate.open()
        learn(good.ends(), "complete")


@thorough
def test_row_03_a_coordinator_that_dies_is_a_node_that_restarted(pair: tuple[Node, Node], machine: Machine) -> None:
    _, seen, sides = followed(pair)
    began = time.monotonic()
    os.kill(pair[0].coordinator.pid, signal.SIGKILL)
    learn(sides.ends(), "NodeLost", "restarted", machine.bound(1.5, began), began)
    with pytest.raises(ipcsync.NodeLost) as caught:
        seen.at(2).query()
    assert caught.value.node == "a"
    known_complete_stays_good(seen, pair[1], "NodeLost", "restarted")


@thorough
def test_row_05_a_bridge_that_is_back_within_the_ttl_heals_all(patient_pair: tuple[Node, Node]) -> None:
    event, seen, sides = followed(patient_pair)
    stream = ipcsync.Stream()
    for number in range(3):
        patient_pair[0].end_bridge(signal.SIGKILL)
        while_away = event.record(stream)
        patient_pair[0].start_bridge()
        if number == 0:
            learn(sides.ends(), "complete")
        seen.at(while_away.generation).synchronize(DEADLINE_S)
        seen.at(event.record(stream).generation).synchronize(DEADLINE_S)
    assert seen.state == "open"


@thorough
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_row_06_a_bridge_that_stays_away_is_a_silent_node_and_its_own_waits_are_lost(
    default_pair: tuple[Node, Node], how: signal.Signals, machine: Machine
) -> None:
    pair = default_pair
    _, seen, sides = followed(pair)
    a, b = pair[0].client(), pair[1].client()
    theirs = recorded(b, "of b")
    own = Sides(a, a.event("of b", node="b"), 1)
    assert pair[0].bridge is not None
    began = time.monotonic()
    pair[0].bridge.send_signal(how)
    if how == signal.SIGKILL:
        pair[0].bridge.wait(DEADLINE_S)
    within = 0.25 if how == signal.SIGKILL else LEASE_S + _LOOK_S
    learn(own.ends(), "NodeLost", "bridge", machine.bound(within, began), began)
    learn(sides.ends(), "NodeLost", "silent", machine.bound(TTL_S + 0.5, began), began)
    assert min(end.at for end in sides.ends().values()) - began > TTL_S - PING_S - machine.allowance(began - PING_S)
    known_complete_stays_good(seen, pair[1], "NodeLost", "silent")
    if how == signal.SIGSTOP:
        pair[0].end_bridge(signal.SIGKILL)
    pair[0].start_bridge()
    pair[0].await_bridge()
    with pytest.raises(ipcsync.NodeLost):  # row 13: it stays lost, and what is new links
        b.event("kv", node="a").at(2).query()
    recorded(a, "new").record(ipcsync.Stream())
    b.event("new", node="a").at(1).synchronize(DEADLINE_S)
    theirs.close()


def test_row_07_the_waiting_sides_own_bridge_dies(pair: tuple[Node, Node], machine: Machine) -> None:
    event, seen, sides = followed(pair)
    began = time.monotonic()
    pair[1].end_bridge(signal.SIGKILL)
    learn(sides.ends(), "NodeLost", "bridge", machine.bound(0.25, began), began)
    known_complete_stays_good(seen, pair[1], "NodeLost", "bridge")
    event.record(ipcsync.Stream())
    pair[1].start_bridge()
    pair[1].await_bridge()
    known_complete_stays_good(seen, pair[1], "NodeLost", "bridge")


@thorough
def test_row_08_the_waiting_sides_own_coordinator_dies(pair: tuple[Node, Node], machine: Machine) -> None:
    _, _, sides = followed(pair, NO_STREAM)  # a stream waits on, as on one host: nobody is there to release it
    began = time.monotonic()
    os.kill(pair[1].coordinator.pid, signal.SIGKILL)
    learn(sides.ends(), "CoordinatorLost", "", machine.bound(1.0, began), began)
    assert pair[1].bridge is not None
    assert pair[1].bridge.wait(DEADLINE_S) == 1


@thorough
def test_row_09_server_restart_heals(patient_pair: tuple[Node, Node], server: Server) -> None:
    event, seen, sides = followed(patient_pair)
    stream = ipcsync.Stream()
    server.kill()
    event.record(stream)
    server.start()
    learn(sides.ends(), "complete")
    seen.at(event.record(stream).generation).synchronize(DEADLINE_S)


@thorough
def test_row_11_without_a_quorum_links_go_on_and_names_say_so(cluster: Cluster, machine: Machine) -> None:
    with cluster.nodes("a", "b") as pair:
        event, seen, sides = followed(pair)
        for server in cluster.servers[:2]:
            server.kill()
        event.record(ipcsync.Stream())
        learn(sides.ends(), "complete")
        b = pair[1].client()
        began = time.monotonic()
        with pytest.raises((ipcsync.FleetUnavailable, ipcsync.WaitTimeout)):
            b.event("weights", fleet=True, timeout=2.0)
        assert time.monotonic() - began < machine.bound(2.0, began)
        b.event("other", node="a")  # a node's own name asks that node, and no store
        assert seen.state == "open"


@thorough
def test_row_14_a_peer_that_stands_still_makes_nobody_else_slower_and_sees_the_newest_later(
    pair: tuple[Node, Node], new_node: Callable[..., Node]
) -> None:
    event, seen, _ = followed(pair)
    third = new_node("c")
    third.await_bridge()
    also = third.client().event("kv", node="a")
    stream = ipcsync.Stream()
    assert pair[1].bridge is not None
    pair[1].bridge.send_signal(signal.SIGSTOP)
    for _ in range(100):
        also.at(event.record(stream).generation).synchronize(DEADLINE_S)
    before = seen.generation
    pair[1].bridge.send_signal(signal.SIGCONT)
    seen.at(101).synchronize(DEADLINE_S)
    assert before < 101


@contextmanager
def kept_news(server: Server, to: str) -> Iterator[list[tuple[str, bytes]]]:
    """What a node is told meanwhile, as it lies on the wire."""
    news: list[tuple[str, bytes]] = []

    async def keep(message: Any) -> None:
        if isinstance(wire.decode(message.data), wire.News):
            news.append((message.subject, message.data))

    with listening(server, f"ipcsync.main.{to}.ask.*", keep):
        yield news


@thorough
def test_row_16_news_that_come_again_late_and_in_another_order_change_nothing(
    pair: tuple[Node, Node], server: Server
) -> None:
    event, seen, sides = followed(pair)
    stream = ipcsync.Stream()
    with kept_news(server, "b") as news:
        for _ in range(30):
            seen.at(event.record(stream).generation).synchronize(DEADLINE_S)
    learn(sides.ends(), "complete")
    assert len(news) >= 30

    async def replay(client: Any) -> None:
        for subject, data in [*reversed(news), *news[::2], *news]:
            await client.publish(subject, data)
        await client.flush()

    waits = Sides(pair[1].client(), seen, 32)
    with_client(server, replay)
    until(lambda: pair[1].client().bridge().counts["news_received"] >= 2 * len(news), "all of it to be heard")
    assert (seen.generation, seen.completed, seen.state) == (31, 31, "open")
    event.record(stream)
    learn(waits.ends(), "complete")


@thorough
def test_row_17_same_name_refused(pair: tuple[Node, Node], new_node: Callable[..., Node]) -> None:
    event, seen, sides = followed(pair)
    second = new_node("a")
    assert second.bridge is not None
    assert second.bridge.wait(DEADLINE_S) == 1
    assert "another bridge, which answers, has the name 'a'" in second.text()
    event.record(ipcsync.Stream())  # the first has not noticed
    learn(sides.ends(), "complete")
    assert seen.state == "open"


async def _answer_late(message: Any) -> None:
    """As a bridge far away answers a question about itself."""
    await asyncio.sleep(0.05)
    await message.respond(wire.encode(wire.Pong(1, b"e" * 16, b"o" * 16, 0)))


def test_row_17_nor_is_it_taken_from_one_that_is_farther_from_the_server(
    server: Server, new_node: Callable[..., Node]
) -> None:
    first = new_node("a")
    first.await_bridge()
    first.end_bridge(signal.SIGKILL)
    with listening(server, "ipcsync.main.a.ask.*", _answer_late):
        second = new_node("a")
        assert second.bridge is not None
        assert second.bridge.wait(DEADLINE_S) == 1
    assert "another bridge, which answers, has the name 'a'" in second.text()


def _wait_for(endpoint: str, name: str, generation: int) -> tuple[str, str]:
    """In a peer of the waiting node."""
    with ipcsync.connect(endpoint, name="decode", lease_ttl=60) as client:
        seen = client.event(name, node="a", timeout=DEADLINE_S)
        return end_of(lambda: seen.at(generation).synchronize(DEADLINE_S))[:2]


@thorough
def test_row_20_all_of_a_node_is_stopped_and_goes_on(
    new_node: Callable[..., Node], new_peer: Callable[..., Peer]
) -> None:
    a, b = (new_node(name, "--link-ttl", "3", lease_ttl=60) for name in ("a", "b"))
    for node in (a, b):
        node.await_bridge()
    event, peer = recorded(a.client(), "kv"), new_peer()
    seen = b.client().event("kv", node="a")
    peer.begin(_wait_for, b.coordinator.endpoint, "kv", 2)
    until(
        lambda: any(row.name == "kv" and row.attached >= 3 for row in b.client().list_events()), "the peer to wait", 120
    )
    assert b.bridge is not None
    stopped = (b.coordinator.pid, b.bridge.pid, peer.pid)
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    stream = ipcsync.Stream()
    for _ in range(2):
        event.record(stream)
    time.sleep(9.0)  # three times the TTL after which a node that is silent is lost: its own pause is none of a's
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    assert peer.result() == ("complete", "")
    seen.at(event.record(stream).generation).synchronize(DEADLINE_S)
    assert seen.state == "open"


@thorough
def test_a_node_with_another_name_keeps_its_names_and_is_linked_once_the_old_one_is_lost(
    default_pair: tuple[Node, Node],
) -> None:
    a, b = default_pair[0].client(), default_pair[1].client()
    a.event("w", recorder=True, fleet=True)
    old, event = b.event("w", fleet=True), recorded(a, "kv")
    default_pair[0].end_bridge(signal.SIGKILL)
    default_pair[0].start_bridge("--node", "new")
    seen = until(lambda: _opened(b, "kv", "new"), "the node to be found by its new name")
    with pytest.raises(ipcsync.RecorderTaken, match="node 'new'"):
        b.event("w", recorder=True, fleet=True)
    until(lambda: old.state == "broken", "the old name to be lost")
    seen.at(event.record(ipcsync.Stream()).generation).synchronize(DEADLINE_S)
    assert seen.state == "open"


def _opened(client: ipcsync.Client, name: str, node: str) -> ipcsync.SharedEvent | None:
    try:
        return client.event(name, node=node)
    except ipcsync.NodeLost:
        return None


@thorough
def test_a_node_that_says_goodbye_has_stopped(pair: tuple[Node, Node], machine: Machine) -> None:
    _, seen, sides = followed(pair)
    began = time.monotonic()
    assert pair[0].end_bridge() == 0
    learn(sides.ends(), "NodeLost", "stopped", machine.bound(0.25, began), began)
    known_complete_stays_good(seen, pair[1], "NodeLost", "stopped")
