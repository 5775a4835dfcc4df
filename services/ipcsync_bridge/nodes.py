"""The names of the fleet: which machine has a node's name, and which node a fleet event's.

A value names its owner by a number of 128 random bits, so that a write whose outcome was not told is known for one's
own when it is read again. Terms order the owners of a name; they decide who may be called by it, and nothing else.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import os
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from ipcsync._logs import fields
from ipcsync._wire import messages, nodes
from ipcsync.errors import FleetUnavailable, NodeNameTaken, RecorderTaken, WaitTimeout
from ipcsync_bridge import handover
from ipcsync_bridge.asking import ASK_S
from ipcsync_bridge.counters import Counters
from ipcsync_bridge.transport import Conflict, Transport, Unavailable, Unreachable

T = TypeVar("T")

_TRIES = 20
_STORE_S = 5.0  # for a question to the store that no session waits for
_AT_ONCE = 32  # questions to the store
_UNKNOWN = 0  # the revision of a claim that may or may not have been written


Hex = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
NodeName = Annotated[str, Meta(pattern="^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$")]
Count = Annotated[int, Meta(ge=0, le=(1 << 62))]


log = logging.getLogger("ipcsync.bridge")


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


class Names:
    """The keys of the fleet, as one node reads and writes them. `is_there` asks a node whether it answers."""

    def __init__(
        self,
        transport: Transport,
        node: str,
        owner: bytes,
        epoch: bytes,
        ttl_s: float,
        is_there: Callable[[str, float], Awaitable[bytes | None]],
        counters: Counters,
    ) -> None:
        self._transport = transport
        self._node = node
        self._owner = owner.hex()
        self._epoch = epoch.hex()
        self._ttl_s = ttl_s
        self._is_there = is_there
        self._counters = counters
        self.term = 0
        self.claims: dict[tuple[int, int], tuple[str, int]] = {}  # by slot and incarnation: key, revision
        self._over: set[tuple[int, int]] = set()  # of the claims, those whose use is over: to be removed, not kept
        self._silent: dict[Hex, tuple[float, float]] = {}  # owners that did not answer: since when, and the last try

    # --- nodes --------------------------------------------------------------------------------------------------------

    async def _read_all(self, prefix: str, left: Callable[[], float]) -> dict[str, tuple[bytes, int]]:
        """The keys that begin with `prefix`; `left` is how long each question to the store may take."""
        found: dict[str, tuple[bytes, int]] = {}

        async def read(key: str) -> None:
            one = await self._transport.read(key, left())
            if one is not None:
                found[key] = one

        await _for_each(await self._transport.keys(prefix, left()), read)
        return found

    async def take(self) -> None:
        """Take the node's name. Raises NodeNameTaken if another machine has it and answers, and Unavailable."""
        key = f"nodes.{self._node}"
        for _ in range(_TRIES):
            found = await self._transport.read(key, _STORE_S)
            known = None if found is None else decode(found[0], Owner)
            if found is not None and (known is None or known.owner != self._owner):  # or nobody knows whose it is
                await self._refuse_if_alive()
            self.term = max(self.term, 0 if known is None else known.term) + 1
            value = msgspec.json.encode(Owner(self._owner, self._epoch, self.term))
            try:
                await self._transport.cas(key, value, 0 if found is None else found[1], _STORE_S)
            except Conflict:
                continue
            return
        raise Unavailable(f"the key {key} changes all the time")

    async def _refuse_if_alive(self) -> None:
        """Ask who has the name for a whole TTL; one answer means that it is taken."""
        if await self._is_there(self._node, self._ttl_s) is not None:
            raise NodeNameTaken(
                f"another bridge, which answers, has the name {self._node!r} in this fleet: give each node a name "
                "of its own",
                node=self._node,
            )

    async def keeps(self) -> bool:
        """Whether the name is still this node's; it is written again if the store has lost it. Raises Unavailable."""
        found = await self._transport.read(f"nodes.{self._node}", _STORE_S)
        known = None if found is None else decode(found[0], Owner)
        if known is not None and known.owner != self._owner:
            return False
        if known is None or known.epoch != self._epoch:
            try:
                value = msgspec.json.encode(Owner(self._owner, self._epoch, self.term))
                await self._transport.cas(f"nodes.{self._node}", value, 0 if found is None else found[1], _STORE_S)
            except Conflict:
                return await self.keeps()
        await self._keep_claims()
        return True

    async def everybody(self, timeout: float) -> dict[str, Owner]:
        """The nodes by name. FleetUnavailable."""
        deadline = time.monotonic() + timeout
        try:
            found = await self._read_all("nodes.", lambda: _left(deadline))
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

    # --- the fleet's names of events ----------------------------------------------------------------------------------

    async def find(self, name: str, timeout: float) -> Claim:
        """The claim on a name of the fleet. Raises WaitTimeout if there is none, and FleetUnavailable."""
        deadline = time.monotonic() + timeout
        try:
            found = await self._transport.read(_key_of(name), timeout)
            claim = None if found is None else decode(found[0], Claim)
            if claim is None or not await self._is_present(claim, _left(deadline)):
                raise WaitTimeout("no node has claimed it")
        except Unavailable as error:
            raise FleetUnavailable(str(error), timeout=timeout) from None
        return claim

    async def _is_present(self, claim: Claim, timeout: float) -> bool:
        """Whether the claim is of the present epoch of its node."""
        if claim.node == self._node:
            return claim.epoch == self._epoch
        found = await self._transport.read(f"nodes.{claim.node}", timeout)
        owner = None if found is None else decode(found[0], Owner)
        return owner is not None and owner.epoch == claim.epoch

    async def claim(self, want: messages.Want, timeout: float) -> None:
        """Claim a name of the fleet for a use of a slot here. Raises RecorderTaken and FleetUnavailable."""
        key, use = _key_of(want.name), (want.slot, want.incarnation)
        value = self._claim_of(use)
        deadline = time.monotonic() + timeout
        try:
            for _ in range(_TRIES):
                found = await self._transport.read(key, _left(deadline))
                if found is not None and found[0] != value:
                    await self._refuse_if_taken(want.name, found[0], deadline)
                try:
                    is_mine = found is not None and found[0] == value
                    last = 0 if found is None else found[1]
                    revision = last if is_mine else await self._write_claim(use, key, value, last, _left(deadline))
                except Conflict:
                    continue
                self.claims[use] = key, revision
                self._over.discard(use)
                return
        except Unavailable as error:
            raise FleetUnavailable(str(error), timeout=timeout) from None
        raise FleetUnavailable(f"the key {key} changes all the time", timeout=timeout)

    def _claim_of(self, use: tuple[int, int]) -> bytes:
        return msgspec.json.encode(Claim(self._node, self._owner, self._epoch, *use))

    async def _write_claim(self, use: tuple[int, int], key: str, value: bytes, last: int, timeout: float) -> int:
        """The new revision. Raises Conflict; after another error the claim may be applied later, and must be undone."""
        try:
            return await self._transport.cas(key, value, last, timeout)
        except Conflict:
            raise
        except BaseException:
            self.claims[use] = key, _UNKNOWN
            self._over.add(use)
            raise

    async def _refuse_if_taken(self, name: str, value: bytes, deadline: float) -> None:
        claim = decode(value, Claim)
        if claim is None or not await self._is_present(claim, _left(deadline)):
            return
        use = (claim.slot, claim.incarnation)
        if claim.node == self._node and (use not in self.claims or use in self._over):
            return  # of an earlier use here, whose key was not removed
        if claim.node != self._node and await self._is_lost(claim, deadline):
            return
        raise RecorderTaken(
            f"node {claim.node!r} has the fleet's event {name!r}, and an event has one recorder for its whole life",
            event=name,
            recorder=claim.node,
        )

    async def _is_lost(self, claim: Claim, deadline: float) -> bool:
        """Whether the owner of a claim has been silent for a whole TTL, false at its first answer.

        FleetUnavailable if neither is known at the deadline. What this question has heard counts for the next one, if
        that comes within a TTL.
        """
        now = time.monotonic()
        self._silent = {owner: heard for owner, heard in self._silent.items() if now - heard[1] <= self._ttl_s}
        since, _ = self._silent.pop(claim.owner, (now, now))
        # However long it was silent before: it is asked now, too.
        enough = max(since + self._ttl_s, now + min(ASK_S, self._ttl_s / 2, (deadline - now) / 2))
        if await self._is_there(claim.node, min(enough, deadline) - now) is not None:
            return False
        self._silent[claim.owner] = since, time.monotonic()
        if deadline < enough:
            raise FleetUnavailable(
                f"node {claim.node!r}, which has this name, has not answered for {time.monotonic() - since:.1f} s; it "
                f"is lost after {self._ttl_s:g} s, and the name is free then: ask again"
            )
        return True

    async def release(self, key: tuple[int, int]) -> None:
        """Free the name of a use that is over. What cannot be removed now is removed at the next `keeps`."""
        if key in self.claims:
            self._over.add(key)
            await self._remove(key)

    async def _remove(self, key: tuple[int, int]) -> None:
        claim = self.claims.get(key)
        if claim is None:
            return
        name, revision = claim
        try:
            if revision == _UNKNOWN:
                revision = await self._settle(name, self._claim_of(key))
            if key not in self._over:
                return  # claimed again meanwhile
            if revision != _UNKNOWN:
                await self._transport.cas(name, None, revision, _STORE_S)
        except (Unavailable, Unreachable) as error:
            log.info("name stays claimed until the store answers", extra=fields(name=name, error=error))
            return
        except Conflict:
            pass  # somebody else's by now, or removed by an earlier try
        if self.claims.get(key) is claim:  # and not written again meanwhile
            self._forget(key)

    def _forget(self, key: tuple[int, int]) -> None:
        self.claims.pop(key, None)
        self._over.discard(key)

    async def _settle(self, name: str, value: bytes) -> int:
        """The revision of a claim that may have been written, or may still be; _UNKNOWN if it cannot any more.

        It is written again: what is still under way expects an earlier revision, and is refused from then on.
        """
        for _ in range(_TRIES):
            found = await self._transport.read(name, _STORE_S)
            if found is not None:
                return found[1] if found[0] == value else _UNKNOWN
            try:
                return await self._transport.cas(name, value, 0, _STORE_S)
            except Conflict:
                continue
        raise Unavailable(f"the key {name} changes all the time")

    async def _keep_claims(self) -> None:
        """Claim again what the store has lost, and give up what another node has by now."""
        await _for_each(list(self.claims), self._keep_claim)

    async def _keep_claim(self, use: tuple[int, int]) -> None:
        if use not in self.claims or use in self._over:
            await self._remove(use)
            return
        key, _ = self.claims[use]
        value = self._claim_of(use)
        found = await self._transport.read(key, _STORE_S)
        if use in self._over or use not in self.claims:
            return  # by now
        if found is not None and found[0] != value:
            self._lose(use, key, found[0])
            return
        if found is None:
            self.claims[use] = key, _UNKNOWN  # until the store has said so: a write that times out may be done later
        try:
            revision = await self._transport.cas(key, value, 0, _STORE_S) if found is None else found[1]
        except Conflict:
            return
        is_over = use in self._over or use not in self.claims
        self.claims[use] = key, revision
        if is_over:
            self._over.add(use)
            await self._remove(use)

    def _lose(self, use: tuple[int, int], key: str, value: bytes) -> None:
        """Give up a name that is another's by the store. No session is told: its event goes on, as do its waiters."""
        self._forget(use)
        self._counters.names_lost += 1
        claim = decode(value, Claim)
        owner = "unknown" if claim is None else claim.node
        log.warning(
            "name lost: those who ask for it now find another event", extra=fields(name=_name_of(key), node=owner)
        )

    async def resume(self) -> list[tuple[int, int]]:
        """Take over the claims of the bridge before this one, of the same epoch; returns their uses."""
        for key, (value, revision) in (await self._read_all("names.", lambda: _STORE_S)).items():
            claim = decode(value, Claim)
            if claim is not None and claim.node == self._node and claim.epoch == self._epoch:
                self.claims[claim.slot, claim.incarnation] = key, revision
        return list(self.claims)

    # --- from one code to the next ------------------------------------------------------------------------------------

    def leave(self) -> list[handover.Claim]:
        """The claims, for the code that goes on."""
        return [handover.Claim(use, key, last, use in self._over) for use, (key, last) in self.claims.items()]

    def go_on(self, left: handover.State) -> None:
        """Go on with the name and the claims that other code left, without asking the store."""
        self.term = left.term
        self.claims = {claim.use: (claim.key, claim.revision) for claim in left.claims}
        self._over = {claim.use for claim in left.claims if claim.is_over}


async def _for_each(items: Collection[T], work: Callable[[T], Awaitable[None]]) -> None:
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


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.1)


def _key_of(name: str) -> str:
    return "names." + base64.urlsafe_b64encode(name.encode()).decode().rstrip("=")


def _name_of(key: str) -> str:
    data = key.removeprefix("names.")
    return base64.urlsafe_b64decode(data + "=" * (-len(data) % 4)).decode(errors="replace")


def decode(value: bytes, kind: type[T]) -> T | None:
    """The value, None if it cannot be read."""
    try:
        return msgspec.json.decode(value, type=kind)
    except (msgspec.MsgspecError, ValueError):
        return None
