"""Locks and threads that stay whole whatever exception ends a call.

A signal's handler raises in the main thread, and may end a call at any instruction. So a lock is free once the call
that took it has ended. Work that must not stay half done has a thread, which no exception of a caller reaches.

The garbage collector or a signal's handler may call any function of this package in the middle of any other one. So the
locks are reentrant: a call within one of its own thread that has the lock just runs. And who waits in such a call for
what another thread has does not wait for long, since that one may wait for it.
"""

from __future__ import annotations

import _thread
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Generic, ParamSpec, TypeAlias, TypeVar, cast

from ipcsync import _room as room
from ipcsync.errors import ForkedProcessError, IpcSyncError, Reentered

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger("ipcsync")

_PACKAGE = os.path.join(os.path.dirname(__file__), "")
_PATIENCE_S = 0.5  # of a call within one that has a lock: nobody has a lock for so long who waits for nothing
_PAUSE_S = 0.001
_SLICE_S = 0.25
_REPLACERS = (  # and what must be the standard library's own
    ("gevent", "gevent.monkey", "is_module_patched", ("_thread", "select", "queue", "subprocess")),
    ("eventlet", "eventlet.patcher", "is_monkey_patched", ("thread", "select", "subprocess")),
)


# --- threads that keep a session alive --------------------------------------------------------------------------------


beats: dict[int, Callable[[], object]] = {}
"""By the thread that keeps a session alive: what a call that waits on that thread does meanwhile."""


def has_a_beat() -> bool:
    """Whether the calling thread keeps a session alive, so that it may wait for no such thread."""
    return threading.get_ident() in beats


def check_may_wait() -> None:
    """Raise Reentered on a thread that owns a session, where the collector may call any finalizer."""
    if has_a_beat():
        raise Reentered("a finalizer on a thread of ipcsync's own makes a call that waits for such a thread")


# --- locks of calls ---------------------------------------------------------------------------------------------------


CallLock: TypeAlias = _thread.RLock

turns: list[Callable[[], bool]] = [has_a_beat]
"""Whether this thread has what others wait for; the core adds whether it keeps others from an event."""
is_mine: Callable[[CallLock], bool] = CallLock._is_owned  # type: ignore[attr-defined] # noqa: SLF001 - as Condition
"""Whether the calling thread holds a lock."""

outer = CallLock()
"""It is taken before all others and held while functions of users run, which may wait for any other lock."""


