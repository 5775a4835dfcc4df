"""The CUDA driver API as Python functions, from one of two places.

`cuda` is `cuda.bindings.driver`; `host` is a software driver for machines without a GPU. Both have the same function
names, arguments and `(CUresult, value…)` tuples, so no layer above this package knows which one it has.
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
    "wait_event",
]

log = logging.getLogger("ipcsync")

WARNED = "IPCSYNC_WARNED_OF_NO_DRIVER"
"""The environment variable that is set once a parent process has warned that there is no CUDA driver."""

_lock = CallLock()
_chosen: ModuleType | None = None


def load() -> ModuleType:
    """The driver of this process, chosen once by IPCSYNC_DRIVER (auto, cuda or host) and initialised.

    Raises NoDriver, which says what was tried; ForkedProcessError in a child forked after any library used CUDA;
    ValueError for another value of IPCSYNC_DRIVER.
    """
    if _chosen is not None:
        return _chosen
    return under(_lock, _choose_once)


def _choose_once() -> ModuleType:
    return _chosen if _chosen is not None else _choose(os.environ.get("IPCSYNC_DRIVER") or "auto")


def _choose(wanted: str) -> ModuleType:
    global _chosen  # noqa: PLW0603 - one driver a process, for its whole life
    if wanted not in ("auto", "cuda", "host"):
        raise ValueError(f"IPCSYNC_DRIVER must be auto, cuda or host, but is {wanted!r}")
    if wanted != "host":
        from ipcsync._drivers import cuda

        reason = cuda.probe()
        if reason is None:
            _chosen = cuda
            return cuda
        if wanted == "cuda":
            raise NoDriver(f"IPCSYNC_DRIVER=cuda, but the CUDA driver does not work here: {reason}")
        if not os.environ.get(WARNED):
            log.warning("no CUDA driver here (%s): using the host driver, which moves no GPU", reason)
            os.environ[WARNED] = "1"  # the processes that this one starts do not warn again
    from ipcsync._drivers import host

    unwrap(host.cuInit(0), "cuInit")
    _chosen = host
    return host


def is_loaded() -> bool:
    """Whether this process has chosen its driver."""
    return _chosen is not None


def name() -> str:
    """ "cuda" or "host"."""
    try:
        return load().__name__.rpartition(".")[2]
    except ForkedProcessError:  # in a child, whose parent's driver works
        return "cuda"


def wait_event(event: DriverObject, deadline_ns: int) -> bool:
    """Block until `event` is complete, with the GIL released; False if CLOCK_MONOTONIC passed `deadline_ns` before."""
    return bool(load().wait_event(event, deadline_ns))
