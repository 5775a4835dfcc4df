"""Raises an exception inside a call, at one of its lines or instructions, as a signal's handler could.

A *point* is a line (`sys.settrace`), or on Python 3.12 and later an instruction (`sys.monitoring`), that this thread
executes in a file of ipcsync's beneath the call. What runs for a finalizer or the collector is left out: Python
swallows what is raised there. So is the standard library, which has windows of its own under a trace function, that
real signals do not reach, and the instruction that returns: the interpreter looks for signals behind calls, at the
beginning of functions and at the end of loops' bodies, and to return raises nothing.
"""

from __future__ import annotations

import dis
import os
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import ipcsync
from tests.kit.collector import collector_off

_ROOT = os.path.dirname(os.path.abspath(ipcsync.__file__)) + os.sep
_SWALLOWED = ("__del__", "_run_in_child")
_TOOL = 3
_RETURNS = [dis.opmap[name] for name in ("RETURN_VALUE", "RETURN_CONST") if name in dis.opmap]
HAS_INSTRUCTIONS = sys.version_info >= (3, 12)
_REFUSED = {"record", "unnamed", "open", "point", "copy", "stats"}  # records, openings and other requests


class Interruption(BaseException):
    """What is raised; nothing catches it by its type."""


class Outcome:
    """What became of a call: where it was interrupted (empty if it ended before), its result or what it raised."""

    def __init__(self) -> None:
        self.points = 0
        self.where = ""
        self.stack = ""
        self.result: Any = None
        self.error: BaseException | None = None

    def forget(self) -> None:
        """Let go of the result, and of what the exception's frames keep."""
        self.result = self.error = None

    @property
    def was_interrupted(self) -> bool:
        """Whether the point was reached."""
        return bool(self.where)


def interrupted(call: Callable[[], Any], point: int, kind: str, within: Callable[[], object] | None = None) -> Outcome:
    """Run `call`, and raise Interruption at its point number `point` (from 1; 0: nowhere) of a kind: line, instruction.

    `points` of the outcome is how many were reached.
    """
    outcome = Outcome()
    run = _Lines(outcome, point, within) if kind == "line" else _Instructions(outcome, point, within)
    with collector_off():  # CPython 3.11 crashes when a trace function raises within a hook of the collector's
        try:
            with run:
                outcome.result = call()
        except BaseException as error:  # noqa: BLE001 - told to the caller
            outcome.error = error
    return outcome


def called_within(call: Callable[[], Any], point: int, kind: str, within: Callable[[], object]) -> Outcome:
    """Run `call`, and `within` in the middle of it, at its point number `point`, as a signal's handler would."""
    return interrupted(call, point, kind, within)


def is_refusal(kind: str, error: BaseException) -> bool:
    """Whether a call of this kind may raise that within another one: Reentered, but for "query", "wait" and "close"."""
    return kind in _REFUSED and isinstance(error, ipcsync.Reentered)


class _Points:
    """Counts points, and raises at one of them, or calls `within` there."""

    def __init__(self, outcome: Outcome, point: int, within: Callable[[], object] | None) -> None:
        self._outcome = outcome
        self._point = point
        self._within = within
        self._thread = threading.get_ident()

    def at(self, frame: FrameType | None) -> None:
        """A point is about to be executed by `frame`."""
        self._outcome.points += 1
        if self._outcome.points != self._point:
            return
        stack = []
        while frame is not None:
            code = frame.f_code
            if code.co_name in _SWALLOWED and code.co_filename.startswith(_ROOT):
                self._point += 1
                return
            if code.co_filename.startswith(_ROOT):
                stack.append(f"{code.co_filename[len(_ROOT) :]}:{frame.f_lineno} {code.co_name}")
            frame = frame.f_back
        self._outcome.where = stack[0]
        self._outcome.stack = " < ".join(stack)
        self.stop()
        if self._within is None:
            raise Interruption
        self._within()

    def stop(self) -> None:
        """Count no more."""


class _Lines(_Points):
    def __enter__(self) -> None:
        sys.settrace(self._of_call)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def stop(self) -> None:
        sys.settrace(None)

    def _of_call(self, frame: FrameType, _event: str, _arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_ROOT):
            return None
        return self._of_line

    def _of_line(self, frame: FrameType, event: str, _arg: Any) -> Any:
        if event == "line":
            self.at(frame)
        return self._of_line


class _Instructions(_Points):
    def __enter__(self) -> None:
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
        monitoring.use_tool_id(_TOOL, "interrupting")
        monitoring.register_callback(_TOOL, monitoring.events.INSTRUCTION, self._of_instruction)
        monitoring.restart_events()
        monitoring.set_events(_TOOL, monitoring.events.INSTRUCTION)

    def __exit__(self, *_: object) -> None:
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
        monitoring.set_events(_TOOL, 0)
        monitoring.free_tool_id(_TOOL)

    def stop(self) -> None:
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
        monitoring.set_events(_TOOL, 0)

    def _of_instruction(self, code: CodeType, offset: int) -> Any:
        if not code.co_filename.startswith(_ROOT) or code.co_code[offset] in _RETURNS:
            return sys.monitoring.DISABLE  # type: ignore[attr-defined,unused-ignore]
        if threading.get_ident() == self._thread:
            self.at(sys._getframe(1))
        return None
