"""What holds between nodes under load, floods, lost stores and killed servers."""

from __future__ import annotations

import collections
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import ipcsync
from ipcsync._linux.process import resident_bytes
from ipcsync._wire import codec
from ipcsync_bridge import wire
from tests.faults.fixtures import stop
from tests.fleet.nodes import Node, Server, listening, with_client
from tests.kit.machine import Machine
from tests.kit.until import DEADLINE_S, until

pytestmark = [pytest.mark.process, pytest.mark.thorough]


def recorded(client: ipcsync.Client, name: str) -> ipcsync.SharedEvent:
    return client.event(name, recorder=True, engine="timeline")


@contextmanager
def heard(server: Server) -> Iterator[collections.Counter[str]]:
    """Counts what bridges send: "answer", or what is asked, as "ping"; what is asked again is "again"."""
    counts: collections.Counter[str] = collections.Counter()
    asked: set[str] = set()

    async def count(message: Any) -> None:
        kind = message.subject.split(".")[3]
        if kind == "ask":
            # A question that is not answered within a second is asked again, for an answer on the same subject.
            kind = "again" if message.reply in asked else type(wire.decode(message.data)).__name__.lower()
            asked.update(filter(None, [message.reply]))
        counts[kind] += 1

    with listening(server, "ipcsync.>", count):
        yield counts


def test_messages_counted(pair: tuple[Node, Node], server: Server) -> None:
    a, b = pair[0].client(), pair[1].client()
    event, stream = recorded(a, "kv"), ipcsync.Stream()
    with heard(server) as counts:
        seen = b.event("kv", node="a")
        until(lambda: counts["open"], "the question to be heard here too")
        sent = a.messages_sent, b.messages_sent
        for _ in range(100):
            seen.at(event.record(stream).generation).synchronize(DEADLINE_S)
        until(lambda: counts["ping"] >= 2, "two pings")
        assert (a.messages_sent, b.messages_sent) == sent  # records and waits ask nobody
        assert 1 <= counts["news"] <= 200
        assert counts["answer"] <= counts.total() - counts["answer"]
        assert (counts["open"], counts["attach"]) == (1, 0)
    with heard(server) as counts:
        began = time.monotonic()
        time.sleep(3.0)  # the length is tested: what is sent in it, while nothing happens
        until(lambda: counts["ping"] >= 2, "two pings")
        assert counts["ping"] <= time.monotonic() - began + 1
        assert set(counts) <= {"ping", "answer", "again"}
        assert counts["answer"] <= counts["ping"] + counts["again"] + 1  # one may be to the ping before


@pytest.mark.parametrize("records", [1_000, 100_000])
def test_slow_peer_is_conflated(pair: tuple[Node, Node], records: int) -> None:
    a, b = pair[0].client(), pair[1].client()
    event, stream = recorded(a, "kv"), ipcsync.Stream()
    seen = b.event("kv", node="a")
    event.record(stream).synchronize(DEADLINE_S)
    seen.at(1).synchronize(DEADLINE_S)
    assert pair[0].bridge is not None
    assert pair[1].bridge is not None
    before = resident_bytes(pair[0].bridge.pid)
    pair[1].bridge.send_signal(signal.SIGSTOP)
    until_ns = time.monotonic_ns() + 3_000_000_000
    for _ in range(records):
        point = event.record(stream)
    while time.monotonic_ns() < until_ns:
        point = event.record(stream)
    assert resident_bytes(pair[0].bridge.pid) - before < 5_000_000
    point.synchronize(DEADLINE_S)  # from here on there is nothing new
    told = a.bridge().counts["news_sent"]
    pair[1].bridge.send_signal(signal.SIGCONT)
    seen.at(point.generation).synchronize(DEADLINE_S)
    # Behind the one that it had not acknowledged, which is as old as it is, the next one has the newest.
    assert a.bridge().counts["news_sent"] <= told + 2


