"""Gates: a gate holds a stream for as long as a test needs it."""

from __future__ import annotations

import atexit
import ctypes
import warnings
import weakref
from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING

from ipcsync._drivers import SUCCESS, DriverObject, unwrap
from ipcsync._drivers.constants import EVENT_DISABLE_TIMING, STREAM_WAIT_VALUE_GEQ
from ipcsync._linux.futex import Futex
from ipcsync._native import capture, context, fork, words
from ipcsync._native.capture import relaxed_call
from ipcsync._native.context import OnDevice, stream_call
from ipcsync._native.stream import resolve, stream_handle
from ipcsync.errors import StreamCapturing
from ipcsync.typing import StreamLike

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["StreamGate"]


class StreamGate:
    """Holds a stream's later work from its construction to `open()`, on either driver.

    It queues a wait for a word of pinned host memory, to which `open` stores: it uses no kernel, and no Python in a
    driver's callback. Work queued before the gate goes on. Other streams are not held, unless the GPU maps them to the
    same hardware queue. Several gates on one stream may be opened in any order: the stream goes on to the first one
    that is still closed.

    A context manager: leaving its block opens it, and waits for nothing. A gate that is dropped without being opened
    opens too, with a ResourceWarning.

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
            if capture.is_capturing(handle):
                raise StreamCapturing("cannot hold a stream that is being captured into a CUDA graph")
        self._word = _take(ordinal)
        # Before the wait is queued, so that an exception afterwards cannot leave the stream held for ever.
        self._finalizer = weakref.finalize(self, _drop, self._word, repr(self._stream))
        self._finalizer.atexit = False
        try:
            self._word.hold(handle)
        except BaseException:
            self.open()
            raise

    @property
    def is_open(self) -> bool:
        """Whether the gate no longer holds the stream."""
        fork.check()
        return not self._finalizer.alive

    def open(self) -> None:
        """Let the stream go on; a second call does nothing."""
        fork.check()
        if not self._finalizer.alive:
            return  # its word may be another gate's by now
        self._word.release()
        if self._finalizer.detach() is not None:
            _put_by(self._word)

    def __enter__(self) -> Self:
        if self.is_open:
            raise ValueError("this gate was opened and cannot hold again: make another one")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.open()

    def __repr__(self) -> str:
        return f"<ipcsync.testing.StreamGate {'closed' if self._finalizer.alive else 'open'} {self._stream!r}>"


class _Word:
    """A word of pinned host memory that a stream of one device can wait for, and an event behind that wait."""

    def __init__(self, ordinal: int, address: int, pointer: int, marker: DriverObject) -> None:
        self.ordinal = ordinal
        self.marker = marker
        self.is_marked = False
        self._pointer = pointer
        self._value = ctypes.c_uint32.from_address(address)
        self._wake = Futex(address).wake

    def hold(self, handle: DriverObject) -> None:
        """Queue the wait on the stream."""
        driver = context.driver()
        self._value.value = 0
        _held.add(self)
        wait = driver.cuStreamWaitValue32
        result = relaxed_call(stream_call, handle, self.ordinal, wait, handle, self._pointer, 1, STREAM_WAIT_VALUE_GEQ)
        unwrap(result, "cuStreamWaitValue32")
        record = driver.cuEventRecord
        unwrap(relaxed_call(stream_call, handle, self.ordinal, record, self.marker, handle), "cuEventRecord")
        self.is_marked = True

    def release(self) -> bool:
        """Let the stream pass, without a driver call; returns whether it was held."""
        was_held = self in _held
        self._value.value = 1
        self._wake()  # a software driver's stream sleeps on the word; on a GPU it does nothing
        _held.discard(self)
        return was_held

    def is_passed(self) -> bool:
        """Whether the stream is past the wait, so that the word can be used again."""
        return relaxed_call(context.driver().cuEventQuery, self.marker)[0] is SUCCESS


# A word is reused once the stream is past its wait, and its page is never freed: freeing it at the gate's end would
# mean to wait for all earlier work on the stream. Deques, since their operations are atomic: a finalizer or a signal's
# handler may open a gate within any of this.
_free: dict[int, deque[_Word]] = {}
_opened: deque[_Word] = deque()
_held: set[_Word] = set()


def _take(ordinal: int) -> _Word:
    """A word of the device that is 0 and has no queued wait."""
    for _ in range(len(_opened)):
        try:
            word = _opened.popleft()
        except IndexError:
            break  # another thread has taken the rest
        (_free[word.ordinal] if word.is_passed() else _opened).append(word)
    free = _free.setdefault(ordinal, deque())
    try:
        word = free.pop()
    except IndexError:
        return _made(ordinal)
    word.is_marked = False
    return word


def _made(ordinal: int) -> _Word:
    address, pointer = words.take(ordinal, "gate", 64)
    with OnDevice(ordinal) as inside, inside:
        create = context.driver().cuEventCreate
        return _Word(ordinal, address, pointer, unwrap(relaxed_call(create, EVENT_DISABLE_TIMING), "cuEventCreate"))


def _put_by(word: _Word) -> None:
    """Keep a released word for reuse; a word whose wait may have no event behind it is never reused."""
    if word.is_marked:
        _opened.append(word)


def _drop(word: _Word, stream: str) -> None:
    """The finalizer of a gate that was not opened."""
    if fork.is_in_bad_fork() or not word.release():
        return  # a forked child may not have the driver's memory
    _put_by(word)
    warnings.warn(f"a StreamGate of {stream} was dropped before it was opened", ResourceWarning, stacklevel=2)


@atexit.register
def _release_all() -> None:
    """Open all gates at exit: a process that ends must not wait for a stream that is held."""
    if not fork.is_in_bad_fork():
        for word in tuple(_held):
            word.release()
