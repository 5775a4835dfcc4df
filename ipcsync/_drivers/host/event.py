"""Events of the host driver: a record captures a position of a stream, a wait captures the event's latest record.

Of an interprocess event the latest record lies in the segment, where every process that has it stores and loads it; of
any other it lies here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from operator import index
from typing import Any

from cuda.bindings.driver import CUevent, CUresult

from ipcsync._drivers.host import capture as capturing
from ipcsync._drivers.host import context as contexts
from ipcsync._drivers.host import layout
from ipcsync._drivers.host.context import Context
from ipcsync._drivers.host.process import process
from ipcsync._drivers.host.results import (
    INVALID_HANDLE,
    INVALID_VALUE,
    NOT_READY,
    OK,
    OUT_OF_MEMORY,
    SUCCESS,
    CallFailed,
    Result,
    entry,
    number,
)
from ipcsync._drivers.host.stream import Action, Stream, find_stream, submit_behind_all
from ipcsync._drivers.results import unwrap
from ipcsync._linux.robust import OWNER_DIED

BLOCKING_SYNC, DISABLE_TIMING, INTERPROCESS = 1, 2, 4
EXTERNAL = 1  # flag of record and wait, for captures only


class Event:
    """An event of this process, or its import of another's."""

    __slots__ = (
        "_latest",
        "_mark",
        "_owner",
        "_word",
        "captured",
        "context",
        "flags",
        "handle",
        "imported",
        "line",
        "stamp",
    )

    def __init__(self, context: Context, flags: int) -> None:
        self.handle = next(process.numbers)
        self.context = context
        self.flags = flags
        self.imported = False
        self.line = 0  # first word of its line in the segment; 0: it has none
        self._latest = 0
        self._word = self._owner = self._mark = 0
        self.stamp: list[int] = []  # when the latest record was complete, ns
        self.captured: capturing.Capture | None = None  # of the latest record through this handle

    def share(self) -> None:
        """Give a new event its line in the segment."""
        line = process.segment.claim_event(self.context.physical)
        if line is None:
            raise CallFailed(OUT_OF_MEMORY)
        self.line = line

    def attach(self, line: int, word: int, owner: int) -> None:
        """Make this the import of the event that lies in `line` as long as its first word is `word`."""
        self.imported = True
        self._word, self._owner = word, owner
        self._mark = layout.process(process.words[line + layout.E_PROCESS]) + layout.P_MARK
        self.line = line

    def latest(self) -> int:
        """The latest record, 0 if there is none; refused if the exporter destroyed the event, ended or died."""
        line = self.line
        if not line:
            return self._latest
        latest: int = process.words[line + layout.E_LATEST]
        if self.imported:
            self._look_at_exporter()  # after the load, which it vouches for
        return latest

    def _look_at_exporter(self) -> None:
        words, line = process.words, self.line
        is_alive = 0 < words[self._mark] < OWNER_DIED
        is_alive = is_alive or process.segment.is_member(words[line + layout.E_PROCESS], self._owner)
        # The word last: of the dead, the events are freed before another process can have the line and its mark.
        if not is_alive or words[line] != self._word:
            raise CallFailed(INVALID_HANDLE)

    def record(self, stream: Stream) -> None:
        """Record the stream's present work."""
        if stream.context is not self.context:
            raise CallFailed(INVALID_HANDLE)
        if self.imported:
            self._look_at_exporter()
        if capturing.active and capturing.capture_op(stream):
            self.captured = stream.capture
            return
        self._keep(stream.submit)

    def record_context(self, context: Context) -> None:
        """Capture what all streams of a context have now."""
        if context is not self.context:
            raise CallFailed(INVALID_HANDLE)
        if self.imported:
            self._look_at_exporter()
        if capturing.active:
            capturing.look_at_context(context)
        self._keep(partial(submit_behind_all, context))

    def _keep(self, submit: Callable[[Action | None], int]) -> None:
        """Have the event stand for the operation that `submit` queues; it gets the function to call then."""
        self.captured = None
        if self.flags & DISABLE_TIMING:
            record = submit(None)
        else:
            stamp: list[int] = []
            record = submit(partial(_put_time, stamp))
            self.stamp = stamp
        if self.line:
            process.words[self.line + layout.E_LATEST] = record
        else:
            self._latest = record

    def destroy(self) -> None:
        """Forget the event. Waits that were taken on go on: they hold records."""
        if events.pop(self.handle, None) is None:
            raise CallFailed(INVALID_HANDLE)
        if self.line and not self.imported:
            process.segment.free_event(self.line)


def _put_time(stamp: list[int]) -> None:
    stamp.append(time.monotonic_ns())


def is_complete(record: int) -> bool:
    """Whether a record is complete, or none at all."""
    slot = record >> layout.POSITION_BITS
    return bool(process.words[layout.STREAMS + (slot << layout.STREAM_SHIFT)] >= record & layout.POSITION_MASK)


events: dict[int, Event] = {}


