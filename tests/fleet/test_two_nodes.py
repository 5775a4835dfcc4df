"""Two nodes on one machine, with a coordinator and a bridge each, over a real nats-server."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import ipcsync
from ipcsync.testing import StreamGate
from tests.fleet.nodes import Node
from tests.kit import remote
from tests.kit.machine import Machine
from tests.kit.peer import Peer
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
    with pytest.raises(ipcsync.WaitTimeout, match=r"^generation 1 of 'kv' on node 'a' was not recorded within 0 s$"):
        seen.at(1).synchronize(0)
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


def test_the_own_node_is_one_of_the_fleet_too(new_node: Callable[..., Node]) -> None:
    node = new_node("a")
    node.await_bridge()
    recorder, waiter = node.client(), node.client()
    event = recorded(recorder, "kv")
    seen = waiter.event("kv", node="a")
    point = event.record(ipcsync.Stream())
    seen.at(1).synchronize(WAIT_S)
    assert (bytes(seen.at(1)), seen.node) == (bytes(point), "")
    assert [row.name for row in waiter.list_events("k", node="a")] == ["kv"]
    assert [info.name for info in waiter.nodes()] == ["a"]
    seen.close()
    event.close()
    until(lambda: recorder.stats()["pool_in_use"] == 0, "the bridge to hold nothing")


def test_a_ring_of_the_own_node_is_refused_to_who_sees_another_dev_shm(
    shared_directory: str, new_node: Callable[..., Node], peer: Peer
) -> None:
    node = new_node("a", runtime_dir=shared_directory)
    node.await_bridge()
    peer.call(remote.see_another_shm)
    peer.call(remote.connect, node.coordinator.endpoint)
    node.client().event("ring", recorder=True, engine="event")
    refused = peer.call(remote.error_of, remote.open_event, "ring", {"node": "a"})
    assert refused == peer.call(remote.error_of, remote.open_event, "ring")
    assert refused is not None
    assert "/dev/shm" in refused[1]


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


def test_node_name_and_fleet_name(pair: tuple[Node, Node], machine: Machine) -> None:
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
    assert time.monotonic() - began < machine.bound(1.0, began)
    assert again.node == ""


def _claimed(client: ipcsync.Client, name: str) -> ipcsync.SharedEvent | None:
    try:
        return client.event(name, recorder=True, fleet=True)
    except ipcsync.RecorderTaken:
        return None


@pytest.mark.thorough
def test_a_fleet_name_that_nobody_has_is_waited_for(pair: tuple[Node, Node]) -> None:
    a, b = pair[0].client(), pair[1].client()
    with pytest.raises(ipcsync.WaitTimeout, match="no process in the fleet has opened 'later'"):
        b.event("later", fleet=True, timeout=0.3)
    found: list[ipcsync.SharedEvent] = []
    waiting = threading.Thread(target=lambda: found.append(b.event("later", fleet=True, timeout=WAIT_S)))
    waiting.start()
    a.event("later", recorder=True, fleet=True)
    waiting.join(WAIT_S)
    assert [event.node for event in found] == ["a"]


def test_waits_for_names_of_the_fleet_keep_no_other_call_of_asyncio_waiting(pair: tuple[Node, Node]) -> None:
    async def scenario() -> None:
        async with ipcsync.aconnect(pair[0].coordinator.endpoint) as client:
            waits = [asyncio.create_task(client.event(f"later{n}", fleet=True, timeout=WAIT_S)) for n in range(20)]
            await asyncio.sleep(0)
            assert await client.stats(timeout=WAIT_S / 2)
            assert not any(wait.done() for wait in waits)
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    asyncio.run(scenario())


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
    options: dict[str, Any]
    for options in ({"node": "a"}, {"fleet": True}, {"fleet": True, "recorder": True}):
        with pytest.raises(ValueError, match="depth is from 1 to 1024"):
            b.event("kv", depth=0, **options)
        with pytest.raises(ValueError, match="engine is 'auto'"):
            b.event("kv", engine="bogus", **options)  # type: ignore[arg-type]
        with pytest.raises(ipcsync.InvalidDevice):
            b.event("kv", device=99, **options)
    with pytest.raises(ValueError, match="not both"):
        b.event("kv", node="a", fleet=True)
    with pytest.raises(ipcsync.NoBridge, match="ipcsync bridge"):
        new_node("alone", has_bridge=False).client().event("kv", node="a")


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


_kept: list[object] = []


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
def test_bridge_touches_no_cuda(pair: tuple[Node, Node]) -> None:
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


def test_a_mirror_that_is_closed_and_opened_again_at_once_hears_all_that_follows(pair: tuple[Node, Node]) -> None:
    a, b = pair[0].client(), pair[1].client()
    event, stream = recorded(a, "kv"), ipcsync.Stream()
    seen = b.event("kv", node="a")
    for _ in range(100):
        seen.close()
        seen = b.event("kv", node="a")
        event.record(stream)
        seen.at(event.generation).synchronize(WAIT_S)


def test_a_mirror_that_its_asker_may_not_have_is_given_back(new_node: Callable[..., Node]) -> None:
    pair = new_node("a"), new_node("b", max_attachments=4)
    for node in pair:
        node.await_bridge()
    full, other = pair[1].client("full"), pair[1].client("other")
    held = [full.event(f"mine/{number}") for number in range(4)]
    for number in range(6):
        with pytest.raises(ipcsync.QuotaExceeded):
            full.event(f"theirs/{number}", node="a")
    until(lambda: other.bridge().mirrors == 0, "the mirrors to be given back")
    other.event("theirs", node="a").close()
    for event in held:
        event.close()


def test_what_is_opened_while_other_events_are_closed_is_followed(pair: tuple[Node, Node]) -> None:
    """What a node does not want any more may be told while the answer to its next question is under way."""
    recorder, waiter, busy = pair[0].client(), pair[1].client("waiter"), pair[1].client("busy")
    is_over = threading.Event()

    def open_and_close() -> None:
        while not is_over.is_set():
            busy.event("busy", node="a").close()

    with recorder.event("busy", recorder=True, engine="timeline"):
        thread = threading.Thread(target=open_and_close)
        thread.start()
        try:
            opened = [waiter.event(f"later/{number}", node="a") for number in range(80)]
            for number, event in enumerate(opened):
                with recorder.event(f"later/{number}", recorder=True, engine="timeline") as made:
                    made.record(ipcsync.Stream())
                    event.at(1).synchronize(WAIT_S)
        finally:
            is_over.set()
            thread.join()
