"""The mark by which others see with one load that a process lives: a robust futex, held by a thread for just that."""

from __future__ import annotations

import threading
from contextlib import suppress

from ipcsync._linux import robust


class Life:
    """A word at `address` that is not 0 from `show` on, and OWNER_DIED from this process's death or exec on.

    The thread calls nothing, least of all a library that may have robust mutexes of its own. Where no thread can be
    had, or the kernel refuses, the word stays 0, and others have to ask the kernel.
    """

    def __init__(self, address: int) -> None:
        self._address = address
        self._is_settled = threading.Event()
        self._end = threading.Event()
        self._is_given_up = False
        self._thread: threading.Thread | None = None

    def show(self) -> None:
        """Have the word held when this returns; twice does nothing."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._hold, name="ipcsync-life", daemon=True)
            with suppress(RuntimeError):
                self._thread.start()
                self._is_settled.wait()

    def _hold(self) -> None:
        try:
            with suppress(OSError), robust.held(self._address) as is_held:
                self._is_settled.set()
                if is_held:
                    self._end.wait()
                    if self._is_given_up:
                        raise robust.Abandon
        finally:
            self._is_settled.set()

    def end(self) -> None:
        """Have the word let go of before another process may get it: it is 0 when this returns."""
        self._end.set()
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join()

    def give_up(self) -> None:
        """Have the kernel mark the word as it does at this process's death, which is about to come."""
        if not self._end.is_set():
            self._is_given_up = True
            self._end.set()
