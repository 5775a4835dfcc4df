"""Shared CUDA events for processes that share GPUs.

Every public name is here, and each is loaded at its first use: importing this package loads neither ZeroMQ nor CUDA.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ipcsync.errors import (
    ClientClosed,
    ConnectError,
    CoordinatorLost,
    DeviceMismatch,
    DriverError,
    EngineMismatch,
    EventClosed,
    ForkedProcessError,
    HandleError,
    InvalidDevice,
    IpcSyncError,
    NoDriver,
    NotRecorder,
    ProtocolError,
    QuotaExceeded,
    RecorderLost,
    RecorderTaken,
    SessionExpired,
    StreamCapturing,
    WaitTimeout,
)

if TYPE_CHECKING:
    from ipcsync.client import (
        AsyncClient,
        AsyncPoint,
        AsyncSharedEvent,
        AttachmentInfo,
        Client,
        EventInfo,
        Notice,
        Point,
        SessionInfo,
        SharedEvent,
        aconnect,
        connect,
    )
    from ipcsync.launch import Coordinator, launch
    from ipcsync.native.device import (
        Device,
        DeviceProperties,
        can_device_access_peer,
        current_device,
        device,
        device_count,
        driver_name,
        driver_version,
        exchange_device,
        get_device_properties,
        has_primary_context,
        ipc_collect,
        is_available,
        is_in_bad_fork,
        maybe_exchange_device,
        set_device,
        synchronize,
    )
    from ipcsync.native.event import Event
    from ipcsync.native.stream import (
        ExternalStream,
        Stream,
        current_stream,
        default_stream,
        is_current_stream_capturing,
        set_stream,
        stream,
    )

__all__ = [
    "AsyncClient",
    "AsyncPoint",
    "AsyncSharedEvent",
    "AttachmentInfo",
    "Client",
    "ClientClosed",
    "ConnectError",
    "Coordinator",
    "CoordinatorLost",
    "Device",
    "DeviceMismatch",
    "DeviceProperties",
    "DriverError",
    "EngineMismatch",
    "Event",
    "EventClosed",
    "EventInfo",
    "ExternalStream",
    "ForkedProcessError",
    "HandleError",
    "InvalidDevice",
    "IpcSyncError",
    "NoDriver",
    "NotRecorder",
    "Notice",
    "Point",
    "ProtocolError",
    "QuotaExceeded",
    "RecorderLost",
    "RecorderTaken",
    "SessionExpired",
    "SessionInfo",
    "SharedEvent",
    "Stream",
    "StreamCapturing",
    "WaitTimeout",
    "aconnect",
    "can_device_access_peer",
    "connect",
    "current_device",
    "current_stream",
    "default_stream",
    "device",
    "device_count",
    "driver_name",
    "driver_version",
    "exchange_device",
    "get_device_properties",
    "has_primary_context",
    "ipc_collect",
    "is_available",
    "is_current_stream_capturing",
    "is_in_bad_fork",
    "launch",
    "maybe_exchange_device",
    "set_device",
    "set_stream",
    "stream",
    "synchronize",
]

_CLIENT, _LAUNCH = "ipcsync.client", "ipcsync.launch"
_DEVICE, _EVENT, _STREAM = "ipcsync.native.device", "ipcsync.native.event", "ipcsync.native.stream"

_HOME = {
    "AsyncClient": _CLIENT,
    "AsyncPoint": _CLIENT,
    "AsyncSharedEvent": _CLIENT,
    "AttachmentInfo": _CLIENT,
    "Client": _CLIENT,
    "Coordinator": _LAUNCH,
    "Device": _DEVICE,
    "DeviceProperties": _DEVICE,
    "Event": _EVENT,
    "EventInfo": _CLIENT,
    "ExternalStream": _STREAM,
    "Notice": _CLIENT,
    "Point": _CLIENT,
    "SessionInfo": _CLIENT,
    "SharedEvent": _CLIENT,
    "Stream": _STREAM,
    "aconnect": _CLIENT,
    "can_device_access_peer": _DEVICE,
    "connect": _CLIENT,
    "current_device": _DEVICE,
    "current_stream": _STREAM,
    "default_stream": _STREAM,
    "device": _DEVICE,
    "device_count": _DEVICE,
    "driver_name": _DEVICE,
    "driver_version": _DEVICE,
    "exchange_device": _DEVICE,
    "get_device_properties": _DEVICE,
    "has_primary_context": _DEVICE,
    "ipc_collect": _DEVICE,
    "is_available": _DEVICE,
    "is_current_stream_capturing": _STREAM,
    "is_in_bad_fork": _DEVICE,
    "maybe_exchange_device": _DEVICE,
    "set_device": _DEVICE,
    "set_stream": _STREAM,
    "stream": _STREAM,
    "synchronize": _DEVICE,
}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """This package, in which `launch` is always the function.

    The import system binds the submodule of that name over whatever stands here, whenever anybody first imports it. A
    property goes before what is bound in the module.
    """

    @property
    def launch(self) -> Any:
        return importlib.import_module(_LAUNCH).launch

    @launch.setter
    def launch(self, submodule: Any) -> None:
        """Bind nothing: the submodule stays to be had by `from ipcsync.launch import …`."""


sys.modules[__name__].__class__ = _Package
