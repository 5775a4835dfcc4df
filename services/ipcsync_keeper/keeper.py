"""The keeper's loop: one coordinator serves; the next one follows if it dies or hangs, or at a reload."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import select
import signal
import time
from collections.abc import Mapping
from contextlib import suppress

import msgspec

from ipcsync._board.runtime_dir import RELOAD, Outcome, write_outcome
from ipcsync._linux.process import Process, has_terminal
from ipcsync._linux.service_manager import ServiceManager
from ipcsync._logs import fields
from ipcsync_keeper.config import FIXED, Settings
from ipcsync_keeper.link import CoordinatorProcess, DriverThread
from ipcsync_keeper.resources import CURRENT_REQUEST, IS_ENDING, KILLED_FROM_OUTSIDE, REPLIES, UNREADABLE, Resources

log = logging.getLogger("ipcsync.coordinator")

_TICK_S = 0.5
_START_S = 30.0  # until a started coordinator sends its greeting
_STOP_S = 1.0  # for the current request
_NO_SPARE_S = 60.0
_PATIENCE_S = 10.0  # with a heartbeat that does not advance


class Plan(msgspec.Struct, frozen=True):
    """What the command line says. `command` starts a coordinator; `exit_with` is PID:START or empty."""

    settings: Settings
    command: list[str]
    ready_fd: int | None = None
    exit_with: str | None = None


class Wake:
    """Catches signals from its construction on; the pipe keeps their numbers until the loop reads them."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)  # first: what a handler swallows must be kept
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, RELOAD, signal.SIGCHLD):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup(1) ignores it
                signal.signal(number, lambda *_: None)

    def fileno(self) -> int:
        return self._read

    def wake(self) -> None:
        with suppress(BlockingIOError):  # the pipe is full, so it wakes anyway
            os.write(self._write, b"\0")

    def signals(self) -> list[int]:
        """The signals that came since the last call, without SIGCHLD: that one only wakes."""
        try:
            return [number for number in os.read(self._read, 4096) if number not in (0, signal.SIGCHLD)]
        except BlockingIOError:
            return []