def find_event(hEvent: Any) -> Event:
    """The event of a handle; refused for an unknown handle."""
    try:
        event = events.get(index(hEvent))  # `number`, in most cases
    except TypeError:
        event = events.get(number(hEvent))
    if event is None:
        raise CallFailed(INVALID_HANDLE)
    return event


@entry(1)
def cuEventCreate(Flags: Any) -> Result:
    """A new event of the current context. Flags: CUevent_flags; INTERPROCESS needs DISABLE_TIMING."""
    flags = number(Flags)
    with_timing = not flags & DISABLE_TIMING
    if flags & ~(BLOCKING_SYNC | DISABLE_TIMING | INTERPROCESS) or (with_timing and flags & INTERPROCESS):
        raise CallFailed(INVALID_VALUE)
    event = Event(contexts.current(), flags)
    if flags & INTERPROCESS:
        event.share()
    events[event.handle] = event
    return SUCCESS, CUevent(event.handle)


@entry()
def cuEventDestroy(hEvent: Any) -> Result:
    """Destroy an event; never blocks."""
    find_event(hEvent).destroy()
    return OK


@entry()
def cuEventRecord(hEvent: Any, hStream: Any) -> Result:
    """Record an event on a stream of its own context."""
    find_event(hEvent).record(find_stream(hStream))
    return OK


@entry()
def cuEventRecordWithFlags(hEvent: Any, hStream: Any, flags: Any) -> Result:
    """Record an event; the flag EXTERNAL (1) is for capturing streams only."""
    event, stream, wanted = find_event(hEvent), find_stream(hStream), number(flags)
    if wanted & ~EXTERNAL or (wanted and stream.capture is None):
        raise CallFailed(INVALID_VALUE)
    if wanted:
        capturing.capture_op(stream)
    else:
        event.record(stream)
    return OK


@entry()
def cuCtxRecordEvent(hCtx: Any, hEvent: Any) -> Result:
    """Record an event behind everything that its own context has now.

    STREAM_CAPTURE_UNSUPPORTED while a stream of that context captures, and every such capture is invalidated.
    """
    context = contexts.find_context(hCtx)
    find_event(hEvent).record_context(context)
    return OK


@entry()
def cuEventQuery(hEvent: Any) -> Result:
    """SUCCESS if the latest record is complete, or there is none; NOT_READY otherwise."""
    event = find_event(hEvent)
    if capturing.active or event.captured is not None:
        capturing.look_at_event(event)
    return OK if is_complete(event.latest()) else NOT_READY


@entry()
def cuEventSynchronize(hEvent: Any) -> Result:
    """Wait until the record that is the latest at the call is complete."""
    event = find_event(hEvent)
    if capturing.active or event.captured is not None:
        capturing.look_at_event(event)
    process.segment.wait_record(event.latest())
    return OK


def wait_event(event: Any, deadline_ns: int) -> bool:
    """Block until the record that is the latest at the call is complete; False if CLOCK_MONOTONIC passed `deadline_ns`.

    Raises DriverError where cuEventSynchronize would fail.
    """
    done: list[bool] = []
    unwrap(_wait_event(event, deadline_ns, done), "cuEventQuery")
    return done[0]


@entry()
def _wait_event(hEvent: Any, deadline_ns: int, done: list[bool]) -> Result:
    event = find_event(hEvent)
    if capturing.active or event.captured is not None:
        capturing.look_at_event(event)
    done.append(process.segment.wait_record(event.latest(), deadline_ns))
    return OK


@entry(1)
def cuEventElapsedTime(hStart: Any, hEnd: Any) -> Result:
    """Milliseconds between the completions of two records of events with timing, of one device."""
    start, end = find_event(hStart), find_event(hEnd)
    for event in (start, end):
        if capturing.active or event.captured is not None:
            capturing.look_at_event(event)
        if event.flags & DISABLE_TIMING or not event.latest():
            raise CallFailed(INVALID_HANDLE)
    if start.context is not end.context:
        raise CallFailed(INVALID_HANDLE)
    first, last = start.stamp, end.stamp
    if not (first and last and is_complete(start.latest()) and is_complete(end.latest())):
        raise CallFailed(CUresult.CUDA_ERROR_NOT_READY)
    return SUCCESS, (last[0] - first[0]) / 1e6


@entry()
def cuStreamWaitEvent(hStream: Any, hEvent: Any, Flags: Any) -> Result:
    """Let a stream's later work wait for the record that is an event's latest at the call."""
    stream, event, flags = find_stream(hStream), find_event(hEvent), number(Flags)
    if flags & ~EXTERNAL:
        raise CallFailed(INVALID_VALUE)
    record = event.latest()
    if capturing.active or event.captured is not None:
        if flags and stream.capture is not None:
            capturing.capture_op(stream)
            return OK
        if capturing.capture_wait(stream, event, is_recorded=bool(record)):
            return OK
    if flags:
        raise CallFailed(INVALID_VALUE)
    if not is_complete(record) and record >> layout.POSITION_BITS != stream.slot:
        stream.submit(partial(process.segment.wait_record, record), at_once=False)
    return OK
