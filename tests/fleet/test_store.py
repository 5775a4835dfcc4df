"""The store of the fleet's names, as a bridge reads it from a real server."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nats", reason="nats-py is not installed: pip install -e '.[fleet]'")

import msgspec
import nats
import nats.js.errors
from nats.aio.client import Client
from nats.errors import AuthorizationError

from ipcsync.errors import NodeNameTaken
from ipcsync_bridge import transport as transport_module
from ipcsync_bridge import wire
from ipcsync_bridge.bridge import Bridge
from ipcsync_bridge.config import Settings
from ipcsync_bridge.session import BridgeSession
from ipcsync_bridge.store import Identity, Names, Nodes, Owner, insist
from ipcsync_bridge.transport import ASK_S, Answer, Conflict, Transport, Unavailable, flushed
from ipcsync_bridge.wire import Counters, owner_of
from tests.fleet.cluster import Cluster
from tests.fleet.nodes import Node, Server, listening, with_client
from tests.kit.examples import LONG
from tests.kit.machine import Machine
from tests.kit.until import DEADLINE_S

# nats-py leaves the socket of an attempt that failed to the collector.
pytestmark = [
    pytest.mark.process,
    pytest.mark.filterwarnings("ignore:.*StreamWriter:pytest.PytestUnraisableExceptionWarning"),
]
_RACES = 60 if LONG else 20  # for a key of three servers


@pytest.fixture(autouse=True)
def _no_socket_is_left_to_a_later_test() -> Iterator[None]:
    yield
    gc.collect()


class _Deaf:
    """Hears what other nodes say, and does nothing."""

    def received(self, sender: str, data: bytes, answer: Answer | None) -> None: ...
    def connected(self) -> None: ...
    def closed(self, why: str) -> None: ...


class _Keen(_Deaf):
    """Keeps what other nodes say."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, bytes]] = []

    def received(self, sender: str, data: bytes, answer: Answer | None) -> None:
        self.heard.append((sender, data))


@contextlib.asynccontextmanager
async def _transport(url: str, listener: _Deaf | None = None, replicas: int = 1) -> AsyncIterator[Transport]:
    transport = Transport(Settings("a", (url,), replicas=replicas))
    await transport.listen(listener or _Deaf())
    yield transport
    await transport.close()


@contextlib.asynccontextmanager
async def _far_away(server: Server, delay_s: float) -> AsyncIterator[str]:
    """The URL of a relay through which each byte takes so long, in either direction."""

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        while data := await reader.read(1 << 16):
            loop.call_later(delay_s, writer.write, data)
        loop.call_later(delay_s, writer.close)

    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, there = await asyncio.open_connection(server.host, int(server.url.rpartition(":")[2]))
        writers.extend((writer, there))
        await asyncio.gather(carry(reader, there), carry(back, writer))

    relay = await asyncio.start_server(serve, server.host, 0)
    async with relay:
        yield f"nats://{server.host}:{relay.sockets[0].getsockname()[1]}"
    for each in writers:
        each.close()
        with contextlib.suppress(ConnectionError):
            await each.wait_closed()


def _names(transport: Any) -> Names:
    async def nobody(_node: str, _timeout: float) -> bytes | None:
        return None

    me = Identity("a", b"o" * 16, b"e" * 16)
    return Names(transport, Nodes(transport, me, 1.0, nobody), Counters())


def test_keys_that_no_bridge_writes_keep_none_from_its_names(server: Server, new_node: Callable[..., Node]) -> None:
    first = new_node("a")
    first.await_bridge()
    first.client().event("w", recorder=True, fleet=True)

    async def write(client: Any) -> None:
        for key in ("names.%", "names.a.b", "names.ends.", "nodes.%", "nodes.b"):
            await client.publish(f"$KV.ipcsync_main.{key.rstrip('.')}", b"what no bridge writes")
        await flushed(client, DEADLINE_S)

    with_client(server, write)
    second = new_node("c")
    second.await_bridge()
    seen = second.client()
    assert {row.name for row in seen.nodes()} == {"a", "c"}
    assert seen.event("w", fleet=True).node == "a"


