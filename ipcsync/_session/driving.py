"""What a session asks of the driver: whether the engines work, on callers' threads; all else on a thread of its own.

That is publication and releases. The driver may keep the thread for as long as it likes: the session lives on, since
its owner is another one. A use of a slot is released once no thread is inside a call of it, no queued wait is pending,
and its imports are destroyed. Until then it drains, and each look tries again.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeVar
from weakref import WeakMethod

from cuda.bindings.driver import CUipcEventHandle

from ipcsync import _drivers
from ipcsync._board import SessionLine
from ipcsync._deadline import deadline_of, left_of, pauses
from ipcsync._drivers import STREAM_NON_BLOCKING, STREAM_WAIT_VALUE_GEQ, STREAM_WRITE_VALUE_DEFAULT, unwrap
from ipcsync._engines import Engine
from ipcsync._native import pinned
from ipcsync._native.context import OnDevice, call, relaxed_call
from ipcsync._session.attachments import AttachmentTable, Life, Use
from ipcsync._session.owner import Owner, SessionLease
from ipcsync._threads import CallLock, attempt, under_within
from ipcsync._wire.messages import ProbeReply
from ipcsync.errors import DriverError, HandleError, IpcSyncError, WaitTimeout
from ipcsync.typing import EngineChecks

T = TypeVar("T")

log = logging.getLogger("ipcsync")

_JUDGING_S = 0.001  # to the next look, while others judge what complete records here stand behind
_STANDING_S = 1.0
_PASS_S = 4.0  # longer than a busy machine keeps the driver from it


class Driving:
    """The driver calls of one session; `check` raises once it cannot be used."""

    def __init__(self, table: AttachmentTable, lease: SessionLease, owner: Owner, check: Callable[[], None]) -> None:
        self._table = table
        self._lease = lease
        self._owner = owner
        self._check = WeakMethod(check)  # of the session, which has this
        self._works_on: set[tuple[str, int]] = set()  # engine, device
        self._why_not: dict[int, str] = {}  # by devices
        self._trial = CallLock()  # of two that write the word at a time, one's value would pull down the other's
        self._wakes: SimpleQueue[bool] = SimpleQueue()
        self._since = 0.0  # when the look that is under way began
        self._told_of = 0.0

    # --- the thread ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Look, until `stop`, and once more: the streams of a session that is lost may go on."""
        seconds, goes_on = self._lease.period_s, True
        while goes_on:
            with suppress(Empty):
                goes_on = self._wakes.get(timeout=seconds)
                while goes_on and not self._wakes.empty():
                    goes_on = self._wakes.get()
            self._since = time.monotonic()
            try:
                seconds = _JUDGING_S if self.look() else self._lease.period_s
            except Exception:
                log.exception("the driver's thread of a session failed, and goes on")
            self._since = 0.0

    def wake(self) -> None:
        self._wakes.put(True)

    def stop(self) -> None:
        self._wakes.put(False)

    def standing_s(self) -> float:
        """For how many seconds the driver has kept the thread; 0 if that is not long. Logged once each time."""
        since = self._since
        seconds = time.monotonic() - since if since else 0.0
        if seconds < _STANDING_S:
            return 0.0
        if since != self._told_of:
            self._told_of = since
            log.warning(
                "the driver has kept a session's thread for more than %g s: until it returns, what is complete is "
                "published late, and nothing is released",
                _STANDING_S,
            )
        return seconds

    # --- on any thread but the owner's --------------------------------------------------------------------------------

    def look(self, *, settles: bool = True) -> bool:
        """Publish what is complete, and release what is closed (`settles`): a driver may take long for that.

        Returns whether complete records wait for another recorder's judgement, which nobody tells of.
        """
        # After the coordinator's death the driver must not be asked about its events, and nobody waits for the answer.
        is_alive = self._lease.coordinator_is_alive()
        uses = [*list(self._table.uses.values()), *self._table.ending]
        for use in uses:
            if use.life is not Life.OPEN and settles:
                self.settle(use)
            elif is_alive:
                self._try(use, "publish what is complete of", use.engine.publish_completed)
            else:
                use.engine.free_streams()
        if any(use.engine.chain.wants_break and not use.engine.chain.has_asked for use in uses):
            self._owner.wake()
        return is_alive and any(use.engine.chain.is_due for use in uses)

    def settle(self, use: Use) -> None:
        if (life := self.progress(use)) > use.life:
            self._owner.post(partial(self._table.advance, use, life))

    def progress(self, use: Use) -> Life:
        """How far a closed use is by now; it is released if possible."""
        if use.life is Life.RELEASED or self._try(use, "release", use.engine.try_release):
            return Life.RELEASED
        return max(use.life, Life.DRAINED if use.engine.has_drained else Life.DRAINING)

    def _try(self, use: Use, what: str, call: Callable[[], T]) -> T | None:
        """A broken CUDA context, or an event that cannot be opened here, must not keep other events from it.

        In such a context nothing can be released before the process ends. Logged once for each use, since each look
        fails again; then at level debug.
        """
        try:
            return call()
        except IpcSyncError as error:
            level = logging.DEBUG if use.has_failed else logging.WARNING
            log.log(level, "cannot %s the event %r: %s", what, use.engine.name, error)
            use.has_failed = True
            return None

    # --- trials, on callers' threads: one at a time -------------------------------------------------------------------

    @property
    def is_trying(self) -> bool:
        """Whether a call tries an engine: at any moment it may open an import, or register a page of the board."""
        return attempt(self._trial, lambda: True) is None

    def test(self, engine: Engine, seconds: float) -> None:
        """Test an engine, if it is the first of its kind here. Raises EngineMismatch if it does not work."""
        if (engine.kind, engine.ordinal) not in self._works_on:
            self._tried(partial(self._open_first, engine), seconds)

    def why_not_timeline(self, ordinal: int, seconds: float) -> str:
        """Why the `timeline` engine does not work in this process on a device, "" if it does; tried once, and logged.

        WaitTimeout if these seconds did not tell: then the next call tries again.
        """
        if ordinal not in self._why_not:
            self._tried(partial(self._try_timeline, ordinal, deadline_of(seconds)), seconds)
        return self._why_not[ordinal]

    def check_engines(self, reply: ProbeReply, ordinal: int, deadline: int) -> EngineChecks:
        def check() -> EngineChecks:
            event = reply.why_not_event
            if event is None:
                with OnDevice(ordinal) as inside, inside:
                    event = relaxed_call(_why_not_event, reply.handle)
            timeline = _why_not_timeline(self._lease.line, ordinal, left_of(deadline))
            return {
                "event": {"ok": event is None, "why": event or ""},
                "timeline": {"ok": timeline is None, "why": timeline or ""},
            }

        return self._tried(check, left_of(deadline))

    def _tried(self, function: Callable[[], T], seconds: float) -> T:
        """What it returns. WaitTimeout if other threads' trials took all of the time."""
        if (found := under_within(self._trial, seconds, self._within, function)) is None:
            text = f"other threads' trials of what a stream can do took all of the {seconds:g} s"
            raise WaitTimeout(text, timeout=seconds)
        return found[0]

    def _within(self, function: Callable[[], T]) -> tuple[T]:
        if (check := self._check()) is not None:
            check()  # with the lock: who ends the session sees this trial, or this the end
        return (function(),)

    def _open_first(self, engine: Engine) -> None:
        try:
            engine.open_first()
        except DriverError as error:
            engine.raise_unusable(error)
        self._works_on.add((engine.kind, engine.ordinal))

    def _try_timeline(self, ordinal: int, deadline: int) -> None:
        if ordinal in self._why_not:
            return  # another thread has tried meanwhile
        why_not = _why_not_timeline(self._lease.line, ordinal, left_of(deadline)) or ""
        if why_not:
            log.warning(
                "what this session creates on cuda:%d has engine='event' where 'auto' is asked for, since words do "
                "not work: %s; with IPCSYNC_ENGINE=event they are not tried",
                ordinal,
                why_not,
            )
        else:
            self._works_on.add(("timeline", ordinal))
        self._why_not[ordinal] = why_not


