"""How a process's death is seen: by the kernel's mark within a millisecond; its end, by its pidfd or its lifeline.
That its work is over, by a lock. And from when its silence counts, since the coordinator may have been stopped itself.

The kernel wakes one waiter of a robust futex that it marks: it is the coordinator, which wakes all others by its break.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from contextlib import closing, suppress

from ipcsync._board import Board, Peer
from ipcsync._linux.files import holders
from ipcsync._linux.futex import MOST_FUTEXES, FutexSet, Word
from ipcsync._linux.process import PidFd, PidFdError, is_running, start_time
from ipcsync._logs import fields
from ipcsync_coordinator.registry import Registry
from ipcsync_coordinator.state import UNKNOWN, Recorder, Session

log = logging.getLogger("ipcsync.coordinator")

_SLICE_NS = 250_000_000  # a stop by SIGSTOP takes a waiter out of the kernel's queue
_PATIENCE_NS = 1_000_000_000  # before the log says who keeps what a dead one left
_LOOK_S = 0.005  # without futex_waitv, or for a process that the kernel does not mark


# --- the kernel's mark ------------------------------------------------------------------------------------------------


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
        self._thread = threading.Thread(target=self._run, name="ipcsync-deaths", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_closed:
            self._futexes.put(0, self.bell.address, self.bell.value)  # before the look at what it was rung for
            self._futexes.wait(self._look())

    def _look(self) -> int:
        """Report who died; returns for how many nanoseconds to wait for the others."""
        futexes, count, slice_ns = self._futexes, 1, _SLICE_NS
        for serial, peer in self.peers.copy().items():
            owner = peer.line.owner  # before the question, so that a mark after it ends the wait
            if owner == 0:
                slice_ns = int(_LOOK_S * 1e9)
            with suppress(OSError):  # no descriptor to ask by, which proves nothing: the next look asks again
                if not peer.is_alive():
                    if self.peers.pop(serial, None) is not None:
                        self._on_death(serial)
                elif owner:
                    futexes.put(count, peer.line.owner_address, owner)
                    count += 1
        futexes.count = count
        return slice_ns

    def close(self) -> None:
        self._is_closed = True
        self.bell.bump()
        self._thread.join()


# --- the end of a process ---------------------------------------------------------------------------------------------


def has_ended(pid: int, started: int) -> bool | None:
    """Whether the kernel has torn a process down; None where pidfds are refused."""
    try:
        with closing(PidFd(pid)) as pidfd:
            return pidfd.has_ended() or start_time(pid) != started
    except ProcessLookupError:
        return True
    except PidFdError:
        return None
    except OSError:  # descriptors are short, which proves nothing: the next tick asks again
        return False


def is_gone(board: Board, session: Session) -> bool:
    """Whether a session's process has ended, or released its lifeline: its last step when it closes, or calls exec.

    A dying one releases it before a driver's files are closed: its pidfd, if there is one, says when it is gone. Whose
    process it is, is known once the session is ready: before it spoke again, its pid might have been reused.
    """
    ended = has_ended(session.pid, session.started) if session.is_ready and session.started else None
    if ended or board.has_lifeline(board.session(session.line)):
        return bool(ended)
    return ended is None or is_running(session.pid, session.started)


def warn_without_pidfds() -> None:
    """Log what is lost where a sandbox refuses pidfds."""
    try:
        PidFd(os.getpid()).close()
    except PidFdError as error:
        log.warning("dead sessions' ends are seen by their lifelines alone", extra=fields(why=error))
    except OSError:
        return  # descriptors are short, which says nothing of them


# --- silence ----------------------------------------------------------------------------------------------------------


class PauseCredit:
    """From when silence counts: each session has a full TTL after a stop of the coordinator itself (late ticks)."""

    def __init__(self, now_ns: int, tick_ns: int) -> None:
        self.since_ns = now_ns
        self._last_ns = now_ns
        self._late_ns = 4 * tick_ns

    def tick(self, now_ns: int) -> None:
        if now_ns - self._last_ns > self._late_ns:
            self.since_ns = now_ns
        self._last_ns = now_ns


# --- the end of its work ----------------------------------------------------------------------------------------------


class Leftovers:
    """Frees what is kept once the work of its recorder is over, which a lock shows."""

    def __init__(self, registry: Registry, board: Board) -> None:
        self._registry = registry
        self._board = board
        self._since: dict[int, int] = {}  # by recorder: when it was seen first, 0 once the log has it
        self._telling: threading.Thread | None = None

    def look(self, now_ns: int) -> None:
        """Ask for each recorder that is gone whether its work is over, and say once whose is not for long."""
        held, untold = self._registry.kept.by_recorder, []
        self._since = {serial: self._since.get(serial, now_ns) for serial in held}
        for serial, slots in list(held.items()):
            if slots[0].held != UNKNOWN and self._board.is_over(serial):
                self._registry.end_held(serial)
            elif 0 < self._since[serial] < now_ns - _PATIENCE_NS:
                untold.append(serial)
        if untold and (self._telling is None or not self._telling.is_alive()):
            # On a thread, since it looks at all processes, and on one for all of them.
            left = [(held[serial][0].held, held[serial][0].recorder, len(held[serial])) for serial in untold]
            self._telling = threading.Thread(target=_tell, args=(left,), name="ipcsync-kept", daemon=True)
            with suppress(RuntimeError):  # there may be no thread: they are told of later
                self._telling.start()
                self._since.update(dict.fromkeys(untold, 0))


def _tell(left: list[tuple[int, Recorder, int]]) -> None:
    found = holders({lock for lock, _, _ in left} - {UNKNOWN})
    for lock, recorder, count in left:
        who = {"name": recorder.name, "pid": recorder.pid, "slots": count}
        if lock == UNKNOWN:
            log.warning("kept for good: whether its GPU work is over is never known", extra=fields(**who))
        else:
            pids = ",".join(map(str, found[lock])) or "unknown"
            log.warning("kept: a process forked from it has the driver's files open", extra=fields(**who, held_by=pids))
