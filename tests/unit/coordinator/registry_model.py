"""What the registry promises, in the words of the contract: a model of uses and who holds them, without slots."""

from __future__ import annotations

from dataclasses import dataclass, field

Key = tuple[int, int]


@dataclass
class Use:
    """One use of a slot. `holders` may still touch it, of whom `active` have it open.

    `is_held`: its recorder is gone, and GPU work of that may still touch it.
    """

    name: str
    state: str = "open"
    recorder: int | None = None
    is_drained: bool = False
    is_held: bool = False
    active: set[int] = field(default_factory=set)
    holders: set[int] = field(default_factory=set)


class Model:
    """What is promised, in the words of the contract."""

    def __init__(self) -> None:
        self.uses: dict[Key, Use] = {}
        self.kept: dict[Key, int] = {}  # uses that are over, by their recorder, whose GPU work is not
        self.live: set[int] = set()
        self.there: set[int] = set()  # live, or may still touch something (its own line, if it only fell silent)
        self.silent: set[int] = set()

    def named(self, name: str) -> Key | None:
        found = [key for key, use in self.uses.items() if name and use.name == name and use.state == "open"]
        assert len(found) <= 1
        return found[0] if found else None

    def take(self, session: int, key: Key) -> None:
        use = self.uses[key]
        use.active.add(session)
        use.holders.add(session)

    def leave(self, session: int, key: Key, *, broke: bool, released: bool, drained: bool = False) -> None:
        use = self.uses[key]
        use.active.discard(session)
        if released:
            use.holders.discard(session)
        if use.recorder == session:
            if broke and not use.is_drained:
                use.state = "broken"
            elif use.state == "open":
                use.state = "closed"
            use.is_drained = use.is_drained or ((released or drained) and use.state == "closed")
        elif use.state == "open" and not use.active:
            use.state = "closed"
            use.is_drained = use.recorder is None
        if not use.holders:
            del self.uses[key]
            if use.is_held:
                assert use.recorder is not None
                self.kept[key] = use.recorder

    def end(self, session: int, *, broke: bool, released: bool, held: bool = False) -> None:
        self.live.discard(session)
        for key in [key for key, use in self.uses.items() if session in use.holders]:
            self.uses[key].is_held |= held and self.uses[key].recorder == session and not self.uses[key].is_drained
            self.leave(session, key, broke=broke, released=released)
        if released or session not in self.silent:
            self.settle(session)

    def working(self) -> list[int]:
        """Recorders that are gone, and whose GPU work may go on."""
        held = {use.recorder for use in self.uses.values() if use.is_held and use.recorder is not None}
        return sorted(held | set(self.kept.values()))

    def work_ends(self, session: int) -> None:
        self.kept = {key: recorder for key, recorder in self.kept.items() if recorder != session}
        for use in self.uses.values():
            use.is_held &= use.recorder != session

    def settle(self, session: int) -> None:
        if session not in self.live and not any(session in use.holders for use in self.uses.values()):
            self.there.discard(session)

    def draining(self) -> list[tuple[int, Key]]:
        """Who lives and has closed a use, but may touch it still."""
        uses = sorted(self.uses.items(), key=lambda item: item[0])
        return [
            (session, key) for key, use in uses for session in sorted(use.holders - use.active) if session in self.live
        ]

    def held(self, session: int) -> list[Key]:
        return [key for key, use in self.uses.items() if session in use.holders]