def test_of_more_nodes_than_one_answer_holds_those_that_are_linked_are_listed(
    server: Server, new_node: Callable[..., Node]
) -> None:
    first, second = new_node("n"), new_node("z")
    for node in (first, second):
        node.await_bridge()
    seen = first.client()
    event = seen.event("kv", node="z")

    async def write(client: Any) -> None:
        for number in range(1_100):
            owner = msgspec.json.encode(Owner("0" * 32, f"{number:032x}", 1))
            await client.publish(f"$KV.ipcsync_main.nodes.{number:063}", owner)
        await flushed(client, DEADLINE_S)

    with_client(server, write)
    found = seen.nodes(timeout=DEADLINE_S)
    assert [(row.name, row.state) for row in found[:2]] == [("n", "known"), ("z", "linked")]
    assert (len(found), {row.state for row in found[2:]}) == (401, {"known"})
    event.close()


def test_a_bucket_that_was_made_by_hand_is_read_as_any_other(server: Server) -> None:
    """Direct reads need a permission that no node has, and a replica may answer them with what was before."""
    heard: list[str] = []

    async def make(client: Any) -> None:
        await client.jetstream().create_key_value(bucket="ipcsync_main", direct=True)

    async def keep(message: Any) -> None:
        heard.append(message.subject)

    async def scenario() -> None:
        async with _transport(server.url) as transport:
            last = await transport.cas("names.x", b"value", 0, DEADLINE_S)
            assert await transport.read("names.x", DEADLINE_S) == (b"value", last)

    with_client(server, make)
    with listening(server, "$JS.API.DIRECT.GET.>", keep):
        asyncio.run(scenario())
    assert heard == []


@pytest.mark.parametrize("code", [10071, 10164])
def test_a_write_at_another_revision_is_a_conflict_by_any_of_the_servers_codes(server: Server, code: int) -> None:
    async def refused(_bucket: object) -> None:
        raise nats.js.errors.APIError(code=400, err_code=code, description="wrong last sequence")

    async def scenario() -> None:
        async with _transport(server.url) as transport:
            with pytest.raises(Conflict):
                await transport._ask_store(refused, DEADLINE_S)

    asyncio.run(scenario())


def test_nothing_is_said_to_be_flushed_by_a_connection_that_is_lost(server: Server) -> None:
    async def scenario() -> None:
        client = await nats.connect(server.url)
        await flushed(client, DEADLINE_S)
        server.kill()
        while client.is_connected:
            await asyncio.sleep(0.01)
        await client.publish("somewhere", b"kept for the next connection")
        with pytest.raises(nats.errors.ConnectionClosedError):
            await flushed(client, DEADLINE_S)
        server.start()
        while not client.is_connected:
            await asyncio.sleep(0.01)
        await flushed(client, DEADLINE_S)
        await client.close()

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))


def test_a_slow_answer_is_one_and_without_a_connection_no_node_is_silent(server: Server) -> None:
    async def scenario() -> None:
        async with _transport(server.url) as transport:
            holder = await nats.connect(server.url)

            async def answer(message: Any) -> None:
                await asyncio.sleep(1.5 * ASK_S)
                await message.respond(wire.encode(wire.Pong(1, b"e" * 16, b"o" * 16, 0)))

            await holder.subscribe("ipcsync.main.b.ask.*", cb=answer)
            await flushed(holder, DEADLINE_S)
            assert await owner_of(transport, "b", 5.0) == b"o" * 16
            await holder.close()
            assert await owner_of(transport, "b", 0.3) is None
            server.kill()
            with pytest.raises(Unavailable, match="cut off"):
                await owner_of(transport, "b", 0.3)

    asyncio.run(scenario())


def test_a_question_that_was_lost_is_asked_again_and_has_one_answer(server: Server) -> None:
    async def scenario() -> None:
        async with _transport(server.url) as transport:
            holder = await nats.connect(server.url)
            replies: list[str] = []

            async def answer(message: Any) -> None:
                replies.append(message.reply)
                if len(replies) > 1:
                    await message.respond(message.data)

            await holder.subscribe("ipcsync.main.b.ask.*", cb=answer)
            await flushed(holder, DEADLINE_S)
            assert await transport.ask("b", b"is anybody there", DEADLINE_S) == b"is anybody there"
            assert len(set(replies)) == 1 < len(replies)
            await holder.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("is_back", [False, True])
