"""Streams of the host driver: operations in order, finished within the call or by the stream's thread."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from operator import index
from queue import Empty, SimpleQueue
from typing import Any

from ipcsync._drivers.host import capture as capturing
from ipcsync._drivers.host import context as contexts
from ipcsync._drivers.host import layout
from ipcsync._drivers.host.context import Context
from ipcsync._drivers.host.process import process
from ipcsync._drivers.host.results import (
    INVALID_HANDLE,
    OUT_OF_MEMORY,
    CallFailed,
    number,
)
from ipcsync._drivers.host.segment import SEQ_CST, fence
from ipcsync._locks import CallLock, HeldBelow, under
from ipcsync._worker import start

log = logging.getLogger("ipcsync")

LEGACY, PER_THREAD = 1, 2  # handles; 0 is LEGACY
_IDLE_S = 2.0  # after which a stream's thread ends

Action = Callable[[], object]


class Stream:
    """A stream: a slot in the segment, and a thread while there is something to wait for.

    Its lock orders what is taken on. It is held during short operations, never while anything is waited for. What is
    not finished stands in `_pending`, which says it all: an operation is taken on in the step that puts it there, and
    has the position behind the last one's. So an exception that ends a call leaves it taken on or not, and the next
    call on the stream finds it so.
    """

    __slots__ = (
        "_gone",
        "_lock",
        "_pending",
        "_running",
        "_slots",
        "_wake",
        "base",
        "capture",
        "context",
        "done_at",
        "handle",
        "is_blocking",
        "is_legacy",
        "number",
        "priority",
        "slot",
    )

    def __init__(self, context: Context, *, blocking: bool, priority: int, legacy: bool = False) -> None:
        slot = process.segment.claim_stream()
        if slot is None:
            raise CallFailed(OUT_OF_MEMORY)
        self.slot = slot
        self._slots = [slot]  # until it is given back, once
        self.base = slot << layout.POSITION_BITS
        self.done_at = layout.STREAMS + slot * layout.STREAM_WORDS
        self.context = context
        self.is_blocking = blocking  # towards the legacy stream, which is not towards itself
        self.is_legacy = legacy
        self.priority = priority
        self.handle = self.number = next(process.numbers)
        self.capture: capturing.Capture | None = None
        self._lock = CallLock()
        self._gone = False
        self._pending: deque[tuple[int, Action | None]] = deque()
        self._running = threading.Lock()  # held by the stream's thread, in which no exception of a call's arrives
        self._wake: SimpleQueue[None] = SimpleQueue()
        under(contexts.lock, context.streams.add, self)

    @property
    def tail(self) -> int:
        """The position of the last operation taken on."""
        try:
            return self._pending[-1][0]
        except IndexError:
            # The words are two stores, between which an exception may come: the greater one counts.
            return max(process.words[self.done_at], process.words[self.done_at + layout.S_TAIL])

    def latest(self) -> int:
        """The record of everything taken on so far."""
        return self.base | self.tail

    def is_idle(self) -> bool:
        """Whether everything taken on is finished."""
        return not self._pending

    def has_nothing_before(self) -> bool:
        """Whether an operation taken on now would have nothing to wait for in front of it."""
        return self.is_idle() and not ((self.is_blocking or self.is_legacy) and self.implicit())

    def submit(self, action: Action | None = None, *, at_once: bool = True) -> int:
        """Take on an operation, None for one that does nothing, and return its record.

        An idle stream finishes it within the call, unless `at_once` is False because it may have to wait. HeldBelow for
        a finalizer or a signal's handler that interrupts another call on the stream.
        """
        lock = self._lock
        if lock.is_mine() and lock.is_held_below():
            raise HeldBelow
        try:
            with lock:
                return self._take_on(action, at_once)
        except BaseException:
            lock.unwind()
            raise

    def _take_on(self, action: Action | None, at_once: bool) -> int:
        if self._gone:
            raise CallFailed(INVALID_HANDLE)
        words, done_at = process.words, self.done_at
        position = self.tail + 1
        before = self.implicit() if self.is_blocking or self.is_legacy else ()
        if at_once and not before and not self._pending and not process.asynchronous:
            if action is not None:
                action()
            if fence:
                fence(SEQ_CST)
            # No wake: no process can sleep for a position that was not published yet.
            words[done_at] = words[done_at + layout.S_TAIL] = position
            return self.base | position
        self._pending.append((position, partial(_after, before, action) if before else action))
        words[done_at + layout.S_TAIL] = position
        self.go_on()
        return self.base | position

    def implicit(self) -> list[int]:
        """The records that a new operation has to wait for by the rules of the legacy default stream."""
        if self.is_legacy:
            others = [stream for stream in list(self.context.streams) if stream.is_blocking]
        else:
            others = [self.context.legacy] if self.context.legacy is not None else []
        return [stream.latest() for stream in others if not stream.is_idle()]

    def go_on(self) -> None:
        """Have a thread at work if there is work; an exception may have ended the call that took it on before."""
        if not self._pending:
            return
        if not self._running.locked():
            start(self._run, f"ipcsync-host-stream-{self.number:#x}", _no_thread)
        self._wake.put(None)

    def _run(self) -> None:
        # Asked once more with the lock released: who took on work while it was held has started no other thread.
        while self._pending and self._running.acquire(False):
            try:
                self._work()
            finally:
                self._running.release()

    def _work(self) -> None:
        pending, words, done_at, futex = self._pending, process.words, self.done_at, process.segment.futex(self.slot)
        while True:
            while pending:
                position, action = pending[0]
                if action is not None:
                    action()
                if fence:
                    fence(SEQ_CST)
                words[done_at] = position
                pending.popleft()
                futex.wake()
            if self._gone:
                self._release()
                return
            try:
                self._wake.get(timeout=_IDLE_S)
            except Empty:
                return

    def destroy(self) -> None:
        """Refuse new operations; the slot is freed when all work is done. Never blocks; a second call does nothing."""
        under(self._lock, self.close)
        capturing.drop(self)
        if self._pending:
            self.go_on()
        elif self._running.locked():
            self._wake.put(None)
        else:
            self._release()
        streams.pop(self.handle, None)

    def close(self) -> None:
        """The process leaves the segment: take nothing on any more."""
        self._gone = True

    def _release(self) -> None:
        self.context.streams.discard(self)
        try:
            slot = self._slots.pop()
        except IndexError:
            return  # it was freed already
        process.segment.free_stream(slot)


def _no_thread(error: BaseException) -> None:
    log.error("a stream of the host driver has no thread, and finishes nothing: %s", error)


def _after(records: list[int], action: Action | None) -> None:
    for record in records:
        process.segment.wait_record(record)
    if action is not None:
        action()


streams: dict[int, Stream] = {}


def find_stream(hStream: Any) -> Stream:
    """The stream of a handle: 0 and 1 are the current context's legacy stream, 2 its per-thread one."""
    try:
        handle = index(hStream)  # `number`, in most cases
    except TypeError:
        handle = number(hStream)
    stream = streams.get(handle)
    if stream is not None:
        return stream
    if handle > PER_THREAD or handle < 0:
        raise CallFailed(INVALID_HANDLE)
    context = contexts.current()
    if handle == PER_THREAD:
        return _per_thread_stream(context)
    return context.legacy or under(contexts.lock, _legacy_stream, context)


