"""Engines: how a record of a shared event is made and waited for.

The compiled core (`core_cython`) has every step of every call; `engine` has what it asks of Python.
"""

from ipcsync import _threads

__all__ = ["INTERFACE", "Engine"]

INTERFACE = 28
"""The version of what this package and the core expect of each other; raised on both sides with each change of it."""

try:
    import ipcsync._engines.core as _core
except ModuleNotFoundError as missing:
    if missing.name != "ipcsync._engines.core":
        raise
    raise ImportError(
        "ipcsync's compiled core is missing: it is built when ipcsync is installed (pip install .), and is then beside "
        "the installed modules: start programs outside of the checkout, or install it with pip install -e ."
    ) from None
if _core.INTERFACE != INTERFACE:
    raise ImportError(
        "ipcsync's compiled core was built from another version, install ipcsync again (pip install .):"
        f" {_core.__file__} has interface {_core.INTERFACE}, not {INTERFACE}"
    )
_threads.turns.append(_core.has_turn)

from ipcsync._engines.engine import Engine  # noqa: E402 - which import the core
