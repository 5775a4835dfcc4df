"""What travels as bytes: frames, which are one MessagePack array each, and points. Both are checked as they are read.

A request is [version, id, op, token, deadline, body], a reply [version, id, op, body], an announcement [version, body].
`id` counts a session's requests, so that a retry is known; `deadline` is CLOCK_MONOTONIC in ns, after which the client
waits no more; `body` is a map. The coordinator's `decode` reads requests, which any process may send.

A point is 48 bytes, little-endian: `ipc1`, the slot in 4 bytes, the epoch in 16, incarnation and generation in 8 each,
4 zero bytes, and the CRC-32 of these 44.
"""

from __future__ import annotations

import struct
import zlib
from types import UnionType
from typing import Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from ipcsync import errors
from ipcsync._threads import CallLock, under
from ipcsync._wire.messages import ANSWERS, OPS, REPLIES, REQUESTS, VERSION, Announcement, Failure, Message
from ipcsync.errors import IpcSyncError, ProtocolError

FEED_START_BITS = 40  # the low bits of a feed's number; the bits above count the coordinator's starts
MAX_REPLY = 64 * 1024 * 1024
# Besides msgspec's own: ValueError for bad UTF-8; TypeError, up to 0.21, for a map as a map's key.
UNREADABLE = (msgspec.MsgspecError, ValueError, TypeError, RecursionError)
ARRAY = 0x90  # the first byte of a short array, whose low half is the length

POINT_SIZE = 48
_BODY = struct.Struct("<4sI16sQQI")
_CRC = struct.Struct("<I")
_MAGIC = b"ipc1"

_M = TypeVar("_M", bound=Message)
_reply = msgspec.msgpack.Decoder(tuple[int, int, str, msgspec.Raw])
_announcement = msgspec.msgpack.Decoder(tuple[int, Announcement])
_bodies: dict[type[Message], msgspec.msgpack.Decoder[Any]] = {}
_first_use = CallLock()


def _body_decoder(kind: type[_M]) -> msgspec.msgpack.Decoder[_M]:
    """The decoder of a kind; to be asked for before any use of it: two threads that begin with a type crash msgspec."""
    return _bodies.get(kind) or under(_first_use, _make_decoder, kind)


def _make_decoder(kind: type[_M]) -> msgspec.msgpack.Decoder[_M]:
    return _bodies.setdefault(kind, msgspec.msgpack.Decoder(kind))


def _encode(parts: tuple[Any, ...]) -> bytes:
    try:
        return msgspec.msgpack.encode(parts)
    except (ValueError, OverflowError) as error:  # UnicodeEncodeError is a ValueError
        raise ProtocolError(f"cannot be sent: {type(error).__name__}: {error}", code="invalid") from None


def _decode(decoder: msgspec.msgpack.Decoder[Any], frame: bytes | memoryview, what: str) -> Any:
    if len(frame) > MAX_REPLY:
        raise ProtocolError(f"a frame of {len(frame)} bytes, more than {MAX_REPLY}", code="too_large")
    try:
        value = decoder.decode(frame)
    except UNREADABLE as error:
        if len(frame) > 1 and frame[0] & 0xF0 == ARRAY and frame[1] == VERSION:
            raise ProtocolError(f"not {what}: {type(error).__name__}: {error}", code="malformed") from None
        value = (None,)
    if value[0] != VERSION:
        theirs = f"is of protocol version {value[0]}" if isinstance(value[0], int) else "cannot be read here"
        raise ProtocolError(f"{what} {theirs}, and this is version {VERSION}", code="version")
    return value


def check_body(body: Message) -> None:
    """Raise the ProtocolError that the receiver would raise, before the body is sent."""
    if body.__struct_fields__:
        kind, values = type(body), msgspec.to_builtins(body, builtin_types=(bytes,))
        _body_decoder(kind)
        try:
            msgspec.convert(values, kind, strict=True)
        except (msgspec.ValidationError, RecursionError) as error:
            raise ProtocolError(f"{kind.__name__}: {error}", code="invalid") from None


def encode_request(id: int, body: Message, token: bytes, deadline_ns: int) -> bytes:  # noqa: A002 - the field's name
    return _encode((VERSION, id, OPS[type(body)], token, deadline_ns, body))


def encode_reply(id: int, body: Message) -> bytes:  # noqa: A002 - the field's name
    return _encode((VERSION, id, ANSWERS[type(body)], body))


