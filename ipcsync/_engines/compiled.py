"""The compiled core: what there is of it for the rest of the package."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ipcsync import _locks

__all__ = [
    "INTERFACE",
    "Behind",
    "CallLock",
    "Core",
    "Entry",
    "EventBase",
    "PointBase",
    "SessionCheck",
    "Wait",
    "bind_driver",
    "is_parked",
    "know_streams",
    "parked",
    "shortened",
]

INTERFACE = 17
"""The version of what this package and the core expect of each other; raised on both sides with each change of it."""

_INSTALL = "install ipcsync again (pip install .)"

try:
    import ipcsync._engines.core as _core
except ModuleNotFoundError as missing:
    if missing.name != "ipcsync._engines.core":
        raise
    raise ImportError(f"ipcsync's compiled core is missing, {_INSTALL}") from None
if _core.INTERFACE != INTERFACE:
    raise ImportError(
        f"ipcsync's compiled core was built from another version, {_INSTALL}:"
        f" {_core.__file__} has interface {_core.INTERFACE}, not {INTERFACE}"
    )

Behind = _core.Behind
Core = _core.Core
Entry = _core.Entry
EventBase = _core.EventBase
PointBase = _core.PointBase
SessionCheck = _core.SessionCheck
Wait = _core.Wait
bind_driver = _core.bind_driver
is_parked = _core.is_parked
know_streams = _core.know_streams
parked = _core.parked
shortened = _core.shortened
_locks.know_turns(_core.has_turn)


if TYPE_CHECKING:
    from ipcsync._locks import CallLock
else:

    class CallLock(_locks.Unwinding, _core.Lock):
        """A reentrant lock that is free once no call that took it runs any more."""

        __slots__ = ()
