"""The CUDA events behind the slots: made some at a time, given out as rings, destroyed once nobody can touch them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from ipcsync.errors import DeviceMismatch, DriverError, EngineMismatch, IpcSyncError, ProtocolError, QuotaExceeded
from ipcsync_coordinator.state import Session
from ipcsync_keeper.link import DriverClient
from ipcsync_keeper.resources import SharedCudaEvent


class Pool:
    """The interprocess events of all devices, by serial, which `driver` makes and destroys.

    `limit` bounds their number, since drivers fail beyond some twenty thousand; `step` or more are made at a time.
    `held` are events of an earlier coordinator: slots have some of them, and `sweep` destroys the others. The first one
    of each device is its probe, which is kept for clients that test whether handles open.
    """

    def __init__(
        self, devices: list[str], driver: DriverClient, limit: int, step: int = 64, held: Sequence[SharedCudaEvent] = ()
    ) -> None:
        self._spare: dict[str, list[int]] = {uuid: [] for uuid in devices}
        self._driver = driver
        self._limit = limit
        self._step = step
        self._events = {shared.serial: shared for shared in held}
        self._probes: dict[str, SharedCudaEvent] = {}
        self.left_pending = 0
        """How many were destroyed with a record that never completes, and so take a place in the driver for ever."""
        for shared in held:
            if shared.device not in self._probes:
                self._probes[shared.device] = self._events.pop(shared.serial)

    @property
    def made(self) -> int:
        """How many CUDA events there are, with the probes and those that were left pending."""
        return len(self._events) + len(self._probes) + self.left_pending

    @property
    def devices(self) -> list[str]:
        return list(self._spare)

    def check_served(self, uuid: str) -> None:
        """Raise DeviceMismatch for a device that this coordinator does not serve; the other calls take served ones."""
        if uuid not in self._spare:
            served = ", ".join(self._spare)
            raise DeviceMismatch(f"the coordinator does not serve device {uuid!r:.80}; it serves {served}")

    def take(self, uuid: str, depth: int) -> list[int]:
        """A ring of `depth` unused events; QuotaExceeded beyond the limit."""
        self.probe_handle(uuid)
        spare = self._spare[uuid]
        missing = depth - len(spare)
        if missing > 0:
            unmade = len(self._spare) - len(self._probes)  # each device's probe has its place
            self._make_room(spare, missing + unmade)
            room = self._limit - self.made - unmade
            if missing > room:
                raise QuotaExceeded(f"there are {self.made} CUDA events already (--max-cuda-events)", limit=self._limit)
            try:
                self._driver.make(uuid, min(max(missing, self._step), room), self._add)
            except DriverError:  # it has no room for spare ones
                self._driver.make(uuid, missing, self._add)
        ring = spare[-depth:]
        del spare[-depth:]
        return ring

    def _add(self, made: list[SharedCudaEvent]) -> None:
        self._events.update((shared.serial, shared) for shared in made)
        self.give_back([shared.serial for shared in made])

    def _make_room(self, spare: list[int], missing: int) -> None:
        """Destroy as many spare events of other devices as the limit asks for: no process has them."""
        for other in self._spare.values():
            too_many = self.made + missing - self._limit
            if too_many > 0 and other is not spare:
                ring = other[:too_many]
                del other[:too_many]
                self.destroy(ring)

    def handles(self, ring: list[int]) -> list[bytes]:
        """The handles of a ring's events; KeyError for one that does not exist."""
        return [self._events[serial].handle for serial in ring]

    def give_back(self, ring: list[int]) -> None:
        for serial in ring:
            self._spare[self._events[serial].device].append(serial)

    def destroy(self, ring: list[int]) -> None:
        """Destroy a ring of a dead recorder, whose state is unknown."""
        for serial in ring:
            del self._events[serial]
        self._driver.destroy(ring, partial(setattr, self, "left_pending"))

    def sweep(self, used: Iterable[int]) -> None:
        """Destroy the events of an earlier coordinator that are not `used`: their state is unknown."""
        self.destroy(list(self._events.keys() - set(used)))

    def probe_handle(self, uuid: str) -> bytes:
        if uuid not in self._probes:
            if not self._spare[uuid]:  # else it came too late for an earlier call
                self._driver.make(uuid, 1, self._add)
            self._probes[uuid] = self._events.pop(self._spare[uuid].pop(0))
        return self._probes[uuid].handle

    def why_not_event(self, uuid: str) -> str | None:
        """Why event handles cannot be made on a device, None if they can; tested with real calls."""
        try:
            self.probe_handle(uuid)
        except IpcSyncError as error:
            return str(error)
        return None

    def choose_engine(self, session: Session, wanted: str, device: str, why_not_timeline: str) -> str:
        """The engine of a new event on `device`. EngineMismatch if the wanted one cannot work, with the reason.

        `why_not_timeline` is what the process found when it tried. The coordinator needs no GPU for words, and so has
        nothing to try there: it stores them with the CPU. DeviceMismatch for a device that is not served.
        """
        if wanted not in ("auto", "event", "timeline"):
            raise ProtocolError(f"an engine must be 'auto', 'event' or 'timeline', not {wanted!r}", code="engine")
        self.check_served(device)
        reasons: dict[str, str | None] = {}
        if wanted != "event":
            if not why_not_timeline:
                return "timeline"
            reasons["timeline"] = why_not_timeline
        if wanted != "timeline":  # last: it makes a context and CUDA events, which nobody may want
            reasons["event"] = session.why_not_event or self.why_not_event(device)
            if not reasons["event"]:
                return "event"
        why = "; ".join(f"{engine}: {reason}" for engine, reason in reasons.items())
        raise EngineMismatch(f"the engine {wanted!r} cannot work between this process and the coordinator: {why}")
