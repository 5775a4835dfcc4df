"""What an exception of a call leaves whole: work that has a thread, how a call waits for it, and locks."""

from __future__ import annotations

import gc
import random
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

import pytest

import ipcsync
from ipcsync import _threads
from ipcsync._threads import CallLock, Job, Worker, attempt, errand, is_mine, under, under_within
from tests.kit.until import DEADLINE_S

Start = tuple[Callable[[], object], Callable[[BaseException], object]]


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[Start]:
    """The threads that were asked for, which the test runs itself, or fails."""
    asked: list[Start] = []
    monkeypatch.setattr(_threads, "start", lambda target, _name, on_failure: asked.append((target, on_failure)))
    return asked


@pytest.fixture
def queue() -> SimpleQueue[str]:
    return SimpleQueue()


@pytest.fixture
def done() -> list[str]:
    return []


@pytest.fixture
def worker(queue: SimpleQueue[str], done: list[str]) -> Worker:
    return Worker("test", lambda: not queue.empty(), lambda: done.append(queue.get()))


def test_much_work_starts_one_thread_however_late_it_runs(
    worker: Worker, queue: SimpleQueue[str], starts: list[Start], done: list[str]
) -> None:
    for i in range(100):
        queue.put(str(i))
        worker.ensure()
    assert len(starts) == 1
    starts[0][0]()
    assert done == [str(i) for i in range(100)]


def test_work_that_comes_when_the_thread_ends_has_another(
    worker: Worker, queue: SimpleQueue[str], starts: list[Start], done: list[str]
) -> None:
    queue.put("first")
    worker.ensure()
    starts[0][0]()
    queue.put("second")
    worker.ensure()
    starts[1][0]()
    assert done == ["first", "second"]


def test_where_no_thread_can_be_started_the_one_that_was_to_start_it_does_the_work(
    worker: Worker, queue: SimpleQueue[str], done: list[str], starts: list[Start], caplog: pytest.LogCaptureFixture
) -> None:
    queue.put("work")
    worker.ensure()
    starts[0][1](RuntimeError("can't start new thread"))
    assert done == ["work"]
    assert "no new thread for test (can't start new thread)" in caplog.text
    queue.put("more")
    worker.ensure()
    assert len(starts) == 2


