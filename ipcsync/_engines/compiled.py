"""Which core this process has: the compiled one, if it was built and IPCSYNC_COMPILED does not say otherwise."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType

from ipcsync._engines import core_python

__all__ = ["COMPILED", "WHY_NOT", "built_with"]


def built_with() -> str:
    """What the build said of itself: "compiled: …" or "pure: …" and why."""
    try:
        return Path(__file__).with_name("core_build.txt").read_text().strip()
    except OSError:
        return "pure: this tree was never installed (make install, or pip install .)"


def _load() -> tuple[ModuleType, str]:
    """The core, and why it is not the compiled one; empty if it is."""
    wanted = os.environ.get("IPCSYNC_COMPILED", "auto")
    if wanted not in ("auto", "0", "1"):
        raise ValueError(f"IPCSYNC_COMPILED must be auto, 0 or 1, but is {wanted!r}")
    if wanted == "0":
        return core_python, "IPCSYNC_COMPILED=0"
    try:
        from ipcsync._engines import core

        theirs = core.INTERFACE
    except ImportError as error:
        why_not = built_with().removeprefix("pure: ")
        if why_not.startswith("compiled: "):
            why_not = f"it does not load here: {error}"
    else:
        if theirs == core_python.INTERFACE:
            return core, ""
        why_not = f"it was built from another version (interface {theirs}, not {core_python.INTERFACE}): install anew"
    if wanted == "1":
        raise ImportError(f"IPCSYNC_COMPILED=1, but there is no compiled core: {why_not}")
    return core_python, why_not


_core, WHY_NOT = _load()
COMPILED = not WHY_NOT
"""Whether the core is the compiled one; if not, `WHY_NOT` says why."""

Look: type[core_python.Look] = _core.Look
