"""The bridge and its process: what other nodes say, what sessions of this node want, and what is due by the clock.

One loop does all of it; the heartbeat and the looks at exports have threads.
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import time
from collections.abc import Coroutine
from functools import partial
from typing import Any

from ipcsync._board.runtime_dir import RELOAD
from ipcsync._linux.process import has_terminal
from ipcsync._linux.service_manager import ServiceManager
from ipcsync._logs import fields, is_round
from ipcsync._wire.endpoints import endpoint_in
from ipcsync.cli.output import Failed
from ipcsync.errors import CoordinatorLost, IpcSyncError, NodeNameTaken, ProtocolError, SessionLost
from ipcsync_bridge import upgrade, wire
from ipcsync_bridge.answers import Answers
from ipcsync_bridge.config import Settings
from ipcsync_bridge.remote_requests import RemoteRequests
from ipcsync_bridge.session import BridgeSession
from ipcsync_bridge.store import Identity, Names, Nodes, owner_id
from ipcsync_bridge.subscriber import Mirrors, Subscriber
from ipcsync_bridge.transport import RETRY_S, Answer, Transport, Unavailable

log = logging.getLogger("ipcsync.bridge")

SIGNALS = frozenset((signal.SIGTERM, signal.SIGINT, signal.SIGHUP, RELOAD))
"""The signals with a handler. They are blocked until there is one, so that none is lost or kills the process."""

_ENDS = {"stopped": 0, "restarted": 1, "expired": 1, "replaced": 3}
_TICK_S = 1.0
_KEYS_S = 10.0
_LATE_S = 1.0
_LEFT_TTLS = 10
_PAUSE_S = 2.0
_CANCEL_S = 0.1
_SAID_S = 10.0  # in which each node that is connected has pinged new code, and said what it wants


class Bridge:
    """One node's bridge over one session, until it is told to stop, is fenced, or the session is lost."""

    def __init__(self, session: BridgeSession, transport: Transport, owner: bytes) -> None:
        settings = self._settings = transport.settings
        self._session = session
        self._transport = transport
        self.counters = wire.Counters()
        self.me = Identity(settings.node, owner, session.epoch)
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._done = self._loop.create_future()
        self._has_name = False
        self.why = ""
        self.manager = ServiceManager()
        # Where a terminal can hang up, SIGHUP says that it did.
        self.reload_signals = {RELOAD} if has_terminal() else {RELOAD, signal.SIGHUP}
        self._reloads = 0  # asked for since the one that is under way began, that one included
        self.nodes = Nodes(transport, self.me, settings.link_ttl, partial(wire.owner_of, transport))
        self.answers = Answers(session, transport, self.me, self.counters, self.begin, self._failed)
        self.mirrors = Mirrors(session, self.begin)
        self.subscriber = Subscriber(transport, self.mirrors, self.counters, self.begin)
        self.names = Names(transport, self.nodes, self.counters, self.subscriber.last_received)
        self.remote_requests = RemoteRequests(
            session, self.names, self.subscriber, self.answers, self.counters, self.begin
        )
        self._is_serving = False
        self._next_keys = 0.0

    # --- life ---------------------------------------------------------------------------------------------------------

    async def run(self, left: upgrade.State | None = None) -> str:
        """Serve; why it ended: "stopped", "restarted" (the coordinator is gone), "expired", "replaced", "reloaded".

        `left` is what other code left in this process, with which this one goes on unnoticed.
        """
        try:
            if left is None:
                self.begin(self._start())
            else:
                self._resume(left)
                self._serve()
            await self._tick_until_done()
        finally:
            await self._end()
        return self.why

    async def _start(self) -> None:
        """Connect, and take the node's name. Beside the ticks, so that a signal ends it at once."""
        try:
            await self._transport.listen(self)
            await self.nodes.take()
            self._has_name = True
            await self.names.resume()
            await self.nodes.forget_earlier_names()  # by which its claims were found until now
            self._serve()
        except Exception as error:  # noqa: BLE001 - `run` raises it
            if not self._done.done():
                self._done.set_exception(error)

    def _serve(self) -> None:
        self._is_serving = True
        self.remote_requests.listen()
        self._next_keys = time.monotonic() + _KEYS_S
        log.info("serving", extra=fields(node=self._settings.node, fleet=self._settings.fleet, term=self.me.term))
        for number in self.reload_signals:
            self._loop.add_signal_handler(number, self._begin_reload)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self.reload_signals)
        self.manager.ready("serving")

    def stop(self, why: str) -> None:
        """Begin to end. Any other reason goes before "reloaded"."""
        if self.why in ("", "reloaded"):
            self.why = why
        if not self._done.done():
            self._done.set_result(None)

    async def _end(self) -> None:
        if self.why not in ("", "expired", "reloaded"):  # "": it failed, and is started again
            data = wire.encode(wire.Over(self.me.term, self.me.epoch, self.why))
            for node in {*self.answers.followers, *self.subscriber.sources}:
                await self._transport.send(node, data)
        self.remote_requests.close()
        while self._tasks:  # more than once: before Python 3.12 `asyncio.wait_for` loses some cancellations
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks, timeout=_CANCEL_S)
        self.answers.exports.close()
        await self._transport.close()

    # --- from one code to the next ------------------------------------------------------------------------------------

    def _begin_reload(self) -> None:
        self._reloads += 1
        if self._reloads == 1:
            self.manager.reloading()
            self.begin(self._reload())

    async def _reload(self) -> None:
        """End as "reloaded" with nothing asked of the coordinator, once the code on disk has said that it can go on."""
        why_not = await upgrade.why_not()
        if why_not is None and not await self._session.pause(_PAUSE_S):
            why_not = "the coordinator does not answer what it was asked"
        if self._done.done():
            return  # it ends, whatever the new code has said
        if why_not is None:
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # what comes from now on is the new code's
            self.stop("reloaded")
            return
        log.error("reload", extra=fields(outcome=f"{why_not}; the old code goes on"))
        self.manager.ready(f"not reloaded: {why_not}")
        asked, self._reloads = self._reloads, 0
        if asked > 1:  # what was refused may be old by now: a certificate whose key came later
            self._begin_reload()

    def leave(self) -> upgrade.State:
        """What other code needs to go on, once `run` has ended and nothing changes it any more."""
        return upgrade.State(
            session=self._session.hand_over(),
            owner=self.me.owner,
            term=self.me.term,
            lost=self.subscriber.lost,
            mirrors=[mirror.attachment for mirror in self.mirrors.values()],
            held=list(self.answers.held),
            claims=self.names.claims,
            over=self.names.over,
            handovers=self.counters.handovers + 1,
        )

    def _resume(self, left: upgrade.State) -> None:
        self.me.term, self.counters.handovers, self._has_name = left.term, left.handovers, True
        self.names.claims, self.names.over = left.claims, left.over
        self.subscriber.resume(left)
        self.answers.hold(left.held, math.inf)
        self.begin(self._connect(left))

    async def _connect(self, left: upgrade.State) -> None:
        """Connect, however long that takes: links that other code left do not end because the servers are away."""
        while True:
            try:
                await self._transport.listen(self)
                break
            except Unavailable as error:
                log.warning("nats", extra=fields(error=error))
                await asyncio.sleep(RETRY_S)
        self.answers.hold(left.held, time.monotonic() + min(self._settings.link_ttl, _SAID_S))
        self.connected()
        log.info("took over", extra=fields(mirrors=len(self.mirrors)))

    def _failed(self, error: Exception) -> None:
        """End, since other nodes are sent no news any more, and would go on trusting this one's pings."""
        log.error("failed: other nodes are sent no news any more", exc_info=error)
        self.stop("expired")

    def begin(self, work: Coroutine[Any, Any, object]) -> None:
        """Start a task; its failure is logged."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, SessionLost):
            self._session_is_lost(error)
        elif error is not None:
            log.error("failed", extra=fields(what=str(task.get_coro())), exc_info=error)

    def _session_is_lost(self, error: IpcSyncError) -> None:
        log.error("session lost", extra=fields(why=error))
        # If only this process was silent for too long, the epoch is not over: the next bridge heals what others mirror.
        self.stop("restarted" if isinstance(error, CoordinatorLost) else "expired")

    # --- ticks --------------------------------------------------------------------------------------------------------

    async def _tick_until_done(self) -> None:
        awaited = time.monotonic()
        late_s = min(_LATE_S, self._settings.link_ttl / 4)
        while not self._done.done():
            now = time.monotonic()
            if now - awaited > late_s:
                self.subscriber.paused(now)
                for follower in self.answers.followers.values():
                    follower.last_asked = now
            try:
                self._session.lease.check()
            except IpcSyncError as error:
                self._session_is_lost(error)
                break
            due = self.subscriber.lose_silent(now)
            if self._is_serving:
                self.remote_requests.drain()
                self._keep_house(now)
            awaited = min(due, now + min(_TICK_S, late_s))
            await asyncio.wait((self._done,), timeout=max(awaited - time.monotonic(), 0.0))
        self._done.result()

    def _keep_house(self, now: float) -> None:
        if now >= self._next_keys:
            self._next_keys = now + _KEYS_S
            self.begin(self._keep_keys())
        before = now - _LEFT_TTLS * self._settings.link_ttl
        for follower in [each for each in self.answers.followers.values() if each.last_asked < before]:
            log.info("left out", extra=fields(node=follower.node))
            self.answers.forget(follower)
        self.begin(self.answers.close_unused())

    async def _keep_keys(self) -> None:
        try:
            if await self.nodes.keeps():
                await self.names.keep()
            else:
                log.error("another machine has this node's name now", extra=fields(node=self._settings.node))
                self.stop("replaced")
        except Unavailable as error:
            self.counters.store_failures += 1
            log.warning("store", extra=fields(error=error))

    # --- what other nodes say -----------------------------------------------------------------------------------------

    def connected(self) -> None:
        """The connection is back: look at the keys. News that were missed are sent again."""
        self._next_keys = 0.0

    def closed(self, why: str) -> None:
        """The connection will not come back: end, to be started again."""
        log.error("nats: the connection has ended for good", extra=fields(why=why))
        self.stop("expired")

    def received(self, sender: str, data: bytes, answer: Answer | None) -> None:
        if not self._has_name:
            return  # it may be another machine's, whose bridge receives it too
        try:
            body = wire.decode(data)
            if isinstance(body, wire.News):
                self.counters.news_received += 1
                self.subscriber.receive(sender, body)
                if answer is not None:
                    self.counters.acks += 1
                    self.begin(answer(wire.encode(wire.Ack())))
            elif isinstance(body, wire.Over):
                self.subscriber.over(sender, body)
            else:
                self.answers.asked(sender, body, answer, time.monotonic())
        except ProtocolError as error:
            count = self.counters.invalid_messages = self.counters.invalid_messages + 1
            if is_round(count):
                log.warning("invalid message", extra=fields(node=sender[:80], why=error, count=count))


# --- the process ------------------------------------------------------------------------------------------------------


def run(settings: Settings) -> int:
    """Run a bridge; its exit status. It does not return if other code goes on in this process. Raises Failed."""
    try:
        import uvloop
    except ImportError:
        ended = asyncio.run(_run(settings))
    else:
        ended = uvloop.run(_run(settings))  # in which a word takes a fifth less time
    return ended if isinstance(ended, int) else upgrade.go_on(*ended)


async def _run(settings: Settings) -> int | tuple[upgrade.State, dict[str, str]]:
    """The exit status, or what the code that is on disk now is to go on with."""
    try:
        left, endpoint = upgrade.take(), endpoint_in(settings.directory)
        if left is not None:
            session = BridgeSession.resumed(endpoint, left.session)
        else:
            session = BridgeSession.opened(endpoint, f"bridge {settings.node}", 5.0)
    except IpcSyncError as error:
        raise Failed(str(error)) from None
    why = "restarted"
    try:
        owner = owner_id(settings.owner_file) if left is None else left.owner
        bridge = Bridge(session, Transport(settings), owner)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, bridge.stop, "stopped")
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS - bridge.reload_signals)
        why = await bridge.run(left)
    except (NodeNameTaken, Unavailable) as error:
        raise Failed(str(error)) from None
    finally:
        if why != "reloaded":
            session.close(says_goodbye=why in ("stopped", "replaced"))
    if why == "reloaded":
        return bridge.leave(), bridge.manager.environment
    log.info("ended", extra=fields(why=why))
    return _ENDS[why]
