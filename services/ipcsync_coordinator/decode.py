"""Decoding of requests: arbitrary bytes. No body has a list or a map, so nothing much larger than its frame is built.

`ipcsync._wire.codec` describes the frames.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ipcsync._wire.codec import UNREADABLE
from ipcsync._wire.messages import REQUESTS, VERSION, RequestBody
from ipcsync.errors import ProtocolError
from ipcsync_keeper.config import MAX_FRAME

_ARRAY = 0x90  # the first byte of a short array, whose low half is the length
_MOST_FIXED = 0x7F  # a byte up to it is that number
_SIZES = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}  # of a whole number, by its first byte


class Request(msgspec.Struct, frozen=True, gc=False):
    """A request as it came."""

    id: int
    op: str
    token: bytes
    deadline_ns: int
    body: RequestBody


_Id = Annotated[int, Meta(gt=0, le=(1 << 63) - 1)]
_Deadline = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Version = Annotated[int, Meta(ge=VERSION, le=VERSION)]
_id = msgspec.msgpack.Decoder(_Id)
_request = msgspec.msgpack.Decoder(tuple[_Version, _Id, str, bytes, _Deadline, msgspec.Raw])
_bodies = {op: msgspec.msgpack.Decoder[Any](kind) for op, kind in REQUESTS.items()}


def peek_id(frame: bytes | memoryview) -> int:
    """The request id of an invalid frame, 0 if there is none: so that its refusal is a typed reply, too."""
    if len(frame) < 3 or frame[0] & 0xF0 != _ARRAY or frame[1] > _MOST_FIXED:
        return 0
    try:
        return _id.decode(frame[2 : 3 + _SIZES.get(frame[2], 0)])
    except msgspec.MsgspecError:
        return 0


def decode_request(frame: bytes | memoryview, max_frame: int = MAX_FRAME) -> Request:
    """The request in a frame of at most `max_frame` bytes; ProtocolError says which rule it breaks."""
    if len(frame) > max_frame:
        raise ProtocolError(f"a frame of {len(frame)} bytes, more than {max_frame}", code="too_large")
    if len(frame) > 1 and frame[0] & 0xF0 == _ARRAY and VERSION != frame[1] <= _MOST_FIXED:
        raise ProtocolError(f"protocol version {frame[1]}, but this is {VERSION}", code="version")
    try:
        _, id_, op, token, deadline_ns, body = _request.decode(frame)
    except UNREADABLE as error:
        raise ProtocolError(f"not a request: {type(error).__name__}: {error}", code="malformed") from None
    decoder = _bodies.get(op)
    if decoder is None:
        raise ProtocolError(f"unknown operation {op!r:.80}", code="unknown_op")
    try:
        return Request(id_, op, token, deadline_ns, decoder.decode(body))
    except UNREADABLE as error:
        raise ProtocolError(f"{REQUESTS[op].__name__}: {error}", code="invalid") from None