def test_a_connection_that_is_closed_while_it_is_made_anew_ends(
    server: Server, monkeypatch: pytest.MonkeyPatch, is_back: bool
) -> None:
    """nats-py loses a cancellation in the moment in which an attempt ends, as `asyncio.wait_for` does before 3.12."""
    connect = Client._connect_to_server

    async def scenario() -> None:
        async with _transport(server.url):
            is_trying = asyncio.Event()

            async def connect_all_the_same(self: Client, *arguments: Any) -> None:
                is_trying.set()
                try:
                    await asyncio.sleep(DEADLINE_S)
                except asyncio.CancelledError:
                    if not is_back:
                        raise ConnectionRefusedError from None
                await connect(self, *arguments)

            monkeypatch.setattr(Client, "_connect_to_server", connect_all_the_same)
            server.kill()
            await is_trying.wait()
            if is_back:
                server.start()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert not others or not (await asyncio.wait(others, timeout=DEADLINE_S))[1]

    asyncio.run(scenario())


def test_a_bridge_that_gets_no_name_leaves_the_servers(server: Server, new_node: Callable[..., Node]) -> None:
    """Else its process does not end if it just then has no connection: nats-py goes on to make one."""
    new_node("a").await_bridge()
    other = new_node("a", has_bridge=False)

    async def scenario() -> None:
        session = BridgeSession.opened(other.coordinator.endpoint, "bridge a", DEADLINE_S)
        with pytest.raises(NodeNameTaken):
            await Bridge(session, Transport(Settings("a", (server.url,))), b"o" * 16).run()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        session.close(says_goodbye=True)

    asyncio.run(scenario())


async def _fill(transport: Transport, server: Server) -> None:
    """Stop the server, and send what neither it nor the sockets on the way take in."""
    server.process.send_signal(signal.SIGSTOP)
    with contextlib.suppress(asyncio.TimeoutError):
        for _ in range(400):  # 24 MB, more than the sockets' buffers
            await asyncio.wait_for(transport.send("b", bytes(60_000)), 1.0)
            await asyncio.sleep(0)


def test_a_connection_ends_soon_though_the_server_takes_nothing(server: Server, machine: Machine) -> None:
    """What was sent and not taken in would keep the socket open until TCP gives up: a quarter of an hour."""

    async def scenario() -> None:
        transport = Transport(Settings("a", (server.url,)))
        await transport.listen(_Deaf())
        await _fill(transport, server)
        began = time.monotonic()
        await transport.close()
        assert time.monotonic() - began < machine.limit(5.0, began)

    try:
        asyncio.run(scenario())
    finally:
        server.process.send_signal(signal.SIGCONT)


def test_a_transport_closes_though_the_end_of_its_connection_is_never_told(server: Server) -> None:
    """As that of one that was cut off amid its TLS handshake: the bridge that a server does not take must end."""

    async def scenario() -> None:
        transport = Transport(Settings("a", (server.url,)))
        await transport.listen(_Deaf())
        writer = transport._writer()
        assert writer is not None
        asked = asyncio.Event()

        async def never() -> None:
            asked.set()
            await asyncio.Event().wait()

        writer.wait_closed = never  # type: ignore[method-assign]
        await transport.close()
        assert asked.is_set()

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))


