"""Threads that wait for the kernel's marks on the session lines, and so learn of a death within a millisecond.

The kernel wakes one waiter of a robust futex that it marks: it is the coordinator, which wakes all others by its break.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from ipcsync._board import Peer
from ipcsync._linux.futex import MOST_FUTEXES, FutexSet, Word
from ipcsync._logs import fields

log = logging.getLogger("ipcsync.coordinator")

_SLICE_NS = 250_000_000  # a stop by SIGSTOP takes a waiter out of the kernel's queue
_LOOK_S = 0.005  # without futex_waitv, or for a process that the kernel does not mark


class DeathWatch:
    """Calls `on_death` with the serial of each session whose process died, once, on a thread of its own."""

    def __init__(self, on_death: Callable[[int], object]) -> None:
        self._on_death = on_death
        self._threads: list[_Thread] = []

    def watch(self, peer: Peer) -> None:
        """Watch a session, until `forget`. Without a thread for it the caller has to look itself."""
        thread = next((each for each in self._threads if len(each.peers) < MOST_FUTEXES - 1), None)
        if thread is None:
            try:
                thread = _Thread(self._on_death)
            except RuntimeError as error:
                log.warning("deaths are noticed at the next tick", extra=fields(why=error))
                return
            self._threads.append(thread)
        thread.peers[peer.serial] = peer
        thread.bell.bump()

    def forget(self, serial: int) -> None:
        """Watch a session no more: its line may be another one's."""
        for thread in self._threads:
            thread.peers.pop(serial, None)

    def close(self) -> None:
        """End the threads, before the board is closed."""
        for thread in self._threads:
            thread.close()


class _Thread:
    """Waits for as many sessions as one call of the kernel takes; `bell` has it look again."""

    def __init__(self, on_death: Callable[[int], object]) -> None:
        self.peers: dict[int, Peer] = {}
        self.bell = Word()
        self._on_death = on_death
        self._is_closed = False
        self._futexes = FutexSet(_LOOK_S)
        self._futexes.put(0, self.bell.address)
        self._thread = threading.Thread(target=self._run, name="ipcsync-deaths", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_closed:
            self._futexes.expect(0, self.bell.value)  # before the look at what it was rung for
            self._futexes.wait(self._look())

    def _look(self) -> int:
        """Report who died; returns for how many nanoseconds to wait for the others."""
        futexes, count, slice_ns = self._futexes, 1, _SLICE_NS
        for serial, peer in self.peers.copy().items():
            owner = peer.line.owner  # before the question, so that a mark after it ends the wait
            if not peer.is_alive():
                if self.peers.pop(serial, None) is not None:
                    self._on_death(serial)
            elif owner == 0:
                slice_ns = int(_LOOK_S * 1e9)
            else:
                futexes.put(count, peer.line.owner_address)
                futexes.expect(count, owner)
                count += 1
        futexes.count = count
        return slice_ns

    def close(self) -> None:
        self._is_closed = True
        self.bell.bump()
        self._thread.join()