def test_a_slow_peer_keeps_no_news_from_a_third_node(pair: tuple[Node, Node], new_node: Callable[..., Node]) -> None:
    third = new_node("c", "--link-ttl", "30", lease_ttl=30)
    third.await_bridge()
    a, b, c = pair[0].client(), pair[1].client(), third.client()
    event, stream = recorded(a, "kv"), ipcsync.Stream()
    slow, seen = b.event("kv", node="a"), c.event("kv", node="a")
    event.record(stream)
    for one in (slow, seen):
        one.at(1).synchronize(DEADLINE_S)
    assert pair[1].bridge is not None
    pair[1].bridge.send_signal(signal.SIGSTOP)
    for _ in range(100):
        seen.at(event.record(stream).generation).synchronize(DEADLINE_S)

    def pending() -> dict[str, int]:
        return {peer.name: peer.pending for peer in a.bridge().peers}

    until(lambda: pending() == {"b": 1, "c": 0}, "b to be sent the newest, and c to have it")
    assert slow.generation < seen.generation == 101
    pair[1].bridge.send_signal(signal.SIGCONT)
    slow.at(101).synchronize(DEADLINE_S)


@pytest.mark.parametrize("linked", [0, 100])
def test_an_idle_bridge_sleeps(pair: tuple[Node, Node], linked: int) -> None:
    """What wakes it each second: two pings of the servers, one of its own, its coordinator's tick, its heartbeat."""
    names = [f"e{number}" for number in range(linked)]
    recorders = pair[0].client().events(names, recorder=True, engine="timeline")
    followers = pair[1].client().events(names, node="a")
    per_s: list[float] = []

    def are_few() -> bool:
        before, began = _wake_ups(pair), time.monotonic()
        time.sleep(5.0)  # the length is tested: what wakes them in it
        seconds = time.monotonic() - began
        per_s[:] = [(now - then) / seconds for now, then in zip(_wake_ups(pair), before, strict=True)]
        return max(per_s) < _MOST_WAKE_UPS

    # On a busy machine they may be more: a thread that awaits the GIL of one that does not run wakes every 5 ms.
    assert any(are_few() for _ in range(4)), per_s
    assert len(recorders) == len(followers) == linked


_MOST_WAKE_UPS = 16.0  # a second; a loop or thread that looks every 50 ms has 20


def _wake_ups(pair: tuple[Node, Node]) -> list[int]:
    """How often each bridge has slept so far, all threads together."""
    return [sum(map(_sleeps, Path(f"/proc/{node.bridge.pid}/task").iterdir())) for node in pair if node.bridge]


def _sleeps(task: Path) -> int:
    (line,) = (line for line in (task / "status").read_text().splitlines() if line.startswith("voluntary"))
    return int(line.split()[1])


@pytest.mark.parametrize("messages", [20_000, 100_000])
def test_hostile_peer(pair: tuple[Node, Node], server: Server, messages: int) -> None:
    a, b = pair[0].client(), pair[1].client()
    event, stream = recorded(a, "kv"), ipcsync.Stream()
    seen = b.event("kv", node="a")
    seen.at(event.record(stream).generation).synchronize(DEADLINE_S)
    chance = random.Random(1)
    assert pair[1].bridge is not None
    before = resident_bytes(pair[1].bridge.pid)

    async def flood(client: Any) -> None:
        good = wire.encode(wire.News(9, b"e" * 16, []))
        for number in range(messages):
            data = bytearray(good) if number % 2 else bytearray(chance.randbytes(chance.randrange(200)))
            for _ in range(3):
                if data:
                    data[chance.randrange(len(data))] = chance.randrange(256)
            await client.publish("ipcsync.main.b.ask.evil", bytes(data))
            if number % 500 == 0:
                await client.flush()
        forged = wire.News(99, a.epoch, [wire.Row(0, 1, 1 << 40, 1 << 40)])
        await client.publish("ipcsync.main.b.ask.evil", wire.encode(forged))
        await client.flush()

    with_client(server, flood)
    until(lambda: b.bridge().counts["invalid_messages"] >= messages / 2, "what is invalid to be counted", 120)
    assert "count=1000" in pair[1].text()
    assert resident_bytes(pair[1].bridge.pid) - before < 10_000_000
    assert seen.generation == 1
    seen.at(event.record(stream).generation).synchronize(DEADLINE_S)