def test_a_try_to_connect_ends_though_the_server_never_says_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bridge that was upgraded tries again, and says so in its log."""
    monkeypatch.setattr(transport_module, "_TRY_S", 0.2)

    async def scenario(url: str) -> None:
        transport = Transport(Settings("a", (url,)))
        with pytest.raises(Unavailable, match="takes this node"):
            await transport.listen(_Deaf())
        await transport.close()

    with socket.create_server(("127.0.0.1", 0)) as silent:
        asyncio.run(asyncio.wait_for(scenario(f"nats://127.0.0.1:{silent.getsockname()[1]}"), DEADLINE_S))


_NO_SERVER = b"INFO null\r\n"


def test_what_is_no_nats_server_is_named() -> None:
    async def scenario() -> None:
        async with _saying(_NO_SERVER) as (url, _):
            transport = Transport(Settings("a", (url,)))
            with pytest.raises(Unavailable, match=f"no NATS server at {url}"):
                await transport.listen(_Deaf())
            await transport.close()

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))


def test_a_server_that_takes_no_message_as_large_as_a_bridges_is_named() -> None:
    async def scenario() -> None:
        async with _saying(b'INFO {"max_payload": 65535}\r\nPONG\r\n') as (url, _):
            transport = Transport(Settings("a", (url,)))
            with pytest.raises(Unavailable, match="max_payload is 65535 bytes, and bridges send 65536"):
                await transport.connect(1.0)
            await transport.close()

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))


@pytest.mark.parametrize("hang_up", [BrokenPipeError, ConnectionResetError])
def test_what_a_server_says_is_not_lost_to_its_hang_up(hang_up: type[OSError]) -> None:
    async def scenario() -> str:
        transport = Transport(Settings("a", ("nats://127.0.0.1:1",)))
        for error in (OSError("unreachable"), AuthorizationError(), hang_up()):
            await transport._failed(error)
        return transport.last_error

    assert asyncio.run(scenario()) == "nats: authorization failed"


def test_what_is_no_nats_server_for_a_while_ends_no_connection(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """As where a server is started again behind a proxy. Not each try is logged."""

    async def scenario() -> None:
        async with _transport(server.url) as transport:
            server.kill()
            async with _saying(_NO_SERVER, int(server.url.rpartition(":")[2])) as (_, was_heard):
                await was_heard.wait()
                while transport._errors < 3:
                    await asyncio.sleep(0.01)
            await asyncio.to_thread(server.start)
            while transport._errors:
                await asyncio.sleep(0.01)
            assert transport.server

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))
    said = {each.getMessage() for each in caplog.records if each.name == "ipcsync.bridge"}
    assert said == {"nats", "nats: connected again"}


@contextlib.asynccontextmanager
async def _saying(
    data: bytes, port: int = 0, heard: list[bytes] | None = None
) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """The URL of what says this to who connects, and whether that was so; what that one said goes to `heard`."""
    was_heard = asyncio.Event()

    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        writer.write(data)
        with contextlib.suppress(ConnectionError):
            said = await reader.read()  # until the other end has closed it
            if heard is not None:
                heard.append(said)
        was_heard.set()

    writers: list[asyncio.StreamWriter] = []
    async with await asyncio.start_server(say, "127.0.0.1", port, reuse_address=True) as sayer:
        yield f"nats://127.0.0.1:{sayer.sockets[0].getsockname()[1]}", was_heard
        await was_heard.wait()
        for writer in writers:
            writer.transport.abort()


def test_a_server_that_does_not_ask_for_tls_hears_nothing(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nats-py would go on in the clear, with whoever it is."""
    monkeypatch.setattr(transport_module, "tls_of", lambda _: ssl.create_default_context())
    authority = tmp_path / "ca.pem"
    authority.touch()
    heard: list[bytes] = []

    async def try_(url: str) -> str:
        transport = Transport(Settings("a", (url,), tls_ca=str(authority)))
        trying = asyncio.ensure_future(transport.connect(DEADLINE_S))
        while not (transport.last_error or trying.done()):
            await asyncio.sleep(0.01)
        trying.cancel()
        await asyncio.wait({trying})
        await transport.close()
        return transport.last_error

    async def scenario() -> None:
        async with _saying(b"INFO {}\r\nPONG\r\n", heard=heard) as (url, _):
            for each in (url, server.url):
                assert await try_(each) == "the server does not ask for TLS"

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))
    assert set(heard) == {b""}


@pytest.mark.parametrize("insecure", [False, True])
def test_servers_that_one_of_this_machine_announces_are_spoken_to_only_if_that_may_be_in_the_clear(
    insecure: bool,
) -> None:
    """As those of its cluster, on other machines."""
    infos = [b'INFO {"connect_urls": ["10.0.0.%d:4222"]}\r\n' % number for number in (1, 2)]
    says = infos[0] + b"PONG\r\n" + infos[1] + b"-ERR 'Permissions Violation for all'\r\n"  # which is told, the last

    async def scenario() -> None:
        async with _saying(says) as (url, _):
            transport = Transport(Settings("a", (url,), insecure=insecure))
            await transport.connect(DEADLINE_S)
            while not transport.last_error:
                await asyncio.sleep(0.01)
            found = {server.hostname for server in transport.client.discovered_servers}
            await transport.close()
            assert found == ({"10.0.0.1", "10.0.0.2"} if insecure else set())

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))


def test_a_transport_whose_certificates_cannot_be_used_says_so_and_closes(tmp_path: Path) -> None:
    """nats-py does not close what it never began to connect."""
    (tmp_path / "ca.pem").write_text("no certificate")

    async def scenario() -> None:
        transport = Transport(Settings("a", ("tls://127.0.0.1:1",), tls_ca=str(tmp_path / "ca.pem")))
        with pytest.raises(Unavailable, match=r"(?i)certificate"):
            await transport.connect(DEADLINE_S)
        await transport.close()

    asyncio.run(scenario())


