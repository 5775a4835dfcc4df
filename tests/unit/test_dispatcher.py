"""The dispatcher without a socket: any frame gets a reply or none, never an exception, and nothing grows."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ipcsync import _drivers
from ipcsync._board import Board
from ipcsync._wire import codec, messages
from ipcsync._wire.messages import Message
from ipcsync_coordinator import records
from ipcsync_coordinator.abuse import StrikeCounter
from ipcsync_coordinator.auth import Sender
from ipcsync_coordinator.config import Settings
from ipcsync_coordinator.dispatcher import Dispatcher
from ipcsync_coordinator.driver_work import OwnDriver
from ipcsync_coordinator.effects import Effects
from ipcsync_coordinator.feed import Feed
from ipcsync_coordinator.fleet import Fleet
from ipcsync_coordinator.handlers import Handlers
from ipcsync_coordinator.journal import Journal
from ipcsync_coordinator.metrics import Metrics
from ipcsync_coordinator.pool import Pool
from ipcsync_coordinator.recovery import recover
from ipcsync_coordinator.registry import Registry
from ipcsync_coordinator.sessions import SessionEntry, SessionTable
from ipcsync_coordinator.state import Limits
from ipcsync_coordinator.transactions import Transactions
from ipcsync_holdings.events import EventStore, SharedCudaEvent, served_devices
from ipcsync_holdings.holdings import Fixed, Terms
from ipcsync_holdings.journal_files import JournalFiles
from tests.unit import frames

_SETTINGS = Settings(runtime_dir="/", pool=12, max_sessions=6, max_attachments=5, max_streams=4, remembered_requests=3)


class _Frame:
    """A frame from the process `pid`, or from one that we cannot see."""

    def __init__(self, pid: int | None = None) -> None:
        self._address = "" if pid is None else f"localhost:{os.getuid()}:{os.getgid()}:{pid}"

    def get(self, _: str) -> str:
        """What ZeroMQ tells of the peer."""
        return self._address


_SENDER = Sender(b"routing", _Frame())
_CODES = {
    "malformed", "version", "unknown_op", "invalid", "too_large", "too_deep", "name", "ttl", "engine", "forgotten",
    "late", "ConnectError", "SessionExpired", "QuotaExceeded", "EventClosed", "RecorderTaken", "DeviceMismatch",
    "EngineMismatch", "role", "epoch", "wanted", "NoBridge", "CoordinatorLost", "NodeLost", "NotRecorder",
}  # fmt: skip


class _NoSocket:
    def send(self, _frame: bytes, _flags: int) -> None:
        """Nobody subscribes."""


class World:
    """Handlers with all that stands behind them, the driver included, and nothing before them."""

    def __init__(self) -> None:
        path = f"/dev/shm/ipcsync-board-{os.getuid()}-{os.urandom(16).hex()}"
        self.board = Board.create(path, os.urandom(16), _SETTINGS.max_sessions, _SETTINGS.pool)
        self.events = EventStore(served_devices(None), self.board)
        self.work = OwnDriver(self.events)
        self.files = JournalFiles.create()
        self.begin(held=[])

    def begin(self, held: list[SharedCudaEvent]) -> None:
        """Begin, or go on with what another one left: board, journal and CUDA events."""
        self.registry = Registry(
            Limits(_SETTINGS.pool, _SETTINGS.max_sessions, _SETTINGS.max_attachments, _SETTINGS.max_streams)
        )
        devices = list(served_devices(None))
        self.pool = Pool(devices, self.work, limit=200, step=8, held=held)
        effects = self.effects = Effects(self.board, self.pool, Feed(_NoSocket()), self._forget, self.registry.graves)  # type: ignore[arg-type]
        self.sessions = SessionTable(_SETTINGS.remembered_requests, _SETTINGS.max_sessions)
        self.metrics = Metrics()
        journal = Journal(self.files, lambda: records.whole(self.registry, self.sessions))
        self.transactions = Transactions(self.registry, self.sessions, effects, journal)
        self.differing = recover(journal, self.registry, self.sessions, effects, self.board, time.monotonic_ns())
        fixed = Fixed("/", "host", None, _SETTINGS.pool, _SETTINGS.max_sessions)
        name = _drivers.name()
        now_ns = time.monotonic_ns()
        terms = Terms(fixed, self.board.epoch, self.board.path, name, devices, os.getpid(), now_ns, 1, {}, 0, [])
        self.handlers = Handlers(
            _SETTINGS,
            self.registry,
            self.board,
            effects,
            self.sessions,
            self.metrics,
            terms,
            self.transactions,
            Fleet(self.registry, effects, self.sessions, self.transactions, self.board.epoch, 0),
            "ipc://feed",
        )
        self.dispatcher = Dispatcher(
            _SETTINGS,
            self.handlers,
            self.sessions,
            self.metrics,
            StrikeCounter(_SETTINGS.max_strange, _SETTINGS.max_sessions),
            self.transactions,
            self._confirm,
        )
        self.ids = iter(range(1 << 40, 1 << 41))

    def _forget(self, session: object) -> None:
        self.handlers.forget(session)  # type: ignore[arg-type] # a Session

    def _confirm(self, _entry: SessionEntry, _sender: Sender) -> None:
        """There is no loop that could watch a pidfd."""

    def handle(self, frame: bytes) -> Message | None:
        """The reply's body."""
        reply = self.dispatcher.handle(frame, _SENDER, time.monotonic_ns())
        return None if reply is None else codec.decode_reply(reply)[1]

    def ask(self, body: Message, token: bytes = b"") -> Message:
        reply = self.handle(codec.encode_request(next(self.ids), body, token, 0))
        assert reply is not None
        return reply

    def hello(self) -> messages.Welcome:
        reply = self.ask(messages.Hello(os.urandom(16), _drivers.name()))
        assert isinstance(reply, messages.Welcome)
        return reply

    def bury_all(self) -> None:
        for entry in self.sessions:
            self.handlers.lose(entry, "pidfd")

    def close(self) -> None:
        self.bury_all()
        self.pool.close()
        self.files.close()
        self.board.close()
        self.board.unlink()


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """One for all: what grows, grows from test to test."""
    one = World()
    yield one
    one.close()


