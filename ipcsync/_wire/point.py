"""The 48 bytes of a point, little-endian:

| offset | bytes | |
|---|---|---|
| 0 | 4 | `ipc1` |
| 4 | 4 | slot |
| 8 | 16 | epoch |
| 24 | 8 | incarnation |
| 32 | 8 | generation |
| 40 | 4 | zero |
| 44 | 4 | CRC-32 of the first 44 |
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

from ipcsync.errors import ProtocolError

SIZE = 48
_BODY = struct.Struct("<4sI16sQQI")
_CRC = struct.Struct("<I")
_MAGIC = b"ipc1"


class PointKey(NamedTuple):
    """The fields of a point."""

    epoch: bytes
    slot: int
    incarnation: int
    generation: int


def pack(key: PointKey) -> bytes:
    """The 48 bytes."""
    body = _BODY.pack(_MAGIC, key.slot, key.epoch, key.incarnation, key.generation, 0)
    return body + _CRC.pack(zlib.crc32(body))


def unpack(data: bytes | bytearray | memoryview) -> PointKey:
    """The point in 48 bytes-like bytes; TypeError for another type, ProtocolError for invalid bytes."""
    if not isinstance(data, bytes | bytearray | memoryview):
        raise TypeError(f"a point is {SIZE} bytes, not {type(data).__name__}")
    raw = bytes(data)
    if len(raw) != SIZE:
        raise ProtocolError(f"a point is {SIZE} bytes, but got {len(raw)}", code="point")
    magic, slot, epoch, incarnation, generation, zero = _BODY.unpack_from(raw)
    if magic != _MAGIC or zero or _CRC.unpack_from(raw, _BODY.size)[0] != zlib.crc32(raw[: _BODY.size]):
        raise ProtocolError("these 48 bytes are not a point", code="point")
    if generation < 1 or generation >= 1 << 62:
        raise ProtocolError(f"generation {generation} is out of range", code="point")
    return PointKey(epoch, slot, incarnation, generation)
