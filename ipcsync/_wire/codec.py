"""Frames: one MessagePack array each, with limits that hold before anything is built from it.

A request is [version, id, op, token, deadline, body], a reply [version, id, op, body], an announcement [version, body].
`id` counts a session's requests, so that a retry is known; `deadline` is CLOCK_MONOTONIC in ns, after which the client
waits no more; `body` is a map.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgpack
import msgspec

from ipcsync import errors
from ipcsync._wire.messages import ANSWERS, OPS, REPLIES, REQUESTS, VERSION, Announcement, Failure, Message
from ipcsync.errors import IpcSyncError, ProtocolError

MAX_FRAME = 64 * 1024  # of a request; replies carry lists and may be larger
MAX_REPLY = 64 * 1024 * 1024
MAX_NESTING = 8  # of a request: no body of ours nests at all
_MAX_ITEMS = 64  # of one array or map of a request; msgpack makes an array of the size that its header claims
_MAX_REPLY_ITEMS = 1 << 20
_CONTAINERS = frozenset((list, dict))  # what msgpack makes, and no subclasses
_PEEK = 64  # bytes that hold the head of a request up to its id

_M = TypeVar("_M", bound=Message)
_BARE = {kind: kind() for kind in (*OPS, *ANSWERS) if not kind.__struct_fields__}  # bodies that hold nothing


class Request(msgspec.Struct, frozen=True, gc=False):
    """A request as it came."""

    id: int
    op: str
    token: bytes
    deadline_ns: int
    body: Message


def _unpack(frame: bytes | memoryview, limit: int, items: int) -> Any:
    if len(frame) > limit:
        raise ProtocolError(f"a frame of {len(frame)} bytes, more than {limit}", code="too_large")
    try:
        return msgpack.unpackb(
            frame,
            raw=False,
            strict_map_key=True,
            max_str_len=limit,
            max_bin_len=limit,
            max_array_len=items,
            max_map_len=items,
            max_ext_len=0,
        )
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        # ValueError covers bad UTF-8, trailing bytes, a length over a limit, and a depth that msgpack refuses.
        raise ProtocolError(f"not MessagePack as agreed: {type(error).__name__}: {error}", code="malformed") from None


def _pack(parts: list[Any]) -> bytes:
    # Not a Packer kept for all: two threads, or a finalizer in the middle of a call, would meet in its buffer.
    try:
        return bytes(msgpack.packb(parts))
    except (ValueError, OverflowError) as error:  # UnicodeEncodeError is a ValueError
        raise ProtocolError(f"cannot be sent: {type(error).__name__}: {error}", code="invalid") from None


def _convert(body: Any, kind: type[_M]) -> _M:
    if not body and kind in _BARE and type(body) is dict:
        return _BARE[kind]  # type: ignore[return-value] # of that kind
    try:
        return msgspec.convert(body, kind, strict=True)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ProtocolError(f"{kind.__name__}: {error}", code="invalid") from None


def _dump(body: Message) -> Any:
    if type(body) in _BARE:
        return {}
    return msgspec.to_builtins(body, builtin_types=(bytes,))


def check_body(body: Message) -> None:
    """Raise the ProtocolError that the other side would, before the body is sent."""
    if type(body) not in _BARE:
        _convert(_dump(body), type(body))


def encode_request(id: int, body: Message, token: bytes, deadline_ns: int) -> bytes:  # noqa: A002 - the field's name
    """The frame of a request."""
    return _pack([VERSION, id, OPS[type(body)], token, deadline_ns, _dump(body)])


def peek_id(frame: bytes | memoryview) -> int:
    """The request id of a frame that is wrong otherwise, 0 if it has none: so that its refusal too is a typed reply."""
    unpacker = msgpack.Unpacker(max_buffer_size=_PEEK, max_ext_len=0)
    unpacker.feed(bytes(frame[:_PEEK]))
    try:
        if unpacker.read_array_header() < 2 or type(unpacker.unpack()) is not int:
            return 0
        id_ = unpacker.unpack()
    except (ValueError, msgpack.UnpackException):
        return 0
    return id_ if type(id_) is int and 0 <= id_ < 1 << 63 else 0


def _check_nesting(value: Any, limit: int) -> None:
    layer = [value]
    for _ in range(limit):
        inner = []
        for container in layer:
            for part in container.values() if type(container) is dict else container:
                if type(part) in _CONTAINERS:
                    inner.append(part)  # noqa: PERF401 - twice as fast as a comprehension for the few there are
        if not inner:
            return
        layer = inner
    raise ProtocolError(f"a request nested more than {limit} deep", code="too_deep")


def decode_request(frame: bytes | memoryview, max_frame: int = MAX_FRAME, max_nesting: int = MAX_NESTING) -> Request:
    """The request in a frame of at most `max_frame` bytes; ProtocolError says which rule it breaks."""
    value = _unpack(frame, max_frame, _MAX_ITEMS)
    if not isinstance(value, list) or not value or type(value[0]) is not int:
        raise ProtocolError("a request is an array that begins with the version", code="malformed")
    if value[0] != VERSION:
        raise ProtocolError(f"protocol version {value[0]}, but this is {VERSION}", code="version")
    if len(value) != 6:
        raise ProtocolError(f"a request has 6 parts, not {len(value)}", code="malformed")
    _, id_, op, token, deadline_ns, body = value
    if type(id_) is not int or not 0 < id_ < 1 << 63 or type(deadline_ns) is not int or type(token) is not bytes:
        raise ProtocolError("id and deadline are whole numbers, the id above 0, the token is bytes", code="malformed")
    if type(op) in _CONTAINERS:
        raise ProtocolError("the operation is text", code="malformed")  # not shown: it may be nested without end
    if body and type(body) in _CONTAINERS:
        _check_nesting(body, max_nesting - 1)
    kind = REQUESTS.get(op) if isinstance(op, str) else None
    if kind is None:
        raise ProtocolError(f"unknown operation {op!r:.80}", code="unknown_op")
    return Request(id_, op, token, deadline_ns, _convert(body, kind))


def encode_reply(id: int, body: Message) -> bytes:  # noqa: A002 - the field's name
    """The frame of a reply."""
    return _pack([VERSION, id, ANSWERS[type(body)], _dump(body)])


def decode_reply(frame: bytes | memoryview) -> tuple[int, Message]:
    """(request id, body) of a reply; ProtocolError if it is none."""
    value = _unpack(frame, MAX_REPLY, _MAX_REPLY_ITEMS)
    if not isinstance(value, list) or not value or value[0] != VERSION:
        raise ProtocolError(f"not a reply of protocol version {VERSION}", code="version")
    kind = REPLIES.get(value[2]) if len(value) == 4 and isinstance(value[2], str) else None
    if kind is None or type(value[1]) is not int:
        raise ProtocolError("a reply is [version, id, op, body]", code="malformed")
    return value[1], _convert(value[3], kind)


def encode_announcement(body: Announcement) -> bytes:
    """The frame of an announcement."""
    return _pack([VERSION, _dump(body)])


def decode_announcement(frame: bytes | memoryview) -> Announcement:
    """The announcement in a frame; ProtocolError if it is none."""
    value = _unpack(frame, MAX_REPLY, _MAX_REPLY_ITEMS)
    if not isinstance(value, list) or len(value) != 2 or value[0] != VERSION:
        raise ProtocolError(f"not an announcement of protocol version {VERSION}", code="version")
    return _convert(value[1], Announcement)


def failure_of(error: IpcSyncError) -> Failure:
    """How an error travels."""
    attributes: dict[str, object] = {
        key: value for key, value in vars(error).items() if isinstance(value, str | int | float)
    }
    return Failure(kind=type(error).__name__, message=str(error), attributes=attributes)


def error_of(failure: Failure) -> IpcSyncError:
    """The error that travelled; an unknown kind becomes a plain IpcSyncError."""
    kind = getattr(errors, failure.kind, None) if failure.kind in errors.__all__ else None
    if kind is None:
        return IpcSyncError(f"{failure.kind}: {failure.message}")
    error = kind(failure.message)
    for key, value in failure.attributes.items():
        if key in vars(error):
            setattr(error, key, value)
    assert isinstance(error, IpcSyncError)
    return error