def decode_reply(frame: bytes | memoryview) -> tuple[int, Message]:
    """(request id, body) of a reply; ProtocolError if the frame is not a reply."""
    _, id_, op, raw = _decode(_reply, frame, "a reply")
    kind = REPLIES.get(op)
    if kind is None:
        raise ProtocolError(f"unknown reply {op!r:.80}", code="malformed")
    try:
        return id_, _body_decoder(kind).decode(raw)
    except UNREADABLE as error:
        raise ProtocolError(f"{kind.__name__}: {error}", code="invalid") from None


def encode_announcement(body: Announcement) -> bytes:
    return _encode((VERSION, body))


def decode_announcement(frame: bytes | memoryview) -> Announcement:
    """The announcement in a frame; ProtocolError if the frame is not one."""
    body: Announcement = _decode(_announcement, frame, "an announcement")[1]
    return body


def failure_of(error: IpcSyncError) -> Failure:
    attributes: dict[str, object] = {
        key: value for key, value in vars(error).items() if isinstance(value, str | int | float)
    }
    return Failure(kind=type(error).__name__, message=str(error), attributes=attributes)


def error_of(failure: Failure) -> IpcSyncError:
    """The error of a message; an unknown kind becomes a plain IpcSyncError."""
    if failure.kind not in errors.__all__:
        return IpcSyncError(f"{failure.kind}: {failure.message}")
    error: IpcSyncError = getattr(errors, failure.kind)(failure.message)
    for key, value in failure.attributes.items():
        if key in vars(error):
            setattr(error, key, value)
    return error


# --- points -----------------------------------------------------------------------------------------------------------


class Origin(NamedTuple):
    """The use of a slot of another node's coordinator."""

    epoch: bytes
    slot: int
    incarnation: int

    @property
    def key(self) -> tuple[int, int]:
        return self.slot, self.incarnation


class PointKey(NamedTuple):
    """The fields of a point."""

    epoch: bytes
    slot: int
    incarnation: int
    generation: int


def pack(key: PointKey) -> bytes:
    body = _BODY.pack(_MAGIC, key.slot, key.epoch, key.incarnation, key.generation, 0)
    return body + _CRC.pack(zlib.crc32(body))


def unpack(data: bytes | bytearray | memoryview) -> PointKey:
    """The point in 48 bytes-like bytes; TypeError for another type, ProtocolError for invalid bytes."""
    if not isinstance(data, bytes | bytearray | memoryview):
        raise TypeError(f"a point is {POINT_SIZE} bytes, not {type(data).__name__}")
    raw = bytes(data)
    if len(raw) != POINT_SIZE:
        raise ProtocolError(f"a point is {POINT_SIZE} bytes, but got {len(raw)}", code="point")
    magic, slot, epoch, incarnation, generation, zero = _BODY.unpack_from(raw)
    if magic != _MAGIC or zero or _CRC.unpack_from(raw, _BODY.size)[0] != zlib.crc32(raw[: _BODY.size]):
        raise ProtocolError("these 48 bytes are not a point", code="point")
    if generation < 1 or generation >= 1 << 62:
        raise ProtocolError(f"generation {generation} is out of range", code="point")
    return PointKey(epoch, slot, incarnation, generation)


# --- all that two programs must read alike, as plain data: what versions are compared by ----------------------------


def wire() -> list[dict[str, Any]]:
    """Every message by its name."""
    tables = (REQUESTS, REPLIES, {"announcement": Announcement})
    return [{op: fields_of(kind) for op, kind in table.items()} for table in tables]


def fields_of(kind: type[Message]) -> list[Any]:
    """The fields of a message in order, each with its type, that one's own fields and bounds, and its default."""
    hints = get_type_hints(kind, include_extras=True)
    return [[field.name, _type(hints[field.name]), repr(field.default)] for field in msgspec.structs.fields(kind)]


def _type(hint: Any) -> Any:
    """What a field's type is on the wire, whatever Python calls it."""
    if parts := get_args(hint):
        of: Any = get_origin(hint)
        return ["union" if of in (Union, UnionType) else of.__name__, *map(_type, parts)]
    if isinstance(hint, type) and issubclass(hint, Message):
        return fields_of(hint)
    return hint.__name__ if isinstance(hint, type) else repr(hint)  # a bound, or a literal
