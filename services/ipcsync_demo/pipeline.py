"""The process that starts a pipeline: it feeds the file in, collects the results, and does the same work itself.

It is not a stage. It needs the results on the host, so only here a point is waited for on the host.
"""

from __future__ import annotations

import hashlib
import os
import select
import signal
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from typing import TYPE_CHECKING, Any, BinaryIO

import ipcsync
from ipcsync.cli.output import Failed, WrongCall
from ipcsync.typing import EngineChoice
from ipcsync_demo.link import NO_POINT, Kind, Link, Message, NeighbourGoneError
from ipcsync_demo.memory import SharedMemory
from ipcsync_demo.plan import STAMP, Plan, chunk_size, work
from ipcsync_demo.report import Restart, Result, StageRow
from ipcsync_demo.stages import Stages

if TYPE_CHECKING:
    from typing_extensions import Self

_RESTART_S = 30.0
_IDLE_MS = 100
_GPU_S = 0.005

Show = Callable[[str, int], None]


class Interrupt:
    """Ctrl-C and SIGTERM set a flag that is polled, so that the run can be ended in order.

    A second one raises KeyboardInterrupt, in case that hangs. A context manager.
    """

    def __init__(self) -> None:
        self._came = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._at_signal)
        return self

    def _at_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self._came:
            raise KeyboardInterrupt
        self._came = True

    def check(self) -> None:
        """Raise Failed if a signal came."""
        if self._came:
            raise Failed("interrupted")

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def run(
    source: BinaryIO,
    size: int | None,
    *,
    workers: int,
    engine: EngineChoice,
    without_waits: bool,
    progress: Show,
    kill_coordinator: bool = False,
) -> Result:
    """Send `source` (of `size` bytes, None if it is not known) through a pipeline of `workers` processes.

    `kill_coordinator`: once the first chunk is through; its keeper starts another.

    Whatever happens, coordinator, processes and shared memory are gone afterwards. Raises Failed when a stage failed or
    died or at an interrupt, and the errors of ipcsync.
    """
    plan = Plan(workers, chunk_size(size), engine, without_waits)
    with ExitStack() as stack:
        interrupt = stack.enter_context(Interrupt())
        driver = ipcsync.driver_name()
        try:
            memory = SharedMemory.create(plan)
        except OSError as error:
            raise Failed(f"cannot get {plan.size} bytes of shared memory: {error.strerror}") from None
        stack.callback(os.close, memory.fd)
        # Only errors of its log: this process reports a worker's death itself.
        coordinator = stack.enter_context(ipcsync.launch(driver=driver, log_level="error", keeper=kill_coordinator))
        interrupt.check()
        client = stack.enter_context(ipcsync.connect(coordinator.endpoint, name="demo"))
        stages = Stages(plan, coordinator)
        stack.callback(stages.close)
        stack.callback(memory.open_all_gates)  # before the rest: a process with held work may not be able to end
        stages.start(driver, memory.fd)
        pipeline = Pipeline(plan, stages, memory, client, source, interrupt)
        try:
            return pipeline.run(driver, progress, kill_coordinator=kill_coordinator)
        except (ipcsync.RecorderLost, ipcsync.CoordinatorLost) as error:
            raise stages.blame(str(error)) from error
        except NeighbourGoneError as error:
            raise stages.blame("a stage has closed its link") from error