_TOKENS = [bytes([number]) * 16 for number in range(6)]


def _with_real_tokens(world: World, frame: bytes) -> bytes:
    """The frame with the tokens of sessions that are there: those it was made with stand for their places."""
    known = [entry.token for entry in world.sessions]
    for index, place in enumerate(_TOKENS[:-1] if known else []):
        frame = frame.replace(place, known[index % len(known)])
    return frame


@settings(max_examples=150, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(st.lists(frames.anything(st.sampled_from(_TOKENS)), min_size=5, max_size=25), st.integers(1, 3))
def test_any_frames_in_any_order_get_replies_and_leave_nothing_behind(
    world: World, sent: list[bytes], sessions: int
) -> None:
    for _ in range(min(sessions, _SETTINGS.max_sessions - len(world.sessions))):
        world.hello()
    for frame in sent:
        world.handle(_with_real_tokens(world, frame))  # raises for a reply that is none
        _assert_bounded(world)
    world.bury_all()
    assert world.metrics.refusals["internal"] == 0
    assert set(world.metrics.refusals) - {"internal"} <= _CODES
    assert world.registry.in_use == 0
    assert not world.registry.sessions
    assert not world.registry.names
    assert not world.registry.streams
    assert not world.sessions
    assert not world.sessions._by_serial
    assert not world.sessions._by_nonce


def _assert_bounded(world: World) -> None:
    sessions, registry = world.sessions, world.registry
    assert len(sessions) == len(sessions._by_serial) == len(sessions._by_nonce) <= _SETTINGS.max_sessions
    assert len(sessions._final_replies) <= _SETTINGS.max_sessions
    assert all(len(entry.replies) <= _SETTINGS.remembered_requests for entry in sessions)
    assert len(registry.slots) <= _SETTINGS.pool
    assert len(registry.streams) <= _SETTINGS.max_streams
    assert len(registry.sessions) <= _SETTINGS.max_sessions
    assert not registry.changes
    assert world.pool.made <= 200
    assert set(world.metrics.requests) <= set(messages.REQUESTS)


def test_every_request_has_a_handler_and_is_among_the_frames_that_are_tried(world: World) -> None:
    # hello has no session yet, and the reply to remote is owed until the bridge answers
    assert {*world.handlers.table, "hello", "remote"} == set(messages.REQUESTS)
    assert set(frames.bodies_of) == set(messages.REQUESTS.values())


def test_a_request_past_its_deadline_is_dropped_and_counted(world: World) -> None:
    token = world.hello().token
    before = world.metrics.refusals["late"]
    late = codec.encode_request(5, messages.Open("late", True), token, time.monotonic_ns() - 1)
    assert world.handle(late) is None
    assert world.metrics.refusals["late"] == before + 1
    assert world.registry.find("late") is None
    world.bury_all()


@pytest.mark.parametrize(
    ("wanted", "granted"), [(None, 5.0), (0.0001, 0.2), (1e300, 3600.0), (float("inf"), 3600.0), (7.5, 7.5)]
)
def test_a_ttl_is_clamped_and_the_granted_one_is_told(world: World, wanted: float | None, granted: float) -> None:
    reply = world.ask(messages.Hello(os.urandom(16), _drivers.name(), lease_ttl=wanted))
    assert isinstance(reply, messages.Welcome)
    assert (reply.lease_ttl, reply.heartbeat) == (granted, granted / 3)
    world.bury_all()


@pytest.mark.parametrize("wanted", [0.0, -1.0, -1e300, float("nan"), float("-inf")])
def test_a_ttl_that_is_none_is_refused(world: World, wanted: float) -> None:
    reply = world.ask(messages.Hello(os.urandom(16), _drivers.name(), lease_ttl=wanted))
    assert isinstance(reply, messages.Failure)
    assert (reply.kind, reply.attributes["code"]) == ("ProtocolError", "ttl")
    assert not world.sessions


def test_an_exception_inside_is_a_reply_and_counted_and_nothing_of_it_is_told(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = world.hello().token

    def fail(*_: object) -> Message:
        raise ZeroDivisionError("secret")

    monkeypatch.setitem(world.handlers.table, "stats", fail)
    reply = world.ask(messages.Stats(), token)
    assert isinstance(reply, messages.Failure)
    assert reply.kind == "IpcSyncError"
    assert "secret" not in reply.message
    assert world.metrics.refusals.pop("internal") == 1
    assert isinstance(world.ask(messages.ListSessions(), token), messages.SessionList)
    world.bury_all()


def test_a_change_that_fails_in_the_driver_keeps_no_other_back(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    token = world.hello().token
    for number in range(3):
        opened = world.ask(messages.Open(f"e{number}", True, engine="event", depth=1), token)
        assert isinstance(opened, messages.Attachment)

    def fail(*_: object) -> None:
        raise _drivers.describe(999, "cuEventDestroy")

    monkeypatch.setattr(world.pool, "destroy", fail)
    monkeypatch.setattr(world.pool, "give_back", fail)
    world.bury_all()
    assert world.registry.in_use == 0
    assert not world.sessions


def test_a_hello_when_descriptors_are_short_leaves_no_session_behind(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_pid: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("ipcsync_coordinator.liveness.start_time", fail)
    hello = messages.Hello(os.urandom(16), _drivers.name())
    frame = codec.encode_request(1, hello, b"", 0)
    sender = Sender(b"r", _Frame(os.getpid()))
    reply = world.dispatcher.handle(frame, sender, time.monotonic_ns())
    assert reply is not None
    _, welcome = codec.decode_reply(reply)
    assert isinstance(welcome, messages.Welcome)
    # Nobody can ask the kernel of a pid without its start time: others are pointed to the lifeline.
    assert world.board.session(welcome.line).process[0] == 0
    world.bury_all()
    assert not world.registry.sessions
