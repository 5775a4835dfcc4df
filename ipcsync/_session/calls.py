"""Calls that a session's owner makes for other threads: how they are handed over, and how their end is awaited.

An exception that ends a caller never reaches the owner's thread.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar, cast

from ipcsync._deadline import left_of
from ipcsync._native import fork
from ipcsync._session.lease import has_a_beat
from ipcsync._worker import Latch
from ipcsync.errors import Reentered, WaitTimeout

T = TypeVar("T")

_SLICE_S = 0.25
_PATIENCE_NS = 1_000_000_000  # behind a call's deadline, which the owner sees first


class CallerGone(Exception):  # noqa: N818 - nobody gets it
    """The caller of the job under way is gone."""


class OwnerGone(Exception):  # noqa: N818 - the session says why
    """Nobody does the job any more."""


def check_may_wait() -> None:
    """Raise Reentered on a thread that owns a session, where the collector may call any finalizer."""
    if has_a_beat():
        raise Reentered("a finalizer on a thread of ipcsync's own makes a call that waits for such a thread")


class Job(Latch, Generic[T]):
    """`function()`, which the owner of a session calls once, and for which one thread waits."""

    __slots__ = ("_error", "_function", "_value", "has_begun", "is_wanted")

    def __init__(self, function: Callable[[], T]) -> None:
        super().__init__()
        self._function: Callable[[], T] | None = function
        self._error: BaseException | None = None
        self._value: T | None = None
        self.has_begun: bool = False
        self.is_wanted: bool = True
        """False once the caller is gone."""

    def run(self) -> None:
        """Call it; raises nothing."""
        self.has_begun = True
        try:
            assert self._function is not None
            self._value = self._function()
        except BaseException as error:  # noqa: BLE001 - raised by `result`
            self._error = error
        self._function = None
        self.set()

    def result(self) -> T:
        """What the function returned; raises what it raised."""
        if self._error is not None:
            raise self._error
        return cast("T", self._value)


class Calls:
    """The jobs of one session, done by its owner one after the other. `ring` wakes it."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._queue: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._job: Job[Any] | None = None
        self.is_over: bool = False
        """Set by the owner before it works for the last time."""

    # --- the owner's thread -------------------------------------------------------------------------------------------

    def work(self) -> None:
        """Do what was asked for."""
        while not self._queue.empty():
            self._queue.get()()

    def _do(self, job: Job[Any]) -> None:
        self._job = job
        job.run()
        self._job = None

    @property
    def is_unwanted(self) -> bool:
        """Whether the caller of the job under way is gone."""
        return self._job is not None and not self._job.is_wanted

    # --- other threads ------------------------------------------------------------------------------------------------

    def post(self, function: Callable[[], object]) -> None:
        """Have the owner call a function, behind those before. An exception of it ends the session."""
        self._queue.put(function)
        self._ring()

    def submit(self, job: Job[T]) -> Job[T]:
        """Have the owner do a job, behind those before."""
        self.post(partial(self._do, job))
        return job

    def call(self, function: Callable[[], T], deadline: int, timeout: float) -> T:
        """What the function returns, which the owner calls. An exception that ends the wait gives up its request.

        Raises as `result_of`.
        """
        job = Job(function)
        try:
            self.submit(job)
            return self.result_of(job, deadline, timeout)
        except BaseException:  # also of a submit that was interrupted behind its put
            job.is_wanted = False
            raise

    def result_of(self, job: Job[T], deadline: int, timeout: float) -> T:
        """Wait for what came of a job. WaitTimeout behind the `deadline` of `timeout` seconds, OwnerGone, Reentered."""
        check_may_wait()
        while not job.wait(0 if self.is_over else min(_SLICE_S, left_of(deadline) + 0.001)):
            fork.check()
            if self.is_over or sys.is_finalizing():
                raise OwnerGone
            now = time.monotonic_ns()
            if now >= deadline + (_PATIENCE_NS if job.has_begun else 0):
                raise WaitTimeout(f"other requests of this client took all of the {timeout} s", timeout=timeout)
        return job.result()