class Pipeline:
    """The two ends of a pipeline, and the same work done here."""

    def __init__(
        self,
        plan: Plan,
        stages: Stages,
        memory: SharedMemory,
        client: ipcsync.Client,
        source: BinaryIO,
        interrupt: Interrupt,
    ) -> None:
        assert stages.first is not None
        assert stages.last is not None
        self._plan = plan
        self._stages = stages
        self._memory = memory
        self._client = client
        self._source = source
        self._interrupt = interrupt
        self._first: Link = stages.first
        self._last: Link = stages.last
        # Opened now, so that no later point of either end costs a message.
        self._events = [
            client.event(plan.event_of(stage), engine=plan.engine, depth=plan.depth)
            for stage in sorted({1, plan.workers})
        ]
        self._free: deque[tuple[int, bytes]] = deque((index, NO_POINT) for index in range(plan.buffers))
        self._outputs: deque[Message] = deque()
        self._expected: dict[int, bytes] = {}
        self._is_fed = self._is_ended = False
        self._fed = self._fed_bytes = self._through = self._corrupt = 0
        self._first_corrupt: int | None = None
        self._result_hash = hashlib.sha256()
        self._expected_hash = hashlib.sha256()
        self._poll = select.poll()
        for fd in (self._first.fileno(), self._last.fileno(), *(control.fileno() for control in stages.controls)):
            self._poll.register(fd, select.POLLIN)
        self._numbers = {control.fileno(): number for number, control in enumerate(stages.controls, 1)}
        self._listens_to_source = False
        self._answers: dict[int, dict[str, Any]] = {}

    def run(self, driver: str, progress: Show, *, kill_coordinator: bool = False) -> Result:
        """Run the pipeline, from the stages' start to their reports."""
        self._await("ready")
        self._stages.go()
        began = time.monotonic()
        victim = self._client.stats()["pid"] if kill_coordinator else 0
        while not (self._is_fed and self._is_ended and not self._outputs):
            self._feed()
            self._listen(0 if self._owed() is not None else _IDLE_MS)
            self._collect()
            if victim and self._through:
                os.kill(victim, signal.SIGKILL)
                victim = 0
            progress("through the pipeline", self._through)
        self._await("done")
        seconds = time.monotonic() - began
        restart = self._restart() if kill_coordinator else None
        self._stages.dismiss()
        return self._result(driver, seconds, restart)

    def _restart(self) -> Restart:
        stats = self._client.stats(timeout=_RESTART_S)
        return Restart(starts=stats["starts"], sessions=stats["sessions"], expected_sessions=self._plan.workers + 1)

    # --- what the stages say ------------------------------------------------------------------------------------------

    def _await(self, word: str) -> None:
        """Wait until every stage has said `word`."""
        while not all(word in self._answers.get(number, {}) for number in self._numbers.values()):
            self._listen(_IDLE_MS)

    def _listen(self, timeout_ms: int) -> None:
        """Read the messages that have come, waiting up to `timeout_ms`."""
        self._interrupt.check()
        for fd, _ in self._poll.poll(timeout_ms):
            if fd in self._numbers:
                number = self._numbers[fd]
                self._answers.setdefault(number, {}).update(self._stages.hear(number))
            elif fd == self._first.fileno():
                self._take_back(self._first.receive())
            elif fd == self._last.fileno():
                self._take_output(self._last.receive())
            # Else the file has more, which `_feed` reads.

    def _take_back(self, message: Message) -> None:
        if message.kind is Kind.FREE:
            self._free.append((message.buffer, message.point))

    def _take_output(self, message: Message) -> None:
        if message.kind is Kind.END:
            self._is_ended = True
        elif self._plan.without_waits:
            self._read_output(message)  # before its writer may go on
        else:
            self._last.send(Message(Kind.TAKEN, chunk=message.chunk))
            self._outputs.append(message)

    # --- the two ends -------------------------------------------------------------------------------------------------

    def _is_complete(self, point: bytes) -> bool:
        return point == NO_POINT or self._plan.without_waits or self._client.point(point).query()

    def _feed(self) -> None:
        """Read chunks of the file into free buffers, until there is none, or the file has no more data for now."""
        fd = self._source.fileno()
        while not self._is_fed and self._free and self._is_complete(self._free[0][1]):
            if not select.select([fd], [], [], 0)[0]:
                self._poll.register(fd, select.POLLIN)  # a pipe: wake when it has data
                self._listens_to_source = True
                return
            data = self._read(fd)
            if data:
                self._send(data)
            else:
                self._is_fed = True
                self._first.send(Message(Kind.END))
        if self._listens_to_source:  # it would wake this process all the time, without a free buffer
            self._poll.unregister(fd)
            self._listens_to_source = False

    def _read(self, fd: int) -> bytes:
        try:
            return os.read(fd, self._plan.chunk)
        except OSError as error:
            raise WrongCall(f"cannot read the file: {error.strerror}") from None

    def _send(self, data: bytes) -> None:
        index, _ = self._free.popleft()
        self._memory.write(0, index, data)
        expected = data
        for stage in range(1, self._plan.workers + 1):
            expected = work(expected, stage, self._fed)
        self._expected[self._fed] = expected
        self._expected_hash.update(expected)
        self._first.send(Message(Kind.CHUNK, index, len(data), self._fed, time.monotonic_ns()))
        self._fed += 1
        self._fed_bytes += len(data)

    def _owed(self) -> bytes | None:
        """The point that has to be complete next, None if messages are waited for."""
        if self._outputs:
            return self._outputs[0].point
        if self._free and not self._is_fed and not self._is_complete(self._free[0][1]):
            return self._free[0][1]
        return None

    def _collect(self) -> None:
        """Wait a moment for the next output, and read it if it is complete."""
        point = self._owed()
        if point is None:
            return
        try:
            self._client.point(point).synchronize(_GPU_S)
        except ipcsync.WaitTimeout:
            return  # listen again: a stage may have died, or a signal may have come
        if self._outputs:
            self._read_output(self._outputs.popleft())

    def _read_output(self, message: Message) -> None:
        output = self._memory.read(self._plan.workers, message.buffer, message.length)
        self._result_hash.update(output)
        expected = self._expected.pop(message.chunk)
        if output != expected:
            self._corrupt += 1
            if self._first_corrupt is None:
                self._first_corrupt = message.chunk
        self._through += len(expected) - self._plan.workers * STAMP
        self._last.send(Message(Kind.FREE, message.buffer, chunk=message.chunk))

    def _result(self, driver: str, seconds: float, restart: Restart | None) -> Result:
        reports = [(number, self._answers[number]["done"]) for number in sorted(self._answers)]
        return Result(
            driver=driver,
            engine=self._events[0].engine,
            without_waits=self._plan.without_waits,
            bytes=self._fed_bytes,
            chunks=self._fed,
            seconds=round(seconds, 3),
            sha256=self._result_hash.hexdigest(),
            expected_sha256=self._expected_hash.hexdigest(),
            corrupt_chunks=self._corrupt,
            first_corrupt=self._first_corrupt,
            restart=restart,
            stages=[
                StageRow(
                    stage=number,
                    pid=self._stages.pid(number),
                    chunks=report["chunks"],
                    mb_per_s=round(report["bytes"] / report["seconds"] / 1e6, 2) if report["chunks"] else 0.0,
                    hand_over_p50_us=report["hand_over_p50_us"],
                    hand_over_p99_us=report["hand_over_p99_us"],
                    messages=report["messages"],
                )
                for number, report in reports
            ],
        )
