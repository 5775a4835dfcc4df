"""The CUDA events behind the slots: made ahead, handed out as rings, destroyed only when nobody can touch them.

All device work of the coordinator goes through here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ipcsync import _drivers
from ipcsync._native import context
from ipcsync.errors import DeviceMismatch, InvalidDevice, QuotaExceeded

_INTERPROCESS = 4 | 2  # CU_EVENT_INTERPROCESS needs CU_EVENT_DISABLE_TIMING


@dataclass(frozen=True, eq=False)
class SharedCudaEvent:
    """One interprocess CUDA event. `serial` never comes again, while handle bytes can."""

    serial: int
    event: Any
    handle: bytes


@dataclass(eq=False)
class _Device:
    ordinal: int
    is_open: bool = False
    spare: list[SharedCudaEvent] = field(default_factory=list)
    probe: SharedCudaEvent | None = None


class Pool:
    """The interprocess events of all devices.

    `limit` bounds how many there are at once, since drivers fail beyond some twenty thousand. A device's context is
    created with its first event, because an idle one costs hundreds of megabytes on a real GPU.
    """

    def __init__(self, devices: dict[str, int], limit: int, step: int = 64) -> None:
        self._devices = {uuid: _Device(ordinal) for uuid, ordinal in devices.items()}
        self._limit = limit
        self._step = step
        self._serial = 0
        self.made = 0

    @property
    def devices(self) -> list[str]:
        """The UUIDs of the devices that this coordinator serves."""
        return list(self._devices)

    def enter(self, uuid: str) -> None:
        """Make a context of a device current on this thread; DeviceMismatch for one that is not served here."""
        device = self._devices.get(uuid)
        if device is None:
            served = ", ".join(self._devices)
            raise DeviceMismatch(f"the coordinator does not serve device {uuid!r:.80}; it serves {served}")
        context.ensure_context(device.ordinal)
        device.is_open = True

    def take(self, uuid: str, depth: int) -> list[SharedCudaEvent]:
        """A ring of `depth` events that nobody uses; QuotaExceeded beyond the limit."""
        self.enter(uuid)
        spare = self._devices[uuid].spare
        if len(spare) < depth:
            if self.made + depth - len(spare) > self._limit:
                raise QuotaExceeded(f"there are {self.made} CUDA events already (--max-cuda-events)", limit=self._limit)
            self._make(spare, depth - len(spare))
        ring = spare[-depth:]
        del spare[-depth:]
        return ring

    def give_back(self, uuid: str, ring: list[SharedCudaEvent]) -> None:
        """Take back a ring that every session has let go of."""
        self._devices[uuid].spare.extend(ring)

    def destroy(self, uuid: str, ring: list[SharedCudaEvent]) -> None:
        """Destroy a ring that a dead recorder left as it was."""
        if not ring:
            return
        self.enter(uuid)
        driver = _drivers.load()
        for shared in ring:
            _drivers.unwrap(driver.cuEventDestroy(shared.event), "cuEventDestroy")
            self.made -= 1

    def refill(self, uuid: str) -> bool:
        """Make one step of spare events ahead if there are few; whether it did."""
        device = self._devices[uuid]
        room = min(self._step, self._limit - self.made)
        if not device.is_open or len(device.spare) >= self._step or room <= 0:
            return False
        self.enter(uuid)
        self._make(device.spare, room)
        return True

    def ordinal(self, uuid: str) -> int:
        """The ordinal of a device that is served here, whose context is then current on this thread."""
        self.enter(uuid)
        return self._devices[uuid].ordinal

    def probe_handle(self, uuid: str) -> bytes:
        """The handle of an event kept for clients that want to try whether handles open."""
        device = self._devices.get(uuid)
        if device is None or device.probe is None:
            (probe,) = self.take(uuid, 1)
            device = self._devices[uuid]
            device.probe = probe
        assert device.probe is not None
        return device.probe.handle

    def close(self) -> None:
        """Destroy the spare events; those in use end with the process, after their importers were told."""
        for uuid, device in self._devices.items():
            ring, device.spare = device.spare, []
            self.destroy(uuid, ring)

    def _make(self, spare: list[SharedCudaEvent], count: int) -> None:
        driver = _drivers.load()
        for _ in range(count):
            event = _drivers.unwrap(driver.cuEventCreate(_INTERPROCESS), "cuEventCreate")
            # Exported at once: export wants the context current, and the bytes are the same each time.
            exported = driver.cuIpcGetEventHandle(event)
            if exported[0] is not _drivers.SUCCESS:
                driver.cuEventDestroy(event)
            handle = _drivers.unwrap(exported, "cuIpcGetEventHandle")
            self._serial += 1
            self.made += 1
            spare.append(SharedCudaEvent(self._serial, event, _drivers.handle_bytes(handle)))


def served_devices(wanted: list[int] | None) -> dict[str, int]:
    """UUID → ordinal of the devices to serve: those in `wanted`, all by default. InvalidDevice for one that is none."""
    count = context.count()
    ordinals = list(range(count)) if wanted is None else wanted
    for ordinal in ordinals:
        if not 0 <= ordinal < count:
            raise InvalidDevice(f"there is no device {ordinal}: {count} are visible")
    return {context.uuid_of(ordinal): ordinal for ordinal in ordinals}
