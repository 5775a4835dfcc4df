"""The daemon: one thread, one asyncio loop, plain ZeroMQ sockets drained from `add_reader`."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable

import zmq

from ipcsync import _drivers
from ipcsync._board import Board
from ipcsync._linux.process import PidFd
from ipcsync._logs import fields, is_round
from ipcsync._wire import codec
from ipcsync.errors import IpcSyncError
from ipcsync_coordinator import auth
from ipcsync_coordinator.abuse import StrikeCounter
from ipcsync_coordinator.config import Settings
from ipcsync_coordinator.descriptors import Descriptors, Gate
from ipcsync_coordinator.dispatcher import Dispatcher
from ipcsync_coordinator.effects import Effects
from ipcsync_coordinator.feed import MAX_SUBSCRIPTION, Feed
from ipcsync_coordinator.handlers import Handlers
from ipcsync_coordinator.liveness import PauseCredit
from ipcsync_coordinator.metrics import Metrics
from ipcsync_coordinator.pool import Pool, served_devices
from ipcsync_coordinator.registry import Limits, Registry, Session
from ipcsync_coordinator.requests import Requests
from ipcsync_coordinator.runtime_dir import RuntimeDir
from ipcsync_coordinator.sessions import Sender, SessionEntry, SessionTable

log = logging.getLogger("ipcsync.coordinator")

_RELEASE_S = 0.05


class Server:
    """One coordinator, from bound sockets to their removal."""

    def __init__(
        self, settings: Settings, directory: RuntimeDir, tell_alive: Callable[[], None] = lambda: None
    ) -> None:
        self._settings = settings
        self._tell_alive = tell_alive  # called with each tick that did all it has to
        self.directory = directory
        self._loop = asyncio.get_running_loop()
        self._done = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self.stop)  # before there is anything to be cleaned up
        self.status = 0
        self.epoch = os.urandom(16)
        devices = served_devices(settings.device_list())
        if not devices:
            raise RuntimeError("the driver shows no device")
        self.board = Board.create(directory.board_path(self.epoch), self.epoch, settings.max_sessions, settings.pool)
        if not self.board.show_life():
            log.warning("no robust futex: clients ask /proc or a file lock whether this process lives")
        self._descriptors = Descriptors(settings.max_sessions)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 65_535)
        self._zap = auth.ZapHandler(self._context, self._refuse)
        try:
            router = self._bind_router()
            self.feed = Feed(self._bind_feed())
        except BaseException:
            self.board.unlink()
            raise
        self.registry = Registry(_limits(settings))
        pool = Pool(devices, settings.max_cuda_events)
        self.effects = Effects(self.board, pool, self.feed, self._forget)
        self.metrics = Metrics()
        self.sessions = SessionTable(settings.remembered_requests, settings.max_sessions)
        self.handlers = Handlers(
            settings,
            self.registry,
            self.board,
            self.effects,
            self.sessions,
            self.metrics,
            _drivers.name(),
            directory.feed,
            self._descriptors.sessions,
        )
        strikes = StrikeCounter(settings.max_strange, settings.max_sessions)
        dispatcher = Dispatcher(settings, self.handlers, self.sessions, self.metrics, strikes, self._confirm)
        self._requests = Requests(router, settings, dispatcher, strikes, self._refuse)
        self._tick_s = min(0.25, settings.lease_ttl / 8)
        self._credit = PauseCredit(time.monotonic_ns(), int(self._tick_s * 1e9))
        self._idle_since = time.monotonic()
        self._next_feed_tick = 0.0
        self._gate = Gate(
            [self._requests.socket, self.feed.socket],
            directory.sockets,
            self._descriptors.usable,
            self._refuse_from_gate,
        )
        self._parent: PidFd | None = None
        self._refills = True

    # --- sockets ------------------------------------------------------------------------------------------------------

    def _guard(self, socket: zmq.Socket[bytes]) -> None:
        socket.linger = 0
        socket.setsockopt(zmq.ZAP_DOMAIN, auth.DOMAIN)
        socket.setsockopt(zmq.HANDSHAKE_IVL, int(self._settings.handshake_s * 1000))
        socket.setsockopt(zmq.BACKLOG, self._descriptors.backlog())

    def _bind_router(self) -> zmq.Socket[bytes]:
        router = self._context.socket(zmq.ROUTER)
        self._guard(router)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # ZeroMQ ends the connection of a larger frame without a word: with room above the limit we refuse and count.
        router.setsockopt(zmq.MAXMSGSIZE, 4 * self._settings.max_frame)
        router.sndhwm = self._settings.reply_queue
        router.bind(self.directory.endpoint)
        return router

    def _bind_feed(self) -> zmq.Socket[bytes]:
        feed = self._context.socket(zmq.XPUB)
        self._guard(feed)
        feed.setsockopt(zmq.MAXMSGSIZE, MAX_SUBSCRIPTION)
        feed.setsockopt(zmq.XPUB_WELCOME_MSG, codec.FEED_WELCOME)
        feed.sndhwm = self._settings.feed_queue
        feed.bind(self.directory.feed)
        return feed

    def _refuse_from_gate(self, reason: str) -> None:
        self._loop.call_soon_threadsafe(self._refuse, reason)

    def _refuse(self, reason: str, **more: object) -> None:
        self.metrics.refusals[reason] += 1
        count = self.metrics.refusals[reason]
        if is_round(count):
            log.warning("refused", extra=fields(reason=reason, count=count, **more))

    # --- the loop -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until SIGTERM, SIGINT or the end of the process that this one ends with."""
        readers: list[tuple[zmq.Socket[bytes], Callable[[], None]]] = [
            (self._zap.socket, self._drain_zap),
            (self._requests.socket, self._drain_requests),
            (self.feed.socket, self._drain_feed),
        ]
        for socket, drain in readers:
            self._loop.add_reader(_fd(socket), drain)
            self._loop.call_soon(drain)  # what came before the reader was there gives no edge any more
        self._loop.call_soon(self._tick)
        await self._done.wait()
        for socket, _ in readers:
            self._loop.remove_reader(_fd(socket))

    def stop(self) -> None:
        """Begin to end."""
        self._done.set()

    def end_with(self, pid: int, started: int) -> None:
        """End when the process `pid` that started at `started` does."""
        from ipcsync._linux.process import is_running

        try:
            parent = PidFd(pid)
        except ProcessLookupError:
            self.stop()
            return
        self._loop.add_reader(parent, self.stop)
        self._parent = parent
        if not is_running(pid, started):
            self.stop()

    # What the loop still has to call when the end begins is called after `close`, when there are no sockets any more.

    def _drain_feed(self) -> None:
        if not self._done.is_set():
            self.feed.drain()

    def _drain_zap(self) -> None:
        while not self._done.is_set() and self._zap.serve_one():
            continue

    def _drain_requests(self) -> None:
        if not self._done.is_set() and self._requests.drain():
            self._loop.call_soon(self._drain_requests)

    # --- life and death -----------------------------------------------------------------------------------------------

    def _confirm(self, entry: SessionEntry, sender: Sender) -> None:
        entry.watch.confirm(sender.routing, self._loop, lambda: self.handlers.lose(entry, "pidfd"))

    def _forget(self, session: Session) -> None:
        self.handlers.forget(session)
        self._idle_since = time.monotonic()

    def _tick(self) -> None:
        if self._done.is_set():
            return
        try:
            self._beat()
        finally:  # whatever failed: without the next tick no heartbeat would be told and no silence seen
            busy = self.effects.releaser.holds_any()
            self._loop.call_later(min(_RELEASE_S, self._tick_s) if busy else self._tick_s, self._tick)

    def _beat(self) -> None:
        now_ns = time.monotonic_ns()
        self._credit.tick(now_ns)
        self.board.beat(now_ns)
        for entry in self.sessions:
            self._check(entry, now_ns)
        now = now_ns / 1e9
        if now >= self._next_feed_tick:
            self._next_feed_tick = now + 1.0
            self.feed.tick()
        self.effects.releaser.reassert()
        self._refill()
        limit = self._settings.exit_when_idle
        if limit and not self.sessions and now - self._idle_since > limit:
            log.info("stopping", extra=fields(reason="idle", idle_s=limit))
            self.stop()
        # A drain by hand each tick: an edge that was missed then costs a tick, never a client.
        self._drain_zap()
        self._drain_requests()
        self._drain_feed()
        self._tell_alive()

    def _refill(self) -> None:
        if not self._refills:
            return
        try:
            for device in self.effects.pool.devices:
                self.effects.pool.refill(device)
        except IpcSyncError as error:
            self._refills = False  # events are then made when they are asked for, and that says why not
            log.error("no CUDA events are made ahead any more", extra=fields(why=error))

    def _check(self, entry: SessionEntry, now_ns: int) -> None:
        if entry.watch.lifeline_is_cut():
            self.handlers.lose(entry, "pidfd")
        elif entry.session.state == "live":
            # Never back: the line's last user may have been stopped inside of a store of its own.
            entry.beat_ns = max(entry.beat_ns, self.board.session(entry.session.line).heartbeat)
            if now_ns - max(entry.beat_ns, self._credit.since_ns) > entry.ttl_ns:
                self.handlers.lose(entry, "ttl")
        elif entry.watch.gave_up_lifeline():
            self.handlers.lose(entry, "pidfd")  # its goodbye was lost, or it called exec

    def close(self) -> None:
        """Tell everyone, then remove board and sockets."""
        self.board.stop()
        if self._parent is not None:
            self._loop.remove_reader(self._parent)
            self._parent.close()
        self._gate.stop()
        for socket in (self._requests.socket, self.feed.socket):
            socket.close()
        self._zap.close()
        self._context.term()
        for entry in self.sessions:
            entry.watch.close()
        self.effects.pool.close()
        self.board.unlink()
        self.directory.close()


def _limits(settings: Settings) -> Limits:
    return Limits(
        slots=settings.pool,
        sessions=settings.max_sessions,
        attachments=settings.max_attachments,
        streams=settings.max_streams,
        name_bytes=settings.max_name,
    )


def _fd(socket: zmq.Socket[bytes]) -> int:
    fd = socket.fd
    assert isinstance(fd, int)
    return fd
