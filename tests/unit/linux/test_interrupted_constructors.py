"""Objects that own a descriptor, of which an exception ends the constructor: as a signal's handler may, anywhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from itertools import count
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from ipcsync._drivers import load
from ipcsync._linux.process import PidFd, Process, start_time
from ipcsync._native import context
from ipcsync._session.owner import Owner
from tests.kit.descriptors import descriptors

_lease: Any = SimpleNamespace(period_s=1.0)
_CONSTRUCTORS: dict[str, Callable[[], object]] = {
    "Owner": lambda: Owner(_lease),
    "PidFd": lambda: PidFd(os.getpid()),
    "context.Owner": lambda: context.Owner("cuEventDestroy", 0),
    "Process": lambda: Process(os.getpid(), start_time(os.getpid()) or 0),
}


class _Alarm(Exception):  # noqa: N818 - as a user may name it
    """What the handler raises."""


def _is_interrupted(make: Callable[[], object], name: str, line: int) -> bool:
    """Whether an exception before that line of the constructor, counted from 0, ended it."""
    lines = count()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_name != "__init__" or type(frame.f_locals.get("self")).__name__ != name:
            return None
        if event == "line" and next(lines) == line:
            raise _Alarm
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        make()
    except _Alarm:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("name", _CONSTRUCTORS)
def test_a_constructor_that_ends_at_any_line_leaves_no_descriptor_and_a_finalizer_that_says_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", said.append)
    load()  # the driver has descriptors
    before = descriptors()
    make, name = _CONSTRUCTORS[name], name.rpartition(".")[2]
    lines = next(line for line in count() if not _is_interrupted(make, name, line))
    assert lines > 1, "it was ended"
    assert said == []
    assert descriptors().items() <= before.items()  # what earlier tests left may go meanwhile