class Keeper:
    """Keeps a coordinator serving over `resources` while `parent` lives, and reports once the first serves."""

    def __init__(
        self, plan: Plan, resources: Resources, manager: ServiceManager, parent: Process | None, wake: Wake
    ) -> None:
        self._plan = plan
        self._resources = resources
        self._manager = manager
        self._parent = parent
        self._status: int | None = None  # the exit status, once it ends
        self._versions: dict[str, str] | None = None  # the versions of all coordinators over these resources
        self._is_ready = False
        self._active: CoordinatorProcess | None = None  # or is about to serve
        self._spare: CoordinatorProcess | None = None  # the next one
        self._candidate: CoordinatorProcess | None = None  # with new code, until its versions are checked
        self._unserved_ns = 0  # since when no coordinator serves, 0 while one does
        self._spare_at, self._kill_at = 0.0, math.inf
        self._beat, self._beat_at, self._looked_at = 0, 0.0, 0.0
        # A reload that is asked for while one is under way follows it: only a start after the request counts.
        self._wants_reload, self._reload_began_ns = False, 0  # 0: none is under way
        self._last_settings: dict[str, object] = {}  # of the coordinator that serves, or served last
        self._restarts = Restarts()
        self._has_terminal = has_terminal()
        self._wake = wake
        self._driver = DriverThread(resources, wake.wake)

    # --- the loop -----------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Run until SIGTERM, SIGINT, or until a coordinator ends by itself; returns the exit status."""
        try:
            while self._status is None:
                self._step(self._wait())
        finally:
            self._stop()
        return self._status

    def _wait(self) -> list[int]:
        """Sleep until there is something to do; returns the signals that came."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        for child in self._children():
            if child.is_silent:
                poll.register(child.link.socket, select.POLLIN)
        now = time.monotonic()
        due = min(now + _TICK_S, self._kill_at, self._restarts.at if self._active is None else math.inf)
        poll.poll(math.ceil(max(0.0, due - now) * 1000))
        return self._wake.signals()

    def _children(self) -> list[CoordinatorProcess]:
        return [child for child in (self._active, self._spare, self._candidate) if child is not None]

    def _step(self, signals: list[int]) -> None:
        for number in signals:
            # Without a terminal, SIGHUP asks for a reload.
            if number == RELOAD or (number == signal.SIGHUP and not self._has_terminal):
                self._wants_reload = True
            else:
                self._status = 0
        if self._parent is not None and not self._parent.is_alive():
            self._status = 0
        for child in self._children():
            if child.is_silent:
                child.receive_greeting()
        if self._status is None:
            self._supervise_active()
            self._supervise_candidate()
            self._supervise_spare()
            self._check_heartbeat()
        if self._is_ready:
            self._manager.alive()

    # --- the coordinator that serves ----------------------------------------------------------------------------------

    def _supervise_active(self) -> None:
        if (ended := self._active) is not None and ended.is_dead:
            self._active, self._kill_at = None, math.inf
            self._unserved_ns = self._unserved_ns or time.monotonic_ns()
            self._see_end(ended, ended.end() or 0)
            with suppress(RuntimeError):  # without a thread, the old one goes on if its driver's call ends
                driver = DriverThread(self._resources, self._wake.wake)
                self._driver.end()
                self._driver = driver
        now = time.monotonic()
        if self._active is None and self._status is None and now >= self._restarts.at:
            self._drop_bad_spare(now)  # it may have died beside the one that served
            self._active, self._spare = self._spare or self._start(), None
        if (child := self._active) is None:
            return
        if now >= self._kill_at or (child.versions is None and now - child.began > _START_S):
            child.refusal = child.refusal or ("" if child.versions else f"no greeting within {_START_S:g} s")
            child.kill()
            self._kill_at = math.inf  # a process that is stuck in the kernel ends late
        elif child.versions is not None and not child.was_started:
            self._let_serve(child)
        elif child.is_serving and not child.was_dismissed:
            self._note_serving(child)

    def _start(self) -> CoordinatorProcess | None:
        """A coordinator with the code on disk; None if there is no process, memory or descriptor for it."""
        try:
            return CoordinatorProcess(self._resources, self._plan.command)
        except OSError as error:
            log.error("cannot start a coordinator", extra=fields(why=error))
            self._restarts.see_none_started(time.monotonic())
            return None

    def _let_serve(self, child: CoordinatorProcess) -> None:
        """The code on the disk may be another by now: one that speaks otherwise must not go on with what is held."""
        self._versions = self._versions or child.versions
        if differing := self._differing(child):
            log.error("the code on disk has other versions", extra=fields(differs=differing))
            child.kill()
        else:
            self._resources.journal.words[REPLIES] = 0
            child.began, child.was_started = time.monotonic(), True
            self._driver.serve(child, self._unserved_ns)

    def _differing(self, child: CoordinatorProcess) -> str:
        """The names of versions that differ; empty if none does, or they are not known yet."""
        theirs, ours = child.versions or self._versions or {}, self._versions or {}
        return ", ".join(sorted(name for name in ours | theirs if theirs.get(name) != ours.get(name)))

    def _note_serving(self, child: CoordinatorProcess) -> None:
        self._unserved_ns = 0
        if self._reload_began_ns and self._candidate is None:
            fixed = dataclasses.asdict(self._plan.settings)
            self._end_reload(note=differences(fixed, self._last_settings, child.settings))
        self._last_settings = child.settings
        if not self._is_ready:
            self._is_ready = True
            self._resources.report_ready(self._manager, self._plan.ready_fd, keeper=os.getpid())

    def _see_end(self, child: CoordinatorProcess, status: int) -> None:
        """The coordinator has ended: a death, unless it was told to end or announced it."""
        words, now, how = self._resources.journal.words, time.monotonic(), child.how_it_ended()
        if words[IS_ENDING]:
            self._status = max(status, 0)
        elif not self._is_ready and not child.is_serving and not words[REPLIES]:
            self._status = 1
            log.error("cannot start", extra=fields(why=f"the first coordinator ended before it served: {how}"))
        elif child.was_dismissed:
            words[CURRENT_REQUEST] = 0  # it was ended amid that request, and did not die of it
            self._resources.restarts["reloaded"] += child.has_config
            self._restarts.at = now
        else:
            log.error("the coordinator died", extra=fields(pid=child.pid, how=how, starts=self._resources.starts))
            self._resources.restarts["hung" if child.has_hung else "died"] += child.has_config
            if self._reload_began_ns and self._candidate is None:
                self._end_reload(f"the new code ended before it served ({how}); trying again")
            # Its settings or its code do not load, or there is no room for it: that says nothing of what is held.
            if child.versions is None or status == os.EX_TEMPFAIL:
                self._restarts.see_none_started(now)
                return
            from_outside = status == -signal.SIGKILL and not child.was_killed
            if child.has_config and self._resources.board.starts == self._resources.starts:
                words[KILLED_FROM_OUTSIDE] = from_outside  # else the request in hand is an earlier one's
            has_replied, lived_s = child.was_started and words[REPLIES] > 0, now - child.began
            is_hopeless = self._restarts.see_end(lived_s, now, has_replied=has_replied, is_own_doing=not from_outside)
            if status == UNREADABLE or is_hopeless:
                self._give_up()

    def _give_up(self) -> None:
        """Store the end on the board, and keep the journal for inspection."""
        self._resources.board.stop()
        kept = self._resources.journal.save(self._resources.directory.path)
        log.critical("giving up: no coordinator can continue from this journal", extra=fields(journal=kept))
        self._status = 1

    # --- new code, and the spare --------------------------------------------------------------------------------------

    def _supervise_candidate(self) -> None:
        is_served = self._active is not None and self._active.is_serving
        if self._wants_reload and not self._reload_began_ns and is_served:
            self._wants_reload, self._reload_began_ns = False, time.monotonic_ns()
            self._manager.reloading()
            self._candidate = self._start()
            if self._candidate is None:
                self._end_reload("no process can be started; the old code goes on")
        if (child := self._candidate) is None:
            return
        why_not = ""
        if child.is_dead:
            how = child.how_it_ended()
            why_not = child.refusal or f"the new code did not start ({how})"
        elif time.monotonic() - child.began > _START_S:
            what = "the new code did not start" if child.versions is None else "a driver call did not end"
            why_not = f"{what} within {_START_S:g} s"
        elif differing := self._differing(child):
            why_not = f"the new code has another version of: {differing}; a full restart is needed"
        elif child.versions is not None and not (self._active and self._active.is_asking):
            self._replace_by(child)  # the driver's thread is free for it
        if why_not:
            child.end()
            self._candidate = None
            self._end_reload(f"{why_not}; the old code goes on")

    def _replace_by(self, child: CoordinatorProcess) -> None:
        """End the old coordinator after its current request; the process that was checked takes over."""
        if self._spare is not None:
            self._spare.end()  # it has the old code
        self._spare, self._candidate = child, None
        if self._active is not None:
            self._active.dismiss()
            self._kill_at = time.monotonic() + _STOP_S
            self._unserved_ns = self._unserved_ns or time.monotonic_ns()

    def _end_reload(self, why_not: str = "", note: str = "") -> None:
        """Report that the new code serves, and what changed by it (`note`); or why it does not."""
        began_ns, self._reload_began_ns = self._reload_began_ns, 0
        more = {"note": note} if note else {}
        log.log(logging.ERROR if why_not else logging.INFO, "reload", extra=fields(outcome=why_not or "done", **more))
        try:
            write_outcome(self._resources.directory.path, Outcome(began_ns, why_not, note))
        except OSError as error:
            log.error("the outcome of the reload cannot be written", extra=fields(why=error))
        self._manager.ready(f"not reloaded: {why_not}" if why_not else f"reloaded: {note}" if note else "reloaded")

    def _supervise_spare(self) -> None:
        """Keep a spare waiting with its modules imported, if that is wanted. Its death has no effect."""
        now = time.monotonic()
        self._drop_bad_spare(now)
        is_quiet = self._active is not None and self._active.is_serving and not self._reload_began_ns
        if self._plan.settings.spare and self._spare is None and is_quiet and now >= self._spare_at:
            self._spare = self._start()
            self._spare_at = now if self._spare else now + _NO_SPARE_S

    def _drop_bad_spare(self, now: float) -> None:
        spare = self._spare
        if spare is not None and (spare.is_dead or self._differing(spare)):
            self._spare, self._spare_at, differing = None, now + _NO_SPARE_S, self._differing(spare)
            log.warning("no spare", extra=fields(differs=differing, how=spare.how_it_ended(), again_s=_NO_SPARE_S))

    # --- time, and the end --------------------------------------------------------------------------------------------

    def _check_heartbeat(self) -> None:
        """Kill a coordinator that hangs. Time in which this process did not run itself does not count."""
        child, now = self._active, time.monotonic()
        was_late, self._looked_at = now - self._looked_at > 4 * _TICK_S, now
        beat = 2 * self._resources.board.heartbeat + (child is not None and child.is_asking)  # an answer is life, too
        if beat != self._beat or was_late or child is None or not child.has_config:
            self._beat, self._beat_at = beat, now
        elif now - self._beat_at > _PATIENCE_S * (4 if child.is_asking else 1):  # for three answers, of 10 s each
            child.has_hung, self._beat_at = True, now
            child.kill()
            log.error("the coordinator hung, and was killed", extra=fields(pid=child.pid))

    def _stop(self) -> None:
        """Store the end on the board, end the coordinator, remove the files."""
        self._manager.stopping()
        self._resources.board.stop()
        for child in self._children():
            child.end(_STOP_S if child is self._active else 0.0)
        self._resources.close()


_QUICK_S = 10.0
_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
_MOST_FAILURES = 3


# --- when it starts the next one, and what a reload changed -----------------------------------------------------------


class Restarts:
    """When the next coordinator is started, and whether another one is at all: a pure state machine; times in seconds.

    An end within 10 s and without a reply is a failure: the next start waits, longer each time. Three failures in a row
    end it. An end by SIGKILL does not count as one, since it comes from outside.
    """

    def __init__(self) -> None:
        self.at = 0.0  # when the next one is started
        self._fruitless = self._failures = 0

    def see_end(self, lived_s: float, now: float, *, has_replied: bool, is_own_doing: bool) -> bool:
        """Note the end of a coordinator; returns whether to give up."""
        if lived_s >= _QUICK_S or has_replied:
            self._fruitless = self._failures = 0
            self.at = now
        else:
            self._failures += is_own_doing
            self.see_none_started(now)
        return self._failures >= _MOST_FAILURES

    def see_none_started(self, now: float) -> None:
        """Note that none could be started, for want of room or as its code does not load: that is no failure."""
        self.at = now + min(_LONGEST_PAUSE_S, _PAUSE_S * 2.0 ** min(self._fruitless, 10))
        self._fruitless += 1


def differences(first: Mapping[str, object], last: Mapping[str, object], new: Mapping[str, object]) -> str:
    """What a reload to `new` settings changes of the last ones, and what it cannot, by the first; empty for nothing."""
    taken, left = (
        ", ".join(f"{name} {old[name]} -> {new[name]}" for name in sorted(names & old.keys()) if old[name] != new[name])
        for old, names in ((last, new.keys() - FIXED), (first, new.keys() & FIXED))
    )
    return "; ".join(filter(None, (taken, left and f"not before a restart: {left}")))
