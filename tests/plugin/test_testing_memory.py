"""Memory that streams fill and copy, and that other processes open: public names only, on either driver."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

import ipcsync
from ipcsync.testing import Memory, StreamGate
from tests.kit.peer import Peer

pytestmark = pytest.mark.driver

SIZE = 4096
_theirs: list[Memory] = []


def _open_and_fill(handle: bytes, value: int) -> bool:
    """In another process: whether the memory held zeros; it holds `value` afterwards."""
    _theirs.append(Memory(SIZE, handle=handle))
    held_zeros, stream = _theirs[0].holds(0), ipcsync.Stream()
    _theirs[0].fill(value, stream)
    stream.synchronize()
    return held_zeros


def _close() -> None:
    _theirs.pop().close()


@pytest.mark.parametrize("pinned", [False, True])
def test_streams_fill_and_copy_in_their_order(pinned: bool) -> None:
    stream = ipcsync.Stream()
    with Memory(SIZE) as source, Memory(SIZE, pinned=pinned) as target:
        assert source.holds(0)
        assert target.holds(0)
        with StreamGate(stream) as gate:
            source.fill(7, stream)
            target.copy_from(source, stream)
            source.fill(8, stream)
            assert target.holds(0)
            gate.open()
            stream.synchronize()
        assert target.holds(7)
        assert source.holds(8)


def test_what_is_new_or_written_is_there_for_every_stream_at_once() -> None:
    stream = ipcsync.Stream()
    with Memory(SIZE) as source:
        for value in range(1, 100):
            source.write(bytes([value]) * SIZE)
            with Memory(SIZE) as target:  # whose zeros come before what the stream copies
                target.copy_from(source, stream)
                stream.synchronize()
                assert target.holds(value)


def test_another_process_opens_it(peer: Peer) -> None:
    with Memory(SIZE) as memory:
        assert peer.call(_open_and_fill, memory.handle(), 9)
        assert memory.holds(9)
        peer.call(_close)


def test_without_a_stream_it_is_the_current_one() -> None:
    stream = ipcsync.Stream()
    with Memory(SIZE) as memory, StreamGate(stream) as gate:
        with ipcsync.stream(stream):
            memory.fill(3)
        assert memory.holds(0)
        gate.open()
        stream.synchronize()
        assert memory.holds(3)


@pytest.mark.parametrize("pinned", [False, True])
def test_the_host_writes_and_reads_all_of_it(pinned: bool) -> None:
    data = bytes(range(256)) * (SIZE // 256)
    with Memory(SIZE, pinned=pinned) as memory:
        for kind in (bytes, bytearray, memoryview):
            memory.write(kind(data))
            assert memory.read() == data
        with pytest.raises(ValueError, match="4096 bytes, but got 1"):
            memory.write(b"x")


def test_it_says_what_it_is() -> None:
    with Memory(SIZE) as memory, Memory(1, pinned=True) as host:
        assert (memory.size, memory.device.index, memory.is_pinned, host.is_pinned) == (SIZE, 0, False, True)
        assert memory.__cuda_array_interface__["data"] == (memory.address, False)
        assert "device" in repr(memory)
        with pytest.raises(AttributeError, match="pinned"):
            host.__cuda_array_interface__  # noqa: B018 - looking is the test
        with pytest.raises(ValueError, match="this is pinned"):
            host.handle()
        with pytest.raises(ValueError, match="1 bytes, but"):
            host.copy_from(memory)
    assert "closed" in repr(memory)
    memory.close()
    for use in (memory.read, memory.handle, lambda: memory.fill(0), lambda: memory.write(b"")):
        with pytest.raises(ValueError, match="was closed"):
            use()


def test_wrong_arguments_are_refused() -> None:
    wrong_sizes: list[tuple[Any, type[Exception]]] = [
        (0, ValueError),
        (-1, ValueError),
        (1.0, TypeError),
        (True, TypeError),
    ]
    for size, error in wrong_sizes:
        with pytest.raises(error, match="a size is"):
            Memory(size)
    with pytest.raises(ValueError, match="one of the two"):
        Memory(1, handle=bytes(64), pinned=True)
    with Memory(1) as memory:
        own = memory.handle()
        for handle, text in (
            (b"", "but got 0"),
            (bytes(63), "but got 63"),
            (bytes(64), "no such handle"),
            (b"x" * 64, "no such handle"),
            (own, "this process exported the handle itself, and must use the memory itself"),
        ):
            with pytest.raises(ipcsync.HandleError, match=text):
                Memory(1, handle=handle)
        with pytest.raises(ValueError, match="from 0 to 255"):
            memory.fill(256)
    with pytest.raises(ipcsync.InvalidDevice):
        Memory(1, 1000)


def test_memory_is_not_copied_and_not_sent() -> None:
    with Memory(SIZE) as memory:
        for take in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match=r"send memory\.handle\(\), and open"):
                take(memory)


@pytest.mark.parametrize(
    "misuse",
    [
        pytest.param(lambda memory: memory.write(SIZE), id="write a size"),
        pytest.param(lambda memory: memory.fill(1.5), id="fill with no int"),
        pytest.param(lambda memory: memory.fill(True), id="fill with a bool"),
        pytest.param(lambda memory: memory.copy_from(None), id="copy from nothing"),
    ],
)
def test_what_no_memory_takes_is_refused(misuse: Callable[[Memory], None]) -> None:
    with Memory(SIZE) as memory, pytest.raises(TypeError, match="but got"):
        misuse(memory)
