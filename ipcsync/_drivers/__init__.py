"""The CUDA driver API, as `cuda.bindings.driver` has it, over one of two libraries.

`cuda` is NVIDIA's libcuda. `host` is a software driver for machines without a GPU, a libcuda of our own. No layer above
this package knows which one it has.
"""

from __future__ import annotations

import logging
import os
from types import ModuleType

from ipcsync._drivers.results import (
    HANDLE_SIZE,
    SUCCESS,
    DriverObject,
    describe,
    handle_bytes,
    handle_from_bytes,
    unwrap,
)
from ipcsync._locks import CallLock, under
from ipcsync.errors import ForkedProcessError, NoDriver

__all__ = [
    "HANDLE_SIZE",
    "SUCCESS",
    "DriverObject",
    "describe",
    "handle_bytes",
    "handle_from_bytes",
    "is_loaded",
    "load",
    "name",
    "unwrap",
]

log = logging.getLogger("ipcsync")

WARNED = "IPCSYNC_WARNED_OF_NO_DRIVER"
"""The environment variable that is set once a parent process has warned that there is no CUDA driver."""

_lock = CallLock()
_chosen: tuple[str, ModuleType] | None = None


def load() -> ModuleType:
    """`cuda.bindings.driver`, over the library chosen once by IPCSYNC_DRIVER (auto, cuda or host) and initialised.

    Raises NoDriver, which says what was tried; ForkedProcessError in a child forked after any library used CUDA;
    ValueError for another value of IPCSYNC_DRIVER.
    """
    return (_chosen or under(_lock, _choose_once))[1]


def _choose_once() -> tuple[str, ModuleType]:
    global _chosen  # noqa: PLW0603 - one driver a process, for its whole life
    if _chosen is None:
        from cuda.bindings import driver

        _chosen = (_choose(os.environ.get("IPCSYNC_DRIVER") or "auto"), driver)
    return _chosen


def _choose(wanted: str) -> str:
    """Initialise the library that IPCSYNC_DRIVER=`wanted` means here; returns "cuda" or "host"."""
    from ipcsync._drivers import hardware, software

    if wanted not in ("auto", "cuda", "host"):
        raise ValueError(f"IPCSYNC_DRIVER must be auto, cuda or host, but is {wanted!r}")
    if wanted == "host":
        software.load(hidden=False)
        return "host"
    if wanted == "auto" and software.is_ours(software.loaded()):
        software.load(hidden=None)
        return "host"
    reason = (hardware.why_absent() if wanted == "auto" else None) or hardware.why_not()
    if reason is None:
        return "cuda"
    if wanted == "cuda":
        raise NoDriver(f"IPCSYNC_DRIVER=cuda, but the CUDA driver does not work here: {reason}")
    try:
        software.load(hidden=True)
    except NoDriver as error:
        raise NoDriver(f"the CUDA driver does not work here ({reason}), and {error}") from None
    if not os.environ.get(WARNED):
        log.warning("no CUDA driver here (%s): using the software driver; no GPU is involved", reason)
        os.environ[WARNED] = "1"  # the processes that this one starts do not warn again
    return "host"


def is_loaded() -> bool:
    """Whether this process has chosen its driver."""
    return _chosen is not None


def name() -> str:
    """ "cuda" or "host"."""
    try:
        load()
    except ForkedProcessError:  # in a child, whose parent's driver works
        from ipcsync._drivers import software

        return "host" if software.is_ours(software.loaded()) else "cuda"
    assert _chosen is not None
    return _chosen[0]
