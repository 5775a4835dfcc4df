"""The keeper's loop: one coordinator serves; the next one follows if it dies or hangs, or at a reload."""

from __future__ import annotations

import logging
import math
import select
import signal
import time
from collections.abc import Callable

import msgspec

from ipcsync._board.runtime_dir import RELOAD
from ipcsync._linux.process import Process, has_terminal
from ipcsync._linux.service_manager import ServiceManager
from ipcsync._logs import fields
from ipcsync_holdings.answers import Answers
from ipcsync_holdings.holdings import Fixed, Holdings
from ipcsync_holdings.journal_files import IN_HAND, IS_ENDING, KILLED_FROM_OUTSIDE, REPLIES, UNREADABLE
from ipcsync_keeper.child import Child
from ipcsync_keeper.patience import Restarts
from ipcsync_keeper.reload import Reloads, SeenSettings
from ipcsync_keeper.wake import Wake

log = logging.getLogger("ipcsync.coordinator")

_TICK_S = 0.5
_START_S = 30.0  # until a started coordinator sends its greeting
_STOP_S = 1.0  # for the current request
_NO_SPARE_S = 60.0
_PATIENCE_S = 10.0  # with a heartbeat that does not advance


class Plan(msgspec.Struct, frozen=True):
    """The options of the command line. `command` starts a coordinator; `exit_with` is PID:START or empty."""

    fixed: Fixed
    command: list[str]
    spare: bool
    log_level: str
    log_json: bool
    ready_fd: int | None = None
    exit_with: str | None = None


