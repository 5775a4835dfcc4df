"""Requests: what is sent is what is read, and what is none is a ProtocolError, refused before it is built."""

from __future__ import annotations

import math
import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipcsync._wire import codec, messages
from ipcsync._wire.messages import VERSION
from ipcsync.errors import ProtocolError
from ipcsync_coordinator import requests
from tests.unit.wire import frames

_HEAD = bytes([0x96, VERSION, 1])  # an array of six: version, id, …


def _has_nan(body: messages.Message) -> bool:
    return any(isinstance(value, float) and math.isnan(value) for value in msgspec.structs.asdict(body).values())


@frames.MANY
@given(frames.ids, frames.bodies, frames.tokens, st.integers(0, 1 << 62))
def test_a_request_is_read_as_it_was_sent(id_: int, body: messages.Message, token: bytes, deadline: int) -> None:
    frame = codec.encode_request(id_, body, token, deadline)
    read = requests.decode_request(frame)
    assert (read.id, read.op, read.token, read.deadline_ns) == (id_, messages.OPS[type(body)], token, deadline)
    assert type(read.body) is type(body)
    assert _has_nan(body) or read.body == body
    assert requests.peek_id(frame) == id_


@frames.MANY
@given(frames.anything())
def test_any_bytes_are_a_request_or_a_protocol_error(frame: bytes) -> None:
    request = frames.decoded(requests.decode_request, frame)
    if isinstance(request, requests.Request):
        assert isinstance(request.body, messages.REQUESTS[request.op])
        assert 0 < request.id < 1 << 63
    assert 0 <= requests.peek_id(frame) < 1 << 63


@pytest.mark.parametrize("deadline", [-1, 1 << 63, (1 << 64) - 1])
def test_a_deadline_that_the_bridge_could_not_read_in_a_want_is_refused(deadline: int) -> None:
    frame = codec.encode_request(1, messages.Remote("nodes"), b"", deadline)
    with pytest.raises(ProtocolError, match=r"\$\[4\]") as caught:
        requests.decode_request(frame)
    assert caught.value.code == "malformed"


def test_a_frame_of_exactly_the_limit_is_read_and_one_byte_more_is_not() -> None:
    def frame(size: int) -> bytes:
        empty = codec.encode_request(1, messages.Probe(""), b"x" * 300, 0)
        return codec.encode_request(1, messages.Probe(""), b"x" * (300 + size - len(empty)), 0)

    assert len(frame(1024)) == 1024
    assert requests.decode_request(frame(1024), max_frame=1024).op == "probe"
    with pytest.raises(ProtocolError) as caught:
        requests.decode_request(frame(1025), max_frame=1024)
    assert caught.value.code == "too_large"
    assert requests.peek_id(frame(1025)) == 1


@pytest.mark.parametrize("kind", messages.REQUESTS.values())
def test_no_body_of_a_request_has_a_list_or_a_map(kind: type[messages.Message]) -> None:
    """So a frame of a few bytes has nothing built that is larger, and nothing is read that is not a field."""
    described = msgspec.inspect.type_info(kind)
    assert isinstance(described, msgspec.inspect.StructType)
    assert described.forbid_unknown_fields
    for field in described.fields:
        types = field.type.types if isinstance(field.type, msgspec.inspect.UnionType) else (field.type,)
        assert {type(each).__name__ for each in types} <= {
            "IntType",
            "FloatType",
            "StrType",
            "BytesType",
            "BoolType",
            "LiteralType",
            "NoneType",
        }


@pytest.mark.parametrize("depth", [200, 500, 1000, 1023, 1024, 5000])
@pytest.mark.parametrize("head", [b"", _HEAD, _HEAD + b"\xa8sessions\xc4\x00\x00"], ids=["all", "op", "body"])
def test_deep_frames_are_a_protocol_error_wherever_they_are_deep(head: bytes, depth: int) -> None:
    rest = {b"": b"", _HEAD: b"\xc4\x00\x00\x80"}.get(head, b"")
    for opening in (b"\x91", b"\x81\xa1a"):
        with pytest.raises(ProtocolError):
            requests.decode_request(head + opening * depth + b"\x00" + rest)


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
        for frame in (bomb, _HEAD + b"\xa8sessions\xc4\x00\x00" + bomb):
            with pytest.raises(ProtocolError):
                requests.decode_request(frame)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 << 20
