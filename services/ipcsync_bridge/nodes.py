"""The nodes of the fleet by name: which machine has a node's name, and with which coordinator's epoch."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Awaitable, Callable

import msgspec

from ipcsync._wire import nodes
from ipcsync.errors import FleetUnavailable, NodeNameTaken
from ipcsync_bridge.store import STORE_S, TRIES, Claim, Owner, decode, insist, one_try, read_all
from ipcsync_bridge.transport import Conflict, Transport, Unavailable


def _owner_file(directory: str, fleet: str, node: str) -> str:
    return os.path.join(directory, f"bridge-{fleet}-{node}")


def known_owner_id(directory: str, fleet: str, node: str) -> bytes | None:
    """The same if there is one, None if no bridge of that name has run here."""
    try:
        with open(_owner_file(directory, fleet, node), "rb") as file:
            known = file.read()
    except FileNotFoundError:
        return None
    return known if len(known) == 16 else None


def owner_id(directory: str, fleet: str, node: str) -> bytes:
    """128 random bits in the runtime directory, by which a bridge recognises its own keys in the store."""
    known = known_owner_id(directory, fleet, node)
    if known is not None:
        return known
    path = _owner_file(directory, fleet, node)
    fresh = os.urandom(16)
    descriptor = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(fresh)
    os.replace(f"{path}.new", path)
    return fresh


class Nodes:
    """The nodes' keys, as one node reads and writes them.

    `owner` and `epoch` are its own, in hex; `is_there` asks a node whether it answers.
    """

    def __init__(
        self,
        transport: Transport,
        node: str,
        owner: bytes,
        epoch: bytes,
        ttl_s: float,
        is_there: Callable[[str, float], Awaitable[bytes | None]],
    ) -> None:
        self._transport = transport
        self.node = node
        self.owner = owner.hex()
        self.epoch = epoch.hex()
        self.ttl_s = ttl_s
        self.is_there = is_there
        self.term = 0

    async def take(self) -> None:
        """Take the node's name. Raises NodeNameTaken if another machine has it and answers, and Unavailable."""
        key = f"nodes.{self.node}"
        for _ in range(TRIES):
            found = await self._transport.read(key, STORE_S)
            known = None if found is None else decode(found[0], Owner)
            if found is not None and (known is None or known.owner != self.owner):  # or its owner is unknown
                await self._raise_if_alive()
            self.term = max(self.term, 0 if known is None else known.term) + 1
            value = msgspec.json.encode(Owner(self.owner, self.epoch, self.term))
            try:
                await self._transport.cas(key, value, 0 if found is None else found[1], STORE_S)
            except Conflict:
                continue
            await self._forget_earlier_names()
            return
        raise Unavailable(f"the key {key} changes all the time")

    async def _forget_earlier_names(self) -> None:
        """Remove the keys of this coordinator under other names: it has one bridge, so none answers to them."""
        for key, (value, revision) in (await read_all(self._transport, "nodes.", lambda: STORE_S)).items():
            known = decode(value, Owner)
            if known is not None and known.epoch == self.epoch and key != f"nodes.{self.node}":
                with contextlib.suppress(Conflict):
                    await self._transport.cas(key, None, revision, STORE_S)

    async def _raise_if_alive(self) -> None:
        """Ask who has the name for a whole TTL; one answer means that it is taken."""
        if await self.is_there(self.node, self.ttl_s) is not None:
            raise NodeNameTaken(
                f"another bridge, which answers, has the name {self.node!r} in this fleet: give each node a name "
                "of its own",
                node=self.node,
            )

    async def keeps(self) -> bool:
        """Whether the name is still this node's; it is written again if the store has lost it. Raises Unavailable."""
        found = await self._transport.read(f"nodes.{self.node}", STORE_S)
        known = None if found is None else decode(found[0], Owner)
        if known is not None and known.owner != self.owner:
            return False
        if known is None or known.epoch != self.epoch:
            try:
                value = msgspec.json.encode(Owner(self.owner, self.epoch, self.term))
                await self._transport.cas(f"nodes.{self.node}", value, 0 if found is None else found[1], STORE_S)
            except Conflict:
                return await self.keeps()
        return True

    async def everybody(self, timeout: float) -> dict[str, Owner]:
        """The nodes by name. FleetUnavailable."""
        deadline = time.monotonic() + timeout
        try:
            found = await insist(lambda: read_all(self._transport, "nodes.", lambda: one_try(deadline)), deadline)
        except Unavailable as error:
            raise FleetUnavailable(str(error), timeout=timeout) from None
        owners = {key.partition(".")[2]: decode(value, Owner) for key, (value, _) in found.items()}
        return {node: owner for node, owner in owners.items() if owner is not None and not nodes.why_not(node)}

    async def node_of(self, epoch: bytes, timeout: float) -> str | None:
        """The node that has an epoch, None if there is none. Raises FleetUnavailable."""
        for node, owner in (await self.everybody(timeout)).items():
            if owner.epoch == epoch.hex():
                return node
        return None

    async def is_present(self, claim: Claim, timeout: float) -> bool:
        """Whether a claim is of the present epoch of its node. Raises Unavailable."""
        if claim.node == self.node:
            return claim.epoch == self.epoch
        found = await self._transport.read(f"nodes.{claim.node}", timeout)
        owner = None if found is None else decode(found[0], Owner)
        return owner is not None and owner.epoch == claim.epoch
