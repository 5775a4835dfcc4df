"""Replies and announcements: what is sent is what is read, and what is none is a ProtocolError, whatever it is."""

from __future__ import annotations

import threading
import time
import tracemalloc

import msgpack
import pytest
from hypothesis import given

from ipcsync import _threads, errors
from ipcsync._wire import codec, messages
from ipcsync._wire.messages import VERSION
from ipcsync.errors import IpcSyncError, ProtocolError
from tests.unit.wire import frames


@frames.MANY
@given(frames.anything())
def test_any_bytes_are_a_reply_or_a_protocol_error(frame: bytes) -> None:
    frames.decoded(codec.decode_reply, frame)
    frames.decoded(codec.decode_announcement, frame)


@pytest.mark.parametrize("count", [1, 5])
def test_replies_and_announcements_are_read_as_they_were_sent(count: int) -> None:
    row = messages.EventInfo("e", "gpu", "event", "open", 3, 2, 1, "me", 4, 5)
    replies = [
        messages.Done(),
        messages.Welcome(b"t" * 16, "id", 1, 2, b"e" * 16, 5.0, 1.5, "/board", "ipc://f", "host", ["gpu"] * count, 3),
        messages.Attachment("e", 1, 2, 3, "gpu", "event", 4, True, [b"h" * 64] * count),
        messages.StreamSpec("gpu", -1),
        messages.EventList([row] * count),
        messages.SessionList([messages.SessionInfo("i", "n", 1, 2, 3.0, 4.0)] * count),
        messages.AttachmentList([messages.AttachmentInfo("e", "me", "i", "records", "active", 4, 5)] * count),
        messages.Counters({"sessions": 1, "requests": {"open": 2}}),
        messages.SnapshotReply(9, [row], []),
        messages.ProbeReply(b"h", "why"),
        messages.Remains("e", 1, 2, "gpu", count, 3, "died", 4, "prefill", 5),
        messages.Failure("IpcSyncError", "text", {"limit": 3}),
        messages.NodeList([messages.NodeInfo("n", b"e" * 16, "linked", 3, 0.5)] * count),
        messages.BridgeInfo(
            "a", "main", 1, "nats://h:1", 2, 3, [messages.PeerInfo("b", "lost", reason="silent")], {"tells": 4}, {}, {}
        ),
        messages.WantList([messages.Want(7, "open", 9, "n", "e")] * count),
    ]
    assert {type(reply) for reply in replies} == set(messages.REPLIES.values())
    for reply in replies:
        assert codec.decode_reply(codec.encode_reply(count, reply)) == (count, reply)
    announcement = messages.Announcement(count, "opened", "e", 1, 2, "gpu", "event", [b"h" * 64])
    assert codec.decode_announcement(codec.encode_announcement(announcement)) == announcement


_HEAD = bytes([0x94, VERSION, 1])  # an array of four: version, id, …
_REPLY = _HEAD + b"\xa4done"


@pytest.mark.parametrize("depth", [200, 1000, 5000, 100_000])
@pytest.mark.parametrize("head", [b"", _REPLY], ids=["all", "body"])
def test_a_deep_reply_is_a_protocol_error(head: bytes, depth: int) -> None:
    for opening in (b"\x91", b"\x81\xa1a"):
        with pytest.raises(ProtocolError):
            codec.decode_reply(head + opening * depth + b"\x00")


@pytest.mark.parametrize("bomb", [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"])
def test_a_reply_that_claims_to_be_huge_builds_nothing(bomb: bytes) -> None:
    tracemalloc.start()
    try:
        for frame in (bomb, _REPLY + bomb, _HEAD + b"\xa6events\x81\xa6events" + bomb):
            with pytest.raises(ProtocolError):
                codec.decode_reply(frame)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 << 20


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (msgpack.packb([VERSION + 1, 1, "done", {}]), "version"),
        (msgpack.packb([VERSION + 1, "more", "parts", {}, 5]), "version"),
        (msgpack.packb({"version": VERSION + 1}), "version"),
        (b"", "version"),
        (msgpack.packb([VERSION, "1", "done", {}]), "malformed"),
        (msgpack.packb([VERSION, True, "done", {}]), "malformed"),
        (msgpack.packb([VERSION, 1, "done"]), "malformed"),
        (msgpack.packb([VERSION, 1, "nothing", {}]), "malformed"),
        (msgpack.packb([VERSION, 1, "done", {}]) + b"\x00", "malformed"),
        (msgpack.packb([VERSION, 1, "done", {"more": 1}]), "invalid"),
        (msgpack.packb([VERSION, 1, "done", []]), "invalid"),
        (_HEAD + b"\xa5stats\x81\xa5stats\x81\xa1a\x81\x80\x01", "invalid"),  # a map as a map's key
        (msgpack.packb([VERSION, 1, "stream", {"name": "s", "device": "d", "priority": "high"}]), "invalid"),
    ],
)
def test_what_is_wrong_with_a_reply_is_told(frame: bytes, code: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        codec.decode_reply(frame)
    assert caught.value.code == code


def test_what_cannot_be_sent_is_a_protocol_error() -> None:
    for body in (messages.Open("\ud800"), messages.Attach(1 << 70, 1), messages.OpenStream("s", priority=-(1 << 70))):
        with pytest.raises(ProtocolError) as caught:
            codec.encode_request(1, body, b"", 0)
        assert caught.value.code == "invalid"


def test_threads_may_encode_at_the_same_time() -> None:
    wrong: list[bytes] = []
    deadline = time.monotonic() + 0.3

    def encode(name: str) -> None:
        expected = codec.encode_request(1, messages.Open(name), b"t" * 16, 0)
        while time.monotonic() < deadline:
            frame = codec.encode_request(1, messages.Open(name), b"t" * 16, 0)
            if frame != expected:
                wrong.append(frame)

    threads = [threading.Thread(target=encode, args=(str(number) * 200,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not wrong


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_travels_with_its_attributes(name: str) -> None:
    error = getattr(errors, name)("said")
    for key, value in vars(error).items():
        setattr(error, key, 3.5 if value is None else type(value)(7))
    failure = codec.failure_of(error)
    _, reply = codec.decode_reply(codec.encode_reply(1, failure))
    assert isinstance(reply, messages.Failure)
    again = codec.error_of(reply)
    assert type(again) is type(error)
    assert str(again) == "said"
    assert vars(again) == vars(error)


@pytest.mark.parametrize("kind", ["", "SystemExit", "__all__", "annotations", "os", "Exception"])
def test_a_failure_of_an_unknown_kind_becomes_a_plain_error(kind: str) -> None:
    error = codec.error_of(messages.Failure(kind, "text", {"code": 1, "__class__": 2, "args": 3}))
    assert type(error) is IpcSyncError
    assert str(error) == f"{kind}: text"


def test_two_threads_do_not_begin_with_a_kind_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """msgspec 0.22 crashes if they do."""
    asked: list[int] = []
    both = threading.Event()
    make, take = codec._make_decoder, _threads._take

    def slow(kind: type[messages.Hello]) -> object:
        assert both.wait(60)
        return make(kind)

    def taken(lock: _threads.CallLock, seconds: float) -> bool:
        if lock is codec._first_use:
            asked.append(1)
            if len(asked) == 2:
                both.set()
        return take(lock, seconds)

    monkeypatch.setattr(codec, "_bodies", {})
    monkeypatch.setattr(codec, "_make_decoder", slow)
    monkeypatch.setattr(_threads, "_take", taken)
    hello = messages.Hello(bytes(16), "host")
    threads = [threading.Thread(target=codec.check_body, args=(hello,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert messages.Hello in codec._bodies
