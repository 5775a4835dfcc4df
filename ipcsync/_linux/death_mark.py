"""A mark by which other processes see with one load that this one lives: a robust futex that a thread holds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from ipcsync._linux import robust
from ipcsync._linux.futex import Futex

_LONGEST_SLEEP_NS = 10**9
_GIVE_UP_S = 0.1


class DeathMark:
    """A word at `address`: not 0 once `show` returned, OWNER_DIED after this process's death or exec.

    With a `doorbell` the mark wakes one process that waits on the word, and the thread calls `on_ring` when another
    process wakes `doorbell`, a word that stays 0. It calls nothing else: a
    library may have robust mutexes of its own, and a thread has one list of them. A ring that comes while it is awake
    is missed, so a process that needs an answer rings again. If no thread can be started, or the kernel refuses, the
    word stays 0, and other processes have to ask the kernel.
    """

    def __init__(self, address: int, doorbell: Futex | None = None, on_ring: Callable[[], None] = lambda: None) -> None:
        self._address = address
        self._doorbell = doorbell
        self._on_ring = on_ring
        self._has_begun = threading.Event()
        self._end = threading.Event()
        self._is_given_up = False
        self._thread: threading.Thread | None = None

    def show(self) -> None:
        """Hold the word from when this returns; a second call does nothing."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._hold, name="ipcsync-life", daemon=True)
            with suppress(RuntimeError):
                self._thread.start()
                self._has_begun.wait()

    def _hold(self) -> None:
        try:
            with suppress(OSError), robust.held(self._address, wakes=self._doorbell is not None) as is_held:
                self._has_begun.set()
                self._sleep()
                if is_held and self._is_given_up:
                    raise robust.Abandon
        finally:
            self._has_begun.set()

    def _sleep(self) -> None:
        if self._doorbell is None:
            self._end.wait()
            return
        while not self._end.is_set():
            if self._doorbell.wait(0, _LONGEST_SLEEP_NS) and not self._end.is_set():
                self._on_ring()

    def end(self) -> None:
        """Release the word, before another process may get it: it is 0 when this returns."""
        self._end.set()
        self._await_end(threading.TIMEOUT_MAX)
        self._on_ring = _nothing  # breaks a reference cycle with its owner

    def _await_end(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        if self._thread is None or self._thread.ident is None:
            return
        while self._thread.is_alive() and time.monotonic() < deadline:
            if self._doorbell is not None:
                self._doorbell.wake()  # repeatedly: the thread may have been about to sleep
            self._thread.join(0.001)

    def give_up(self) -> None:
        """Have the kernel mark the word now, as at this process's death, which is about to come."""
        if not self._end.is_set():
            self._is_given_up = True
            self._end.set()
            self._await_end(_GIVE_UP_S)


def _nothing() -> None:
    """The effect of a ring once the word was released."""
