"""Mirrors: slots that stand for uses of other nodes' slots; here is which of those are lost for good.

A use that was lost on this node stays lost, also for a session that asks for it after the mirror was released. So a
lost mirror leaves a grave, which says up to which generation it is good. Graves are kept for the coordinator's life,
and their number is bounded: beyond the bound, all uses of that epoch are lost.
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
    """The rest of a lost use: generations up to `good` stay good. `reason` is that of `Finish`."""

    node: str
    good: int
    reason: str


class Graves:
    """The uses of other nodes' slots that are lost for good on this node."""

    def __init__(self, most: int = MOST_GRAVES) -> None:
        self._most = most
        self._graves: dict[Origin, Grave] = {}
        self._epochs: dict[bytes, Grave] = {}  # epochs of which every use is lost
        self._new: list[tuple[Origin, Grave]] = []

    def __len__(self) -> int:
        return len(self._graves) + len(self._epochs)

    def dig(self, origin: Origin, grave: Grave) -> None:
        """Add a lost use. The first call for a use counts."""
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
        """The grave of a use, None if the use is not lost."""
        return self._graves.get(origin) or self._epochs.get(origin.epoch)

    def take_new(self) -> list[tuple[Origin, Grave]]:
        """The graves since the last call."""
        new, self._new = self._new, []
        return new

    def everything(self) -> list[tuple[Origin, Grave]]:
        """All graves; a whole epoch has slot and incarnation 0."""
        epochs = [(Origin(epoch, 0, 0), grave) for epoch, grave in self._epochs.items()]
        return [*epochs, *self._graves.items()]

    def restore(self, origin: Origin, grave: Grave) -> None:
        """Add a grave of an earlier coordinator."""
        if self.find(origin) is None:
            self._put(origin, grave)
