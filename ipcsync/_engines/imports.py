"""IPC handles opened by this process, each once.

The key is (epoch, serial number of the event), never the handle's bytes, which can be reused. The table holds the users
of each import themselves, not a count: an exception may interrupt a user between this table and its own, and a repeated
acquire or release must not count twice.
"""

from __future__ import annotations

from typing import Any

from cuda.bindings.driver import CUipcEventHandle

from ipcsync import _drivers
from ipcsync._drivers import DriverObject, unwrap
from ipcsync._native.context import OnDevice, relaxed_call
from ipcsync._threads import CallLock, attempt, under_within
from ipcsync.errors import HandleError

_Key = tuple[bytes, int]

_lock = CallLock()
_events: dict[_Key, Any] = {}
_users: dict[_Key, set[object]] = {}


def acquire(user: object, key: _Key, handle: bytes, ordinal: int, patience_s: float = -1) -> DriverObject:
    """The CUevent behind a handle; opened on the device `ordinal` if this process has not opened it yet.

    None if another thread has the table for `patience_s` seconds (below 0: it is waited for), since its driver call
    takes long. Raises HandleError if the driver does not open it.
    """
    return under_within(_lock, patience_s, _acquire, user, key, handle, ordinal)


def _acquire(user: object, key: _Key, handle: bytes, ordinal: int) -> DriverObject:
    _users.setdefault(key, set()).add(user)
    if key not in _events:
        with OnDevice(ordinal) as inside, inside:
            data = _drivers.handle_from_bytes(CUipcEventHandle, handle)
            result = relaxed_call(_drivers.load().cuIpcOpenEventHandle, data)
        _events.setdefault(key, unwrap(result, "cuIpcOpenEventHandle", HandleError))
    return _events[key]


def release(user: object, key: _Key) -> bool | None:
    """Remove a user; the last one destroys the import, which leaves the coordinator's event untouched.

    Does nothing and returns None while another thread has the table, since its driver call may take long.
    """
    return attempt(_lock, _release, user, key)


def _release(user: object, key: _Key) -> bool:
    users = _users.setdefault(key, set())
    users.discard(user)
    # No call stands between the look and the removal: a handler, which runs behind one, may acquire it.
    if not users:
        del _users[key]
        if key in _events:
            event = _events[key]
            del _events[key]
            unwrap(_drivers.load().cuEventDestroy(event), "cuEventDestroy")
    return True


def count() -> int:
    return len(_events)
