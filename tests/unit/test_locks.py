"""Locks of calls: free after a signal's exception; who has one in the call below waits not long for another."""

from __future__ import annotations

import random
import signal
import threading

import pytest

import ipcsync
from ipcsync._threads import CallLock, attempt, is_mine, under, under_within
from tests.kit.until import DEADLINE_S


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
