"""Gates: a gate holds a stream for as long as a test needs it."""

from __future__ import annotations

import atexit
import ctypes
import warnings
import weakref

from ipcsync._drivers import STREAM_WAIT_VALUE_GEQ
from ipcsync._linux.futex import Futex
from ipcsync._native import context, fork, pinned
from ipcsync._native.context import OnDevice, relaxed_call, stream_call
from ipcsync._native.stream import resolve, stream_handle
from ipcsync.errors import StreamCapturing
from ipcsync.typing import StreamLike

__all__ = ["StreamGate"]


class StreamGate:
    """Holds a stream's later work from its construction to `open()`, on either driver.

    It queues a wait for a word of pinned host memory, to which `open` stores: it uses no kernel, and no Python in a
    driver's callback. Work queued before the gate goes on. Other streams are not held, unless the GPU maps them to the
    same hardware queue. Several gates on one stream may be opened in any order: the stream goes on to the first one
    that is still closed.

    A context manager: leaving its block opens it, and waits for nothing. A gate that is dropped without being opened
    opens too, with a ResourceWarning. Each takes 4 bytes of pinned memory until the process ends.

        with StreamGate(stream) as gate:
            point = event.record(stream)
            assert not point.query()
            gate.open()
            point.synchronize(5)

    Raises StreamCapturing for a stream that is being captured, TypeError for an argument that is not a stream,
    DriverError if the driver has no stream memory operations.
    """

    def __init__(self, stream: StreamLike | None = None) -> None:
        fork.arm()
        self._stream = resolve(None) if stream is None else stream  # kept alive as long as the gate
        handle, ordinal = stream_handle(self._stream)
        with OnDevice(ordinal) as inside, inside:
            if context.is_capturing(handle):
                raise StreamCapturing("cannot hold a stream that is being captured into a CUDA graph")
        self._address, pointer = pinned.take(ordinal, "gate", 4)
        # Before the wait is queued, so that an exception afterwards cannot leave the stream held for ever.
        self._finalizer = weakref.finalize(self, _drop, self._address, repr(self._stream))
        self._finalizer.atexit = False
        _held.add(self._address)
        try:
            arguments = handle, pointer, 1, STREAM_WAIT_VALUE_GEQ
            relaxed_call(stream_call, handle, ordinal, "cuStreamWaitValue32", *arguments)
        except BaseException:
            self.open()
            raise

    @property
    def is_open(self) -> bool:
        """Whether the gate no longer holds the stream."""
        fork.check()
        return self._address not in _held

    def open(self) -> None:
        """Let the stream go on; a second call does nothing."""
        fork.check()
        _release(self._address)
        self._finalizer.detach()

    def __enter__(self) -> StreamGate:
        if self.is_open:
            raise ValueError("this gate was opened and cannot hold again: make another one")
        return self

    def __exit__(self, *error: object) -> None:
        self.open()

    def __repr__(self) -> str:
        return f"<ipcsync.testing.StreamGate {'closed' if self._address in _held else 'open'} {self._stream!r}>"


# The words of gates that are closed. None is used again: only the driver knows when its stream has passed it.
_held: set[int] = set()


def _release(address: int) -> bool:
    """Let the stream pass, without a driver call; returns whether it was held."""
    was_held = address in _held
    ctypes.c_uint32.from_address(address).value = 1
    Futex(address).wake()  # a software driver's stream sleeps on the word; on a GPU it does nothing
    _held.discard(address)
    return was_held


def _drop(address: int, stream: str) -> None:
    """The finalizer of a gate that was not opened."""
    if fork.is_in_bad_fork() or not _release(address):
        return  # a forked child may not have the driver's memory
    warnings.warn(f"a StreamGate of {stream} was dropped before it was opened", ResourceWarning, stacklevel=2)


@atexit.register
def _release_all() -> None:
    """Open all gates at exit: a process that ends must not wait for a stream that is held."""
    if not fork.is_in_bad_fork():
        for address in tuple(_held):
            _release(address)
