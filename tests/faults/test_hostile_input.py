"""Whatever comes over the socket harms nobody but its sender: rows 25 to 27."""

from __future__ import annotations

import random

import msgpack
import pytest
import zmq

import ipcsync
from ipcsync._wire import codec, messages
from ipcsync._wire.messages import VERSION
from ipcsync_keeper import config
from tests.faults import flood
from tests.kit.raw_client import Raw, assert_serves, await_end, failure_in, refusals, request, resident_kib, unix_socket
from tests.kit.until import until

pytestmark = [pytest.mark.keeper, pytest.mark.own_coordinator]

_FRAME = config.MAX_FRAME


# --- row 25 -----------------------------------------------------------------------------------------------------------


def test_row_25_a_frame_over_the_limit_is_refused_with_a_typed_reply(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client
) -> None:
    with Raw(coordinator.endpoint) as raw:
        reply = raw.exchange(request("open", {"name": "x" * _FRAME}, id=9))
        assert codec.decode_reply(reply)[0] == 9
        assert failure_in(reply).attributes["code"] == "too_large"
    assert refusals(client)["too_large"] == 1
    assert_serves(coordinator, client)


def test_row_25_a_frame_far_over_the_limit_ends_its_connection_only(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client
) -> None:
    with Raw(coordinator.endpoint) as raw:
        monitor = raw.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        raw.send(b"x" * (5 * _FRAME))
        assert monitor.poll(10_000), "the connection is still there"
        monitor.close()
        raw.socket.disable_monitor()
    assert_serves(coordinator, client)


def test_row_25_a_message_of_10000_frames_is_refused_and_counted(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client
) -> None:
    with Raw(coordinator.endpoint) as raw:
        raw.send(*[request("stats")] * 10_000)
        raw.send(request("stats"), b"")
        raw.hello()  # behind them, on the same connection
    assert refusals(client)["too_many_frames"] == 2
    assert_serves(coordinator, client)


# --- row 26 -----------------------------------------------------------------------------------------------------------

_GOOD = request("events", {"prefix": "abc"})
_HEAD = bytes([0x96, VERSION, 7])  # an array of six: version, id, …
_MALFORMED = {
    "empty": b"",
    "truncated": _GOOD[:-1],
    "trailing": _GOOD + b"\x00",
    "5,000 deep": b"\x91" * 5000 + b"\xc0",
    "1,000 deep operation": _HEAD + b"\x91" * 1000 + b"\xc0\xc4\x00\x00\x80",
    "200 deep body": request("events", msgpack.unpackb(b"\x91" * 200 + b"\xc0")),
    "maps 200 deep": request("events", msgpack.unpackb(b"\x81\xa1a" * 200 + b"\xc0")),
    "array32 bomb": b"\xdd\xff\xff\xff\xff",
    "array32 bomb in the body": _HEAD + b"\xa6events\xc4\x00\x00\xdd\xff\xff\xff\xff",
    "array16 bombs in each other": b"\xdc\x0f\xff" * 900,
    "map32 bomb": b"\xdf\xff\xff\xff\xff",
    "str32 bomb": b"\xdb\xff\xff\xff\xff",
    "bin32 bomb": b"\xc6\xff\xff\xff\xff",
    "ext32 bomb": b"\xc9\xff\xff\xff\xff\x01",
    "timestamp": _HEAD + b"\xd6\xff\x00\x00\x00\x00\xc4\x00\x00\x80",
    "invalid UTF-8": _GOOD.replace(b"abc", b"\xff\xfe\x80"),
    "a list as a map's key": _HEAD + b"\xa6events\xc4\x00\x00\x81\x90\xc0",
    "reserved byte": b"\xc1",
    "no array": b"\x07",
    "empty array": b"\x90",
    "HTTP": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
}


def test_row_26_malformed_messages_get_a_typed_error_each(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client
) -> None:
    with Raw(coordinator.endpoint) as raw:
        for what, frame in _MALFORMED.items():
            failure = failure_in(raw.exchange(frame))
            assert failure.kind == "ProtocolError", what
            assert failure.attributes["code"] in ("malformed", "invalid"), what
    assert sum(refusals(client).values()) == len(_MALFORMED)
    assert_serves(coordinator, client)


def test_row_26_random_bytes_get_a_typed_error_or_nothing(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client
) -> None:
    random_bytes = random.Random(26)
    for _ in range(10):  # a connection that sent more of it would be cut
        with Raw(coordinator.endpoint) as raw:
            for _ in range(50):
                frame = random_bytes.randbytes(random_bytes.randrange(200))
                assert failure_in(raw.exchange(frame)).kind == "ProtocolError"
    with unix_socket(coordinator.endpoint) as connection:
        connection.sendall(b"\x7f" + random_bytes.randbytes(1000))
        await_end(connection)
    assert_serves(coordinator, client)


