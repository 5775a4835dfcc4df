"""Two nodes on one machine, with a coordinator and a bridge each, over a real nats-server."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest

import ipcsync
from ipcsync.testing import StreamGate
from tests.fleet.nodes import Node, Server
from tests.kit.until import until

pytestmark = pytest.mark.process

WAIT_S = 20.0


def recorded(client: ipcsync.Client, name: str) -> ipcsync.SharedEvent:
    return client.event(name, recorder=True, engine="timeline")


@pytest.mark.driver
def test_record_on_a_releases_stream_on_b(pair: tuple[Node, Node]) -> None:
    a, b = pair[0].client(), pair[1].client()
    event = recorded(a, "kv")
    seen = b.event("kv", node="a")
    assert (seen.node, seen.engine, seen.generation) == ("a", "timeline", 0)
    here, there = ipcsync.Stream(), ipcsync.Stream()
    with StreamGate(here) as gate:
        point = event.record(here)
        seen.at(1).wait(there, timeout=WAIT_S)  # recorded, so the host goes on
        assert not there.query()
        assert not seen.at(1).query()
        gate.open()
        seen.at(1).synchronize(WAIT_S)
    there.synchronize()
    assert (seen.generation, seen.completed) == (1, 1)
    assert point.query()


def test_point_is_48_bytes_and_the_same_everywhere(pair: tuple[Node, Node], new_node: Callable[..., Node]) -> None:
    third = new_node("c")
    third.await_bridge()
    a, b, c = pair[0].client(), pair[1].client(), third.client()
    point = recorded(a, "kv").record(ipcsync.Stream())
    data = bytes(point)
    assert len(data) == 48
    for client in (b, c):
        there = client.point(data)
        assert bytes(there) == data
        assert there.node == "a"
        there.synchronize(WAIT_S)
    home = a.point(bytes(c.point(bytes(b.point(data)))))
    assert home == point
    assert home.node == ""


@pytest.mark.driver
def test_wait_before_record_and_before_open(pair: tuple[Node, Node]) -> None:
    a, b = pair[0].client(), pair[1].client()
    seen = b.event("later", node="a")
    stream = ipcsync.Stream()
    seen.at(1).wait(stream, ahead=True)
    assert not stream.query()
    waiting = threading.Thread(target=seen.at(1).synchronize, args=(WAIT_S,))
    waiting.start()
    event = recorded(a, "later")
    event.record(ipcsync.Stream())
    waiting.join(WAIT_S)
    assert not waiting.is_alive()
    stream.synchronize()


@pytest.mark.thorough
def test_an_event_that_is_not_on_the_timeline_engine_is_refused_with_what_to_do(pair: tuple[Node, Node]) -> None:
    a, b = pair[0].client(), pair[1].client()
    event = a.event("ring", recorder=True, engine="event")
    with pytest.raises(ipcsync.EngineMismatch, match="record it with engine='timeline'"):
        b.event("ring", node="a")
    point = event.record(ipcsync.Stream())
    with pytest.raises(ipcsync.EngineMismatch, match="engine='timeline'"):
        b.point(bytes(point))


def test_node_name_and_fleet_name(pair: tuple[Node, Node]) -> None:
    a, b = pair[0].client(), pair[1].client()
    event = a.event("weights/v", recorder=True, fleet=True)
    with pytest.raises(ipcsync.RecorderTaken, match="node 'a' has the fleet's event"):
        b.event("weights/v", recorder=True, fleet=True)
    seen, home = b.event("weights/v", fleet=True), a.event("weights/v", fleet=True)
    assert (seen.node, home.node) == ("a", "")
    event.record(ipcsync.Stream())
    seen.at(1).synchronize(WAIT_S)
    home.at(1).synchronize(WAIT_S)
    assert [row.name for row in b.list_events("weights", node="a")] == ["weights/v"]
    nodes = {row.name: row for row in b.nodes()}
    assert list(nodes) == ["b", "a"]
    assert (nodes["a"].state, nodes["a"].links) == ("linked", 1)
    home.close()
    event.close()
    began = time.monotonic()
    again = until(lambda: _claimed(b, "weights/v"), "the name to be free")
    assert time.monotonic() - began < 2.0
    assert again.node == ""


def _claimed(client: ipcsync.Client, name: str) -> ipcsync.SharedEvent | None:
    try:
        return client.event(name, recorder=True, fleet=True)
    except ipcsync.RecorderTaken:
        return None


@pytest.mark.thorough
def test_a_fleet_name_that_nobody_has_is_waited_for(pair: tuple[Node, Node]) -> None:
    a, b = pair[0].client(), pair[1].client()
    with pytest.raises(ipcsync.WaitTimeout, match="nobody in the fleet has opened 'later'"):
        b.event("later", fleet=True, timeout=0.3)
    found: list[ipcsync.SharedEvent] = []
    waiting = threading.Thread(target=lambda: found.append(b.event("later", fleet=True, timeout=WAIT_S)))
    waiting.start()
    a.event("later", recorder=True, fleet=True)
    waiting.join(WAIT_S)
    assert [event.node for event in found] == ["a"]


@pytest.mark.thorough
def test_unknown_nodes_are_lost_and_wrong_calls_say_so(pair: tuple[Node, Node], new_node: Callable[..., Node]) -> None:
    b = pair[1].client()
    with pytest.raises(ipcsync.NodeLost, match="node 'nobody' does not answer"):
        b.event("kv", node="nobody", timeout=5.0)
    with pytest.raises(ValueError, match="letters, digits"):
        b.event("kv", node="no.body")
    with pytest.raises(ValueError, match="waiting only"):
        b.event("kv", node="a", recorder=True)
    with pytest.raises(ipcsync.EngineMismatch):
        b.event("kv", node="a", engine="event")
    with pytest.raises(ipcsync.NoBridge, match="ipcsync bridge"):
        new_node("alone", has_bridge=False).client().event("kv", node="a")


@pytest.mark.thorough
def test_row_01_a_recorder_that_dies_is_a_recorder_lost(
    pair: tuple[Node, Node], new_peer: Callable[..., object]
) -> None:
    peer = new_peer()
    b = pair[1].client()
    peer.call(_record_on, pair[0].coordinator.endpoint, "kv")  # type: ignore[attr-defined]
    seen = b.event("kv", node="a")
    seen.at(1).synchronize(WAIT_S)
    point = seen.at(2)
    began = time.monotonic()
    os.kill(peer.pid, signal.SIGKILL)  # type: ignore[attr-defined]
    with pytest.raises(ipcsync.RecorderLost) as caught:
        point.synchronize(WAIT_S)
    assert time.monotonic() - began < 2.0
    assert not isinstance(caught.value, ipcsync.NodeLost)
    assert caught.value.cause == "died"
    assert "on node 'a' died" in str(caught.value)
    seen.at(1).synchronize(WAIT_S)  # known complete: good for ever


_kept: list[object] = []


def _record_on(endpoint: str, name: str) -> None:
    client = ipcsync.connect(endpoint, name="prefill")
    event = client.event(name, recorder=True, engine="timeline")
    event.record(ipcsync.Stream()).synchronize(WAIT_S)
    _kept.extend((client, event))


@pytest.mark.thorough
def test_row_02_a_recorder_that_closes_leaves_what_it_recorded(pair: tuple[Node, Node]) -> None:
    a, b = pair[0].client(), pair[1].client()
    event = recorded(a, "kv")
    seen = b.event("kv", node="a")
    stream = ipcsync.Stream()
    with StreamGate(stream) as gate:
        event.record(stream)
        until(lambda: seen.generation == 1, "the record to be told")
        event.close()
        with pytest.raises(ipcsync.RecorderLost) as caught:
            seen.at(2).synchronize(WAIT_S)
        assert caught.value.cause == "closed"
        assert not seen.at(1).query()
        gate.open()
        seen.at(1).synchronize(WAIT_S)


@pytest.mark.thorough
def test_row_03_a_coordinator_that_dies_is_a_node_that_restarted(pair: tuple[Node, Node]) -> None:
    a, b = pair[0].client(), pair[1].client()
    event = recorded(a, "kv")
    seen = b.event("kv", node="a")
    event.record(ipcsync.Stream())
    seen.at(1).synchronize(WAIT_S)
    data = bytes(seen.at(2))
    os.kill(pair[0].coordinator.pid, signal.SIGKILL)
    with pytest.raises(ipcsync.NodeLost) as caught:
        seen.at(2).synchronize(WAIT_S)
    assert (caught.value.node, caught.value.reason) == ("a", "restarted")
    seen.close()
    late = pair[1].client("late").point(data)  # lost once, lost for good: also for who comes later
    with pytest.raises(ipcsync.NodeLost):
        late.query()


@pytest.mark.thorough
def test_row_05_a_bridge_that_is_back_within_the_ttl_heals_all(patient_pair: tuple[Node, Node]) -> None:
    pair = patient_pair
    a, b = pair[0].client(), pair[1].client()
    event, stream = recorded(a, "kv"), ipcsync.Stream()
    seen = b.event("kv", node="a")
    for _ in range(3):
        pair[0].end_bridge(signal.SIGKILL)
        while_away = event.record(stream)
        pair[0].start_bridge()
        seen.at(while_away.generation).synchronize(WAIT_S)
        seen.at(event.record(stream).generation).synchronize(WAIT_S)
    assert seen.state == "open"


@pytest.mark.thorough
def test_row_06_a_bridge_that_stays_away_is_a_silent_node(pair: tuple[Node, Node]) -> None:
    a, b = pair[0].client(), pair[1].client()
    event = recorded(a, "kv")
    seen = b.event("kv", node="a")
    event.record(ipcsync.Stream())
    seen.at(1).synchronize(WAIT_S)
    began = time.monotonic()
    pair[0].end_bridge(signal.SIGKILL)
    with pytest.raises(ipcsync.NodeLost) as caught:
        seen.at(2).synchronize(WAIT_S)
    assert 3.0 < time.monotonic() - began < 6.5
    assert (caught.value.node, caught.value.reason) == ("a", "silent")
    assert seen.at(1).query()
    pair[0].start_bridge()
    pair[0].await_bridge()
    with pytest.raises(ipcsync.NodeLost):  # row 13: it stays lost, and what is new links
        b.event("kv", node="a").at(2).query()
    recorded(a, "new").record(ipcsync.Stream())
    b.event("new", node="a").at(1).synchronize(WAIT_S)


@pytest.mark.driver
def test_row_07_the_waiting_sides_own_bridge_dies(pair: tuple[Node, Node]) -> None:
    a, b = pair[0].client(), pair[1].client()
    event = recorded(a, "kv")
    seen = b.event("kv", node="a")
    event.record(ipcsync.Stream())
    seen.at(1).synchronize(WAIT_S)
    stream = ipcsync.Stream()
    seen.at(2).wait(stream, ahead=True)
    began = time.monotonic()
    pair[1].end_bridge(signal.SIGKILL)
    with pytest.raises(ipcsync.NodeLost) as caught:
        seen.at(2).synchronize(WAIT_S)
    assert time.monotonic() - began < 1.0
    assert caught.value.reason == "bridge"
    stream.synchronize()  # released, and not as success
    assert seen.at(1).query()
    event.record(ipcsync.Stream())
    pair[1].start_bridge()
    pair[1].await_bridge()
    with pytest.raises(ipcsync.NodeLost):
        b.point(bytes(seen.at(2))).query()


@pytest.mark.thorough
def test_a_node_that_says_goodbye_has_stopped(pair: tuple[Node, Node]) -> None:
    a, b = pair[0].client(), pair[1].client()
    recorded(a, "kv")
    seen = b.event("kv", node="a")
    assert pair[0].end_bridge() == 0
    with pytest.raises(ipcsync.NodeLost) as caught:
        seen.at(1).synchronize(WAIT_S)
    assert caught.value.reason == "stopped"


@pytest.mark.thorough
def test_same_name_refused(pair: tuple[Node, Node], new_node: Callable[..., Node]) -> None:
    second = new_node("a", "--link-ttl", "1")
    assert second.bridge is not None
    assert second.bridge.wait(30) == 1
    assert "another bridge, which answers, has the name 'a'" in second.text()
    a, b = pair[0].client(), pair[1].client()
    recorded(a, "kv").record(ipcsync.Stream())
    b.event("kv", node="a").at(1).synchronize(WAIT_S)


@pytest.mark.thorough
def test_row_09_a_server_that_is_back_soon_costs_a_delay(patient_pair: tuple[Node, Node], server: Server) -> None:
    pair = patient_pair
    a, b = pair[0].client(), pair[1].client()
    event, stream = recorded(a, "kv"), ipcsync.Stream()
    seen = b.event("kv", node="a")
    event.record(stream)
    seen.at(1).synchronize(WAIT_S)
    server.kill()
    event.record(stream)
    server.start()
    seen.at(2).synchronize(WAIT_S)
    seen.at(event.record(stream).generation).synchronize(WAIT_S)


@pytest.mark.driver
def test_a_loss_on_another_node_goes_along_a_chain(pair: tuple[Node, Node], new_peer: Callable[..., object]) -> None:
    """The recorder on a dies; b's stream had waited for it, and b recorded behind that: c must not pass."""
    peer = new_peer()
    peer.call(_open_on, pair[0].coordinator.endpoint, "kv")  # type: ignore[attr-defined]
    b, c = pair[1].client("b"), pair[1].client("c")
    seen = b.event("kv", node="a")
    mine = b.event("out", recorder=True, engine="timeline")
    stream = ipcsync.Stream()
    seen.at(1).wait(stream, ahead=True)
    mine.record(stream)
    theirs = c.event("out")
    assert not theirs.at(1).query()
    os.kill(peer.pid, signal.SIGKILL)  # type: ignore[attr-defined]
    with pytest.raises(ipcsync.RecorderLost) as caught:
        theirs.at(1).synchronize(WAIT_S)
    assert caught.value.cause == "behind"
    with pytest.raises(ipcsync.RecorderLost):
        mine.record(stream)


