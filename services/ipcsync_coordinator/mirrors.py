"""Mirrors: slots that stand for uses of other nodes' slots. Which there are, and which are lost for good.

What was lost on this node once stays lost, also for a session that comes when nobody holds the mirror any more: so a
lost mirror leaves a grave, which says up to where it is good. Graves are kept for the coordinator's life, and bounded:
beyond the bound, all uses of that epoch are lost.
"""

from __future__ import annotations

from typing import NamedTuple

MOST_GRAVES = 65_536


class Origin(NamedTuple):
    """The use of a slot of another node's coordinator."""

    epoch: bytes
    slot: int
    incarnation: int


class Grave(NamedTuple):
    """What stays good of a use that is lost: generations up to `good`. `reason` is that of `Finish`."""

    node: str
    good: int
    reason: str


class Graves:
    """The uses of other nodes' slots that are lost for good on this node."""

    def __init__(self, most: int = MOST_GRAVES) -> None:
        self._most = most
        self._graves: dict[Origin, Grave] = {}
        self._epochs: dict[bytes, Grave] = {}  # of which all is lost
        self._new: list[tuple[Origin, Grave]] = []

    def __len__(self) -> int:
        return len(self._graves) + len(self._epochs)

    def dig(self, origin: Origin, grave: Grave) -> None:
        """A use is lost. The first word of that counts."""
        if self.find(origin) is not None:
            return
        self._new.append((origin, grave))
        self._put(origin, grave)

    def _put(self, origin: Origin, grave: Grave) -> None:
        if not origin.incarnation or len(self._graves) >= self._most:
            for known in [each for each in self._graves if each.epoch == origin.epoch]:
                del self._graves[known]
            self._epochs[origin.epoch] = grave._replace(good=0)
        else:
            self._graves[origin] = grave

    def find(self, origin: Origin) -> Grave | None:
        """What is left of a use that is lost, None for one that is not."""
        return self._graves.get(origin) or self._epochs.get(origin.epoch)

    def take_new(self) -> list[tuple[Origin, Grave]]:
        """Those since the last call."""
        new, self._new = self._new, []
        return new

    def everything(self) -> list[tuple[Origin, Grave]]:
        """All of them; a whole epoch as its slot and incarnation 0."""
        epochs = [(Origin(epoch, 0, 0), grave) for epoch, grave in self._epochs.items()]
        return [*epochs, *self._graves.items()]

    def restore(self, origin: Origin, grave: Grave) -> None:
        """Take in one that another coordinator left."""
        if self.find(origin) is None:
            self._put(origin, grave)
