"""The parts of the host driver that compute: which devices are seen, how words compare, which ranges overlap."""

from __future__ import annotations

import mmap
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipcsync._drivers.host.context import Context
from ipcsync._drivers.host.device import device_uuid, visible_devices
from ipcsync._drivers.host.memops import AND, EQ, GEQ, NOR, _fits
from ipcsync._drivers.host.memory import HOST, REGISTERED, Range, Ranges, _is_mapped
from ipcsync._drivers.host.segment import open_segment

pytestmark = pytest.mark.process

UUID1 = f"GPU-{device_uuid(1)}"


@pytest.mark.parametrize(
    ("wanted", "seen"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("1", [1]),
        ("2, 0", [2, 0]),
        ("0,7,1", [0]),
        ("0,-1,1", [0]),
        ("0,0", []),
        (UUID1, [1]),
        (UUID1[:12].upper().replace("GPU-", "GPU-"), [1]),
        (f"2,{UUID1}", [2, 1]),
        ("GPU-", []),
        ("GPU-no", []),
        ("MIG-1", []),
    ],
)
def test_cuda_visible_devices_chooses_as_in_cuda(wanted: str | None, seen: list[int]) -> None:
    assert visible_devices(3, wanted) == seen


@given(value=st.integers(0, 2**64 - 1), wanted=st.integers(0, 2**64 - 1))
def test_geq_is_the_sign_of_the_difference(value: int, wanted: int) -> None:
    difference = (value - wanted) % 2**64
    assert _fits(64, GEQ, wanted)(value) == (difference < 2**63)


def test_int64_max_releases_every_wait_for_a_small_generation_and_uint64_max_none() -> None:
    assert all(_fits(64, GEQ, generation)(2**63 - 1) for generation in (1, 1000, 2**62))
    assert not _fits(64, GEQ, 1)(2**64 - 1)


@pytest.mark.parametrize(
    ("comparison", "value", "wanted", "fits"),
    [
        (EQ, 5, 5, True),
        (EQ, 4, 5, False),
        (AND, 0b110, 0b010, True),
        (AND, 0b101, 0b010, False),
        (NOR, 0, 0xFFFFFFFF, False),
        (NOR, 0, 0xFFFFFFFE, True),
        (GEQ, 0, 0xFFFFFFFF, True),
        (GEQ, 0x80000000, 0, False),
    ],
)
def test_32_bit_comparisons(comparison: int, value: int, wanted: int, fits: bool) -> None:
    assert _fits(32, comparison, wanted)(value) is fits


@given(st.lists(st.tuples(st.integers(1, 200), st.integers(1, 20)), max_size=30))
def test_ranges_never_overlap_and_every_address_finds_its_own(pieces: list[tuple[int, int]]) -> None:
    ranges, taken = Ranges(), dict[int, int]()
    for start, size in pieces:
        addresses = set(range(start, start + size))
        added = ranges.add(Range(REGISTERED, cast("Context", None), start, size))
        assert added == addresses.isdisjoint(taken)
        if added:
            taken.update(dict.fromkeys(addresses, start))
    for address in range(230):
        found = ranges.find(address)
        assert (found.start if found else None) == taken.get(address)


def test_a_range_is_found_only_with_all_its_bytes() -> None:
    ranges = Ranges()
    ranges.add(Range(REGISTERED, cast("Context", None), 100, 8))
    assert ranges.find(100, 8) is not None
    assert ranges.find(101, 8) is None
    assert ranges.find(92, 8) is None


def test_mapped_memory_is_told_from_unmapped() -> None:
    import ctypes

    page = mmap.mmap(-1, mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    assert _is_mapped(address, mmap.PAGESIZE)
    assert _is_mapped(address + 5, 10)
    assert not _is_mapped(0, 1)
    assert not _is_mapped(1 << 46, mmap.PAGESIZE)


@pytest.mark.parametrize("name", ["", "a/b", "..\0", "x" * 121, "a-mem-1-2"])
def test_a_segment_name_that_could_be_another_file_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="IPCSYNC_HOST_SEGMENT"):
        open_segment(name)


def test_what_was_registered_where_memory_is_mapped_now_is_gone() -> None:
    context = cast("Context", None)
    ranges = Ranges()
    for start in (0x1000, 0x3000, 0x9000):
        assert ranges.add(Range(REGISTERED, context, start, 0x1000))
    new = Range(HOST, context, 0x1000, 0x3000)
    ranges.map(new)
    assert ranges.find(0x3000) is new
    assert not ranges.add(Range(REGISTERED, context, 0x9000, 1))
