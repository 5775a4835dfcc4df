"""Board pages registered with CUDA, so that a GPU can write their words."""

from __future__ import annotations

import logging
import threading

from ipcsync import _drivers
from ipcsync._board.layout import PAGE
from ipcsync._drivers import unwrap
from ipcsync._native import context, fork
from ipcsync._native.capture import relaxed_call
from ipcsync.errors import DriverError

log = logging.getLogger("ipcsync")

_PORTABLE_MAPPED = 1 | 2  # CU_MEMHOSTREGISTER_PORTABLE: every context of this process; _DEVICEMAP


class Registration:
    """The pages of one mapping that are registered, each from its first use on.

    CUDA pins the memory that lies at an address when it is registered. So a page is unregistered before it is unmapped,
    or never unmapped: else the next mapping at its address would be taken for it, and the GPU write to the old one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ordinals: dict[int, int] = {}  # by page: a device whose context was current then

    def page(self, address: int) -> int:
        """The device pointer of the page at `address` (aligned to 4096), registered at the first call.

        A context must be current. Raises DriverError where the driver refuses, as it does for pages of a file on disk.
        """
        driver = _drivers.load()
        with self._lock:
            if address not in self._ordinals:
                # To CUDA this is an unsafe call, which would spoil a capture that another thread makes.
                unwrap(relaxed_call(driver.cuMemHostRegister, address, PAGE, _PORTABLE_MAPPED), "cuMemHostRegister")
                self._ordinals[address] = context.current_ordinal()
        return int(unwrap(driver.cuMemHostGetDevicePointer(address, 0), "cuMemHostGetDevicePointer"))

    def word(self, address: int) -> int:
        """The device pointer of the 8-byte word at `address`."""
        page = address & ~(PAGE - 1)
        return self.page(page) + (address - page)

    def end(self) -> bool:
        """Unregister all pages, to which no queued work may write any more; whether none is left registered."""
        if fork.is_in_bad_fork():
            return False
        with self._lock:
            for address, ordinal in list(self._ordinals.items()):
                try:
                    with context.OnDevice(ordinal):
                        result = relaxed_call(_drivers.load().cuMemHostUnregister, address)
                    unwrap(result, "cuMemHostUnregister")
                except DriverError as error:
                    log.debug("a page of the board stays registered: %s", error)
                    return False
                del self._ordinals[address]
        return True

    @property
    def is_empty(self) -> bool:
        """Whether no page is registered."""
        return not self._ordinals
