"""One worker of the pipeline, a process that `stages.py` starts.

Its host only queues work and passes messages on. It never waits for a chunk to be finished.
"""

from __future__ import annotations

import math
import select
import socket
import time
from collections import deque
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import ipcsync
from ipcsync import _drivers
from ipcsync._drivers import unwrap
from ipcsync._drivers.constants import MEMHOSTREGISTER_DEVICEMAP, MEMHOSTREGISTER_PORTABLE, STREAM_WAIT_VALUE_GEQ
from ipcsync._native.context import ensure_context
from ipcsync_demo.link import NO_POINT, Kind, Link, Message, NeighbourGoneError, hear
from ipcsync_demo.memory import SharedMemory
from ipcsync_demo.plan import STAMP, Plan, stamp, turn

_TIMEOUT_S = 30.0
_MAPPED = MEMHOSTREGISTER_PORTABLE | MEMHOSTREGISTER_DEVICEMAP


class ParentGoneError(Exception):
    """The parent process is gone, or has given up."""


class Buffer(NamedTuple):
    """A buffer to write to, once its point is complete."""

    number: int
    point: bytes = NO_POINT


class Work:
    """A stage's work on its stream: driver operations, which are only queued."""

    def __init__(self, plan: Plan, number: int, memory: SharedMemory, stream: ipcsync.Stream) -> None:
        self._plan = plan
        self._number = number
        self._api: Any = _drivers.load()
        self._handle = stream.cuda_stream
        self._memory = memory
        unwrap(
            self._api.cuMemHostRegister(memory.address, plan.size, _MAPPED),
            "cuMemHostRegister",
        )
        gate = memory.address + plan.gate_of(number)
        self._gate = int(unwrap(self._api.cuMemHostGetDevicePointer(gate, 0), "cuMemHostGetDevicePointer"))
        self._here, self._turned = (int(unwrap(self._api.cuMemAlloc(plan.capacity), "cuMemAlloc")) for _ in range(2))

    def copy_in(self, buffer: int, length: int) -> None:
        """Copy a buffer of the link before this stage to the device."""
        source = self._memory.address + self._plan.buffer(self._number - 1, buffer)
        unwrap(self._api.cuMemcpyHtoDAsync(self._here, source, length, self._handle), "cuMemcpyHtoDAsync")

    def hold(self, number: int) -> None:
        """Hold the stream until the gate is opened for the hold of that number."""
        unwrap(
            self._api.cuStreamWaitValue32(self._handle, self._gate, number, STREAM_WAIT_VALUE_GEQ),
            "cuStreamWaitValue32",
        )

    def transform(self, chunk: int, length: int) -> None:
        """Stamp the chunk of `length` bytes at its end, and rotate it."""
        value, first = stamp(self._number, chunk), turn(self._number, length + STAMP)
        unwrap(self._api.cuMemsetD8Async(self._here + length, value, STAMP, self._handle), "cuMemsetD8Async")
        rest = length + STAMP - first
        self._copy(self._turned, self._here + first, rest)
        if first:
            self._copy(self._turned + rest, self._here, first)

    def _copy(self, to: int, source: int, length: int) -> None:
        unwrap(self._api.cuMemcpyDtoDAsync(to, source, length, self._handle), "cuMemcpyDtoDAsync")

    def copy_out(self, buffer: int, length: int) -> None:
        """Copy the device's buffer to one of the link after this stage."""
        to = self._memory.address + self._plan.buffer(self._number, buffer)
        unwrap(self._api.cuMemcpyDtoHAsync(to, self._turned, length, self._handle), "cuMemcpyDtoHAsync")

    def close(self) -> None:
        """Free the memory; the stream has finished everything."""
        for pointer in (self._here, self._turned):
            unwrap(self._api.cuMemFree(pointer), "cuMemFree")
        unwrap(self._api.cuMemHostUnregister(self._memory.address), "cuMemHostUnregister")


