"""Memory of the host whose words a GPU reads and writes: pages of mapped files, and pages of this process alone.

CUDA pins the memory that is mapped at an address when it is registered. So a page stays mapped while it is registered:
otherwise CUDA would take the next mapping at the address for it, and the GPU would write to the old memory.
"""

from __future__ import annotations

import ctypes
import logging
import mmap

from ipcsync import _drivers
from ipcsync._drivers import MEMHOSTREGISTER_DEVICEMAP, MEMHOSTREGISTER_PORTABLE, unwrap
from ipcsync._native import context, fork
from ipcsync._native.context import OnDevice, call, primary, relaxed_call
from ipcsync._threads import CallLock, under
from ipcsync.errors import DriverError

log = logging.getLogger("ipcsync")

PAGE = mmap.PAGESIZE
_FLAGS = MEMHOSTREGISTER_PORTABLE | MEMHOSTREGISTER_DEVICEMAP
_ALREADY_REGISTERED, _NOT_REGISTERED = 712, 713
_lock = CallLock()
# By page: a device in whose primary context it was registered, and its mapping. While a page is missing in the
# second set, an exception may have ended the call, with the page registered or not.
_pages: dict[int, tuple[int, object]] = {}
_registered: set[int] = set()
_kept: set[int] = set()
# Words of this process that graphs and streams wait for and write: by device and kind, those that nobody has taken.
_free: dict[tuple[int, str], list[tuple[int, int]]] = {}
_taking = CallLock()


def word(address: int, mapping: object, ordinal: int) -> int:
    """The device pointer of the 8-byte word at `address`; `mapping` is kept.

    Its page is registered at first, in the device's primary context, since a registration ends with its context. Raises
    DriverError if the driver refuses, as it does for pages of a file on disk.
    """
    page = address & ~(PAGE - 1)
    with OnDevice(ordinal, primary(ordinal)) as inside, inside:
        if page not in _registered:
            under(_lock, _register, page, mapping)
        return int(call("cuMemHostGetDevicePointer", page, 0)) + (address - page)


def _register(address: int, mapping: object) -> None:
    if address in _registered:
        return
    was_begun = address in _pages
    entry = _pages[address] = context.current_ordinal(), mapping
    # CUDA counts this as an unsafe call, which would break another thread's capture.
    result = relaxed_call(_drivers.load().cuMemHostRegister, address, PAGE, _FLAGS)
    is_ours = was_begun or address in _registered  # by a handler within this call
    if not (is_ours and result[0] == _ALREADY_REGISTERED):
        try:
            unwrap(result, "cuMemHostRegister")
        except DriverError:
            _pages.pop(address, None)
            raise
    _pages[address] = entry  # again: another thread's `unpin` may have come before it
    _registered.add(address)


def keep(address: int) -> None:
    """Have the page of the word at `address` stay registered: a write to it that nobody awaits may be queued."""
    _kept.add(address & ~(PAGE - 1))


def unpin(address: int, length: int) -> bool:
    """Unregister those pages, to which no queued work may write any more; whether none is left registered.

    A driver may let this stand still behind any stream of the process, so no lock is held that a register takes.
    """
    if fork.is_in_bad_fork() or any(address <= start < address + length for start in list(_kept)):
        return False
    for start in [start for start in list(_pages) if address <= start < address + length]:
        try:
            with OnDevice(ordinal := _pages[start][0], primary(ordinal)) as inside, inside:
                result = relaxed_call(_drivers.load().cuMemHostUnregister, start)
            if start in _registered or result[0] != _NOT_REGISTERED:
                unwrap(result, "cuMemHostUnregister")
        except DriverError as error:
            log.debug("a page stays registered: %s", error)
            return False
        _registered.discard(start)
        _pages.pop(start, None)
    return True


def take(ordinal: int, kind: str, size: int) -> tuple[int, int]:
    """The address of a word of `size` bytes that is 0 and nothing else uses, for the host and for the device `ordinal`.

    Those of a kind lie together, in the order in which they are taken. Every context of the process reaches them. None
    is freed or used again: a graph that was captured with one may be launched for as long as the process lives.
    """
    return under(_taking, _take, ordinal, kind, size)


def _take(ordinal: int, kind: str, size: int) -> tuple[int, int]:
    free = _free.setdefault((ordinal, kind), [])
    if not free:
        # A page of our own, which the host reads whatever becomes of the context, and in the process's exit too.
        page = mmap.mmap(-1, PAGE)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(page))
        host = ctypes.addressof(ctypes.c_char.from_buffer(page))
        with OnDevice(ordinal, primary(ordinal)) as inside, inside:
            # An unsafe call, which would break another thread's capture.
            relaxed_call(call, "cuMemHostRegister", host, PAGE, _FLAGS)
            address = int(call("cuMemHostGetDevicePointer", host, 0))
        free.extend((host + at, address + at) for at in range(0, PAGE, size))
    return free.pop(0)
