"""The 48 bytes of a point."""

from __future__ import annotations

import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipcsync._wire.codec import POINT_SIZE, PointKey, pack, unpack
from ipcsync.errors import ProtocolError
from tests.kit.examples import examples

_MANY = examples(300)
_keys = st.builds(
    PointKey,
    st.binary(min_size=16, max_size=16),
    st.integers(0, (1 << 32) - 1),
    st.integers(0, (1 << 64) - 1),
    st.integers(1, (1 << 62) - 1),
)
_KEY = PointKey(bytes(range(16)), 3, 4, 5)


def test_the_layout_is_the_one_written_down() -> None:
    data = pack(_KEY)
    assert len(data) == POINT_SIZE == 48
    assert data[:4] == b"ipc1"
    assert struct.unpack_from("<I16sQQI", data, 4) == (3, bytes(range(16)), 4, 5, 0)
    assert struct.unpack_from("<I", data, 44) == (zlib.crc32(data[:44]),)


@_MANY
@given(_keys)
def test_a_point_is_read_as_it_was_packed_from_any_bytes_like(key: PointKey) -> None:
    data = pack(key)
    assert unpack(data) == unpack(bytearray(data)) == unpack(memoryview(data)) == key


@_MANY
@given(st.binary(max_size=100) | st.binary(min_size=48, max_size=48))
def test_any_other_bytes_are_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError) as caught:
        unpack(data)
    assert caught.value.code == "point"


@_MANY
@given(_keys, st.integers(0, POINT_SIZE * 8 - 1))
def test_one_flipped_bit_is_a_protocol_error(key: PointKey, bit: int) -> None:
    data = bytearray(pack(key))
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ProtocolError):
        unpack(data)


@pytest.mark.parametrize("generation", [0, 1 << 62, (1 << 64) - 1])
def test_a_generation_out_of_range_is_a_protocol_error(generation: int) -> None:
    with pytest.raises(ProtocolError, match="generation"):
        unpack(pack(_KEY._replace(generation=generation)))


def test_reserved_bytes_that_are_not_zero_are_a_protocol_error() -> None:
    body = struct.pack("<4sI16sQQI", b"ipc1", *_KEY[1:2], _KEY.epoch, 4, 5, 1)
    with pytest.raises(ProtocolError):
        unpack(body + struct.pack("<I", zlib.crc32(body)))


@pytest.mark.parametrize("wrong", [None, "x" * 48, 48, [0] * 48, object()])
def test_another_type_is_a_type_error(wrong: object) -> None:
    with pytest.raises(TypeError, match="48 bytes"):
        unpack(wrong)  # type: ignore[arg-type] # that is what is tried


def test_a_view_of_wider_items_counts_its_bytes() -> None:
    assert unpack(memoryview(pack(_KEY)).cast("Q")) == _KEY
