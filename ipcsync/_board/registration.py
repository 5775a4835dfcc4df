"""Board pages registered with CUDA, so that a GPU can write their words."""

from __future__ import annotations

import threading

from ipcsync import _drivers
from ipcsync._board.layout import PAGE
from ipcsync._drivers import check
from ipcsync.native.capture import relaxed_call

_PORTABLE_MAPPED = 1 | 2  # CU_MEMHOSTREGISTER_PORTABLE: every context of this process; _DEVICEMAP
_ALREADY = 712  # CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED

_lock = threading.Lock()
_registered: set[int] = set()


def register_page(address: int) -> int:
    """The device pointer of the page at `address` (aligned to 4096), registered at the first call for good.

    A context must be current. Raises DriverError where the driver refuses, as it does for pages of a file on disk.
    """
    driver = _drivers.load()
    with _lock:
        if address not in _registered:
            # To CUDA this is an unsafe call, which would spoil a capture that another thread makes.
            result = relaxed_call(driver.cuMemHostRegister, address, PAGE, _PORTABLE_MAPPED)
            if int(result[0]) != _ALREADY:
                check(result, "cuMemHostRegister")
            _registered.add(address)
    return int(check(driver.cuMemHostGetDevicePointer(address, 0), "cuMemHostGetDevicePointer"))


def device_word(address: int) -> int:
    """The device pointer of the 8-byte word at `address`."""
    page = address & ~(PAGE - 1)
    return register_page(page) + (address - page)
