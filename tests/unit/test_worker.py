"""Threads that do what must not be done by half, and how a call waits for them."""

from __future__ import annotations

import threading

from ipcsync._worker import Latch
from tests.faults.interrupting import interrupted


def test_a_latch_is_set_for_all_who_wait_and_for_who_comes_later() -> None:
    latch, seen = Latch(), []
    waiters = [threading.Thread(target=lambda: seen.append(latch.wait(20))) for _ in range(3)]
    for waiter in waiters:
        waiter.start()
    assert not latch.wait(0.001)
    latch.set()
    latch.set()
    for waiter in waiters:
        waiter.join(20)
    assert seen == [True] * 3
    assert latch.wait(0)


def test_a_wait_for_a_latch_that_an_exception_ends_anywhere_keeps_nobody_else() -> None:
    left = 0
    for point in range(1, 9):
        latch = Latch()
        other, setter = threading.Timer(0.005, latch.wait), threading.Timer(0.02, latch.set)  # the second to wait
        other.start()
        setter.start()
        left += interrupted(latch.wait, point, "line").was_interrupted
        setter.join(20)
        other.join(20)
        assert not other.is_alive(), f"left at point {point}"
        assert latch.wait(20)
    assert left >= 5
