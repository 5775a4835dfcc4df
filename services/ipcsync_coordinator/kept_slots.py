"""The slots that a GPU may still touch for a recorder that is gone, and from how many on that is too much.

They do not count for the pool but within limits of their own, since what ends their use is in nobody's hands here.
"""

from __future__ import annotations

from collections import Counter

from ipcsync.errors import QuotaExceeded
from ipcsync_coordinator.state import Slot
from ipcsync_keeper.config import Settings


class KeptSlots:
    """Slots by recorders that are gone. One that every session has released is "kept", and counted here."""

    def __init__(self, limits: Settings) -> None:
        self._limits = limits
        self.by_recorder: dict[int, list[Slot]] = {}
        self._slots: Counter[str] = Counter()  # by engine; counted, since each open asks
        self._cuda_events = 0

    def hold(self, slot: Slot) -> None:
        """Note that its recorder is gone, and its work may not be over."""
        assert slot.recorder is not None
        self.by_recorder.setdefault(slot.recorder.serial, []).append(slot)

    def count(self, slot: Slot, by: int) -> None:
        """Count one that is kept from now on (1), or not any more (-1)."""
        self._slots[slot.engine] += by
        self._cuda_events += by * len(slot.ring)

    @property
    def within_limits(self) -> int:
        """How many are kept, without those beyond an engine's limit."""
        return sum(min(count, self._limits.kept_slots) for count in self._slots.values())

    def counts(self, left_pending: int) -> dict[str, int]:
        """How many words and CUDA events are kept, as in `Client.stats()`; `left_pending` as in `Pool`."""
        return {"timeline": self._slots["timeline"], "event": self._cuda_events + left_pending}

    @property
    def limits(self) -> dict[str, int]:
        """From how many of them on new events are refused."""
        return {"timeline": self._limits.kept_slots, "event": self._limits.kept_cuda_events}

    def check(self, engine: str, left_pending: int) -> None:
        """Raise QuotaExceeded if too much of an engine is kept for a new event; `left_pending` as in `Pool`."""
        bounds = [(self._slots[engine], self._limits.kept_slots, "slots", "half of --pool")]
        if engine == "event":
            count = self.counts(left_pending)[engine]
            bounds.append((count, self._limits.kept_cuda_events, "CUDA events", "half of --max-cuda-events"))
        for count, limit, what, setting in bounds:
            if count >= limit:
                raise QuotaExceeded(
                    f"new events of the engine {engine!r} are refused: {count} {what} of dead recorders are kept "
                    f"({setting}), since their GPU work may go on: {self._why()}",
                    limit=limit,
                )

    def _why(self) -> str:
        of_all = (slot for slots in self.by_recorder.values() for slot in slots)
        pids = {slot.recorder.pid for slot in of_all if slot.recorder and slot.held > 0}
        if pids:
            named = ", ".join(map(str, sorted(pids)[:8]))
            return f"a process forked from pid {named} still has the driver's files open: end it (the log names it)"
        return (
            "whether it does is never known (CUDA MPS, no lock, or a record left pending): start the coordinator anew"
        )