def test_row_26_raw_http_is_dropped(coordinator: ipcsync.Coordinator, client: ipcsync.Client) -> None:
    with unix_socket(coordinator.endpoint) as connection:
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nUser-Agent: curl/8\r\n\r\n" * 3)
        assert b"HTTP" not in await_end(connection)
    assert_serves(coordinator, client)


def test_row_26_a_flood_of_malformed_messages_leaves_the_coordinator_as_it_was(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client
) -> None:
    flood.pour(coordinator.endpoint, 1000, seed=1)  # the allocator's own first growth
    client.stats()
    before = resident_kib(coordinator.pid)
    sent = flood.pour(coordinator.endpoint, 3000, seed=2)
    assert sent == 3000
    assert_serves(coordinator, client)
    assert resident_kib(coordinator.pid) - before < 8 * 1024
    assert refusals(client).get("internal", 0) == 0


_STRANGE = {"malformed": [b"\xc1"], "of no session": [request(token=b"n" * 16)], "of two frames": [b"", b""]}


@pytest.mark.parametrize("frames", _STRANGE.values(), ids=_STRANGE)
def test_row_26_a_connection_that_sends_nothing_else_is_cut(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, frames: list[bytes]
) -> None:
    with Raw(coordinator.endpoint) as raw:
        token = raw.hello().token
        monitor = raw.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        for _ in range(99):
            raw.send(*frames)
        raw.ask(messages.ListSessions(), token, messages.SessionList)  # a session spoke: they are forgotten
        for _ in range(99):
            raw.send(*frames)
        raw.hello()
        assert not monitor.poll(0)
        raw.ask(messages.ListSessions(), token, messages.SessionList)
        for _ in range(100):
            raw.send(*frames)
        assert monitor.poll(10_000), "the connection is still there"
        until(lambda: refusals(client).get("stranger") == 1, "it was counted")
        raw.socket.disable_monitor()
        monitor.close()
        raw.ask(
            messages.ListSessions(), token, messages.SessionList
        )  # over the next connection, under the same session
    assert_serves(coordinator, client)


def test_row_26_a_stranger_with_a_routing_id_of_its_own_is_cut_each_time(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client
) -> None:
    with Raw(coordinator.endpoint, routing=b"me") as raw:
        monitor = raw.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        for _ in range(3):
            for _ in range(100):  # the last ones' replies may be lost with the connection
                raw.send(b"\xc1")
            assert monitor.poll(10_000), "the connection is still there"
            monitor.recv_multipart()
        raw.socket.disable_monitor()
        monitor.close()
    until(lambda: refusals(client).get("stranger") == 3, "each was counted")
    assert_serves(coordinator, client)


def _command(body: bytes) -> bytes:
    return b"\6" + len(body).to_bytes(8, "big") + body


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value


def test_row_26_of_a_long_routing_id_little_is_remembered(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client
) -> None:
    greeting = b"\xff" + bytes(8) + b"\x7f\3\0" + b"NULL".ljust(20, b"\0") + bytes(32)
    before, count = resident_kib(coordinator.pid), 300
    for number in range(count):
        routing = number.to_bytes(8, "big") + b"x" * 200_000  # ZMTP allows 255, and libzmq as many as a frame may have
        ready = _command(b"\5READY" + _property(b"Socket-Type", b"DEALER") + _property(b"Identity", b"r" + routing))
        with unix_socket(coordinator.endpoint) as connection:
            said = b""
            for words, answer in ((greeting, b"NULL"), (ready, b"READY"), (b"\0\1\xc1", b"malformed")):
                connection.sendall(words)
                while answer not in said:
                    said += connection.recv(4096) or pytest.fail("it is closed")
    assert refusals(client)["malformed"] == count
    assert resident_kib(coordinator.pid) - before < 100 * count  # of each 200 kB in all would be kept
    assert_serves(coordinator, client)


# --- row 27 -----------------------------------------------------------------------------------------------------------

