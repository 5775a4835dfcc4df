"""What lies in the fleet's store: which machine has a node's name, and which node an event's.

The store holds JSON, which anybody may have written. A name of an event has one node at a time, in one slot there.

A value names its owner by a number of 128 random bits, so that a write whose outcome was not told is known for one's
own when it is read again. Terms order the owners of a name; they decide who may be called by it, and nothing else.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import math
import os
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from ipcsync._logs import fields
from ipcsync._wire import messages, names
from ipcsync.errors import FleetUnavailable, NodeNameTaken, RecorderTaken, WaitTimeout
from ipcsync_bridge.transport import ASK_S, Conflict, Transport, Unavailable
from ipcsync_bridge.wire import Counters

log = logging.getLogger("ipcsync.bridge")
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
    """What this bridge says of itself."""

    node: str
    owner: bytes  # it tells this machine's bridge from another one under the same name
    epoch: bytes
    term: int = 0  # of the name


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
    """The owner id in a file, None if no bridge of that name has run here."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        known = file.read()
        return known if len(known) == 16 else None
    return None


def owner_id(path: str) -> bytes:
    """128 random bits in a file, by which a bridge recognises its keys in the store. Unavailable without one."""
    try:
        if (known := known_owner_id(path)) is None:
            known = os.urandom(16)
            descriptor = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with open(descriptor, "wb") as file:
                file.write(known)
            os.replace(f"{path}.new", path)
    except OSError as error:
        raise Unavailable(f"{path}, by which this node's name is its own, cannot be had: {error.strerror}") from None
    return known


# --- which machine has a node's name ----------------------------------------------------------------------------------


@dataclass(eq=False)
class Nodes:
    """The nodes' keys, as the node `me` reads and writes them. `is_there` asks a node whether it answers."""

    transport: Transport
    me: Identity
    ttl_s: float
    is_there: Callable[[str, float], Awaitable[bytes | None]]

    def __post_init__(self) -> None:
        self._owner, self._epoch = self.me.owner.hex(), self.me.epoch.hex()

    async def _read(self, node: str, timeout: float = STORE_S) -> tuple[Owner | None, int]:
        value, revision = await self.transport.read(f"nodes.{node}", timeout)
        return decode(value, Owner), revision

    async def _write(self, last: int) -> None:
        value = msgspec.json.encode(Owner(self._owner, self._epoch, self.me.term))
        await self.transport.cas(f"nodes.{self.me.node}", value, last, STORE_S)

    async def take(self) -> None:
        """Take the node's name. Raises NodeNameTaken if another machine has it and answers within a TTL."""
        for _ in range(TRIES):
            known, revision = await self._read(self.me.node)
            is_anothers = revision and (known is None or known.owner != self._owner)  # or its owner is unknown
            if is_anothers and await self.is_there(self.me.node, self.ttl_s) is not None:
                raise NodeNameTaken(
                    f"another bridge, which answers, has the name {self.me.node!r} in this fleet: give each node a "
                    "name of its own",
                    node=self.me.node,
                )
            self.me.term = max(self.me.term, 0 if known is None else known.term) + 1
            with contextlib.suppress(Conflict):
                await self._write(revision)
                return
        raise Unavailable(f"the key nodes.{self.me.node} changes all the time")

    async def forget_earlier_names(self) -> None:
        """Remove the keys of this coordinator under other names: it has one bridge, so none answers to them."""
        for key, (value, revision) in (await read_all(self.transport, "nodes.", lambda: STORE_S)).items():
            known = decode(value, Owner)
            if known is not None and known.epoch == self._epoch and key != f"nodes.{self.me.node}":
                try:
                    await self.transport.cas(key, None, revision, STORE_S)
                except Conflict:
                    log.debug("an earlier name was written anew", extra=fields(key=key))
                except Unavailable as error:  # a server may let it write its present name only
                    log.warning("an earlier name stays in the store", extra=fields(key=key, why=error))

    async def keeps(self) -> bool:
        """Whether the name is still this node's; it is written again if the store has lost it. Raises Unavailable."""
        known, revision = await self._read(self.me.node)
        if known is not None and known.owner != self._owner:
            return False
        if known is None or known.epoch != self._epoch:
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
            return claim.epoch == self._epoch
        owner, _ = await self._read(claim.node, timeout)
        return owner is not None and owner.epoch == claim.epoch


