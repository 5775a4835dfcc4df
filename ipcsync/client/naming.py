"""What a client calls events and streams, and what the coordinator does: the same, behind the client's prefix."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ipcsync._wire import names
from ipcsync.errors import IpcSyncError, ProtocolError

T = TypeVar("T")


class Naming:
    """The names of one client, which all begin with `prefix` for everybody else."""

    def __init__(self, prefix: str) -> None:
        self.prefix: str = plain(prefix, "prefix")
        if self.prefix:
            _check(f"{self.prefix}x", f"the prefix {prefix!r:.80}")

    def full(self, name: str) -> str:
        """The name as the coordinator knows it. ProtocolError if it cannot name anything."""
        name = plain(name)
        _check(name, f"the name {name!r:.80}")
        if self.prefix:
            _check(self.prefix + name, f"the name {name!r:.80}, behind the prefix {self.prefix!r:.80},")
        return self.prefix + name

    def begin(self, prefix: str) -> str:
        """What the full names of those begin with whose names begin with `prefix` here."""
        return self.prefix + plain(prefix, "prefix")

    def shown(self, name: str) -> str:
        """The name as this client has it; of an event of others, which a point has led to, all of it."""
        return name.removeprefix(self.prefix)

    def asking(self, ask: Callable[[], T]) -> T:
        """What `ask()` returns; the `event` of an error is named as this client has it."""
        try:
            return ask()
        except IpcSyncError as error:
            event = getattr(error, "event", "")
            if event and self.prefix:
                error.event = self.shown(event)  # type: ignore[attr-defined] # asked for above
            raise


def plain(text: str, what: str = "name") -> str:
    """The text as a plain str: what numpy, an enum or a user derives from str does not travel."""
    if not isinstance(text, str):
        raise TypeError(f"a {what} is a str, but got {type(text).__name__}")
    return str.__str__(text)


def _check(name: str, what: str) -> None:
    reason = names.why_not(name)
    if reason:
        raise ProtocolError(f"{what} {reason}", code="name")
