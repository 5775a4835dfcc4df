"""Which uses of other nodes' slots are lost for good on this node.

A use that was lost here stays lost, also for a session that asks for it after its mirror was released. So a lost mirror
leaves a tombstone, which says up to which generation it is good. Tombstones are kept for the coordinator's life, and
their number is bounded: beyond the bound, all uses of that epoch are lost.
"""

from __future__ import annotations

from typing import NamedTuple

MOST_TOMBSTONES = 65_536


class Origin(NamedTuple):
    """The use of a slot of another node's coordinator."""

    epoch: bytes
    slot: int
    incarnation: int


class Tombstone(NamedTuple):
    """The rest of a lost use: generations up to `good` stay good. `reason` is that of `Finish`."""

    node: str
    good: int
    reason: str


class Tombstones:
    """The uses of other nodes' slots that are lost for good on this node."""

    def __init__(self, most: int = MOST_TOMBSTONES) -> None:
        self._most = most
        self._tombstones: dict[Origin, Tombstone] = {}
        self._epochs: dict[bytes, Tombstone] = {}  # epochs of which every use is lost
        self.new: list[tuple[Origin, Tombstone]] = []  # in no record of the journal yet

    def __len__(self) -> int:
        return len(self._tombstones) + len(self._epochs)

    def add(self, origin: Origin, tombstone: Tombstone) -> None:
        """Add a lost use. The first call for a use counts."""
        if self.find(origin) is not None:
            return
        self.new.append((origin, tombstone))
        if not origin.incarnation or len(self._tombstones) >= self._most:
            for known in [each for each in self._tombstones if each.epoch == origin.epoch]:
                del self._tombstones[known]
            self._epochs[origin.epoch] = tombstone._replace(good=0)
        else:
            self._tombstones[origin] = tombstone

    def find(self, origin: Origin) -> Tombstone | None:
        """The tombstone of a use, None if the use is not lost."""
        return self._tombstones.get(origin) or self._epochs.get(origin.epoch)

    def everything(self) -> list[tuple[Origin, Tombstone]]:
        """All tombstones; a whole epoch has slot and incarnation 0."""
        epochs = [(Origin(epoch, 0, 0), tombstone) for epoch, tombstone in self._epochs.items()]
        return [*epochs, *self._tombstones.items()]
