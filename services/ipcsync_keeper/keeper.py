"""The keeper's loop: it starts coordinators, works with the driver for them, sees to their deaths and upgrades."""

from __future__ import annotations

import json
import logging
import os
import queue
import select
import signal
import threading
import time
from collections.abc import Callable

from ipcsync._board.runtime_dir import OUTCOME, RELOAD
from ipcsync._linux.process import PidFd, is_running
from ipcsync._linux.service_manager import ServiceManager
from ipcsync._logs import fields
from ipcsync._wire import codec
from ipcsync.errors import IpcSyncError
from ipcsync_keeper import journal_files
from ipcsync_keeper.child import Child
from ipcsync_keeper.holdings import Holdings

log = logging.getLogger("ipcsync.coordinator")

UNREADABLE = 3  # a coordinator's exit status: the journal cannot be read
_START_S = 30.0
_STOP_S = 1.0
_QUICK_S = 10.0  # a coordinator that ends sooner than this, and without a reply, has come to nothing
_PAUSE_S = 0.1
_PATIENCE_S = 10.0  # how long a coordinator's heartbeat may stand still
_TICK_S = 0.5
_MOST_FRUITLESS = 3


class Keeper:
    """Keeps a coordinator serving over `holdings`. `command` starts one; `ready` is told when the first one serves."""

    def __init__(
        self, holdings: Holdings, command: list[str], manager: ServiceManager, ready: Callable[[], None], *, spare: bool
    ) -> None:
        self._holdings = holdings
        self._command = command
        self._manager = manager
        self._tell_ready = ready
        self._wants_spare = spare
        self._status: int | None = None  # to exit with, once it ends
        self._serving: Child | None = None
        self._spare: Child | None = None
        self._candidate: Child | None = None  # of the code on disk, started to take over
        self._is_ready = self._is_reloading = False
        self._versions: dict[str, str] | None = None  # that all coordinators over these holdings speak
        self._start_at: float | None = 0.0
        self._spare_at = 0.0
        self._fruitless = 0
        self._beat, self._beat_at = 0, time.monotonic()
        self._ticked_at = time.monotonic()
        self._parent: PidFd | None = None
        self._has_terminal = _has_terminal()
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._signals: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._served: queue.SimpleQueue[Child] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="ipcsync-driver", daemon=True).start()

    # --- the driver's thread ------------------------------------------------------------------------------------------

    def _work(self) -> None:
        """Answer the questions of one coordinator after the other: a driver's call may take long."""
        while True:
            child = self._served.get()
            try:
                child.serve(self._holdings)
                self._answer_all(child)
            except EOFError:
                self._wake()

    def _answer_all(self, child: Child) -> None:
        while True:
            message = child.link.receive(None)
            assert message is not None
            child.is_asking = True
            child.link.send(*self._answer(child, *message))
            child.is_asking = False

    def _answer(self, child: Child, number: int, op: str, arguments: list[object]) -> tuple[int, bool, object]:
        if op == "serving":
            child.is_serving = True
            self._wake()
            return number, False, None
        try:
            return number, False, getattr(self._holdings.events, op)(*arguments)
        except IpcSyncError as error:
            return number, True, codec.failure_of(error)
        except Exception as error:  # whatever was asked: the next question is answered
            log.exception("a question could not be answered", extra=fields(op=op))
            return number, True, codec.failure_of(IpcSyncError(f"the keeper failed inside: {type(error).__name__}"))

    # --- the loop -----------------------------------------------------------------------------------------------------

    def end_with(self, pid: int, started: int) -> None:
        """End when the process `pid` that started at `started` does."""
        try:
            self._parent = PidFd(pid)
        except ProcessLookupError:
            self._status = 0
        if not is_running(pid, started):
            self._status = 0

    def run(self) -> int:
        """Run until SIGTERM, SIGINT or a coordinator's own wish to end, and return the exit status."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, RELOAD):
            signal.signal(number, lambda number, _: self._signals.put(number))
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        try:
            while self._status is None:
                self._wait()
                self._step()
        finally:
            self._stop()
        return self._status

    def _wake(self) -> None:
        try:
            os.write(self._wake_write, b"x")
        except BlockingIOError:
            return  # it has enough reasons to wake already

    def _wait(self) -> None:
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        if self._parent is not None:
            poll.register(self._parent, select.POLLIN)
        for child in (self._serving, self._spare, self._candidate):
            if child is not None:
                poll.register(child.pidfd, select.POLLIN)
                if child.versions is None:
                    poll.register(child.link.socket, select.POLLIN)
        due = _TICK_S if self._start_at is None else min(_TICK_S, max(0.0, self._start_at - time.monotonic()))
        if any(fd == self._wake_read for fd, _ in poll.poll(int(due * 1000) + 1)):
            os.read(self._wake_read, 4096)

    def _step(self) -> None:
        """Look at everything that may have changed."""
        while not self._signals.empty():
            self._heed(self._signals.get())
        if self._parent is not None and self._parent.is_dead:
            self._status = 0
        if self._status is None:
            self._see_to_serving()
            self._see_to_candidate()
            self._see_to_spare()
            self._tick()

    def _heed(self, number: int) -> None:
        is_reload = number == RELOAD or (number == signal.SIGHUP and not self._has_terminal)
        if not is_reload:
            self._status = 0
        elif self._candidate is None and self._serving is not None and self._serving.is_serving:
            self._manager.reloading()
            self._is_reloading = True
            self._candidate = Child(self._holdings, self._command)
        else:
            self._tell_outcome("another start is under way")

    # --- the coordinator that serves ----------------------------------------------------------------------------------

    def _see_to_serving(self) -> None:
        child = self._serving
        if child is not None and child.pidfd.is_dead:
            self._serving = None
            self._see_end(child, child.end())
            child = None
        if child is not None:
            if child.versions is None and _has_spoken(child):
                self._let_serve(child)
            elif child.versions is None and time.monotonic() - child.began > _START_S:
                child.kill()
            elif child.is_serving and not self._is_ready:
                self._is_ready = True
                self._tell_ready()
            elif child.is_serving and self._is_reloading and self._candidate is None:
                self._end_reload("")
        elif self._status is None and self._start_at is not None and time.monotonic() >= self._start_at:
            self._start_at = None
            self._start()

    def _start(self) -> None:
        """Have the spare serve, or a new one."""
        child, self._spare = self._spare, None
        if child is None or child.versions is None:
            child = child or Child(self._holdings, self._command)
        else:
            self._let_serve(child)
        self._serving = child
        self._holdings.journal.words[journal_files.REPLIES] = 0
        self._beat_at = time.monotonic()

    def _let_serve(self, child: Child) -> None:
        """It speaks. The code on disk may be another by now: one that does not fit is none to go on with."""
        self._versions = self._versions or child.versions
        if child.versions == self._versions:
            self._served.put(child)
        else:
            log.error("the code on disk does not fit", extra=fields(differs=_differing(child.versions, self._versions)))
            child.kill()

    def _see_end(self, child: Child, status: int) -> None:
        """It has ended, whatever the status: a death, unless it told before."""
        words, now = self._holdings.journal.words, time.monotonic()
        if words[journal_files.IS_ENDING]:
            self._status = max(status, 0)
            return
        log.error("the coordinator died", extra=fields(pid=child.pid, status=status, starts=self._holdings.starts))
        if self._is_reloading and self._candidate is None:
            self._end_reload(f"the new coordinator ended before it served: status {status}")
        is_fruitless = now - child.began < _QUICK_S and not words[journal_files.REPLIES]
        self._fruitless = self._fruitless + 1 if is_fruitless else 0
        if not self._is_ready:
            self._status = 1  # its log says why
        elif status == UNREADABLE or self._fruitless >= _MOST_FRUITLESS:
            self._give_up()
        else:
            self._start_at = now + _PAUSE_S * self._fruitless

    def _give_up(self) -> None:
        path = os.path.join(self._holdings.directory.path, f"journal-{time.time_ns()}")
        self._holdings.board.stop()
        try:
            self._holdings.journal.save(path)
        except OSError as error:
            path = f"not kept: {error}"
        log.critical("giving up: no coordinator goes on from this journal", extra=fields(journal=path))
        self._status = 1

    # --- an upgrade, and the spare ------------------------------------------------------------------------------------

    def _see_to_candidate(self) -> None:
        child = self._candidate
        if child is None:
            return
        if child.pidfd.is_dead or time.monotonic() - child.began > _START_S:
            self._refuse(f"the new coordinator did not start: status {child.end()}")
        elif child.versions is None and not _has_spoken(child):
            return
        elif child.versions != self._versions:
            differing = _differing(child.versions, self._versions)
            child.end()
            self._refuse(f"the new code speaks another version of: {differing}; a full restart is needed")
        else:
            self._replace(child)

    def _refuse(self, why: str) -> None:
        self._candidate = None
        self._end_reload(why)

    def _replace(self, child: Child) -> None:
        """The old one ends after the request in hand; the very process that was checked goes on."""
        self._candidate = None
        if self._serving is not None:
            self._serving.end(_STOP_S)
        if self._spare is not None:
            self._spare.end()
        self._spare, self._start_at = child, None
        self._start()

    def _end_reload(self, why: str) -> None:
        """Say what came of it: why it failed, or nothing."""
        self._is_reloading = False
        if why:
            log.error("not reloaded", extra=fields(why=why))
        else:
            log.info("reloaded", extra=fields(starts=self._holdings.starts))
        self._tell_outcome(why)
        self._manager.ready(f"not reloaded: {why}" if why else "reloaded")

    def _tell_outcome(self, why: str) -> None:
        path = os.path.join(self._holdings.directory.path, OUTCOME)
        with open(f"{path}.new", "w", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            json.dump({"at_ns": time.monotonic_ns(), "ok": not why, "why": why}, file)
        os.rename(f"{path}.new", path)

    def _see_to_spare(self) -> None:
        if self._spare is not None and self._spare.pidfd.is_dead:
            self._spare.end()
            self._spare, self._spare_at = None, time.monotonic() + _QUICK_S
        elif self._spare is not None and self._spare.versions is None:
            _has_spoken(self._spare)
        elif (
            self._wants_spare
            and self._spare is None
            and self._serving is not None
            and self._serving.is_serving
            and time.monotonic() >= self._spare_at
        ):
            self._spare = Child(self._holdings, self._command)

    # --- time ---------------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        now = time.monotonic()
        was_late, self._ticked_at = now - self._ticked_at > 4 * _TICK_S, now
        child, beat = self._serving, self._holdings.board.heartbeat
        if beat != self._beat or was_late or child is None or child.is_asking:
            self._beat, self._beat_at = beat, now
        elif now - self._beat_at > _PATIENCE_S:
            log.error("the coordinator hangs, and is killed", extra=fields(pid=child.pid))
            child.kill()
            self._beat_at = now
        self._manager.alive()

    def _stop(self) -> None:
        """Tell everyone, end the coordinator, remove what has a name."""
        self._manager.stopping()
        self._holdings.board.stop()
        for child in (self._candidate, self._spare):
            if child is not None:
                child.end()
        if self._serving is not None:
            self._serving.end(_STOP_S)
        self._holdings.close()


def _has_terminal() -> bool:
    """Whether SIGHUP means that a terminal was closed."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def _differing(theirs: dict[str, str] | None, ours: dict[str, str] | None) -> str:
    return ", ".join(name for name, version in (ours or {}).items() if (theirs or {}).get(name) != version)


def _has_spoken(child: Child) -> bool:
    try:
        return child.hear()
    except EOFError:
        return False  # its pidfd tells the rest