def _legacy_stream(context: Context) -> Stream:
    if context.legacy is None:
        context.legacy = Stream(context, blocking=False, priority=0, legacy=True)
    return context.legacy


def submit_behind_all(context: Context, action: Action | None) -> int:
    """Take on an operation behind everything that the streams of a context have now; its record."""
    everything = context.everything or under(contexts.lock, _stream_of_everything, context)
    records = []
    for stream in list(context.streams):  # of destroyed ones too, until they are done
        if stream is not everything and not stream.is_idle():
            stream.go_on()
            records.append(stream.latest())
    return everything.submit(partial(_after, records, action) if records else action, at_once=not records)


def _stream_of_everything(context: Context) -> Stream:
    if context.everything is None:
        context.everything = Stream(context, blocking=False, priority=0)
    return context.everything


def _per_thread_stream(context: Context) -> Stream:
    return under(contexts.lock, _stream_of, context, threading.current_thread())


def _stream_of(context: Context, me: threading.Thread) -> Stream:
    for thread, stream in context.per_thread:
        if thread is me:
            return stream
    for pair in [pair for pair in context.per_thread if not pair[0].is_alive()]:
        context.per_thread.remove(pair)
        pair[1].destroy()
    stream = Stream(context, blocking=True, priority=0)
    context.per_thread.append((me, stream))
    return stream
