"""Shared CUDA events for processes that share GPUs.

Every public name is here, and each is loaded at its first use: importing this package loads neither ZeroMQ nor CUDA.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

from ipcsync import errors as _errors
from ipcsync.errors import *

if TYPE_CHECKING:
    from ipcsync._launch import *
    from ipcsync._native.device import *
    from ipcsync._native.event import *
    from ipcsync._native.stream import *
    from ipcsync.client import *
    from ipcsync.client.aio.client import *
    from ipcsync.client.aio.event import *

__version__ = "0.2.0.dev0"
__compiled__ = True

_HOME = {
    name: module
    for module, names in {
        "ipcsync._launch": "Coordinator launch",
        "ipcsync._native.device": (
            "can_device_access_peer current_device Device device device_count DeviceProperties "
            "driver_name driver_version exchange_device get_device_properties has_primary_context "
            "ipc_collect is_available is_in_bad_fork maybe_exchange_device set_device"
        ),
        "ipcsync._native.event": "Event synchronize",
        "ipcsync._native.stream": (
            "current_stream default_stream ExternalStream is_current_stream_capturing set_stream Stream stream"
        ),
        "ipcsync.client": (
            "AttachmentInfo BridgeInfo Client connect DEFAULT_DEPTH default_client EventInfo GraphRecord GraphWait "
            "NodeInfo Notice PeerInfo Point Replay Replaying Reservation SessionInfo SharedEvent synchronize_all "
            "Upcoming wait_all"
        ),
        "ipcsync.client.aio.client": "aconnect AsyncClient Connecting",
        "ipcsync.client.aio.event": (
            "AsyncPoint AsyncReplay AsyncReplaying AsyncReservation AsyncSharedEvent AsyncUpcoming"
        ),
    }.items()
    for name in names.split()
}
__all__ = sorted([*_errors.__all__, *_HOME])


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_loads: dict[object, int] = {}  # those under way, each with the process in which it began
if not TYPE_CHECKING:  # a type checker reads the star imports above

    def __getattr__(name):
        home = _HOME.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        load = object()
        try:
            _loads[load] = os.getpid()
            if len(set(_loads.values())) > 1:  # a parent's, whose thread has the import's locks for ever
                raise _errors.ForkedProcessError
            module = importlib.import_module(home)
        except (ImportError, RuntimeError) as error:  # a library below that has one state for the whole process
            if "subinterpreter" not in str(error):
                raise
            raise _errors.IpcSyncError(
                f"ipcsync does not work in this sub-interpreter ({error}): use it in the main interpreter, or in a "
                "process of its own"
            ) from error
        finally:
            _loads.pop(load, None)
        value = globals()[name] = getattr(module, name)
        return value