def _open_on(endpoint: str, name: str) -> None:
    client = ipcsync.connect(endpoint, name="prefill")
    _kept.extend((client, client.event(name, recorder=True, engine="timeline")))


@pytest.mark.thorough
def test_a_chain_on_the_recording_node_holds_over_the_bridge(
    pair: tuple[Node, Node], new_peer: Callable[..., object]
) -> None:
    """On a, one session records behind another's, which dies: the waiter on b learns it, and does not pass."""
    peer = new_peer()
    endpoint = pair[0].coordinator.endpoint
    peer.call(_open_on, endpoint, "first")  # type: ignore[attr-defined]
    a, b = pair[0].client("second"), pair[1].client()
    stream = ipcsync.Stream()
    second = a.event("second", recorder=True, engine="timeline")
    seen = b.event("second", node="a")
    a.event("first").at(1).wait(stream, ahead=True)
    second.record(stream)
    os.kill(peer.pid, signal.SIGKILL)  # type: ignore[attr-defined]
    with pytest.raises(ipcsync.RecorderLost) as caught:
        seen.at(1).synchronize(WAIT_S)
    assert caught.value.cause in ("behind", "died")


@pytest.mark.thorough
def test_every_waiting_side_learns_of_a_loss(pair: tuple[Node, Node]) -> None:
    a, b = pair[0].client(), pair[1].client()
    event = recorded(a, "kv")
    seen = b.event("kv", node="a")
    point = seen.at(1)
    called = threading.Event()
    point.add_done_callback(lambda _: called.set())

    async def wait() -> None:
        async with ipcsync.aconnect(pair[1].coordinator.endpoint) as client:
            there = await client.event("kv", node="a")
            assert there.node == "a"
            waiting = asyncio.ensure_future(there.at(1).synchronize(WAIT_S))
            await asyncio.sleep(0)
            event.close()
            with pytest.raises(ipcsync.RecorderLost):
                await waiting

    asyncio.run(wait())
    assert called.wait(WAIT_S)
    assert isinstance(point.exception(), ipcsync.RecorderLost)
    for wait_for in (point.query, point.synchronize, lambda: point.wait(ipcsync.Stream())):
        with pytest.raises(ipcsync.RecorderLost):
            wait_for()


