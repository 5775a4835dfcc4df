"""The CUDA events behind the slots of the engine `event`: all driver calls of coordinator and keeper."""

from __future__ import annotations

from typing import Any

import msgspec

from ipcsync import _drivers
from ipcsync._drivers import ERROR_NOT_READY, EVENT_BLOCKING_SYNC, EVENT_DISABLE_TIMING, EVENT_INTERPROCESS
from ipcsync._native import context
from ipcsync.errors import DriverError, InvalidDevice


class SharedCudaEvent(msgspec.Struct, frozen=True, array_like=True):
    """One interprocess CUDA event on a device (UUID). `serial` is never reused, but handle bytes can be."""

    serial: int
    device: str
    handle: bytes


class EventStore:
    """Makes, numbers, exports and destroys the interprocess events of all devices, given as UUID → ordinal.

    A device's context is created with its first event, and nothing else needs one: on a crowded GPU that may take
    seconds, and an idle context costs hundreds of megabytes.
    """

    def __init__(self, devices: dict[str, int]) -> None:
        self._devices = devices
        self._serial = 0
        self._made: dict[int, tuple[SharedCudaEvent, Any]] = {}
        self._pending = 0  # that many were destroyed with a pending record

    def make(self, device: str, count: int) -> list[SharedCudaEvent]:
        """`count` new events on a device that is served here; DriverError, and none, if one cannot be made."""
        self._enter(device)
        made: list[SharedCudaEvent] = []
        try:
            for _ in range(count):
                made.append(self._make_one(device))  # noqa: PERF401 - those made before an error are destroyed
        except DriverError:
            self.destroy([shared.serial for shared in made])
            raise
        return made

    def _make_one(self, device: str) -> SharedCudaEvent:
        driver = _drivers.load()
        # Blocking: a host wait for it, or for an import of it if the driver passes that on, sleeps.
        flags = EVENT_INTERPROCESS | EVENT_DISABLE_TIMING | EVENT_BLOCKING_SYNC
        event = _drivers.unwrap(driver.cuEventCreate(flags), "cuEventCreate")
        # Exported at once: the export needs the current context, and always gives the same bytes.
        exported = driver.cuIpcGetEventHandle(event)
        if exported[0] is not _drivers.SUCCESS:
            driver.cuEventDestroy(event)
        handle = _drivers.unwrap(exported, "cuIpcGetEventHandle")
        self._serial += 1
        shared = SharedCudaEvent(self._serial, device, _drivers.handle_bytes(handle))
        self._made[shared.serial] = shared, event
        return shared

    def destroy(self, serials: list[int]) -> int:
        """Destroy these events; unknown ones are gone already. How many were destroyed with a pending record, ever.

        The driver keeps the place of such a one until that is complete, so no other event gets it. A dead process's
        record stays pending for ever.
        """
        driver = _drivers.load()
        for serial in serials:
            if serial in self._made:
                shared, event = self._made.pop(serial)
                self._enter(shared.device)
                self._pending += int(driver.cuEventQuery(event)[0]) == ERROR_NOT_READY
                _drivers.unwrap(driver.cuEventDestroy(event), "cuEventDestroy")
        return self._pending

    def held(self) -> list[SharedCudaEvent]:
        """All events, in the order in which they were made."""
        return [shared for shared, _ in self._made.values()]

    def _enter(self, device: str) -> None:
        context.ensure_context(self._devices[device])


def served_devices(wanted: list[int] | None) -> dict[str, int]:
    """UUID → ordinal of the devices to serve: `wanted`, by default all. InvalidDevice for an unknown ordinal.

    RuntimeError if the driver shows no device.
    """
    count = context.count()
    for ordinal in wanted or ():
        if not 0 <= ordinal < count:
            raise InvalidDevice(f"there is no device {ordinal}: {count} are visible")
    if not count:
        raise RuntimeError("the driver shows no device")
    return {context.uuid_of(ordinal): ordinal for ordinal in (range(count) if wanted is None else wanted)}