# --- which node has an event's name -----------------------------------------------------------------------------------


@dataclass(eq=False)
class Names:
    """The events' keys, as one of the fleet's `nodes` reads and writes them.

    `last_received` says when something was received from a node, on CLOCK_MONOTONIC; 0 if it is not listened to.
    """

    transport: Transport
    nodes: Nodes
    counters: Counters
    last_received: Callable[[str], float] = lambda _: 0.0

    def __post_init__(self) -> None:
        # By slot and incarnation: key and revision, or ~revision of what a write expected that may be done later.
        self.claims: dict[tuple[int, int], tuple[str, int]] = {}
        self.over: set[tuple[int, int]] = set()  # of the claims, those whose use is over: to be removed, not kept
        # Owners that did not answer: since when, and the last try.
        self._silent: dict[Hex, tuple[float, float]] = {}

    async def find(self, name: str, timeout: float) -> Claim:
        """The claim on a name of the fleet. WaitTimeout if there is none of a present epoch, and FleetUnavailable."""
        claim = await insist(lambda deadline: self._present(_key_of(name), deadline), timeout)
        if claim is None:
            raise WaitTimeout("no node has claimed it")
        return claim

    async def _present(self, key: str, deadline: float) -> Claim | None:
        claim = decode((await self.transport.read(key, left_until(deadline)))[0], Claim)
        return claim if claim is not None and await self.nodes.is_present(claim, left_until(deadline)) else None

    async def claim(self, want: messages.Want, timeout: float) -> None:
        """Claim a name of the fleet for a use of a slot here. Raises RecorderTaken and FleetUnavailable."""
        await insist(lambda deadline: self._claim(want, deadline), timeout)

    async def _claim(self, want: messages.Want, deadline: float) -> None:
        key, use = _key_of(want.name), (want.slot, want.incarnation)
        value = self._claim_of(use)
        for _ in range(TRIES):
            found, last = await self.transport.read(key, left_until(deadline))
            if last and found != value:
                await self._raise_if_taken(want.name, found, deadline)
            try:
                # If it is to be removed, it is written again: a removal that is under way expects the earlier revision.
                revision = last
                if found != value or use in self.over:
                    revision = await self.transport.cas(key, value, last, left_until(deadline, math.inf))
            except Conflict:
                continue
            except BaseException:  # it may be written later, and must be undone
                if use not in self.claims or use in self.over:  # else another question has claimed it meanwhile
                    self.claims[use] = key, min(~last, self.claims.get(use, (key, 0))[1])  # the latest of several
                    self.over.add(use)
                raise
            self.claims[use] = key, revision
            self.over.discard(use)
            return
        raise Unavailable(f"the key {key} changes all the time")

    def _claim_of(self, use: tuple[int, int]) -> bytes:
        me = self.nodes.me
        return msgspec.json.encode(Claim(me.node, me.owner.hex(), me.epoch.hex(), *use))

    async def _raise_if_taken(self, name: str, value: bytes, deadline: float) -> None:
        claim = decode(value, Claim)
        if claim is None or not await self.nodes.is_present(claim, left_until(deadline)):
            return
        if claim.node != self.nodes.me.node:
            is_free = await self._is_lost(claim, deadline)
        else:  # of an earlier use here, whose key was not removed
            is_free = (use := (claim.slot, claim.incarnation)) not in self.claims or use in self.over
        if is_free:
            return
        raise RecorderTaken(
            f"node {claim.node!r} has the fleet's event {name!r}, and an event has one recorder for its whole life",
            event=name,
            recorder=claim.node,
        )

    async def _is_lost(self, claim: Claim, deadline: float) -> bool:
        """Whether the owner of a claim has been silent for a whole TTL, false at its first answer.

        FleetUnavailable if neither is known at the deadline. What this question has received counts for the next,
        if that comes within a TTL.
        """
        now = time.monotonic()
        self._silent = {owner: heard for owner, heard in self._silent.items() if now - heard[1] <= self.nodes.ttl_s}
        since, _ = self._silent.pop(claim.owner, (now, now))
        since = max(since, self.last_received(claim.node))
        # However long it was silent before: it is asked now, too.
        enough = max(since + self.nodes.ttl_s, now + min(ASK_S, self.nodes.ttl_s / 2, (deadline - now) / 2))
        if await self.nodes.is_there(claim.node, min(enough, deadline) - now) is not None:
            return False
        self._silent[claim.owner] = since, time.monotonic()
        if deadline < enough:
            raise FleetUnavailable(
                f"node {claim.node!r}, which has this name, has not answered for {time.monotonic() - since:.1f} s; it "
                f"is lost after {self.nodes.ttl_s:g} s, and the name is free then: ask again"
            )
        return True

    async def release(self, use: tuple[int, int]) -> None:
        """Free the name of a use that is over. What cannot be removed now is removed at the next `keep`."""
        if (claim := self.claims.get(use)) is not None:
            self.over.add(use)
            try:
                await self._settle(use)
            except Unavailable as error:
                name = _name_of(claim[0])
                log.info("name stays claimed until the store answers", extra=fields(name=name, error=error))

    async def keep(self) -> None:
        """Claim again what the store has lost, and give up what another node has by now. Raises Unavailable."""
        await for_each(list(self.claims), self._settle)

    async def _settle(self, use: tuple[int, int]) -> None:
        """Have the store hold a claim, or none any more of a use that is over.

        A write that may still be under way expects an earlier revision than any of these, and is refused from then on.
        """
        value = self._claim_of(use)
        for _ in range(TRIES):
            if (claim := self.claims.get(use)) is None:
                return
            key, revision = claim
            found, last = await self.transport.read(key, STORE_S)
            if self.claims.get(use) is not claim:
                continue  # claimed again meanwhile
            is_mine, is_over = found == value, use in self.over
            if is_mine and not is_over:
                self.claims[use] = key, last
                return
            if not is_mine and (revision >= 0 or last > ~revision if is_over else last):
                self._forget(use)
                if not is_over:
                    self._warn_of_loss(key, found)
                return
            try:
                if is_mine:
                    await self.transport.cas(key, None, last, STORE_S)
                    if self.claims.get(use) is claim:
                        self._forget(use)
                    return
                self.claims[use] = key, ~last  # until the store has said so: a write that times out may be done later
                revision = await self.transport.cas(key, value, last, STORE_S)
                if use not in self.claims:
                    self.over.add(use)  # freed meanwhile
                self.claims[use] = key, revision
            except Conflict:
                continue
        raise Unavailable(f"the key of {use} changes all the time")

    def _forget(self, use: tuple[int, int]) -> None:
        self.claims.pop(use, None)
        self.over.discard(use)

    def _warn_of_loss(self, key: str, value: bytes) -> None:
        """A name is another's by the store. No session is told: its event goes on, as do its waiters."""
        self.counters.names_lost += 1
        claim = decode(value, Claim)
        about = fields(name=_name_of(key), node="unknown" if claim is None else claim.node)
        log.warning("name lost: those who ask for it now find another event", extra=about)

    async def resume(self) -> None:
        """Take over the claims of the bridge before this one, of the same epoch, which may have had another name."""
        for key, (value, last) in (await read_all(self.transport, "names.", lambda: STORE_S)).items():
            claim = decode(value, Claim)
            if claim is not None and claim.epoch == self.nodes.me.epoch.hex():
                use = (claim.slot, claim.incarnation)
                mine = self._claim_of(use)
                with contextlib.suppress(Conflict):  # it is another's by now
                    revision = last if value == mine else await self.transport.cas(key, mine, last, STORE_S)
                    self.claims[use] = key, revision


def _key_of(name: str) -> str:
    return "names." + base64.urlsafe_b64encode(name.encode()).decode().rstrip("=")


def _name_of(key: str) -> str:
    data = key.removeprefix("names.")
    return base64.urlsafe_b64decode(data + "=" * (-len(data) % 4)).decode(errors="replace")