class Keeper:
    """Keeps a coordinator serving over `holdings` while `parent` lives. `ready` is called when the first one serves."""

    def __init__(
        self,
        plan: Plan,
        holdings: Holdings,
        manager: ServiceManager,
        parent: Process | None,
        wake: Wake,
        ready: Callable[[], None],
    ) -> None:
        self._plan = plan
        self._holdings = holdings
        self._manager = manager
        self._parent = parent
        self._tell_ready = ready
        self._status: int | None = None  # the exit status, once it ends
        self._versions: dict[str, str] | None = None  # the versions of all coordinators over these holdings
        self._is_ready = False
        self._serving: Child | None = None  # or is about to serve
        self._spare: Child | None = None  # the next one
        self._candidate: Child | None = None  # with new code, until its versions are checked
        self._unserved_ns = 0  # since when no coordinator serves, 0 while one does
        self._spare_at, self._kill_at = 0.0, math.inf
        self._beat, self._beat_at, self._looked_at = 0, 0.0, 0.0
        self._reloads = Reloads(holdings.directory.path, manager)
        self._settings = SeenSettings()
        self._restarts = Restarts()
        self._has_terminal = has_terminal()
        self._wake = wake
        self._answers = Answers(holdings, wake.wake)

    # --- the loop -----------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Run until SIGTERM, SIGINT, or until a coordinator ends by itself; returns the exit status."""
        try:
            while self._status is None:
                self._see_to_all(self._wait())
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
        due = min(now + _TICK_S, self._kill_at, self._restarts.at if self._serving is None else math.inf)
        poll.poll(math.ceil(max(0.0, due - now) * 1000))
        return self._wake.signals()

    def _children(self) -> list[Child]:
        return [child for child in (self._serving, self._spare, self._candidate) if child is not None]

    def _see_to_all(self, signals: list[int]) -> None:
        for number in signals:
            # Without a terminal, SIGHUP asks for a reload.
            if number == RELOAD or (number == signal.SIGHUP and not self._has_terminal):
                self._reloads.are_wanted = True
            else:
                self._status = 0
        if self._parent is not None and not self._parent.is_alive():
            self._status = 0
        for child in self._children():
            if child.is_silent:
                child.hear()
        if self._status is None:
            self._see_to_serving()
            self._see_to_candidate()
            self._see_to_spare()
            self._take_pulse()
        if self._is_ready:
            self._manager.alive()

    # --- the coordinator that serves ----------------------------------------------------------------------------------

    def _see_to_serving(self) -> None:
        if (ended := self._serving) is not None and ended.is_dead:
            self._serving, self._kill_at = None, math.inf
            self._unserved_ns = self._unserved_ns or time.monotonic_ns()
            self._see_end(ended, ended.end() or 0)
        now = time.monotonic()
        if self._serving is None and self._status is None and now >= self._restarts.at:
            self._drop_bad_spare(now)  # it may have died beside the one that served
            self._serving, self._spare = self._spare or self._start(), None
        if (child := self._serving) is None:
            return
        if now >= self._kill_at or (child.versions is None and now - child.began > _START_S):
            child.kill()
        elif child.versions is not None and not child.was_told:
            self._let_serve(child)
        elif child.is_serving and not child.was_dismissed:
            self._see_serving(child)

    def _start(self) -> Child | None:
        """A coordinator with the code on disk; None if there is no process, memory or descriptor for it."""
        try:
            return Child(self._holdings, self._plan.command)
        except OSError as error:
            log.error("cannot start a coordinator", extra=fields(why=error))
            self._restarts.see_none_started(time.monotonic())
            return None

    def _let_serve(self, child: Child) -> None:
        """The code on the disk may be another by now: one that speaks otherwise must not go on with what is held."""
        self._versions = self._versions or child.versions
        if differing := self._differing(child):
            log.error("the code on disk has other versions", extra=fields(differs=differing))
            child.kill()
        else:
            self._holdings.journal.words[REPLIES] = 0
            child.began, child.was_told = time.monotonic(), True
            self._answers.serve(child, self._unserved_ns)

    def _differing(self, child: Child) -> str:
        """The names of versions that differ; empty if none does, or they are not known yet."""
        theirs, ours = child.versions or self._versions or {}, self._versions or {}
        return ", ".join(sorted(name for name in ours | theirs if theirs.get(name) != ours.get(name)))

    def _see_serving(self, child: Child) -> None:
        self._unserved_ns = 0
        if self._reloads.is_under_way and self._candidate is None:
            self._reloads.end(note=self._settings.differences(child.settings))
        self._settings.see(child.settings)
        if not self._is_ready:
            self._is_ready = True
            self._tell_ready()

    def _see_end(self, child: Child, status: int) -> None:
        """The coordinator has ended: a death, unless it was told to end or announced it."""
        words, now, how = self._holdings.journal.words, time.monotonic(), child.how_it_ended()
        if words[IS_ENDING]:
            self._status = max(status, 0)
        elif not self._is_ready and not child.is_serving and not words[REPLIES]:
            self._status = 1  # its log says why
        elif child.was_dismissed:
            words[IN_HAND] = 0  # it was ended amid that request, and did not die of it
            self._holdings.restarts["reloaded"] += 1
            self._restarts.at = now
        else:
            log.error("the coordinator died", extra=fields(pid=child.pid, how=how, starts=self._holdings.starts))
            self._holdings.restarts["hung" if child.has_hung else "died"] += 1
            if self._reloads.is_under_way and self._candidate is None:
                self._reloads.end(f"the new code ended before it served ({how}); trying again")
            if child.versions is None:  # it has read nothing of what is held: its settings or its code do not load
                self._restarts.see_none_started(now)
                return
            words[KILLED_FROM_OUTSIDE] = from_outside = status == -signal.SIGKILL and not child.was_killed
            has_replied, lived_s = child.was_told and words[REPLIES] > 0, now - child.began
            is_hopeless = self._restarts.see_end(lived_s, now, has_replied=has_replied, is_own_doing=not from_outside)
            if status == UNREADABLE or is_hopeless:
                self._give_up()

    def _give_up(self) -> None:
        """Store the end on the board, and keep the journal for inspection."""
        self._holdings.board.stop()
        kept = self._holdings.journal.save(self._holdings.directory.path)
        log.critical("giving up: no coordinator can continue from this journal", extra=fields(journal=kept))
        self._status = 1

    # --- new code, and the spare --------------------------------------------------------------------------------------

    def _see_to_candidate(self) -> None:
        is_served = self._serving is not None and self._serving.is_serving
        if self._reloads.are_wanted and not self._reloads.is_under_way and is_served:
            self._reloads.begin()
            self._candidate = self._start()
            if self._candidate is None:
                self._reloads.end("no process can be started; the old code goes on")
        child = self._candidate
        why_not: str | None = None
        if child is None:
            return
        if child.is_dead:
            why_not = child.why_not_started()
        elif time.monotonic() - child.began > _START_S:
            is_ready = child.versions is not None
            why_not = (
                f"{'a driver call did not end' if is_ready else 'the new code did not start'} within {_START_S:g} s"
            )
        elif differing := self._differing(child):
            why_not = f"the new code has another version of: {differing}; a full restart is needed"
        elif child.versions is not None and not (self._serving and self._serving.is_asking):
            self._replace_by(child)  # the driver's thread is free for it
        if why_not is not None:
            child.end()
            self._candidate = None
            self._reloads.end(f"{why_not}; the old code goes on")

    def _replace_by(self, child: Child) -> None:
        """End the old coordinator after its current request; the process that was checked takes over."""
        if self._spare is not None:
            self._spare.end()  # it has the old code
        self._spare, self._candidate = child, None
        if self._serving is not None:
            self._serving.dismiss()
            self._kill_at = time.monotonic() + _STOP_S
            self._unserved_ns = self._unserved_ns or time.monotonic_ns()

    def _see_to_spare(self) -> None:
        """Keep a spare waiting with its modules imported, if that is wanted. Its death has no effect."""
        now = time.monotonic()
        self._drop_bad_spare(now)
        is_quiet = self._serving is not None and self._serving.is_serving and not self._reloads.is_under_way
        if self._plan.spare and self._spare is None and is_quiet and now >= self._spare_at:
            self._spare = self._start()
            self._spare_at = now if self._spare else now + _NO_SPARE_S

    def _drop_bad_spare(self, now: float) -> None:
        spare = self._spare
        if spare is not None and (spare.is_dead or self._differing(spare)):
            self._spare, self._spare_at, differing = None, now + _NO_SPARE_S, self._differing(spare)
            log.warning("no spare", extra=fields(differs=differing, how=spare.how_it_ended(), again_s=_NO_SPARE_S))

    # --- time, and the end --------------------------------------------------------------------------------------------

    def _take_pulse(self) -> None:
        """Kill a coordinator that hangs. Time in which this process did not run itself does not count."""
        child, now = self._serving, time.monotonic()
        was_late, self._looked_at = now - self._looked_at > 4 * _TICK_S, now
        beat = self._holdings.board.heartbeat
        if beat != self._beat or was_late or child is None or child.is_asking or not child.has_terms:
            self._beat, self._beat_at = beat, now
        elif now - self._beat_at > _PATIENCE_S:
            child.has_hung, self._beat_at = True, now
            child.kill()
            log.error("the coordinator hung, and was killed", extra=fields(pid=child.pid))

    def _stop(self) -> None:
        """Store the end on the board, end the coordinator, remove the files."""
        self._manager.stopping()
        self._holdings.board.stop()
        for child in self._children():
            child.end(_STOP_S if child is self._serving else 0.0)
        self._holdings.close()
