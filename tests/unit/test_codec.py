"""Frames: what is sent is what is read, and what is not a frame is a ProtocolError, whatever it is."""

from __future__ import annotations

import math
import threading
import time
import tracemalloc
from collections.abc import Callable

import msgpack
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ipcsync import errors
from ipcsync._wire import codec, messages
from ipcsync.errors import IpcSyncError, ProtocolError
from tests.unit import frames

_MANY = settings(max_examples=300, deadline=None, database=None, suppress_health_check=list(HealthCheck))


def _has_nan(body: messages.Message) -> bool:
    return any(isinstance(value, float) and math.isnan(value) for value in msgspec.structs.asdict(body).values())


@_MANY
@given(frames.ids, frames.bodies, frames.tokens, st.integers(0, 1 << 62))
def test_a_request_is_read_as_it_was_sent(id_: int, body: messages.Message, token: bytes, deadline: int) -> None:
    frame = codec.encode_request(id_, body, token, deadline)
    read = codec.decode_request(frame)
    assert (read.id, read.op, read.token, read.deadline_ns) == (id_, messages.OPS[type(body)], token, deadline)
    assert type(read.body) is type(body)
    assert _has_nan(body) or read.body == body
    assert codec.peek_id(frame) == id_


@_MANY
@given(frames.anything())
def test_any_bytes_are_a_request_or_a_protocol_error(frame: bytes) -> None:
    request = _decoded(codec.decode_request, frame)
    if isinstance(request, codec.Request):
        assert isinstance(request.body, messages.REQUESTS[request.op])
        assert 0 < request.id < 1 << 63
    assert 0 <= codec.peek_id(frame) < 1 << 63


def _decoded(decode: Callable[[bytes], object], frame: bytes) -> object:
    """What is in the frame, or None if it is refused as it should be."""
    try:
        return decode(frame)
    except ProtocolError as error:
        refusal = error
    assert refusal.code in ("malformed", "version", "unknown_op", "invalid", "too_large", "too_deep")
    assert len(str(refusal)) < 1000
    return None


@_MANY
@given(frames.anything())
def test_any_bytes_are_a_reply_or_a_protocol_error(frame: bytes) -> None:
    _decoded(codec.decode_reply, frame)
    _decoded(codec.decode_announcement, frame)


@pytest.mark.parametrize("count", [1, 5])
def test_replies_and_announcements_are_read_as_they_were_sent(count: int) -> None:
    row = messages.EventRow("e", "gpu", "event", "open", 3, 2, 1, "me", 4, 5)
    replies = [
        messages.Done(),
        messages.Welcome(
            b"t" * 16, "id", 1, 2, b"e" * 16, 5.0, 1.5, "/board", "ipc://f", "host", 7, ["gpu"] * count, 3
        ),
        messages.Attachment("e", 1, 2, 3, "gpu", "event", 4, True, [b"h" * 64] * count, [1] * count),
        messages.Stream("s", "gpu", -1),
        messages.EventList([row] * count),
        messages.SessionList([messages.SessionRow("i", "n", 1, 2, 3.0, 4.0)] * count),
        messages.AttachmentList([messages.AttachmentRow("e", "me", "i", "records", "active", 4, 5)] * count),
        messages.Counters({"sessions": 1, "requests": {"open": 2}}),
        messages.State(9, [row], []),
        messages.Means(b"h", "", "why"),
        messages.Failure("IpcSyncError", "text", {"limit": 3}),
    ]
    assert {type(reply) for reply in replies} == set(messages.REPLIES.values())
    for reply in replies:
        assert codec.decode_reply(codec.encode_reply(count, reply)) == (count, reply)
    announcement = messages.Announcement(count, "opened", "e", 1, 2, "gpu", "event", [b"h" * 64])
    assert codec.decode_announcement(codec.encode_announcement(announcement)) == announcement


def test_a_frame_of_exactly_the_limit_is_read_and_one_byte_more_is_not() -> None:
    def frame(size: int) -> bytes:
        empty = codec.encode_request(1, messages.Probe(""), b"x" * 300, 0)
        return codec.encode_request(1, messages.Probe(""), b"x" * (300 + size - len(empty)), 0)

    assert len(frame(1024)) == 1024
    assert codec.decode_request(frame(1024), max_frame=1024).op == "probe"
    with pytest.raises(ProtocolError) as caught:
        codec.decode_request(frame(1025), max_frame=1024)
    assert caught.value.code == "too_large"
    assert codec.peek_id(frame(1025)) == 1


def test_nesting_of_exactly_the_limit_is_read_and_one_more_is_not() -> None:
    def frame(depth: int) -> bytes:
        value: object = 0
        for _ in range(depth - 2):
            value = [value]
        return bytes(msgpack.packb([1, 1, "renew", b"", 0, {"a": value}]))

    for depth, code in ((3, "invalid"), (4, "too_deep")):
        with pytest.raises(ProtocolError) as caught:
            codec.decode_request(frame(depth), max_nesting=3)
        assert caught.value.code == code


@pytest.mark.parametrize("depth", [200, 500, 1000, 1023, 1024, 5000])
@pytest.mark.parametrize(
    "head", [b"", b"\x96\x01\x01", b"\x96\x01\x01\xa5renew\xc4\x00\x00"], ids=["all", "op", "body"]
)
def test_deep_frames_are_a_protocol_error_wherever_they_are_deep(head: bytes, depth: int) -> None:
    rest = {b"": b"", b"\x96\x01\x01": b"\xc4\x00\x00\x80"}.get(head, b"")
    for opening in (b"\x91", b"\x81\xa1a"):
        with pytest.raises(ProtocolError):
            codec.decode_request(head + opening * depth + b"\x00" + rest)


@pytest.mark.parametrize(
    "bomb",
    [
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdc\xff\xff" * 900,
        b"\xdc\x0f\xff" * 900,
        b"\xdd\x00\x00\x00\x40" * 900,
    ],
)
def test_a_bomb_is_refused_before_it_is_built(bomb: bytes) -> None:
    tracemalloc.start()
    try:
        for frame in (bomb, b"\x96\x01\x01\xa5renew\xc4\x00\x00" + bomb):
            with pytest.raises(ProtocolError):
                codec.decode_request(frame)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 << 20


def test_what_cannot_be_sent_is_a_protocol_error() -> None:
    for body in (messages.Open("\ud800"), messages.Attach(1 << 70, 1), messages.StreamSpec("s", priority=-(1 << 70))):
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
