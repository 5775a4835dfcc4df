"""The compiled core, which takes most calls of an engine: what there is of it for the rest of the package."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from ipcsync import _locks

__all__ = [
    "INTERFACE",
    "SHORTCUTS",
    "CallLock",
    "Core",
    "EventBase",
    "Links",
    "PointBase",
    "SessionCheck",
    "bind_driver",
    "is_parked",
    "know_streams",
    "park",
    "parked",
    "shortened",
]

INTERFACE = 15
"""The version of what this package and the core expect of each other; raised on both sides with each change of it."""

SHORTCUTS = os.environ.get("IPCSYNC_TEST_SHORTCUTS") != "0"
"""Whether the core takes calls. It always does but in the tests of the Python engine, which then takes all of them."""

_INSTALL = "install ipcsync again (pip install .)"

try:
    import ipcsync._engines.core as _core
except ModuleNotFoundError:
    raise ImportError(f"ipcsync's compiled core is missing, {_INSTALL}") from None
if _core.INTERFACE != INTERFACE:
    raise ImportError(
        f"ipcsync's compiled core was built from another version, {_INSTALL}:"
        f" {_core.__file__} has interface {_core.INTERFACE}, not {INTERFACE}"
    )

Core = _core.Core
EventBase = _core.EventBase
PointBase = _core.PointBase
SessionCheck = _core.SessionCheck
is_parked = _core.is_parked
know_streams = _core.know_streams
park = _core.park
parked = _core.parked
shortened = _core.shortened


if TYPE_CHECKING:
    from ipcsync._locks import CallLock
else:

    class CallLock(_locks.Unwinding, _core.Lock):
        """A reentrant lock that is free once no call that took it runs any more; shortcuts take it too."""

        __slots__ = ()


class Links(NamedTuple):
    """What a shortcut needs to note what stands behind what."""

    waits: dict[int, dict[int, Any]]
    """The waits that this process has queued, by stream: a record stands behind those on its stream."""
    changed: list[Any]
    """Those on their way into that; while there are any, no record is a shortcut."""
    lock: object
    """Held while they change."""
    drop: Callable[[Iterable[Any]], object]
    """Removes waits that are known good."""
    make_wait: type
    chain: object
    """The recorder's chain, whose entries are replaced with the engine's lock held."""
    make_entry: type
    behind_all: bool
    """Whether a record stands behind the waits of every stream; then none is a shortcut."""


def bind_driver() -> str | None:
    """Have shortcuts call the driver's functions from now on; returns why they cannot, or None."""
    return _core.bind_driver() if SHORTCUTS else None
