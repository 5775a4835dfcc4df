"""A coordinator without its socket and its loop: handlers with all that stands behind them, the driver included."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack

from ipcsync import _drivers
from ipcsync._board import Board, Peer
from ipcsync._wire import codec, messages
from ipcsync._wire.messages import Message
from ipcsync_coordinator.deaths import DeathWatch
from ipcsync_coordinator.effects import Effects, Feed
from ipcsync_coordinator.gate import Sender
from ipcsync_coordinator.handlers import Handlers
from ipcsync_coordinator.journal import Transactions, recover
from ipcsync_coordinator.pool import Pool
from ipcsync_coordinator.questions import Metrics
from ipcsync_coordinator.registry import Registry
from ipcsync_coordinator.requests import Dispatcher
from ipcsync_coordinator.state import Session
from ipcsync_keeper.config import Settings
from ipcsync_keeper.link import DriverClient
from ipcsync_keeper.resources import EventStore, JournalFiles, SharedCudaEvent, StartupConfig, served_devices
from tests.kit import boards

SETTINGS = Settings(runtime_dir="/", pool=12, max_sessions=6, max_attachments=5, max_streams=4, remembered_requests=3)


class Frame:
    """A frame from the process `pid`, or from one that we cannot see."""

    def __init__(self, pid: int | None = None, uid: int | None = None) -> None:
        uid = os.getuid() if uid is None else uid
        self._address = "" if pid is None else f"localhost:{uid}:{os.getgid()}:{pid}"

    def get(self, _: str) -> str:
        """What ZeroMQ tells of the peer."""
        return self._address


SENDER = Sender(b"routing", Frame())


class _NoSocket:
    def send(self, _frame: bytes, _flags: int) -> None:
        """Nobody subscribes."""


class _NoWatch(DeathWatch):
    def watch(self, _peer: Peer) -> None:
        """Nobody dies, so no thread waits for that."""


class DirectDriver(DriverClient):
    """The driver without a link: each request is done at once, so that nothing is under way between two steps."""

    def __init__(self, events: EventStore) -> None:
        self._events = events

    def make(self, device: str, count: int, then: Callable[[list[SharedCudaEvent]], None]) -> None:
        then(self._events.make(device, count))

    def destroy(self, serials: list[int], then: Callable[[int], None]) -> None:
        then(self._events.destroy(serials))


class World:
    """Handlers with all that stands behind them, the driver included, and nothing before them."""

    def __init__(self) -> None:
        path = f"/dev/shm/ipcsync-board-{os.getuid()}-{os.urandom(16).hex()}"
        self.board = Board.create(path, os.urandom(16), SETTINGS.max_sessions, SETTINGS.most_slots)
        self.events = EventStore(served_devices(None))
        self.driver = DirectDriver(self.events)
        self.files = JournalFiles.create()
        self.begin(held=[])

    def begin(self, held: list[SharedCudaEvent]) -> None:
        """Begin, or go on with what another one left: board, journal and CUDA events."""
        self.registry = Registry(SETTINGS, lambda index: self.effects.line(index).recorded)
        devices = list(served_devices(None))
        self.pool = Pool(devices, self.driver, limit=200, step=8, held=held)
        feed = Feed(_NoSocket(), 0, lambda flush: flush(), lambda _: None)  # type: ignore[arg-type]
        effects = self.effects = Effects(self.board, self.pool, feed, self._forget, self.registry.tombstones)
        self.metrics = Metrics()
        self.transactions = Transactions(self.registry, effects, self.files)
        self.sessions = self.transactions.sessions
        self.differing = recover(self.transactions, time.monotonic_ns())
        name = _drivers.name()
        now_ns = time.monotonic_ns()
        config = StartupConfig(SETTINGS, self.board.path, name, devices, os.getpid(), now_ns, 1, {}, 0, [])
        self.handlers = Handlers(
            self.transactions,
            self.metrics,
            config,
            "ipc://feed",
            _NoWatch(lambda _: None),
            lambda: SETTINGS.max_sessions + 1,
        )
        self.dispatcher = Dispatcher(SETTINGS, self.handlers)
        self.ids = iter(range(1 << 40, 1 << 41))

    def _forget(self, session: Session) -> None:
        self.sessions.forget(session)

    def handle(self, frame: bytes) -> Message | None:
        """The reply's body."""
        reply = self.dispatcher.handle(frame, SENDER, time.monotonic_ns())
        return None if reply is None else codec.decode_reply(reply)[1]

    def ask(self, body: Message, token: bytes = b"") -> Message:
        reply = self.handle(codec.encode_request(next(self.ids), body, token, 0))
        assert reply is not None
        return reply

    def hello(self) -> messages.Welcome:
        reply = self.ask(messages.Hello(os.urandom(16), _drivers.name()))
        assert isinstance(reply, messages.Welcome)
        return reply

    @property
    def written(self) -> tuple[int, int]:
        """How far the journal goes, and in which of its two files."""
        return self.transactions.journal._end, self.transactions.journal._which

    def release_all(self) -> None:
        """All processes are dead, and have closed all files."""
        for entry in self.sessions:
            self.board.session(entry.line).shows_end(17)
            self.handlers.bury(entry)
        for serial in list(self.registry.kept.by_recorder):  # ready before their line showed their end
            self.registry.end_held(serial)
        self.transactions.commit()

    def _destroy_events(self) -> None:
        self.events.destroy([shared.serial for shared in self.events.held()])

    def close(self) -> None:
        with ExitStack() as ending:  # each step, though another one meets a planted mistake
            ending.callback(boards.end, self.board)
            for descriptor in self.files.descriptors:
                ending.callback(os.close, descriptor)
            ending.callback(self._destroy_events)
            self.release_all()
