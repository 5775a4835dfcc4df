"""The daemon: one thread, one asyncio loop, plain ZeroMQ sockets drained from `add_reader`."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress

import zmq

from ipcsync._inbox import Inbox
from ipcsync._linux.process import Process
from ipcsync._logs import fields, is_round
from ipcsync._room import new_context
from ipcsync._wire import codec
from ipcsync_coordinator import gate
from ipcsync_coordinator.deaths import DeathWatch, Leftovers, PauseCredit, is_gone, warn_without_pidfds
from ipcsync_coordinator.effects import MAX_SUBSCRIPTION, UNREAD_SUBSCRIPTIONS, Effects, Feed
from ipcsync_coordinator.gate import Sender, cut
from ipcsync_coordinator.handlers import Handlers
from ipcsync_coordinator.journal import Transactions, recover
from ipcsync_coordinator.pool import Pool
from ipcsync_coordinator.questions import Metrics
from ipcsync_coordinator.registry import Registry
from ipcsync_coordinator.requests import Dispatcher, Requests
from ipcsync_coordinator.startup import Startup
from ipcsync_coordinator.state import Session
from ipcsync_keeper.config import Settings
from ipcsync_keeper.resources import IS_ENDING, listen

log = logging.getLogger("ipcsync.coordinator")

_UNREADY_NS = 30_000_000_000


class Server:
    """One coordinator, with the resources of its `startup`. JournalError if it cannot continue from the journal."""

    def __init__(
        self, settings: Settings, startup: Startup, done: asyncio.Event, tell_alive: Callable[[], None]
    ) -> None:
        self._settings = settings
        self._startup = startup
        self._tell_alive = tell_alive  # called after each complete tick
        self._loop = asyncio.get_running_loop()
        self._done = done  # set: the end begins
        config = startup.config
        self.board = startup.board
        self._endpoints = [f"ipc://{path}" for path in startup.place.sockets]
        gate.raise_limit(settings.max_sessions)
        warn_without_pidfds()
        self._context = new_context(65_535)
        self.metrics = Metrics()
        self._zap = gate.ZapHandler(self._context, self.metrics.refuse)
        self._gate = gate.Gate(startup.place, Inbox(self.metrics.refuse).put)
        # ZeroMQ silently closes the connection of a larger frame; up to this size the coordinator refuses and counts.
        largest = 4 * settings.max_frame
        router = self._take(zmq.ROUTER, 0, ROUTER_MANDATORY=1, MAXMSGSIZE=largest, SNDHWM=settings.reply_queue)
        # Verbose: it tells of each subscriber, not only of the first.
        limits = {"MAXMSGSIZE": MAX_SUBSCRIPTION, "SNDHWM": settings.feed_queue, "RCVHWM": UNREAD_SUBSCRIPTIONS}
        feed = self._take(zmq.XPUB, 1, XPUB_VERBOSE=1, **limits)
        first = (config.starts - 1) << codec.FEED_START_BITS  # above all numbers of earlier coordinators
        self.feed = Feed(
            feed, first, self._loop.call_soon, lambda frame: cut(Sender(b"", frame), "topic", self.metrics.refuse)
        )
        self.registry = Registry(settings, lambda index: self.effects.line(index).recorded)
        pool = Pool(config.devices, startup.driver, settings.max_cuda_events, held=config.events)
        self.effects = Effects(
            self.board, pool, self.feed, self._forget, self.registry.tombstones, self._loop.call_later
        )
        self._transactions = Transactions(self.registry, self.effects, startup.journal)
        self.sessions = self._transactions.sessions
        self._differing = recover(self._transactions, time.monotonic_ns())
        self._deaths = DeathWatch(Inbox(self._died).put)
        self._kept = Leftovers(self.registry, self.board)
        self.handlers = Handlers(
            self._transactions, self.metrics, config, self._endpoints[1], self._deaths, self._gate.sessions
        )
        dispatcher = Dispatcher(settings, self.handlers)
        self._requests = Requests(router, settings, dispatcher, self.metrics.refuse, self.feed)
        self.handlers.fleet.deliver = self._requests.deliver
        self._tick_s = min(0.25, settings.lease_ttl / 8)
        self._credit = PauseCredit(time.monotonic_ns(), int(self._tick_s * 1e9))
        self._idle_since = 0.0
        self._next_feed_tick = 0.0
        self._is_drain_due = False
        self._mend_failures = 1
        self._is_lost = False  # no client can connect here any more
        self.status = 0
        self.parent: Process | None = None
        """The end begins when that process has ended."""
        self._gate.start()

    def _take(self, kind: int, at: int, **options: int) -> zmq.Socket[bytes]:
        """A socket with these options (ZeroMQ's names) over the `at`-th listening one."""
        taken: zmq.Socket[bytes] = self._context.socket(kind)
        taken.setsockopt(zmq.ZAP_DOMAIN, gate.DOMAIN)
        options |= {"LINGER": 0, "HANDSHAKE_IVL": int(self._settings.handshake_s * 1000)}
        for name, value in options.items():
            taken.setsockopt(getattr(zmq, name), value)
        self._gate.bind(taken, self._startup.sockets[at], self._endpoints[at])
        return taken

    # --- the loop -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until the end begins, or until the keeper is gone."""
        self._loop.add_reader(self._startup.driver.link.socket, self._drain_link)
        self._resume()
        readers: list[tuple[zmq.Socket[bytes], Callable[[], None]]] = [
            (self._zap.socket, self._zap.drain),
            (self._requests.socket, self._drain_requests),
            (self.feed.socket, self.feed.drain),
        ]
        for socket, drain in readers:
            self._loop.add_reader(int(socket.fd), self._unless_done, drain)
        # First the look who has died. It drains too what came before the readers were added, which gives no edge.
        self._loop.call_soon(self._unless_done, self._tick)
        self.handlers.serves_ns = time.monotonic_ns()
        self.board.starts = self._startup.config.starts
        self._idle_since = time.monotonic()
        self._startup.driver.report_serving()
        await self._done.wait()
        for socket, _ in readers:
            self._loop.remove_reader(int(socket.fd))

    def _drain_link(self) -> None:
        try:
            self._startup.driver.drain()
        except EOFError:
            self._done.set()

    def _unless_done(self, call: Callable[[], object]) -> None:
        """The loop may call this after `close`, when there are no sockets any more."""
        if not self._done.is_set():
            call()

    def _drain_requests(self) -> None:
        if self._requests.drain() and not self._is_drain_due:
            self._is_drain_due = True  # at most one: ticks drain too, and in a flood each of them would begin another
            self._loop.call_soon(self._unless_done, self._drain_more)

    def _drain_more(self) -> None:
        self._is_drain_due = False
        self._drain_requests()

    # --- life and death -----------------------------------------------------------------------------------------------

    def _resume(self) -> None:
        """Watch the sessions of the earlier coordinator; the first tick finds those that died meanwhile."""
        for slot in self._differing:
            log.error("journal and board differ", extra=fields(slot=slot.index, name=slot.name, state=slot.state))
            if slot.state == "free":
                self.effects.store_slot(slot)  # a word still released lets a later use's waits pass
            elif slot.state != "kept":  # which no session uses
                self.registry.break_slot(slot)
        self._transactions.commit()
        for session in self.sessions:
            if session.is_ready:
                self.handlers.watch(session)

    def _died(self, serial: int) -> None:
        if (session := self.registry.sessions.get(serial)) is not None:
            self.handlers.lose(session, "pidfd")

    def _forget(self, session: Session) -> None:
        self.sessions.forget(session)
        self._deaths.forget(session.serial)
        self._idle_since = time.monotonic()

    def _tick(self) -> None:
        try:
            self._beat()
        finally:  # whatever failed: without the next tick there is no heartbeat, and silence is not seen
            self._loop.call_later(self._tick_s, self._unless_done, self._tick)

    def _beat(self) -> None:
        now_ns = time.monotonic_ns()
        self._credit.tick(now_ns)
        self.board.heartbeat = now_ns
        for session in self.sessions:
            with suppress(OSError):  # no descriptor to ask by, which proves nothing: the next tick asks again
                self._check(session, now_ns)
        now = now_ns / 1e9
        if now >= self._next_feed_tick:
            self._next_feed_tick = now + 1.0
            self.feed.tick()
            self._check_place()
        self._kept.look(now_ns)
        self.handlers.fleet.tick(now_ns)
        self._drain_link()
        self._transactions.commit()  # what is kept no longer, and changes that could not be appended earlier
        # A drain at each tick, so that a missed edge delays a client by a tick at most.
        self._zap.drain()
        self._drain_requests()
        self.feed.drain()
        self._stop_if_idle(now)
        if self.parent is not None and not self.parent.is_alive():
            self._done.set()
        self._tell_alive()

    def _stop_if_idle(self, now: float) -> None:
        """Stop when no client has used it for as long as the settings say; time when it stood still does not count."""
        limit = self._settings.exit_when_idle
        if self.sessions.has_living:
            self._idle_since = now
        if limit and now - max(self._idle_since, self._credit.since_ns / 1e9) > limit:
            log.info("stopping", extra=fields(reason="idle", idle_s=limit))
            self._end()

    def _end(self) -> None:
        """Begin the end; a keeper is told that it is intended."""
        self._startup.journal.words[IS_ENDING] = 1
        self._done.set()

    def _check_place(self) -> None:
        """Make single files anew that were removed. Log once that directory or board was, and end with the last client.

        A bridge's session does not end by itself.
        """
        if not self._is_lost:
            self._mend_place()
            if self._is_lost:
                log.error(
                    "the runtime directory was removed or belongs to another coordinator now, or the board's file was "
                    "removed: no client can connect here any more; this coordinator ends with its last client",
                    extra=fields(path=self._startup.place.path, board=self.board.path, sessions=len(self.sessions)),
                )
        if self._is_lost and not any(not each.is_dead and not each.role for each in self.sessions):
            self.status = 1
            self._end()

    def _mend_place(self) -> None:
        place = self._startup.place
        try:
            if place.mend():
                log.warning("the file that says who serves was removed: made anew", extra=fields(path=place.path))
            # A file without a name gets none again, and without the board's no client can map it.
            self._is_lost = not (place.is_own and _is_there(self.board.path))
            for path in () if self._is_lost else place.lost_sockets():
                self._listen_anew(path)
        except (OSError, zmq.ZMQError) as error:
            if is_round(self._mend_failures):
                log.error("the runtime directory cannot be mended", extra=fields(path=place.path, why=error))
            self._mend_failures += 1

    def _listen_anew(self, path: str) -> None:
        """Bind another socket at `path` for the same peers; those that are connected stay so."""
        with suppress(FileNotFoundError):
            os.unlink(path)  # of a coordinator before this one
        place = self._startup.place
        at = place.sockets.index(path)
        socket = (self._requests.socket, self.feed.socket)[at]
        self._gate.bind(socket, listen(path).detach(), self._endpoints[at])
        place.saw_bound(path)
        log.warning("a socket in the runtime directory was removed: made anew", extra=fields(path=path))

    def _check(self, session: Session, now_ns: int) -> None:
        if session.peer is not None and not session.is_dead and not session.peer.is_alive():
            self.handlers.lose(session, "pidfd")  # whatever became of the thread that waits for the mark
        if session.state == "gone":
            return  # its goodbye stood on the board
        if session.state == "live":
            if self._is_silent(session, now_ns):
                self.handlers.lose(session, "ttl")
        elif is_gone(self.board, session):
            # Its goodbye was lost, it called exec, or it was never ready, and expired with its lifeline held.
            self.handlers.bury(session)
        elif self._is_silent(session, now_ns) and self.registry.drained_by(session):
            self.handlers.break_drained(session)

    def _is_silent(self, session: Session, now_ns: int) -> bool:
        # It never goes back: the line's last user may have been stopped within its own store.
        session.beat_ns = max(session.beat_ns, self.board.session(session.line).heartbeat)
        # One that was never ready may be nobody's: its process gave up before the welcome came.
        ttl_ns = session.ttl_ns if session.is_ready else min(session.ttl_ns, _UNREADY_NS)
        return now_ns - max(session.beat_ns, self._credit.since_ns) > ttl_ns

    def close(self) -> None:
        """Close everything. In one process: store the end on the board first, and remove the files last."""
        resources, link = self._startup.resources, self._startup.driver.link
        if resources is not None:
            self.board.stop()
        self._loop.remove_reader(link.socket)
        link.close()
        self._gate.stop()
        self._deaths.close()
        self._requests.socket.close()
        self.feed.close()
        self._zap.socket.close()
        self._context.term()
        if resources is not None:
            resources.close()


def _is_there(path: str) -> bool:
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True