class Stage:
    """A stage: its neighbours' messages come in, work is queued, messages go out."""

    def __init__(self, plan: Plan, number: int, endpoint: str, fds: dict[str, int], control: Connection) -> None:
        self._plan = plan
        self._number = number
        self._control = control
        self._up, self._down = (Link(socket.socket(fileno=fds[side])) for side in ("up", "down"))
        self._memory = SharedMemory(plan, fds["memory"])
        self._client = ipcsync.connect(endpoint, name=f"demo stage {number}")
        self._stream = ipcsync.Stream()
        ensure_context(self._stream.device_index)
        self._work = Work(plan, number, self._memory, self._stream)
        self._copied_in = ipcsync.Event()
        # Its own event, and its neighbours', so that no later point costs a message.
        last = plan.workers
        self._events = {
            stage: self._client.event(
                plan.event_of(stage), recorder=stage == number, engine=plan.engine, depth=plan.depth
            )
            for stage in range(max(number - 1, 1), min(number + 1, last) + 1)
        }
        self._inbox: deque[Message] = deque()
        self._free = deque(Buffer(index) for index in range(plan.buffers))
        self._is_last_in = False
        self._ready_ns = 0
        self._chunks = self._bytes = 0
        self._hand_over_ns: list[int] = []
        self._poll = select.poll()
        for end in (self._up, self._down, control):
            self._poll.register(end.fileno(), select.POLLIN)

    def run(self) -> None:
        """Run from set-up to the report. Raises NeighbourGoneError, ParentGoneError and the errors of ipcsync."""
        self._control.send({"ready": self._events[self._number].engine})
        if hear(self._control) is None:
            raise ParentGoneError
        before = self._client.messages_sent
        began = time.monotonic()
        while not (self._is_last_in and not self._inbox):
            self._listen()
            while self._inbox and self._free:
                if not self._chunks:
                    began = time.monotonic()
                self._process(self._inbox.popleft(), self._free.popleft())
        self._down.send(Message(Kind.END))
        while len(self._free) < self._plan.buffers:
            self._listen()
        self._stream.synchronize()
        seconds = time.monotonic() - began
        self._control.send({"done": self._report(seconds, self._client.messages_sent - before)})

    def close(self) -> None:
        """The orderly end, once all others are done too."""
        self._work.close()
        self._client.close()

    def _report(self, seconds: float, messages: int) -> dict[str, Any]:
        return {
            "chunks": self._chunks,
            "bytes": self._bytes,
            "seconds": seconds,
            "hand_over_p50_us": _percentile_us(self._hand_over_ns, 0.5),
            "hand_over_p99_us": _percentile_us(self._hand_over_ns, 0.99),
            "messages": messages,
        }

    def _listen(self, timeout_ms: int | None = None) -> None:
        """Read the messages that have come, waiting up to `timeout_ms` (None: without a limit)."""
        for fd, _ in self._poll.poll(timeout_ms):
            if fd == self._control.fileno():
                raise ParentGoneError
            self._take(self._up.receive() if fd == self._up.fileno() else self._down.receive())

    def _take(self, message: Message) -> None:
        if message.kind is Kind.CHUNK:
            self._inbox.append(message)
        elif message.kind is Kind.END:
            self._is_last_in = True
            self._poll.unregister(self._up.fileno())
        else:
            hold = self._plan.hold(message.chunk)
            if hold:
                self._memory.open_gate(self._number, hold)
            if message.kind is Kind.FREE:
                if not self._free:
                    # A chunk may have waited here, but there was no free buffer for it.
                    self._ready_ns = time.monotonic_ns()
                self._free.append(Buffer(message.buffer, message.point))

    def _process(self, message: Message, buffer: Buffer) -> None:
        """Queue this stage's work on a chunk, and hand it on."""
        work, chunk = self._work, message.chunk
        if not self._plan.without_waits:
            self._wait_for(message.point)
            self._wait_for(buffer.point)
        now = time.monotonic_ns()
        self._hand_over_ns.append(now - max(message.sent_ns, self._ready_ns))
        work.copy_in(message.buffer, message.length)
        if self._plan.without_waits:
            self._copied_in.record(self._stream)
        hold = self._plan.hold(chunk)
        if hold:
            work.hold(hold)
        work.transform(chunk, message.length)
        length = message.length + STAMP
        work.copy_out(buffer.number, length)
        point = bytes(self._events[self._number].record(self._stream, timeout=_TIMEOUT_S))
        self._chunks += 1
        self._bytes += message.length
        self._down.send(Message(Kind.CHUNK, buffer.number, length, chunk, time.monotonic_ns(), point))
        if self._plan.without_waits:
            self._see_copied_in()
        self._up.send(Message(Kind.FREE, message.buffer, 0, chunk, 0, point))
        self._ready_ns = time.monotonic_ns()

    def _wait_for(self, point: bytes) -> None:
        if point != NO_POINT:
            self._client.point(point).wait(self._stream, timeout=_TIMEOUT_S)

    def _see_copied_in(self) -> None:
        """Only without waits: hold the writer until its unfinished chunk was read, so that the error surely occurs."""
        while not self._copied_in.query():
            self._listen(1)


def _percentile_us(values: list[int], share: float) -> float | None:
    """The nearest-rank percentile of nanoseconds, in microseconds; None if there are none."""
    if not values:
        return None
    return round(sorted(values)[math.ceil(share * len(values)) - 1] / 1000, 1)


def main(control: Connection, plan: Plan, number: int, endpoint: str, fds: dict[str, int]) -> int:
    """Run a stage, with a pipe to its parent; returns the exit status."""
    try:
        return _serve(control, plan, number, endpoint, fds)
    except (ParentGoneError, BrokenPipeError):
        return 1
    except NeighbourGoneError:
        hear(control)  # the end: the parent sees who died, and ends the others
        return 1


def _serve(control: Connection, plan: Plan, number: int, endpoint: str, fds: dict[str, int]) -> int:
    try:
        stage = Stage(plan, number, endpoint, fds, control)
        stage.run()
        hear(control)  # the end: all are done, and no process needs this stage's points any more
        stage.close()
    except (ParentGoneError, NeighbourGoneError):
        raise
    except Exception as error:  # noqa: BLE001 - sent to the parent, which reports it
        lost = isinstance(error, ipcsync.RecorderLost | ipcsync.CoordinatorLost)
        control.send({"failed": f"{type(error).__name__}: {error}"[:2000], "lost": lost})
        hear(control)
        return 1
    return 0
