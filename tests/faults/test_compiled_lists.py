"""In which list a stream's waits are, as the core remembers of the last streams: by their ids, devices and kinds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.compiled_rig import STREAM, Case, Rig, core, end

pytestmark = pytest.mark.core

_FLAGS = "cuStreamGetFlags"
_FAR = 1 << 56  # ids from here on, and devices from 128 on, are not remembered
_MANY = 8  # streams are remembered


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


def test_the_last_streams_are_asked_for_their_kinds_once(rig: Rig) -> None:
    for _ in range(3):
        assert (_key(rig, 5), _key(rig, 6, 2, is_blocking=True)) == (5, -3)
    assert rig.asked.count(_FLAGS) == 2
    assert [_key(rig, stream) for stream in range(7, 7 + _MANY)] == [*range(7, 7 + _MANY)]
    rig.asked.clear()
    assert (_key(rig, 5), _key(rig, 6, 2, is_blocking=True)) == (5, -3)
    assert rig.asked.count(_FLAGS) == 2


@pytest.mark.parametrize("stream", [_FAR - 1, _FAR + 5, 2 * _FAR + 5])
def test_streams_whose_ids_differ_in_their_highest_bits_alone_have_lists_of_their_own(rig: Rig, stream: int) -> None:
    for _ in range(2):
        assert (_key(rig, stream), _key(rig, 5, is_blocking=True)) == (stream, -1)
        assert (_key(rig, 5, is_blocking=True), _key(rig, stream)) == (-1, stream)


@pytest.mark.parametrize("ordinal", [127, 128, 255, 256])
def test_a_device_of_any_number_has_a_list_of_its_blocking_streams(rig: Rig, ordinal: int) -> None:
    for _ in range(2):
        assert (_key(rig, 7, ordinal, is_blocking=True), _key(rig, 4)) == (-1 - ordinal, 4)
        assert (_remembered(rig, 7), _remembered(rig, 4)) == (-1 - ordinal if ordinal < 128 else None, 4)