@pytest.mark.thorough
def test_the_bridge_maps_no_libcuda_and_asks_the_driver_nothing(pair: tuple[Node, Node]) -> None:
    for node in pair:
        assert node.bridge is not None
        with open(f"/proc/{node.bridge.pid}/maps") as file:
            assert "libcuda" not in file.read()


@pytest.mark.thorough
def test_what_nobody_waits_for_any_more_is_let_go_of_on_both_nodes(pair: tuple[Node, Node]) -> None:
    a, b = pair[0].client(), pair[1].client()
    event = recorded(a, "kv")
    seen = b.event("kv", node="a")
    seen.close()
    until(lambda: b.stats()["pool_in_use"] == 0, "the mirror to be let go of")
    event.close()
    until(lambda: a.stats()["pool_in_use"] == 0, "the export to be let go of")
    recorded(a, "kv").record(ipcsync.Stream())
    b.event("kv", node="a").at(1).synchronize(WAIT_S)


def _has_more_starts(client: ipcsync.Client, starts: int) -> bool:
    return client.stats()["starts"] > starts


@pytest.mark.thorough
def test_a_coordinator_with_a_keeper_dies_and_its_mirrors_live(new_node: Callable[..., Node]) -> None:
    one, two = new_node("a", keeper=True), new_node("b", keeper=True)
    for node in (one, two):
        node.await_bridge()
    a, b = one.client(), two.client()
    event, stream = recorded(a, "kv"), ipcsync.Stream()
    seen = b.event("kv", node="a")
    for client in (a, b):
        starts = client.stats()["starts"]
        os.kill(client.stats()["pid"], signal.SIGKILL)
        until(partial(_has_more_starts, client, starts), "the next coordinator")
    seen.at(event.record(stream).generation).synchronize(WAIT_S)
    b.event("new", node="a")
    assert (one.bridge and one.bridge.poll(), two.bridge and two.bridge.poll()) == (None, None)
