"""IPC handles opened by this process, each once.

They are told apart by (epoch, serial number of the event), never by the handle's bytes, which can come again.
"""

from __future__ import annotations

import threading
from typing import Any

from cuda.bindings.driver import CUipcEventHandle

from ipcsync import _drivers
from ipcsync._drivers import unwrap
from ipcsync._native.capture import relaxed_call
from ipcsync._native.context import OnDevice
from ipcsync.errors import HandleError

_Key = tuple[bytes, int]
_lock = threading.Lock()
_open: dict[_Key, tuple[Any, int]] = {}


def acquire(epoch: bytes, serial: int, handle: bytes, ordinal: int) -> Any:
    """The CUevent behind a handle; opened on the device `ordinal` if nobody in this process has it.

    Raises HandleError if the driver does not open it.
    """
    key = (epoch, serial)
    with _lock:
        known = _open.get(key)
        if known is not None:
            _open[key] = (known[0], known[1] + 1)
            return known[0]
        with OnDevice(ordinal):
            data = _drivers.handle_from_bytes(CUipcEventHandle, handle)
            result = relaxed_call(_drivers.load().cuIpcOpenEventHandle, data)
        event = unwrap(result, "cuIpcOpenEventHandle", HandleError)
        _open[key] = (event, 1)
        return event


def release(epoch: bytes, serial: int) -> None:
    """Give one use back; the last one destroys the import, which leaves the coordinator's event as it is."""
    key = (epoch, serial)
    with _lock:
        event, uses = _open[key]
        if uses > 1:
            _open[key] = (event, uses - 1)
            return
        del _open[key]
        unwrap(_drivers.load().cuEventDestroy(event), "cuEventDestroy")


def count() -> int:
    """How many imports are open in this process."""
    return len(_open)
