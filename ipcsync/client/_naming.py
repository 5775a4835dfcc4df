"""A client's names of events and streams, and the coordinator's: the same, with the client's prefix before them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ipcsync._wire import names
from ipcsync.errors import IpcSyncError, ProtocolError

T = TypeVar("T")

_SHOWN = 80  # characters of a name that is refused


class Naming:
    """The names of one client. The coordinator, and so every other client, has them with `prefix` before them."""

    def __init__(self, prefix: str) -> None:
        self.prefix: str = plain(prefix, "prefix")
        if self.prefix:
            _check(f"{self.prefix}x", f"the prefix {_short(prefix)}")

    def full(self, name: str) -> str:
        """The coordinator's name. ProtocolError if it is invalid."""
        name = plain(name)
        _check(name, f"the name {_short(name)}")
        if self.prefix:
            _check(self.prefix + name, f"the name {_short(name)}, behind the prefix {_short(self.prefix)},")
        return self.prefix + name

    def begin(self, prefix: str) -> str:
        """The coordinator's prefix for names that begin with `prefix` here."""
        return self.prefix + plain(prefix, "prefix")

    def shown(self, name: str) -> str:
        """This client's name; the whole name for an event of other clients, to which a point has led."""
        return name.removeprefix(self.prefix)

    def asking(self, ask: Callable[[], T]) -> T:
        """Return `ask()`; an error that it raises has this client's name in `event`."""
        try:
            return ask()
        except IpcSyncError as error:
            event = getattr(error, "event", "")
            if event and self.prefix:
                error.event = self.shown(event)  # type: ignore[attr-defined] # asked for above
            raise


def plain(text: str, what: str = "name") -> str:
    """The text as a plain str: subclasses of str (of numpy, enum or a user) cannot be sent."""
    if not isinstance(text, str):
        raise TypeError(f"a {what} is a str, but got {type(text).__name__}")
    return str.__str__(text)


def _short(name: str) -> str:
    return repr(name) if len(name) <= _SHOWN else f"{name[:_SHOWN]!r}…"


def _check(name: str, what: str) -> None:
    reason = names.why_not(name)
    if reason:
        raise ProtocolError(f"{what} {reason}", code="name")
