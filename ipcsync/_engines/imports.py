"""IPC handles opened by this process, each once.

They are told apart by (epoch, serial number of the event), never by the handle's bytes, which can come again. Who uses
one is written down by name, so that neither to take nor to give back twice is counted twice: an exception may end a
call between this table and its user's.
"""

from __future__ import annotations

from typing import Any

from cuda.bindings.driver import CUipcEventHandle

from ipcsync import _drivers
from ipcsync._drivers import DriverObject, unwrap
from ipcsync._engines.compiled import is_parked
from ipcsync._locks import CallLock, holding, trying
from ipcsync._native.capture import relaxed_call
from ipcsync._native.context import OnDevice
from ipcsync.errors import HandleError

_Key = tuple[bytes, int]


class Imports:
    """The imports of this process."""

    def __init__(self) -> None:
        self._lock = CallLock()
        self._events: dict[_Key, Any] = {}
        self._users: dict[_Key, set[object]] = {}

    @holding("_lock")
    def acquire(self, user: object, key: _Key, handle: bytes, ordinal: int) -> DriverObject:
        """The CUevent behind a handle; opened on the device `ordinal` if nobody in this process has it.

        Raises HandleError if the driver does not open it.
        """
        self._users.setdefault(key, set()).add(user)
        if key not in self._events:
            with OnDevice(ordinal):
                data = _drivers.handle_from_bytes(CUipcEventHandle, handle)
                result = relaxed_call(_drivers.load().cuIpcOpenEventHandle, data)
            self._events.setdefault(key, unwrap(result, "cuIpcOpenEventHandle", HandleError))
        return self._events[key]

    @trying("_lock")
    def release(self, user: object, key: _Key) -> bool:
        """Give one user's use back; the last one destroys the import, which leaves the coordinator's event as it is.

        Nothing, and None, while another thread is at work here, whom a driver's call may keep for long; False while a
        thread is parked in the driver's wait for it, also if nobody waits for that any more.
        """
        users = self._users.get(key, set())
        if users <= {user} and key in self._events and is_parked(self._events[key]):
            return False
        users.discard(user)
        if not users:
            self._users.pop(key, None)
            event = self._events.pop(key, None)
            if event is not None:
                unwrap(_drivers.load().cuEventDestroy(event), "cuEventDestroy")
        return True

    @property
    def count(self) -> int:
        """How many imports are open in this process."""
        return len(self._events)


_imports = Imports()
acquire, release = _imports.acquire, _imports.release


def count() -> int:
    """How many imports are open in this process."""
    return _imports.count
