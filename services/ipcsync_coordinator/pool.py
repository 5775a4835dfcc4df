"""The CUDA events behind the slots: made ahead, given out as rings, destroyed only once no process can touch them.

And only once no record of them is pending: until then they are set aside, count as before, and are asked for again each
second. What a dead process left pending may stay so for ever.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

from ipcsync._logs import fields
from ipcsync.errors import DeviceMismatch, IpcSyncError, QuotaExceeded
from ipcsync_keeper.events import SharedCudaEvent
from ipcsync_keeper.link import DriverClient, Made

log = logging.getLogger("ipcsync.coordinator")

_AT_A_TIME = 256
"""How many events that were set aside are asked for again at a time."""


@dataclass(eq=False)
class _Device:
    is_open: bool = False
    is_refilling: bool = False
    spare: list[int] = field(default_factory=list)
    probe: bytes | None = None


class Pool:
    """The interprocess events of all devices, by serial, which `driver` makes and destroys.

    `limit` bounds their number, since drivers fail beyond some twenty thousand. `held` are events of an earlier
    coordinator: slots have some of them, and `sweep` destroys the others.
    """

    def __init__(
        self, devices: list[str], driver: DriverClient, limit: int, step: int = 64, held: Iterable[SharedCudaEvent] = ()
    ) -> None:
        self._devices = {uuid: _Device() for uuid in devices}
        self._driver = driver
        self._limit = limit
        self._step = step
        self._refills = True
        self._events = {shared.serial: shared for shared in held}
        self.made = len(self._events)
        self._asked_for = 0  # ahead, and not answered yet
        self._aside: list[int] = []
        for shared in self._events.values():
            self._devices[shared.device].is_open = True

    @property
    def aside(self) -> int:
        """How many of dead recorders are set aside, with a pending record."""
        return len(self._aside)

    @property
    def devices(self) -> list[str]:
        """The UUIDs of the devices that this coordinator serves."""
        return list(self._devices)

    def _device(self, uuid: str) -> _Device:
        device = self._devices.get(uuid)
        if device is None:
            served = ", ".join(self._devices)
            raise DeviceMismatch(f"the coordinator does not serve device {uuid!r:.80}; it serves {served}")
        return device

    def take(self, uuid: str, depth: int) -> list[int]:
        """A ring of `depth` unused events; QuotaExceeded beyond the limit."""
        device = self._device(uuid)
        missing = depth - len(device.spare)
        if missing > 0:
            self._make_room(device, missing)
            if self.made + self._asked_for + missing > self._limit:
                aside = f", {len(self._aside)} of them set aside with a pending record" if self._aside else ""
                raise QuotaExceeded(
                    f"there are {self.made} CUDA events already{aside} (--max-cuda-events)", limit=self._limit
                )
            self._add(device, self._driver.make(uuid, missing))
            device.is_open = True
        ring = device.spare[-depth:]
        del device.spare[-depth:]
        return ring

    def _make_room(self, device: _Device, missing: int) -> None:
        """Destroy as many spare events of other devices as the limit asks for: no process has them."""
        for other in self._devices.values():
            too_many = self.made + self._asked_for + missing - self._limit
            if too_many > 0 and other is not device:
                ring, other.spare = other.spare[:too_many], other.spare[too_many:]
                self.destroy(ring)

    def _add(self, device: _Device, made: Made) -> None:
        self.made += len(made)
        self._events.update((shared.serial, shared) for shared in made)
        device.spare += [shared.serial for shared in made]

    def handles(self, ring: list[int]) -> list[bytes]:
        """The handles of a ring's events; KeyError for one that does not exist."""
        return [self._events[serial].handle for serial in ring]

    def give_back(self, ring: list[int]) -> None:
        """Take back a ring that every session has released."""
        for serial in ring:
            self._devices[self._events[serial].device].spare.append(serial)

    def destroy(self, ring: list[int]) -> None:
        """Destroy a ring of a dead recorder, whose state is unknown; what is pending is set aside."""
        if ring:
            self.made -= len(ring)
            for serial in ring:
                del self._events[serial]
            self._driver.destroy(ring, self._set_aside)

    def destroy_aside(self) -> None:
        """Ask again for some of those set aside."""
        asked, self._aside = self._aside[:_AT_A_TIME], self._aside[_AT_A_TIME:]

        def settle(pending: list[int]) -> None:
            self.made -= len(asked)
            self._set_aside(pending)

        if asked:
            self._driver.destroy(asked, settle)

    def _set_aside(self, pending: list[int]) -> None:
        self.made += len(pending)
        self._aside += pending

    def sweep(self, used: Iterable[int]) -> None:
        """Destroy the events of an earlier coordinator that are not `used`: their state is unknown."""
        self.destroy(list(self._events.keys() - set(used)))

    def refill(self) -> None:
        """Make a step of spare events ahead for each device that has few."""
        for uuid, device in self._devices.items():
            count = min(self._step, self._limit - self.made - self._asked_for)
            is_due = device.is_open and not device.is_refilling and len(device.spare) < self._step
            if self._refills and is_due and count > 0:
                self._refill(uuid, device, count)

    def _refill(self, uuid: str, device: _Device, count: int) -> None:
        def take_in(made: Made | IpcSyncError) -> None:
            device.is_refilling = False
            self._asked_for -= count
            if isinstance(made, IpcSyncError):
                self._refills = False  # events are then made on demand, which reports the error
                log.error("CUDA events cannot be made ahead any more", extra=fields(why=made))
            else:
                self._add(device, made)

        device.is_refilling = True
        self._asked_for += count
        self._driver.make_ahead(uuid, count, take_in)

    def probe_handle(self, uuid: str) -> bytes:
        """The handle of an event that is kept for clients that test whether handles open."""
        device = self._device(uuid)
        if device.probe is None:
            device.probe = self._driver.probe(uuid)
            device.is_open = True
            self.made += 1
        return device.probe

    def why_not_event(self, uuid: str) -> str | None:
        """Why event handles cannot be made on a device, None if they can; tested with real calls.

        DeviceMismatch for a device that is not served here.
        """
        self._device(uuid)
        try:
            self.probe_handle(uuid)
        except IpcSyncError as error:
            return str(error)
        return None

    def why_not_timeline(self, uuid: str) -> str | None:
        """Why timeline words do not work on a device, None if they do; tested with real calls."""
        self._device(uuid)
        return self._driver.why_not_timeline(uuid)