def test_an_exception_amid_the_start_leaves_a_worker_that_starts_again(
    worker: Worker, queue: SimpleQueue[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_args: object) -> None:
        raise KeyboardInterrupt

    queue.put("work")
    with monkeypatch.context() as patch:
        patch.setattr(_threads, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            worker.ensure()
    worker.ensure()
    worker.join(10)
    assert queue.empty()


def test_work_that_raises_is_told_and_the_rest_is_done_by_the_same_thread(
    caplog: pytest.LogCaptureFixture, queue: SimpleQueue[str], done: list[str], starts: list[Start]
) -> None:
    def work() -> None:
        what = queue.get()
        if what == "bad":
            raise OSError(what)
        done.append(what)

    worker = Worker("test", lambda: not queue.empty(), work)
    for what in ("bad", "good"):
        queue.put(what)
    worker.ensure()
    starts[0][0]()
    assert done == ["good"]
    assert "the thread test failed, and goes on" in caplog.text
    assert len(starts) == 1


def test_what_a_job_raises_once_its_caller_is_gone_keeps_nothing() -> None:
    class Kept: ...

    def fail() -> None:
        kept = Kept()
        kept_by.append(weakref.ref(kept))
        raise ZeroDivisionError

    kept_by = list[weakref.ref[Kept]]()
    gc.disable()
    try:
        for gives_up_first in (True, False):
            job = Job(fail)
            for step in (job.give_up, job.run) if gives_up_first else (job.run, job.give_up):
                step()
            assert kept_by.pop()() is None
    finally:
        gc.enable()


def test_a_thread_that_waits_for_its_own_work_does_not_wait_for_ever(queue: SimpleQueue[str], done: list[str]) -> None:
    def work() -> None:
        done.append(queue.get())
        joining.join(1e9)

    joining = Worker("test", lambda: not queue.empty(), work)
    queue.put("once")
    joining.ensure()
    joining.join(DEADLINE_S)
    assert done == ["once"]


def test_who_asks_for_a_thread_that_there_is_no_room_for_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    told: SimpleQueue[BaseException] = SimpleQueue()
    undone: list[int] = []

    def none_left(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none_left)
    _threads.start(lambda: None, "test", told.put)
    assert "can't start" in str(told.get(timeout=DEADLINE_S))
    with pytest.raises(RuntimeError, match="can't start"):
        errand(lambda: 1, undone.append)
    assert undone == []


def test_an_interpreter_that_ends_starts_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to Python 3.11 it would be started, and never run."""
    with monkeypatch.context() as patch:
        patch.setattr(sys, "is_finalizing", lambda: True)
        with pytest.raises(ipcsync.IpcSyncError, match=r"^this interpreter ends, and starts no thread test any more$"):
            _threads.start(lambda: None, "test", lambda _: None)


def test_a_job_is_set_for_all_who_wait_and_for_who_comes_later() -> None:
    job: Job[None] = Job(lambda: None)
    seen: list[bool] = []
    waiters = [threading.Thread(target=lambda: seen.append(job.wait(20))) for _ in range(3)]
    for waiter in waiters:
        waiter.start()
    assert not job.wait(0.001)
    job.run()
    job.set()
    for waiter in waiters:
        waiter.join(20)
    assert seen == [True] * 3
    assert job.wait(0)


@pytest.mark.parametrize("is_late", [False, True])
def test_what_an_errand_made_for_a_caller_who_left_is_undone_once(
    starts: list[Start], monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    undone: list[str] = []

    def leave(_job: Job[str], _timeout: float = 0.0) -> bool:
        """A signal's handler ends the wait."""
        if not is_late:
            starts[0][0]()
        raise KeyboardInterrupt

    monkeypatch.setattr(Job, "wait", leave)
    with pytest.raises(KeyboardInterrupt):
        errand(lambda: "made", undone.append)
    assert undone == ([] if is_late else ["made"])
    if is_late:
        starts[0][0]()
    assert undone == ["made"]


# --- locks ------------------------------------------------------------------------------------------------------------


class Alarm(Exception):  # noqa: N818 - not an error: a handler's exception
    """What the handler raises."""


def _raise_alarm(*_: object) -> None:
    raise Alarm


_CALLS = 100_000  # what an alarm's exception is lost to, as a collection's callback, is over long before


def _take_until_a_signal(lock: CallLock) -> None:
    while True:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, 30e-6))
        for _ in range(_CALLS):
            under(lock, int)


def test_a_lock_is_free_after_a_signals_exception_anywhere() -> None:
    lock, before = CallLock(), signal.signal(signal.SIGALRM, _raise_alarm)
    try:
        for _ in range(2000):
            with pytest.raises(Alarm):
                _take_until_a_signal(lock)
            assert not is_mine(lock)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_call_within_one_that_has_the_lock_runs_or_is_told() -> None:
    lock = CallLock()
    assert under(lock, under, lock, lambda: 1) == 1
    assert under(lock, under_within, lock, 0, lambda: 2) == 2
    assert under(lock, attempt, lock, lambda: 3) is None
    assert attempt(lock, lambda: 4) == 4


def test_who_has_a_lock_in_the_call_below_waits_for_no_thread_for_ever() -> None:
    mine, theirs, held, over = CallLock(), CallLock(), threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        over.wait(DEADLINE_S)

    thread = threading.Thread(target=under, args=(theirs, hold))
    thread.start()
    held.wait(DEADLINE_S)
    try:
        assert under_within(theirs, 0, int) is None
        assert attempt(theirs, int) is None
        with pytest.raises(ipcsync.Reentered):
            under(mine, lambda: under(theirs, int))
    finally:
        over.set()
        thread.join()
    assert under(theirs, int) == 0
