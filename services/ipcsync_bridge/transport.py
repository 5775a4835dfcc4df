"""The transport between bridges, and the store of the fleet's names: six calls, implemented over NATS.

`ask`: what is answered, and `send`: what is not. `listen`, once: what is called with what comes. `cas`, `read` and
`keys`: the store of names. Nothing here gives a guarantee of delivery or of order, and none is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeAlias

from ipcsync.errors import IpcSyncError

Answer: TypeAlias = Callable[[bytes], Coroutine[Any, Any, None]]


class Unreachable(IpcSyncError):  # noqa: N818 - as ipcsync's own errors
    """No node listens there now."""


class CutOff(Unreachable):
    """This node is cut off: it is not known who listens."""


class Conflict(IpcSyncError):  # noqa: N818 - as ipcsync's own errors
    """A key is not at the revision that was expected; or the outcome of an earlier try is known now."""


class Unavailable(IpcSyncError):  # noqa: N818 - as ipcsync's own errors
    """The store did not answer in time, or refused; whether something was written is not known."""


class Listener(Protocol):
    """Receives messages. `sender` is a node's name, which the server vouches for."""

    def received(self, sender: str, data: bytes, answer: Answer | None) -> None:
        """A message; `answer` sends the reply, None if none is awaited."""

    def connected(self) -> None:
        """The connection is back."""

    def closed(self, why: str) -> None:
        """The connection has ended, and will not come back."""


class Transport(Protocol):
    """One node's connection to the others."""

    async def listen(self, listener: Listener, timeout: float | None) -> None:
        """Connect, and have `listener` called from now on. Unavailable if that cannot be within `timeout` seconds.

        None is for one try of a bridge that has links already: it takes seconds, and does not ask the server to answer.
        """

    async def send(self, to: str, data: bytes) -> bool:
        """Send a node what it does not answer; False if nothing was sent."""

    async def ask(self, to: str, data: bytes, timeout: float) -> bytes:
        """Ask a node: its answer. Unreachable at once if none listens, or as CutOff; TimeoutError after `timeout` s."""

    async def cas(self, key: str, value: bytes | None, last: int, timeout: float) -> int:
        """Write a key that is at revision `last` (0: there is none), or delete it (value None): the new revision.

        Conflict, or Unavailable: then it may be applied later still.
        """

    async def read(self, key: str, timeout: float) -> tuple[bytes, int] | None:
        """What a key holds, with its revision; None if there is no such key. Raises Unavailable."""

    async def keys(self, prefix: str, timeout: float) -> list[str]:
        """The keys that begin with `prefix`, which ends in a dot; some may have been deleted. Raises Unavailable."""

    @property
    def server(self) -> str:
        """The server's URL, empty if there is no connection."""

    async def close(self) -> None:
        """Flush what was sent, if that is quick, and end."""