def test_a_member_that_names_another_nodes_epoch_is_none_of_it(pair: tuple[Node, Node], server: Server) -> None:
    """Else its news would count for the other node's event, whose waits would end too soon."""
    a, b = pair[0].client(), pair[1].client()
    event, stream = recorded(a, "kv"), ipcsync.Stream()
    seen = b.event("kv", node="a")
    seen.at(event.record(stream).generation).synchronize(DEADLINE_S)
    key = codec.unpack(bytes(seen.at(2)))
    state = wire.State(99, a.epoch, wire.Row(key.slot, key.incarnation))
    news = wire.News(99, a.epoch, [wire.Row(key.slot, key.incarnation, 1 << 40, 1 << 40)])
    before = b.bridge().counts["news_received"]

    async def answer(message: Any) -> None:
        await message.respond(wire.encode(state))

    async def forge(client: Any) -> None:
        await client.publish("ipcsync.main.b.ask.evil", wire.encode(news))
        await client.flush()

    with listening(server, "ipcsync.main.evil.ask.*", answer):
        with pytest.raises(ipcsync.NodeLost, match="node 'evil' has the epoch of node 'a'"):
            b.event("kv", node="evil")
        with_client(server, forge)
        until(lambda: b.bridge().counts["news_received"] > before, "the forged news to be heard")
    assert (seen.generation, seen.state) == (1, "open")


@pytest.mark.parametrize("how", ["lost", "rolled back"])
def test_store_lost(patient_pair: tuple[Node, Node], server: Server, tmp_path: Path, how: str) -> None:
    pair = patient_pair
    a, b = pair[0].client(), pair[1].client()
    event, stream = recorded(a, "kv"), ipcsync.Stream()
    seen = b.event("kv", node="a")
    store, kept = tmp_path / "store", tmp_path / "kept"
    server.kill()
    if how == "rolled back":
        shutil.copytree(store, kept)
        server.start()
        claimed = until(lambda: _claims(a, "w"), "a claim")
        assert claimed.node == ""
        server.kill()
    shutil.rmtree(store)
    if how == "rolled back":
        kept.rename(store)
    server.start()
    seen.at(event.record(stream).generation).synchronize(DEADLINE_S)  # links go on
    assert seen.state == "open"
    until(lambda: {row.name for row in _nodes(b)} == {"a", "b"}, "the keys to be back")
    if how == "rolled back":
        until(lambda: _finds(b, "w"), "the claim to be back")


def _claims(client: ipcsync.Client, name: str) -> ipcsync.SharedEvent | None:
    try:
        return client.event(name, recorder=True, fleet=True)
    except (ipcsync.FleetUnavailable, ipcsync.WaitTimeout):
        return None


def _finds(client: ipcsync.Client, name: str) -> ipcsync.SharedEvent | None:
    try:
        return client.event(name, fleet=True, timeout=1.0)
    except (ipcsync.FleetUnavailable, ipcsync.WaitTimeout, ipcsync.NodeLost):
        return None


def _nodes(client: ipcsync.Client) -> list[ipcsync.NodeInfo]:
    try:
        return client.nodes()
    except (ipcsync.FleetUnavailable, ipcsync.WaitTimeout):
        return []


def test_without_a_store_links_go_on_and_names_say_so(pair: tuple[Node, Node], server: Server) -> None:
    a, b = pair[0].client(), pair[1].client()
    event, stream = recorded(a, "kv"), ipcsync.Stream()
    seen = b.event("kv", node="a")

    async def purge(client: Any) -> None:
        await client.request("$JS.API.STREAM.DELETE.KV_ipcsync_main", b"", timeout=5)

    with_client(server, purge)
    seen.at(event.record(stream).generation).synchronize(DEADLINE_S)
    b.event("other", node="a")  # a name of a node asks that node, and no store