def under(lock: CallLock, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`function(*args)` with the lock held; within a call that holds it, it just runs. Raises Reentered as `_take`."""
    return cast("T", under_within(lock, -1, function, *args, **kwargs))


def under_within(
    lock: CallLock, seconds: float, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T | None:
    """As `under`; but None, and nothing is done, if another thread keeps the lock for `seconds` (below 0: for ever)."""
    if is_mine(lock):
        return function(*args, **kwargs)
    # A handler runs at the end of any call, so what raises may come while the lock is taken, or not. Whether it is, is
    # asked in the same call that releases it, all in C. Before that call, Python from 3.11 on runs no handler.
    release = map(CallLock.release, filter(is_mine, (lock,)))
    try:
        return function(*args, **kwargs) if _take(lock, seconds) else None
    finally:
        any(release)


def attempt(lock: CallLock, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
    """As `under`; but None, and nothing is done, while another thread or a call below this one has the lock."""
    return None if is_mine(lock) else under_within(lock, 0, function, *args, **kwargs)


def _take(lock: CallLock, seconds: float) -> bool:
    """Acquire the lock, for at most `seconds` (below 0: for ever); False if that was not enough.

    A finalizer's or a signal handler's call, within a call that has a lock, waits half a second at most, then raises
    Reentered: who has this lock may wait for that one.
    """
    if lock.acquire(False) or lock.acquire(timeout=_PATIENCE_S if seconds < 0 else min(seconds, _PATIENCE_S)):
        return True
    if 0 <= seconds <= _PATIENCE_S:
        return False
    if _interrupts_a_holder(sys._getframe(2)):  # noqa: SLF001 - the one way to it
        raise Reentered(
            "this call interrupts another one of its thread, which has a lock, and waits for one that another thread "
            f"has had for {_PATIENCE_S:g} s"
        )
    return lock.acquire(timeout=-1 if seconds < 0 else seconds - _PATIENCE_S)


def _interrupts_a_holder(frame: FrameType | None) -> bool:
    """Whether a call of this package that has a lock or a turn runs below another frame, from `frame` down."""
    has_turn = any(asked() for asked in turns)
    is_below = False
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_PACKAGE) or frame.f_code.co_name == "__del__":
            is_below = True
        elif is_below and (has_turn or _holds(frame)):
            return True
        frame = frame.f_back
    return False


def _holds(frame: FrameType) -> bool:
    if frame.f_code is not under_within.__code__:
        return False
    lock = frame.f_locals["lock"]
    return is_mine(lock) and lock is not outer


# --- what is done on another thread -----------------------------------------------------------------------------------


class Job(Generic[T]):
    """`function()`, which another thread calls once. It is set once that is over, and any thread may wait for that.

    An exception may end a wait at any instruction. What it made for a caller that was gone is undone, by `undo`.
    `threading.Event` cannot be used: if a signal's handler raises while its condition takes the lock again, a
    RuntimeError replaces the handler's exception.
    """

    __slots__ = ("_function", "_lock", "_undo", "error", "has_begun", "has_succeeded", "is_set", "is_wanted", "value")

    def __init__(self, function: Callable[[], T], undo: Callable[[T], object] | None = None) -> None:
        self._function: Callable[[], T] | None = function
        self._undo = [] if undo is None else [undo]  # until it is called, once
        self._lock = threading.Lock()  # held until it is set
        self._lock.acquire()
        self.error: BaseException | None = None
        """What it raised, until whoever waits for it has that."""
        self.value: T | None = None
        self.has_begun: bool = False
        self.has_succeeded: bool = False
        self.is_set: bool = False
        self.is_wanted: bool = True
        """False once the caller is gone."""

    def set(self) -> None:
        """Let all waiters go on; a second call does nothing. For one thread, which no caller's exception reaches."""
        if not self.is_set:
            self.is_set = True
            self._lock.release()

    def wait(self, timeout: float = threading.TIMEOUT_MAX) -> bool:
        """Whether it is set before `timeout`; False soon in a child that a signal's handler forks meanwhile."""
        deadline, pid = time.monotonic() + timeout, os.getpid()
        # In slices: a wait that was interrupted between the two calls keeps the lock; others see the flag alone.
        while not self.is_set and os.getpid() == pid and (left := deadline - time.monotonic()) > 0:
            if self._lock.acquire(timeout=min(left, _SLICE_S)):
                self._lock.release()
        return self.is_set

    def run(self) -> None:
        """Call it; raises nothing."""
        self.has_begun = True
        try:
            assert self._function is not None
            self.value = self._function()
            self.has_succeeded = True
        except BaseException as error:  # noqa: BLE001 - raised by `result`
            self.error = error
        self._function = None
        self.set()
        self._undo_if_unwanted()

    def give_up(self) -> None:
        self.is_wanted = False
        self._undo_if_unwanted()

    def _undo_if_unwanted(self) -> None:
        # Asked on both sides, each after its own word: one of them sees the other's, and the first undoes it.
        if self.is_set and not self.is_wanted:
            self.error = None  # which nobody takes
        if self.has_succeeded and not self.is_wanted:
            try:
                undo = self._undo.pop()
            except IndexError:
                return
            undo(self.result())

    def fail(self, error: BaseException) -> None:
        self.error = error
        self.set()

    def take_error(self) -> BaseException | None:
        """What it raised, once: kept here, it, its traceback and the frames there would keep each other."""
        error, self.error = self.error, None
        return error

    def result(self) -> T:
        """What the function returned; raises what it raised, once."""
        if (error := self.take_error()) is not None:
            try:
                raise error
            finally:
                del error
        return cast("T", self.value)


def check_threads() -> None:
    """Raise IpcSyncError if gevent or eventlet has replaced threads, or a module that ipcsync uses on its own threads.

    One of their threads that waits in the kernel stops all of them, and on a real thread their modules do not work.
    """
    for library, module, question, names in _REPLACERS:
        replacer = sys.modules.get(module)
        if replacer is not None and any(map(getattr(replacer, question), names)):
            without = ", ".join(f"{name.strip('_')}=False" for name in names)
            raise IpcSyncError(
                f"{library} has replaced this process's threads, or what belongs to them, by its own, and ipcsync "
                f"needs real ones: its heartbeat goes on whatever the others do. Have {library} leave them as they are "
                f"({without}), or use ipcsync in a process of its own"
            )


def start(target: Callable[[], object], name: str, on_failure: Callable[[BaseException], object]) -> threading.Thread:
    """A daemon thread that runs `target`, or none: then `on_failure` is told why, on a thread of its own.

    `Thread.start` waits until the thread runs, and an exception that ends it there leaves it torn (CPython 3.11). So
    another thread calls it, which is started in one step. QuotaExceeded if that one cannot be started, IpcSyncError in
    an interpreter that may have none, or ends.
    """
    if sys.is_finalizing():  # up to Python 3.11 it would be started, and never run
        raise IpcSyncError(f"this interpreter ends, and starts no thread {name} any more")
    try:
        thread = threading.Thread(target=target, name=name, daemon=True)

        def begin() -> None:
            try:
                thread.start()
            except BaseException as error:  # noqa: BLE001 - told
                on_failure(error)

        _thread.start_new_thread(begin, ())
    except RuntimeError as error:
        if "sub" in str(error):  # "isolated subinterpreters", "this (sub)interpreter"
            raise IpcSyncError(
                f"this interpreter may not start the threads that ipcsync needs ({error}): use ipcsync in the main "
                "interpreter, or in a process of its own"
            ) from None
        raise room.shortage(error, f"the thread {name}") or error from None
    return thread


class Worker:
    """At most one thread at a time, which calls `work` for as long as `has_work` says so.

    After adding work, call `ensure`, from any thread and at any point: an exception that ends
    `ensure` leaves a thread that runs, or none, and the next call sees which.
    """

    def __init__(self, name: str, has_work: Callable[[], bool], work: Callable[[], None]) -> None:
        self._name = name
        self._has_work = has_work
        self._work = work
        self._running = threading.Lock()  # held by the thread that works, in which no exception of a call's arrives
        self._thread: threading.Thread | None = None
        self._looks = threading.Event()  # whether the thread that was started last has come to look for work
        self._looks.set()

    def ensure(self) -> None:
        """Have a thread that sees the work added before this call."""
        if self._running.locked() or not self._looks.is_set():
            return  # the thread that works, or is to come, sees it
        looks = threading.Event()
        start(lambda: self._run(looks), self._name, lambda error: self._fail(looks, error))
        self._looks = looks  # after it: an exception in between costs a thread too many, never the only one

    def _fail(self, looks: threading.Event, error: BaseException) -> None:
        log.warning("no new thread for %s (%s): the one that was to start it does the work", self._name, error)
        self._run(looks)

    def _run(self, looks: threading.Event) -> None:
        looks.set()
        # Asked once more with the lock released: who added work while it was held has started no other thread.
        while self._has_work() and self._running.acquire(False):
            self._thread = threading.current_thread()
            try:
                while self._has_work():
                    self._work()
            except Exception:
                log.exception("the thread %s failed, and goes on", self._name)
            finally:
                self._running.release()

    def join(self, timeout: float, pause: Callable[[float], object] = time.sleep) -> None:
        """Wait until all work is done, `timeout` seconds at most; not in the thread that works.

        Whether a thread works yet is not asked: one that `ensure` has started may still be on its way.
        """
        deadline = time.monotonic() + timeout
        while (self._has_work() or self._running.locked()) and time.monotonic() < deadline:
            if self._thread is threading.current_thread():
                return
            pause(_PAUSE_S)


def errand(function: Callable[[], T], undo: Callable[[T], object]) -> T:
    """`function()` on a thread of its own, for a caller who may be ended by an exception while it waits: see `Job`."""
    job = Job(function, undo)
    try:
        start(job.run, "ipcsync-errand", job.fail)
        if not job.wait():
            raise ForkedProcessError
        return job.result()
    except BaseException:
        job.give_up()
        raise
