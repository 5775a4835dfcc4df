"""What lies in the fleet's store, how bridges read it, and which machine has a node's name.

The store holds JSON, which anybody may have written.

A value names its owner by a number of 128 random bits, so that a write whose outcome was not told is known for one's
own when it is read again. Terms order the owners of a name; they decide who may be called by it, and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from ipcsync._wire import names
from ipcsync.errors import FleetUnavailable, NodeNameTaken
from ipcsync_bridge.transport import Conflict, Transport, Unavailable

T = TypeVar("T")

TRIES = 20  # of a write that others' writes come before
STORE_S = 5.0  # for a question to the store that no session waits for
_AGAIN_S = 0.1
_TRY_S = 2.5
_AT_ONCE = 32  # questions to the store

Hex = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
NodeName = Annotated[str, Meta(pattern="^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$")]
Count = Annotated[int, Meta(ge=0, le=(1 << 62))]


@dataclass
class Identity:
    """What this bridge says of itself.

    `owner` tells this machine's bridge from another one under the same name, `epoch` one coordinator from another.
    `term` is that of the name.
    """

    node: str
    owner: bytes
    epoch: bytes
    term: int = 0


class Owner(msgspec.Struct, frozen=True):
    """The value of `nodes.<node>`."""

    owner: Hex
    epoch: Hex
    term: Count
    version: int = 1


class Claim(msgspec.Struct, frozen=True):
    """The value of `names.<name>`."""

    node: NodeName
    owner: Hex
    epoch: Hex
    slot: Count
    incarnation: Count


def decode(value: bytes, kind: type[T]) -> T | None:
    """The value, None if it cannot be read."""
    try:
        return msgspec.json.decode(value, type=kind)
    except (msgspec.MsgspecError, ValueError):
        return None


async def read_all(transport: Transport, prefix: str, left: Callable[[], float]) -> dict[str, tuple[bytes, int]]:
    """The keys that begin with `prefix`; `left` is how long each question to the store may take. Raises Unavailable."""
    found: dict[str, tuple[bytes, int]] = {}

    async def read(key: str) -> None:
        found[key] = await transport.read(key, left())

    await for_each(await transport.keys(prefix, left()), read)
    return found


async def for_each(items: Collection[T], work: Callable[[T], Awaitable[None]]) -> None:
    """Await `work` for each item, for some at a time. The first error ends it."""
    left = iter(items)

    async def run() -> None:
        for item in left:
            await work(item)

    tasks = [asyncio.ensure_future(run()) for _ in range(min(_AT_ONCE, len(items)))]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def insist(ask: Callable[[float], Awaitable[T]], timeout: float) -> T:
    """What `ask` returns: it is given the deadline, and asks the store, again until that answers. FleetUnavailable."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            return await ask(deadline)
        except Unavailable as error:  # noqa: PERF203 - each try is one
            if time.monotonic() + _AGAIN_S >= deadline:
                raise FleetUnavailable(str(error), timeout=timeout) from None
            await asyncio.sleep(_AGAIN_S)


def left_until(deadline: float, most: float = _TRY_S) -> float:
    """The seconds for a question, which `insist` repeats, since a server without a leader drops some; 0.1 at least."""
    return max(min(deadline - time.monotonic(), most), 0.1)


def known_owner_id(path: str) -> bytes | None:
    """The same if there is one, None if no bridge of that name has run here."""
    try:
        with open(path, "rb") as file:
            known = file.read()
    except FileNotFoundError:
        return None
    return known if len(known) == 16 else None


def owner_id(path: str) -> bytes:
    """128 random bits in a file, by which a bridge recognises its own keys in the store."""
    known = known_owner_id(path)
    if known is None:
        known = os.urandom(16)
        descriptor = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(known)
        os.replace(f"{path}.new", path)
    return known


@dataclass(eq=False)
class Nodes:
    """The nodes' keys, as the node `me` reads and writes them. `is_there` asks a node whether it answers."""

    transport: Transport
    me: Identity
    ttl_s: float
    is_there: Callable[[str, float], Awaitable[bytes | None]]

    @property
    def _mine(self) -> Owner:
        return Owner(self.me.owner.hex(), self.me.epoch.hex(), self.me.term)

    async def _read(self, node: str, timeout: float = STORE_S) -> tuple[Owner | None, int]:
        value, revision = await self.transport.read(f"nodes.{node}", timeout)
        return decode(value, Owner), revision

    async def _write(self, last: int) -> None:
        await self.transport.cas(f"nodes.{self.me.node}", msgspec.json.encode(self._mine), last, STORE_S)

    async def take(self) -> None:
        """Take the node's name. Raises NodeNameTaken if another machine has it and answers within a TTL."""
        for _ in range(TRIES):
            known, revision = await self._read(self.me.node)
            is_anothers = revision and (known is None or known.owner != self._mine.owner)  # or its owner is unknown
            if is_anothers and await self.is_there(self.me.node, self.ttl_s) is not None:
                raise NodeNameTaken(
                    f"another bridge, which answers, has the name {self.me.node!r} in this fleet: give each node a "
                    "name of its own",
                    node=self.me.node,
                )
            self.me.term = max(self.me.term, 0 if known is None else known.term) + 1
            with contextlib.suppress(Conflict):
                await self._write(revision)
                await self._forget_earlier_names()
                return
        raise Unavailable(f"the key nodes.{self.me.node} changes all the time")

    async def _forget_earlier_names(self) -> None:
        """Remove the keys of this coordinator under other names: it has one bridge, so none answers to them."""
        for key, (value, revision) in (await read_all(self.transport, "nodes.", lambda: STORE_S)).items():
            known = decode(value, Owner)
            if known is not None and known.epoch == self._mine.epoch and key != f"nodes.{self.me.node}":
                with contextlib.suppress(Conflict):
                    await self.transport.cas(key, None, revision, STORE_S)

    async def keeps(self) -> bool:
        """Whether the name is still this node's; it is written again if the store has lost it. Raises Unavailable."""
        known, revision = await self._read(self.me.node)
        if known is not None and known.owner != self._mine.owner:
            return False
        if known is None or known.epoch != self._mine.epoch:
            try:
                await self._write(revision)
            except Conflict:
                return await self.keeps()
        return True

    async def everybody(self, timeout: float) -> dict[str, Owner]:
        """The nodes by name. FleetUnavailable."""
        found = await insist(lambda end: read_all(self.transport, "nodes.", lambda: left_until(end)), timeout)
        owners = {key.partition(".")[2]: decode(value, Owner) for key, (value, _) in found.items()}
        return {node: owner for node, owner in owners.items() if owner is not None and not names.why_not_node(node)}

    async def node_of(self, epoch: bytes, timeout: float) -> str | None:
        """The node that has an epoch, None if there is none. Raises FleetUnavailable."""
        owners = await self.everybody(timeout)
        return next((node for node, owner in owners.items() if owner.epoch == epoch.hex()), None)

    async def is_present(self, claim: Claim, timeout: float) -> bool:
        """Whether a claim is of the present epoch of its node. Raises Unavailable."""
        if claim.node == self.me.node:
            return claim.epoch == self._mine.epoch
        owner, _ = await self._read(claim.node, timeout)
        return owner is not None and owner.epoch == claim.epoch
