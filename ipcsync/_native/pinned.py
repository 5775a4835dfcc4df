"""Pages of mapped files that are registered with CUDA, so that a GPU can write their words.

CUDA pins the memory that lies at an address when it is registered. So a page is unregistered before it is unmapped, or
never unmapped: else the next mapping at its address would be taken for it, and the GPU write to the old one.
"""

from __future__ import annotations

import logging
import mmap
import threading

from ipcsync import _drivers
from ipcsync._drivers import unwrap
from ipcsync._drivers.constants import MEMHOSTREGISTER_DEVICEMAP, MEMHOSTREGISTER_PORTABLE
from ipcsync._native import context, fork
from ipcsync._native.capture import relaxed_call
from ipcsync.errors import DriverError

log = logging.getLogger("ipcsync")

PAGE = mmap.PAGESIZE
_FLAGS = MEMHOSTREGISTER_PORTABLE | MEMHOSTREGISTER_DEVICEMAP
_lock = threading.Lock()
_ordinals: dict[int, int] = {}  # by page: a device whose context was current when it was registered


def page(address: int) -> int:
    """The device pointer of the page at `address`, registered at the first call.

    A context must be current. Raises DriverError where the driver refuses, as it does for pages of a file on disk.
    """
    driver = _drivers.load()
    with _lock:
        if address not in _ordinals:
            # To CUDA this is an unsafe call, which would spoil a capture that another thread makes.
            unwrap(relaxed_call(driver.cuMemHostRegister, address, PAGE, _FLAGS), "cuMemHostRegister")
            _ordinals[address] = context.current_ordinal()
    return int(unwrap(driver.cuMemHostGetDevicePointer(address, 0), "cuMemHostGetDevicePointer"))


def word(address: int) -> int:
    """The device pointer of the 8-byte word at `address`."""
    start = address & ~(PAGE - 1)
    return page(start) + (address - start)


def is_any(address: int, length: int) -> bool:
    """Whether any page from `address` on, within `length` bytes, is registered."""
    return any(address <= start < address + length for start in list(_ordinals))


def unpin(address: int, length: int) -> bool:
    """Unregister those pages, to which no queued work may write any more; whether none is left registered."""
    if fork.is_in_bad_fork():
        return False
    with _lock:
        for start in [start for start in _ordinals if address <= start < address + length]:
            try:
                with context.OnDevice(_ordinals[start]):
                    result = relaxed_call(_drivers.load().cuMemHostUnregister, start)
                unwrap(result, "cuMemHostUnregister")
            except DriverError as error:
                log.debug("a page stays registered: %s", error)
                return False
            del _ordinals[start]
    return True
