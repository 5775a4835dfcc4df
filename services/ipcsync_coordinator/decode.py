"""Decoding of requests: arbitrary bytes, read under limits that hold before any object is built.

`ipcsync._wire.codec` describes the frames.
"""

from __future__ import annotations

from typing import Any

import msgpack
import msgspec

from ipcsync._wire.codec import convert
from ipcsync._wire.messages import REQUESTS, VERSION, RequestBody
from ipcsync.errors import ProtocolError

MAX_FRAME = 64 * 1024  # of a request; replies carry lists and may be larger
MAX_NESTING = 8  # of a request; no valid body nests
_MAX_ITEMS = 64  # of one array or map of a request; msgpack makes an array of the size that its header claims
_CONTAINERS = frozenset((list, dict))  # msgpack makes these, and no subclasses
_PEEK = 64  # bytes that hold the head of a request up to its id
_BARE = {kind: kind() for kind in REQUESTS.values() if not kind.__struct_fields__}  # bodies without fields


class Request(msgspec.Struct, frozen=True, gc=False):
    """A request as it came."""

    id: int
    op: str
    token: bytes
    deadline_ns: int
    body: RequestBody


def _unpack(frame: bytes | memoryview, limit: int) -> object:
    if len(frame) > limit:
        raise ProtocolError(f"a frame of {len(frame)} bytes, more than {limit}", code="too_large")
    try:
        return msgpack.unpackb(
            frame,
            raw=False,
            strict_map_key=True,
            max_str_len=limit,
            max_bin_len=limit,
            max_array_len=_MAX_ITEMS,
            max_map_len=_MAX_ITEMS,
            max_ext_len=0,
        )
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        # ValueError covers bad UTF-8, trailing bytes, a length over a limit, and a depth that msgpack refuses.
        raise ProtocolError(f"not valid MessagePack: {type(error).__name__}: {error}", code="malformed") from None


def peek_id(frame: bytes | memoryview) -> int:
    """The request id of an invalid frame, 0 if there is none: so that its refusal is a typed reply, too."""
    unpacker = msgpack.Unpacker(max_buffer_size=_PEEK, max_ext_len=0)
    unpacker.feed(bytes(frame[:_PEEK]))
    try:
        if unpacker.read_array_header() < 2 or type(unpacker.unpack()) is not int:
            return 0
        id_ = unpacker.unpack()
    except (ValueError, msgpack.UnpackException):
        return 0
    return id_ if type(id_) is int and 0 <= id_ < 1 << 63 else 0


def _check_nesting(value: Any, limit: int) -> None:  # noqa: ANN401 - whatever a frame holds
    layer = [value]
    for _ in range(limit):
        inner = []
        for container in layer:
            for part in container.values() if type(container) is dict else container:
                if type(part) in _CONTAINERS:
                    inner.append(part)  # noqa: PERF401 - twice as fast as a comprehension for so few
        if not inner:
            return
        layer = inner
    raise ProtocolError(f"a request nested more than {limit} deep", code="too_deep")


def decode_request(frame: bytes | memoryview, max_frame: int = MAX_FRAME, max_nesting: int = MAX_NESTING) -> Request:
    """The request in a frame of at most `max_frame` bytes; ProtocolError says which rule it breaks."""
    value = _unpack(frame, max_frame)
    if not isinstance(value, list) or not value or type(value[0]) is not int:
        raise ProtocolError("a request must be an array that begins with the version", code="malformed")
    if value[0] != VERSION:
        raise ProtocolError(f"protocol version {value[0]}, but this is {VERSION}", code="version")
    if len(value) != 6:
        raise ProtocolError(f"a request must have 6 parts, not {len(value)}", code="malformed")
    _, id_, op, token, deadline_ns, body = value
    if type(id_) is not int or type(deadline_ns) is not int or type(token) is not bytes:
        raise ProtocolError("id and deadline must be whole numbers, and the token bytes", code="malformed")
    if not 0 < id_ < 1 << 63 or not 0 <= deadline_ns < 1 << 63:
        raise ProtocolError(
            f"the id must be above 0 and the deadline not below, both below 2**63, not {id_} and {deadline_ns}",
            code="malformed",
        )
    if type(op) in _CONTAINERS:
        raise ProtocolError("the operation must be text", code="malformed")  # not shown: it may be nested deeply
    if body and type(body) in _CONTAINERS:
        _check_nesting(body, max_nesting - 1)
    kind = REQUESTS.get(op) if isinstance(op, str) else None
    if kind is None:
        raise ProtocolError(f"unknown operation {op!r:.80}", code="unknown_op")
    is_bare = type(body) is dict and not body and kind in _BARE
    return Request(id_, op, token, deadline_ns, _BARE[kind] if is_bare else convert(body, kind))