_HELLO = {"nonce": b"n" * 16, "driver": "host"}
_UNKNOWN = {
    "unknown operation": (request("shutdown"), "unknown_op"),
    "operation of another type": (request(5), "malformed"),
    "unknown field": (request("events", {"prefix": "", "all": True}), "invalid"),
    "another version": (request(version=VERSION + 1), "version"),
    "version as a float": (request(version=float(VERSION)), "malformed"),
    "no version": (msgpack.packb([str(VERSION)]), "malformed"),
    "id as text": (request(id="7"), "malformed"),
    "id 0": (request(id=0), "malformed"),
    "id below 0": (request(id=-1), "malformed"),
    "id over 63 bits": (request(id=1 << 63), "malformed"),
    "deadline as a float": (request(deadline=1.5), "malformed"),
    "token as text": (request(token="t" * 16), "malformed"),
    "five parts": (msgpack.packb([VERSION, 7, "sessions", b"", 0]), "malformed"),
    "seven parts": (msgpack.packb([VERSION, 7, "sessions", b"", 0, {}, {}]), "malformed"),
    "body as an array": (request("events", [""]), "invalid"),
    "prefix as a number": (request("events", {"prefix": 5}), "invalid"),
    "missing field": (request("attach", {"slot": 1}), "invalid"),
    "negative slot": (request("attach", {"slot": -1, "incarnation": 1}), "invalid"),
    "slot over 63 bits": (request("attach", {"slot": 1 << 63, "incarnation": 1}), "invalid"),
    "slot as a bool": (request("attach", {"slot": True, "incarnation": 1}), "invalid"),
    "depth 0": (request("open", {"name": "e", "depth": 0}), "invalid"),
    "depth 1025": (request("open", {"name": "e", "depth": 1025}), "invalid"),
    "short nonce": (request("hello", {**_HELLO, "nonce": b"n"}), "invalid"),
    "ttl as text": (request("hello", {**_HELLO, "lease_ttl": "5"}), "invalid"),
}


def test_row_27_unknown_and_ill_typed_requests_get_typed_errors(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client
) -> None:
    with Raw(coordinator.endpoint) as raw:
        for what, (frame, code) in _UNKNOWN.items():
            failure = failure_in(raw.exchange(frame))
            assert (failure.kind, failure.attributes["code"]) == ("ProtocolError", code), what
    counted = refusals(client)
    for code in {code for _, code in _UNKNOWN.values()}:
        assert counted[code] == sum(other == code for _, other in _UNKNOWN.values())
    assert_serves(coordinator, client)


_BAD_NAMES = ["x" * 256, "é" * 128, "x" * 10_000, "a\x00b", "a\nb", "\x7f"]
_BAD_NAMES += ["..", ".", "a/../b", "a/./b", "/a", "a/", "a//b"]


def test_row_27_bad_names_get_typed_errors(coordinator: ipcsync.Coordinator, client: ipcsync.Client) -> None:
    with Raw(coordinator.endpoint) as raw:
        token = raw.hello().token
        for name in _BAD_NAMES:
            for body in (messages.Open(name), messages.OpenStream(name)):
                error = raw.refused(body, token)
                assert isinstance(error, ipcsync.ProtocolError), name
                assert error.code in ("name", "invalid"), name
        assert isinstance(raw.refused(messages.OpenStream(""), token), ipcsync.ProtocolError)
    assert client.list_events() == []
    for name in ["", *_BAD_NAMES, "\ud800"]:
        with pytest.raises(ipcsync.ProtocolError):
            client.event(name)
        with pytest.raises(ipcsync.ProtocolError):
            client.stream(name)
    for name in ["x" * 256, "a\x00b", "\ud800"]:
        with pytest.raises(ipcsync.ProtocolError):
            ipcsync.connect(coordinator.endpoint, name=name)
    with pytest.raises(ipcsync.ProtocolError):
        client.list_events("\ud800")
    sent = client.messages_sent
    for priority in (1 << 70, 5000):
        with pytest.raises(ipcsync.ProtocolError):
            client.stream("s", priority=priority)
    with pytest.raises(ipcsync.ProtocolError):
        client.list_events("x" * 256)
    assert client.messages_sent == sent, "sent again and again, it would have the connection cut"
    assert_serves(coordinator, client)


def test_row_27_the_longest_names_work(client: ipcsync.Client) -> None:
    for name in ("x" * 255, "é" * 127, "a/b.c/..d/…"):
        assert client.event(name, recorder=True).name == name
    assert len(client.list_events()) == 3


def test_row_27_unserved_devices_and_unknown_engines_get_typed_errors(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client
) -> None:
    with Raw(coordinator.endpoint) as raw:
        token = raw.hello().token
        for engine in ("event", "timeline", "auto"):
            error = raw.refused(messages.Open("e", device="no", engine=engine), token)
            assert isinstance(error, ipcsync.DeviceMismatch)
        assert isinstance(raw.refused(messages.Open("e", engine="magic"), token), ipcsync.ProtocolError)
        assert isinstance(raw.refused(messages.Probe("no"), token), ipcsync.DeviceMismatch)
    assert client.stats()["pool_in_use"] == 0