def _why_not_event(handle: bytes) -> str | None:
    try:
        data = _drivers.handle_from_bytes(CUipcEventHandle, handle)
        event = unwrap(_drivers.load().cuIpcOpenEventHandle(data), "cuIpcOpenEventHandle", HandleError)
    except HandleError as error:
        return f"a handle of the coordinator does not open here: {error}"
    call("cuEventDestroy", event)
    return None


def _why_not_timeline(line: SessionLine, ordinal: int, seconds: float) -> str | None:
    """Why streams of a device cannot write words of the board and wait for them here, in this session's own line.

    None if they can. WaitTimeout if fewer `seconds` than a try may take did not tell.
    """
    try:
        with OnDevice(ordinal) as inside, inside:
            return relaxed_call(_try_word, line, ordinal, seconds)
    except DriverError as error:
        return f"there is no context: {error}"


def _try_word(line: SessionLine, ordinal: int, seconds: float) -> str | None:
    try:
        pointer = pinned.word(line.probe_address, line, ordinal)
    except DriverError as error:
        return f"the board's page cannot be registered here: {error}"
    word, passed = ctypes.c_uint64.from_address(line.probe_address), False
    try:
        value = word.value + 1
        passed = _passes(pointer, value, min(seconds, _PASS_S)) and word.value >= value
    except DriverError as error:
        return f"a stream cannot write a word of the board, or wait for it, here: {error}"
    finally:
        if not passed:
            pinned.keep(line.probe_address)
    if passed:
        return None
    late = "a stream's write to the board, and its wait for that, were not over in"
    if seconds < _PASS_S:
        raise WaitTimeout(f"{late} {seconds:g} s: earlier work may hold up the device's streams", timeout=seconds)
    return f"{late} {_PASS_S:g} s"


def _passes(pointer: int, value: int, seconds: float) -> bool:
    """Whether a stream writes `value`, and its wait for that ends, within `seconds`."""
    stream = call("cuStreamCreate", STREAM_NON_BLOCKING)
    try:
        call("cuStreamWriteValue64", stream, pointer, value, STREAM_WRITE_VALUE_DEFAULT)
        call("cuStreamWaitValue64", stream, pointer, value, STREAM_WAIT_VALUE_GEQ)
        for pause_s in pauses(seconds, 10e-6, 1e-3):
            result = _drivers.load().cuStreamQuery(stream)
            if result[0] != _drivers.ERROR_NOT_READY:
                unwrap(result, "cuStreamQuery")
                return True
            time.sleep(pause_s)
        return False
    finally:
        call("cuStreamDestroy", stream)
