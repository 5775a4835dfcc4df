"""The core of this process: the compiled one, if it was built and IPCSYNC_COMPILED allows it."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from ipcsync import _locks
from ipcsync._engines import core_python

__all__ = [
    "COMPILED",
    "WHY_NOT",
    "CallLock",
    "Core",
    "EventBase",
    "PointBase",
    "SessionCheck",
    "bind_driver",
    "built_with",
    "is_parked",
    "know_streams",
    "park",
    "parked",
    "shortened",
]


def built_with() -> str:
    """The build's own record: "compiled: …", or "pure: …" and why."""
    try:
        return Path(__file__).with_name("core_build.txt").read_text().strip()
    except OSError:
        return "pure: this tree was never installed (make install, or pip install .)"


def _load() -> tuple[ModuleType, str | None]:
    """The core, and why it is not the compiled one; None if it is."""
    wanted = os.environ.get("IPCSYNC_COMPILED", "auto")
    if wanted not in ("auto", "0", "1"):
        raise ValueError(f"IPCSYNC_COMPILED must be auto, 0 or 1, but is {wanted!r}")
    if wanted == "0":
        return core_python, "IPCSYNC_COMPILED=0"
    try:
        core = importlib.import_module("ipcsync._engines.core")
        theirs = core.INTERFACE
    except ImportError as error:
        why_not = built_with().removeprefix("pure: ")
        if why_not.startswith("compiled: "):
            why_not = f"it does not load here: {error}"
    else:
        if theirs == core_python.INTERFACE:
            return core, None
        why_not = f"it was built from another version (interface {theirs}, not {core_python.INTERFACE}): install again"
    if wanted == "1":
        raise ImportError(f"IPCSYNC_COMPILED=1, but there is no compiled core: {why_not}")
    return core_python, why_not


_core, WHY_NOT = _load()
COMPILED = WHY_NOT is None
"""Whether the core is the compiled one; if not, `WHY_NOT` says why."""

if TYPE_CHECKING:
    from ipcsync._engines.core_python import (
        Core,
        EventBase,
        PointBase,
        SessionCheck,
        bind_driver,
        is_parked,
        know_streams,
        park,
        parked,
        shortened,
    )
    from ipcsync._locks import CallLock
else:
    Core, EventBase, SessionCheck, PointBase = _core.Core, _core.EventBase, _core.SessionCheck, _core.PointBase
    bind_driver, know_streams, shortened = _core.bind_driver, _core.know_streams, _core.shortened
    park, is_parked, parked = _core.park, _core.is_parked, _core.parked
    CallLock = _locks.CallLock
    if COMPILED:

        class CallLock(_locks.Unwinding, _core.Lock):
            """A reentrant lock that is free once no call that took it runs any more; shortcuts take it too."""

            __slots__ = ()
