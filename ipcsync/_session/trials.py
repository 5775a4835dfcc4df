"""Whether the engines work between this process and the coordinator, tried by real calls, on the callers' threads."""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakMethod, WeakSet

from cuda.bindings.driver import CUipcEventHandle

from ipcsync import _drivers
from ipcsync._board import SessionLine
from ipcsync._deadline import deadline_of, left_of, pauses
from ipcsync._drivers import (
    ERROR_NOT_READY,
    STREAM_NON_BLOCKING,
    STREAM_WAIT_VALUE_GEQ,
    STREAM_WRITE_VALUE_DEFAULT,
    unwrap,
)
from ipcsync._engines import Engine
from ipcsync._locks import CallLock, under, under_within
from ipcsync._native import pinned
from ipcsync._native.context import OnDevice, relaxed_call
from ipcsync._session.finished import Finished
from ipcsync._wire.messages import ProbeReply
from ipcsync.errors import DriverError, HandleError, WaitTimeout
from ipcsync.typing import EngineChecks

log = logging.getLogger("ipcsync")

_PASS_S = 4.0  # longer than a busy machine keeps the driver from it


class _Trial:
    """A block within which a call may open an import or register a page of the board."""


class Trials:
    """What was tried in one session, which has `line` on the board; `check` raises once it cannot be used."""

    def __init__(self, line: SessionLine, check: Callable[[], None]) -> None:
        self._line = line
        self._check = WeakMethod(check)  # of the session, which has this
        self._works_on: set[tuple[str, int]] = set()
        self._why_not: dict[int, str] = {}  # by devices
        self._trials: WeakSet[_Trial] = WeakSet()  # each is held by its caller alone, who may be ended at any step
        self._word = CallLock()  # of two that write it at a time, one's value would pull down the other's

    @contextmanager
    def _trial(self) -> Iterator[None]:
        """The block of a call: within it `are_under_way` is true."""
        trial = _Trial()
        try:
            self._trials.add(trial)
            if (check := self._check()) is not None:
                check()  # behind it: who ends the session sees this block, or this the end
            yield
        finally:
            self._trials.discard(trial)

    @property
    def are_under_way(self) -> bool:
        """Whether a call is within one: then the board may get a registered page at any moment."""
        return bool(self._trials)

    def test(self, engine: Engine | Finished) -> None:
        """Test an engine, if it is the first of its kind here. Raises EngineMismatch if it does not work."""
        with self._trial():
            if isinstance(engine, Finished) or (engine.kind, engine.ordinal) in self._works_on:
                return
            try:
                engine.open_first()
            except DriverError as error:
                engine.raise_unusable(error)
            finally:
                if engine.is_released:  # meanwhile
                    engine.close_events()
            self._works_on.add((engine.kind, engine.ordinal))

    def why_not_timeline(self, ordinal: int, seconds: float) -> str:
        """Why the `timeline` engine does not work in this process on a device, "" if it does; tried once, and logged.

        WaitTimeout if these seconds did not tell: then the next call tries again.
        """
        if ordinal not in self._why_not:
            deadline = deadline_of(seconds)
            with self._trial():
                if under_within(self._word, seconds, self._try_timeline, ordinal, deadline) is None:
                    text = f"other threads' trials of what a stream can do took all of the {seconds:g} s"
                    raise WaitTimeout(text, timeout=seconds)
        return self._why_not[ordinal]

    def _try_timeline(self, ordinal: int, deadline: int) -> bool:
        """With the word's lock: try, unless another thread has meanwhile; True."""
        if ordinal not in self._why_not:
            why_not = _why_not_timeline(self._line, ordinal, left_of(deadline)) or ""
            self._why_not[ordinal] = why_not
            if not why_not:
                self._works_on.add(("timeline", ordinal))
            if why_not:
                log.warning(
                    "what this session creates on cuda:%d has engine='event' where 'auto' is asked for, since words do "
                    "not work: %s; with IPCSYNC_ENGINE=event they are not tried",
                    ordinal,
                    why_not,
                )
        return True

    def of_engines(self, reply: ProbeReply, ordinal: int) -> EngineChecks:
        """The result of `Client.check`."""
        with self._trial():
            event = reply.why_not_event
            if event is None:
                with OnDevice(ordinal) as inside, inside:
                    event = relaxed_call(_why_not_event, reply.handle)
            timeline = under(self._word, _why_not_timeline, self._line, ordinal)
        return {
            "event": {"ok": event is None, "why": event or ""},
            "timeline": {"ok": timeline is None, "why": timeline or ""},
        }


def _why_not_event(handle: bytes) -> str | None:
    driver = _drivers.load()
    try:
        data = _drivers.handle_from_bytes(CUipcEventHandle, handle)
        event = unwrap(driver.cuIpcOpenEventHandle(data), "cuIpcOpenEventHandle", HandleError)
    except HandleError as error:
        return f"a handle of the coordinator does not open here: {error}"
    unwrap(driver.cuEventDestroy(event), "cuEventDestroy")
    return None


def _why_not_timeline(line: SessionLine, ordinal: int, seconds: float = _PASS_S) -> str | None:
    """Why streams of a device cannot write words of the board and wait for them here, in this session's own line.

    None if they can. WaitTimeout if fewer `seconds` than a try may take did not tell.
    """
    try:
        with OnDevice(ordinal) as inside, inside:
            return relaxed_call(_try_word, line, seconds)
    except DriverError as error:
        return f"there is no context: {error}"


def _try_word(line: SessionLine, seconds: float) -> str | None:
    try:
        pointer = pinned.word(line.probe_address, line)
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
    driver = _drivers.load()
    stream = unwrap(driver.cuStreamCreate(STREAM_NON_BLOCKING), "cuStreamCreate")
    try:
        unwrap(driver.cuStreamWriteValue64(stream, pointer, value, STREAM_WRITE_VALUE_DEFAULT), "cuStreamWriteValue64")
        unwrap(driver.cuStreamWaitValue64(stream, pointer, value, STREAM_WAIT_VALUE_GEQ), "cuStreamWaitValue64")
        for pause_s in pauses(seconds, 10e-6, 1e-3):
            result = driver.cuStreamQuery(stream)
            if result[0] != ERROR_NOT_READY:
                unwrap(result, "cuStreamQuery")
                return True
            time.sleep(pause_s)
        return False
    finally:
        unwrap(driver.cuStreamDestroy(stream), "cuStreamDestroy")