def test_a_server_that_takes_nothing_is_left_for_another_one(server: Server, tmp_path: Path) -> None:
    """The old connection's end is what nats-py waits for before it makes a new one."""
    other = Server(tmp_path / "other")
    servers = {one.url: one for one in (server, other)}

    async def scenario() -> None:
        transport = Transport(Settings("a", tuple(servers), link_ttl=2.0))
        await transport.listen(_Deaf())
        first = transport.server
        await _fill(transport, servers[first])
        while not (await transport.send("b", b"news") and transport.server != first):
            await asyncio.sleep(0.01)
        await transport.close()

    try:
        asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))
    finally:
        other.kill()


def test_what_a_server_may_have_been_made_to_send_in_anothers_name_is_not_taken(server: Server) -> None:
    """A server sends replies to whatever subject a message names; permissions do not hold for what it sends."""
    keen, to = _Keen(), "ipcsync.main.a"

    async def scenario() -> None:
        async with _transport(server.url, keen) as transport:
            with pytest.raises(TimeoutError, match="no bridge of node 'b' listens"):
                await transport.ask("b", b"?", 0.3)
            member = await nats.connect(server.url)
            asked = await member.subscribe("ipcsync.main.b.ask.a")
            await flushed(member, DEADLINE_S)
            questions = asyncio.ensure_future(transport.ask("b", b"?", DEADLINE_S))
            question = await asked.next_msg(timeout=DEADLINE_S)
            await member.publish("ipcsync.main.nobody", b"", reply=f"{to}.ask.b")  # the server says: nobody listens
            await member.publish(f"{to}.ask.b", b"a stored message", headers={"Nats-Stream": "KV_ipcsync_main"})
            await member.publish(f"{to}.ask.b", b"a consumer's message", reply="$JS.ACK.x")
            for reply in ("_INBOX_b.x", "$JS.API.INFO", f"{to}.answer.a.0", "ipcsync.main.c.answer.a.0"):
                await member.publish(f"{to}.ask.b", b"its answer would go elsewhere", reply=reply)
            await member.publish(f"{to}.answer.b.{'0' * 32}", b"a guess")
            await member.publish(question.reply, b"a stored message", headers={"Nats-Stream": "KV_ipcsync_main"})
            await member.publish(question.reply, b"the answer")
            await member.publish(question.reply, b"a second answer")
            await member.publish(f"{to}.ask.b", b"a question", reply="ipcsync.main.b.answer.a.0")
            assert await questions == b"the answer"
            await member.publish(f"{to}.ask.b", b"the last")
            while not keen.heard or keen.heard[-1][1] != b"the last":
                await asyncio.sleep(0.01)
            await member.close()

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))
    assert keen.heard == [("b", b"a question"), ("b", b"the last")]


@pytest.mark.thorough
def test_many_names_are_read_side_by_side_each_in_its_own_time(server: Server) -> None:
    """A fleet's names take longer than one answer of the store may: a bridge that starts reads them all the same."""
    delay_s, count = 0.2, 480

    async def scenario() -> None:
        async with _transport(server.url) as near:
            names = _names(near)
            await names.nodes.take()
            for number in range(count):
                await near.cas(f"names.n{number}", names._claim_of((number, 1)), 0, 10.0)
        async with _far_away(server, delay_s) as url, _transport(url) as far:
            began = time.monotonic()
            names = _names(far)
            await names.resume()
            assert len(names.claims) == count
            took_s = time.monotonic() - began
        assert 5.0 < took_s < count * 2 * delay_s / 4

    asyncio.run(scenario())


def test_of_two_writes_at_once_to_three_servers_one_holds(cluster: Cluster) -> None:
    """A server checks what a write expects before the three agree on it: it takes two that come at the same time."""

    async def claim(transport: Transport, key: str, value: bytes, last: int) -> bool:
        try:
            await transport.cas(key, value, last, 10.0)
        except Conflict:
            return False
        return True

    async def scenario() -> list[int]:
        async with _transport(cluster.urls[0], replicas=3) as one, _transport(cluster.urls[1], replicas=3) as two:
            held = []
            for number in range(_RACES):
                key = f"names.k{number % 3}"
                _, last = await insist(lambda _: one.read(key, 10.0), DEADLINE_S)  # noqa: B023 - awaited at once
                writes = [claim(one, key, b"one", last), claim(two, key, b"two", last)]
                held.append(sum(await asyncio.gather(*writes)))
            return held

    assert asyncio.run(scenario()) == [1] * _RACES
