"""In which list a stream's waits are, as the core remembers of a process's streams: by ids, devices and kinds."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from ipcsync.errors import DriverError
from tests.faults.compiled_rig import STREAM, Case, Rig, core, end

pytestmark = pytest.mark.core

_FLAGS = "cuStreamGetFlags"
_FAR = 1 << 55  # ids from here on, and devices from 128 on, are not remembered
_PLACES = 1024  # of two streams whose ids differ by a multiple of it, the last one is remembered
_ids = count((1 << 40) + _PLACES // 2)  # of streams that no other test has, nor their places: rigs have the first ones


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(Case("wait", engine="timeline", recorded=1), tmp_path)
    yield made
    end([made])


def _key(rig: Rig, stream: int, ordinal: int = 0, *, is_blocking: bool = False) -> int:
    """That of the list in which a wait on the stream is."""
    rig.stream, rig.flags = stream, int(not is_blocking)
    assert rig.engine.queue(STREAM, ordinal, 1, None, False, 0) == stream
    return _listed()


def _listed() -> int:
    (wait,) = core.of(None)
    core.drop([wait])
    return int(wait.key)


def _remembered(rig: Rig, stream: int) -> int | None:
    """The same of a stream that is remembered, with its device; None if Python is to look at it."""
    rig.stream = stream
    try:
        rig.point().wait(STREAM)
    except AttributeError:  # Python's part of a point is not here
        return None
    return _listed()


def test_a_stream_is_asked_for_its_kind_once_in_a_process(rig: Rig) -> None:
    free, blocking = next(_ids), next(_ids)
    for _ in range(2):
        for _ in range(3):
            assert (_key(rig, free), _key(rig, blocking, 2, is_blocking=True)) == (free, -3)
        rig.engine = rig.made(0, recorder=False)
    assert rig.asked.count(_FLAGS) == 2


def test_of_streams_that_have_one_place_the_last_one_is_remembered(rig: Rig) -> None:
    one = next(_ids)
    other = one + _PLACES
    for _ in range(2):
        assert _key(rig, one) == one
        assert (_remembered(rig, one), _remembered(rig, other)) == (one, None)
        assert _key(rig, other, 2, is_blocking=True) == -3
        assert (_remembered(rig, one), _remembered(rig, other)) == (None, -3)
    assert rig.asked.count(_FLAGS) == 4


@pytest.mark.parametrize("claimed", [0, 2])
def test_a_stream_that_the_driver_takes_no_marker_on_is_looked_at_anew(rig: Rig, claimed: int) -> None:
    """As one of another device than it was said to be."""
    stream = next(_ids)
    rig.results["cuEventRecord"] = 400
    with pytest.raises(DriverError):
        _key(rig, stream, claimed)
    rig.results.clear()
    assert _remembered(rig, stream) is None
    assert (_key(rig, stream, 1, is_blocking=True), _remembered(rig, stream)) == (-2, -2)


def test_of_a_stream_with_a_record_the_device_stays_known_whatever_a_later_call_says(rig: Rig, tmp_path: Path) -> None:
    stream = next(_ids)
    (tmp_path / "recorder").mkdir()
    recorder = Rig(Case("record", engine="timeline", stream=stream), tmp_path / "recorder")
    assert recorder.call()[1] == ""
    rig.bind()
    assert _key(rig, stream, 2, is_blocking=True) == -3
    assert _remembered(rig, stream) == -1
    end([recorder])


def test_a_record_does_not_change_what_was_seen_of_its_stream(rig: Rig, tmp_path: Path) -> None:
    """The driver writes a timeline's word on a stream of any device."""
    stream = next(_ids)
    assert _key(rig, stream, 1, is_blocking=True) == -2
    (tmp_path / "recorder").mkdir()
    recorder = Rig(Case("record", engine="timeline", stream=stream), tmp_path / "recorder")
    assert recorder.call()[1] == ""
    rig.bind()
    assert _remembered(rig, stream) == -2
    end([recorder])


@pytest.mark.parametrize("high", [_FAR - _PLACES, _FAR, 2 * _FAR])
def test_streams_whose_ids_differ_in_their_highest_bits_alone_have_lists_of_their_own(rig: Rig, high: int) -> None:
    low = next(_ids)
    stream = low | high
    for _ in range(2):
        assert (_key(rig, stream), _key(rig, low, is_blocking=True)) == (stream, -1)
        assert (_key(rig, low, is_blocking=True), _key(rig, stream)) == (-1, stream)


@pytest.mark.parametrize("ordinal", [127, 128, 255, 256])
def test_a_device_of_any_number_has_a_list_of_its_blocking_streams(rig: Rig, ordinal: int) -> None:
    far, near = next(_ids), next(_ids)
    for _ in range(2):
        assert (_key(rig, far, ordinal, is_blocking=True), _key(rig, near)) == (-1 - ordinal, near)
        assert (_remembered(rig, far), _remembered(rig, near)) == (-1 - ordinal if ordinal < 128 else None, near)
