"""The fleet's names of events: which node has an event, and in which slot. One node has a name at a time."""

from __future__ import annotations

import base64
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from ipcsync._logs import fields
from ipcsync._wire import messages
from ipcsync.errors import FleetUnavailable, RecorderTaken, WaitTimeout
from ipcsync_bridge import store
from ipcsync_bridge.counters import Counters
from ipcsync_bridge.transport import ASK_S, Conflict, Transport, Unavailable

log = logging.getLogger("ipcsync.bridge")


@dataclass(eq=False)
class Names:
    """The events' keys, as one of the fleet's `nodes` reads and writes them.

    `last_received` says when something was received from a node, on CLOCK_MONOTONIC; 0 if it is not listened to.
    """

    transport: Transport
    nodes: store.Nodes
    counters: Counters
    last_received: Callable[[str], float] = lambda _: 0.0

    def __post_init__(self) -> None:
        # By slot and incarnation: key and revision, or ~revision of what a write expected that may be done later.
        self.claims: dict[tuple[int, int], tuple[str, int]] = {}
        self.over: set[tuple[int, int]] = set()  # of the claims, those whose use is over: to be removed, not kept
        # Owners that did not answer: since when, and the last try.
        self._silent: dict[store.Hex, tuple[float, float]] = {}

    async def find(self, name: str, timeout: float) -> store.Claim:
        """The claim on a name of the fleet. WaitTimeout if there is none of a present epoch, and FleetUnavailable."""
        claim = await store.insist(lambda deadline: self._present(_key_of(name), deadline), timeout)
        if claim is None:
            raise WaitTimeout("no node has claimed it")
        return claim

    async def _present(self, key: str, deadline: float) -> store.Claim | None:
        claim = store.decode((await self.transport.read(key, store.left_until(deadline)))[0], store.Claim)
        return claim if claim is not None and await self.nodes.is_present(claim, store.left_until(deadline)) else None

    async def claim(self, want: messages.Want, timeout: float) -> None:
        """Claim a name of the fleet for a use of a slot here. Raises RecorderTaken and FleetUnavailable."""
        await store.insist(lambda deadline: self._claim(want, deadline), timeout)

    async def _claim(self, want: messages.Want, deadline: float) -> None:
        key, use = _key_of(want.name), (want.slot, want.incarnation)
        value = self._claim_of(use)
        for _ in range(store.TRIES):
            found, last = await self.transport.read(key, store.left_until(deadline))
            if last and found != value:
                await self._raise_if_taken(want.name, found, deadline)
            try:
                # If it is to be removed, it is written again: a removal that is under way expects the earlier revision.
                revision = last
                if found != value or use in self.over:
                    revision = await self.transport.cas(key, value, last, store.left_until(deadline, math.inf))
            except Conflict:
                continue
            except BaseException:  # it may be written later, and must be undone
                self.claims[use] = key, ~last
                self.over.add(use)
                raise
            self.claims[use] = key, revision
            self.over.discard(use)
            return
        raise Unavailable(f"the key {key} changes all the time")

    def _claim_of(self, use: tuple[int, int]) -> bytes:
        me = self.nodes.me
        return msgspec.json.encode(store.Claim(me.node, me.owner.hex(), me.epoch.hex(), *use))

    async def _raise_if_taken(self, name: str, value: bytes, deadline: float) -> None:
        claim = store.decode(value, store.Claim)
        if claim is None or not await self.nodes.is_present(claim, store.left_until(deadline)):
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

    async def _is_lost(self, claim: store.Claim, deadline: float) -> bool:
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
        await store.for_each(list(self.claims), self._settle)

    async def _settle(self, use: tuple[int, int]) -> None:
        """Have the store hold a claim, or none any more of a use that is over.

        A write that may still be under way expects an earlier revision than any of these, and is refused from then on.
        """
        value = self._claim_of(use)
        for _ in range(store.TRIES):
            if (claim := self.claims.get(use)) is None:
                return
            key, revision = claim
            found, last = await self.transport.read(key, store.STORE_S)
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
                    await self.transport.cas(key, None, last, store.STORE_S)
                    if self.claims.get(use) is claim:
                        self._forget(use)
                    return
                self.claims[use] = key, ~last  # until the store has said so: a write that times out may be done later
                revision = await self.transport.cas(key, value, last, store.STORE_S)
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
        claim = store.decode(value, store.Claim)
        about = fields(name=_name_of(key), node="unknown" if claim is None else claim.node)
        log.warning("name lost: those who ask for it now find another event", extra=about)

    async def resume(self) -> None:
        """Take over the claims of the bridge before this one, of the same epoch."""
        me = self.nodes.me
        for key, (value, revision) in (await store.read_all(self.transport, "names.", lambda: store.STORE_S)).items():
            claim = store.decode(value, store.Claim)
            if claim is not None and claim.node == me.node and claim.epoch == me.epoch.hex():
                self.claims[claim.slot, claim.incarnation] = key, revision


def _key_of(name: str) -> str:
    return "names." + base64.urlsafe_b64encode(name.encode()).decode().rstrip("=")


def _name_of(key: str) -> str:
    data = key.removeprefix("names.")
    return base64.urlsafe_b64decode(data + "=" * (-len(data) % 4)).decode(errors="replace")