def test_no_server_at_all_is_a_fleet_unavailable(pair: tuple[Node, Node], server: Server, machine: Machine) -> None:
    b = pair[1].client()
    server.kill()
    began = time.monotonic()
    with pytest.raises(ipcsync.FleetUnavailable, match=r"cut off from NATS|store"):
        b.nodes(timeout=2.0)
    assert time.monotonic() - began < machine.bound(2.0, began)
    with pytest.raises((ipcsync.NodeLost, ipcsync.WaitTimeout)):
        b.event("kv", node="a", timeout=1.0)


def test_two_fleets_on_one_server_do_not_meet(new_node: Callable[..., Node]) -> None:
    one, other = new_node("a", "--fleet", "one"), new_node("b", "--fleet", "other")
    for node in (one, other):
        node.await_bridge()
    assert [row.name for row in one.client().nodes()] == ["a"]
    with pytest.raises(ipcsync.NodeLost):
        other.client().event("kv", node="a", timeout=5.0)


def test_exports_are_limited_by_prefix(new_node: Callable[..., Node]) -> None:
    one, other = new_node("a", "--export", "kv/"), new_node("b")
    for node in (one, other):
        node.await_bridge()
    a, b = one.client(), other.client()
    for name in ("kv/1", "secret"):
        recorded(a, name).record(ipcsync.Stream())
    b.event("kv/1", node="a").at(1).synchronize(DEADLINE_S)
    with pytest.raises(ipcsync.EventClosed, match="exports no event"):
        b.event("secret", node="a")
    with pytest.raises(ipcsync.RecorderLost, match="is gone"):
        b.point(bytes(a.event("secret").at(1)))
    assert [row.name for row in b.list_events(node="a")] == ["kv/1"]


def test_the_bridge_leaves_nothing_behind(pair: tuple[Node, Node]) -> None:
    a, b = pair[0].client(), pair[1].client()
    assert pair[1].bridge is not None
    stream = ipcsync.Stream()
    for number in range(30):
        event = recorded(a, f"e{number}")
        seen = b.event(f"e{number}", node="a")
        seen.at(event.record(stream).generation).synchronize(DEADLINE_S)
        seen.close()
        event.close()
        if number == 10:
            files = len(os.listdir(f"/proc/{pair[1].bridge.pid}/fd"))
    for client in (a, b):
        until(lambda: client.stats()["pool_in_use"] == 0, "all slots to be free")  # noqa: B023 - at once
    assert len(os.listdir(f"/proc/{pair[1].bridge.pid}/fd")) <= files + 1


def test_timed_out_cas_applied_later(patient_pair: tuple[Node, Node], server: Server) -> None:
    """The server stands still while a name is claimed, and writes the claim when nobody waits for that any more."""
    a, b = (node.client() for node in patient_pair)
    assert _claims(a, "before") is not None  # the store is there, and known to the bridge
    stop(server.process.pid)
    with pytest.raises((ipcsync.FleetUnavailable, ipcsync.WaitTimeout)):
        a.event("w", recorder=True, fleet=True, timeout=1.0)
    server.process.send_signal(signal.SIGCONT)
    # Nobody has the name, whatever was written: it is free, though its node lives and answers.
    claimed = until(lambda: _gets(b, "w"), "the name to be free again")
    assert claimed.node == ""
    with pytest.raises(ipcsync.RecorderTaken, match="node 'b'"):
        a.event("w", recorder=True, fleet=True)


def _gets(client: ipcsync.Client, name: str) -> ipcsync.SharedEvent | None:
    try:
        return _claims(client, name)
    except ipcsync.RecorderTaken:
        return None


def test_a_use_has_one_mirror_however_many_wait_for_it(pair: tuple[Node, Node]) -> None:
    a, b = pair[0].client(), pair[1].client()
    point = recorded(a, "kv").record(ipcsync.Stream())
    seen, again, by_point = b.event("kv", node="a"), pair[1].client().event("kv", node="a"), b.point(bytes(point))
    for one in (seen.at(1), again.at(1), by_point):
        one.synchronize(DEADLINE_S)
    assert b.bridge().mirrors == b.stats()["pool_in_use"] == 1
