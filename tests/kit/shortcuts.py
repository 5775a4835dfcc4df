"""Whether the compiled core makes this process's calls: then they pass by what a test does to the Python engine."""

from __future__ import annotations

from ipcsync._engines import compiled

IN_PYTHON = "the compiled core makes this call here, and the test takes hold of the Python engine's"
"""Why a test of the Python engine is skipped."""

ALL_IN_PYTHON = {"IPCSYNC_TEST_SHORTCUTS": "0"}
"""The variable with which a process has the Python engine make every call."""

NONE_HERE = "no call is made by the compiled core: IPCSYNC_TEST_SHORTCUTS=0"
"""Why a test of the compiled core is skipped."""


def has_shortcuts() -> bool:
    """Whether this process's calls are made by the compiled core."""
    return compiled.SHORTCUTS
