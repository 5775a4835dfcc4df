"""The client: one session with a coordinator."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from threading import get_ident
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ipcsync._board import Board
from ipcsync._engines import deadline_of
from ipcsync._native import device as devices
from ipcsync._native import fork
from ipcsync._native.context import LEGACY, count, current_ordinal, ordinal_of, uuid_of
from ipcsync._native.stream import Stream, stream_handle
from ipcsync._session import feed
from ipcsync._session import handshake as opening
from ipcsync._session.attachments import Attached, Attachments
from ipcsync._session.connection import Connection, context
from ipcsync._session.handshake import expect
from ipcsync._session.lease import Lease
from ipcsync._session.shutdown import Ending
from ipcsync._session.waits import Callbacks
from ipcsync._wire import endpoints, messages, names
from ipcsync._wire import point as wire
from ipcsync._wire.messages import Message
from ipcsync._wire.point import PointKey
from ipcsync.client import clients as known
from ipcsync.client.event import SharedEvent
from ipcsync.client.info import AttachmentInfo, EventInfo, Notice, SessionInfo
from ipcsync.client.point import Point
from ipcsync.errors import (
    ClientClosed,
    CoordinatorLost,
    DeviceMismatch,
    InvalidDevice,
    IpcSyncError,
    ProtocolError,
)

if TYPE_CHECKING:
    from typing_extensions import Self

    from ipcsync._engines.traced import Tracing

_M = TypeVar("_M", bound=Message)

_CLOSE_S = 1.0
_UNNAMED_DEPTH = 16
_DEFAULT_S = 5.0


def connect(
    endpoint: str | None = None,
    *,
    name: str | None = None,
    timeout: float = 5.0,
    lease_ttl: float | None = None,
    trace: str | os.PathLike[str] | None = None,
) -> Client:
    """Open a session with a coordinator.

    `endpoint` is $IPCSYNC_ENDPOINT by default, else the coordinator's socket in the runtime directory; `name` is what
    others see of this session; `timeout` in seconds, for a daemon that is just starting too; `lease_ttl` in seconds
    asks for another TTL than the coordinator's, which clamps it (`client.lease_ttl` is what it granted); `trace` is a
    directory to which this process writes what it does with shared events, $IPCSYNC_TRACE by default, "" for none.

    Raises ConnectError if there is no coordinator, or it is of another uid, protocol version or driver; ValueError for
    a timeout that is negative or NaN; OSError if nothing can be written to the trace's directory.
    """
    fork.arm()
    return Client(endpoint, name=name, timeout=timeout, lease_ttl=lease_ttl, trace=trace)


class Client:
    """One session with a coordinator, with a lease that lives as long as this process does. Thread-safe.

    A context manager that closes it. In a forked child every call but `close` raises ForkedProcessError.
    """

    _session_prefix = ""  # what begins the names of the sessions that `watch` tells of

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        name: str | None = None,
        timeout: float = 5.0,
        lease_ttl: float | None = None,
        trace: str | os.PathLike[str] | None = None,
    ) -> None:
        self._tracing = _tracing(os.environ.get("IPCSYNC_TRACE", "") if trace is None else trace, name or "")
        self.endpoint = endpoint if endpoint is not None else endpoints.default_endpoint()
        self.name = name or ""
        self._is_closed = False
        self._closing = threading.Lock()
        self._unnamed: dict[tuple[int, int, int, str], SharedEvent] = {}
        self._unnamed_lock = threading.Lock()
        self._callbacks = Callbacks()
        self._connection = Connection(self.endpoint)
        try:
            welcome = opening.greet(self._connection, self.name, timeout, lease_ttl)
            board = opening.open_board(welcome, self.endpoint, timeout)
            try:
                self._begin(board, welcome, timeout)
            except BaseException:
                board.close()  # and with it the lifeline, so that the line can be another session's
                raise
        except BaseException:
            self._connection.close()
            raise
        self._ending.forget_child = fork.at_child(self._lease.drop_in_child)
        devices.collectors.append(self._attachments.collect)
        known.add(self)

    def _begin(self, board: Board, welcome: messages.Welcome, timeout: float) -> None:
        self.epoch = welcome.epoch
        self.lease_ttl = welcome.lease_ttl
        self.session_id = welcome.session
        self._token = welcome.token
        self._feed_endpoint = welcome.feed
        self._connection.window = welcome.window
        self._sees_all_devices = {uuid_of(ordinal) for ordinal in range(count())}.issuperset(welcome.devices)
        self._lease = Lease(board, welcome, self.endpoint, self._at_beat)
        self._attachments = Attachments(self, board, self._lease, self._send_close, self._tracing)
        self._ending = Ending(self._connection, welcome.token, self._lease, self._attachments)
        try:
            self._connection.request(messages.Ready(), self._token, timeout, self._lease.check_liveness)
            self._lease.start()
        except BaseException:
            self._lease.stop()
            raise

    # --- requests -----------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        fork.check()
        if self._is_closed:
            raise ClientClosed("this client was closed")
        self._lease.check()

    def _request(self, body: Message, kind: type[_M], timeout: float = _DEFAULT_S, **options: Any) -> _M:
        self._check()
        return expect(self._connection.request(body, self._token, timeout, self._lease.check_liveness, **options), kind)

    def _at_beat(self) -> None:
        """From the heartbeat's thread."""
        self._connection.drain_late()
        self._attachments.beat()
        self._attachments.tell(0.05, wait=False)
        self._ending.at_beat()

    def _send_close(self, body: messages.Close, timeout: float) -> None:
        self._connection.request(body, self._token, timeout, self._lease.check_coordinator)

    @property
    def is_connected(self) -> bool:
        """Whether the session lives, as far as is known; asks nobody."""
        return not self._is_closed and not fork.is_in_bad_fork() and self._lease.is_good

    @property
    def messages_sent(self) -> int:
        """How many requests this client has sent to the coordinator."""
        return self._connection.sent

    # --- events -------------------------------------------------------------------------------------------------------

    def event(
        self,
        name: str,
        *,
        recorder: bool = False,
        device: Any = None,
        engine: str = "auto",
        depth: int = 4,
        timeout: float = 5.0,
    ) -> SharedEvent:
        """Open the shared event `name`, or create it if nobody has it; whoever records may come first or last.

        `recorder=True` makes this session the one that records. `device` is the event's own if it exists, else the
        current one. `engine` is "event", "timeline" or "auto". `depth`, 1 to 1024, is how many records may be in
        flight, and is the creator's. `timeout` in seconds, for the coordinator's answer.

        Raises RecorderTaken, DeviceMismatch, EngineMismatch, QuotaExceeded, ProtocolError for a bad name, WaitTimeout,
        and ValueError for a depth, engine or timeout that is none.
        """
        (opened,) = self.events([name], recorder=recorder, device=device, engine=engine, depth=depth, timeout=timeout)
        return opened

    def events(
        self,
        names: Iterable[str],
        *,
        recorder: bool = False,
        device: Any = None,
        engine: str = "auto",
        depth: int = 4,
        timeout: float = 5.0,
    ) -> list[SharedEvent]:
        """Open many shared events as `event` does, in their order: all, or none, and `timeout` is for all together.

        Many requests are under way at once, so a hundred events take little more time than a few.
        """
        names = list(names)
        for name in names:
            _check_name(name)
        return self._open(names, recorder, device, engine, depth, timeout)

    def _open(
        self, names: Sequence[str], recorder: bool, device: Any, engine: str, depth: int, timeout: float = _DEFAULT_S
    ) -> list[SharedEvent]:
        self._check()
        if isinstance(depth, bool) or not isinstance(depth, int):
            raise TypeError(f"depth is an int, but got {type(depth).__name__}")
        if not 1 <= depth <= 1024:
            raise ValueError(f"depth is from 1 to 1024, but got {depth}")
        if engine not in ("auto", "event", "timeline"):
            raise ValueError(f"engine is 'auto', 'event' or 'timeline', but got {engine!r}")
        wanted = "" if device is None else uuid_of(devices.parse(device))
        default = uuid_of(current_ordinal())
        bodies = [messages.Open(name, bool(recorder), wanted, default, engine, depth) for name in names]
        with self._attachments.change(timeout), ExitStack() as before:
            self._attachments.settle(timeout)
            if recorder and not self._sees_all_devices:
                # Whoever cannot use an event must learn it before it has the role: a recorder that leaves finishes it.
                looks = [msgspec.structs.replace(body, recorder=False) for body in bodies if body.name]
                for event in self._attach_opened(looks, timeout):
                    before.enter_context(event)
            return self._attach_opened(bodies, timeout)

    def _attach_opened(self, bodies: list[messages.Open], timeout: float) -> list[SharedEvent]:
        """Events for the replies to `bodies`; if any is an error, none, and the first of the errors is raised."""
        self._check()
        look, give_back = self._lease.check_liveness, self._give_back
        answers = self._connection.request_many(bodies, self._token, timeout, look, on_late=give_back)
        opened: list[SharedEvent] = []
        try:
            for body, answer in zip(bodies, answers, strict=True):
                if isinstance(answer, IpcSyncError):
                    raise answer
                attached = self._attachments.add(expect(answer, messages.Attachment), opened=True)
                opened.append(SharedEvent(attached, is_recorder=body.recorder))
        except BaseException:
            for answer in answers[len(opened) + 1 :]:  # that one itself was given back, or is none
                if not isinstance(answer, IpcSyncError):
                    give_back(answer)
            for event in opened:
                event.close()
            self._attachments.tell(0.5, wait=True)
            raise
        return opened

    def _give_back(self, late: Message) -> None:
        """An attachment whose request was given up is let go of, not leaked."""
        if isinstance(late, messages.Attachment):
            self._attachments.give_back(late)

    def record(self, stream: Any = None, *, engine: str = "auto") -> Point:
        """Record on this client's unnamed event for `stream`, leased once: the everyday way to hand work on.

        Raises what `SharedEvent.record` does; the first record on a stream asks the coordinator, later ones do not.
        """
        self._check()
        handle, ordinal = stream_handle(stream)
        # An address that comes again means that its first stream is gone: the event of the one serves the other. The
        # default streams' handles may mean another stream in each thread.
        address = int(handle)
        key = (address, get_ident() if address in LEGACY else 0, ordinal, engine)
        event = self._unnamed.get(key) or self._unnamed_event(key)
        return event.record_on(handle, ordinal)

    def _unnamed_event(self, key: tuple[int, int, int, str]) -> SharedEvent:
        """The unnamed event of (stream's address, thread or 0, ordinal, engine), opened if there is none yet."""
        with self._unnamed_lock:
            event = self._unnamed.get(key)
            if event is None:
                (event,) = self._open([""], True, key[2], key[3], _UNNAMED_DEPTH)
                self._unnamed[key] = event
        return event

    def point(self, data: bytes | bytearray | memoryview) -> Point:
        """The point in 48 bytes from any process. Asks the coordinator only at the first sight of an event.

        Raises ProtocolError for bytes that are no point, CoordinatorLost for one of another coordinator or epoch,
        EventClosed for one whose event is gone.
        """
        self._check()
        key = wire.unpack(data)
        return Point(self._attach_point(key), key.generation)

    def _attach_point(self, key: PointKey) -> Attached:
        self._check()
        if key.epoch != self.epoch:
            raise CoordinatorLost("this point is of another coordinator, or of one that has restarted since")
        where = (key.slot, key.incarnation)
        found = self._attachments.find(where)
        if found is not None:
            return found
        with self._attachments.change(_DEFAULT_S):
            found = self._attachments.find(where)
            if found is not None:
                return found
            self._attachments.settle(_DEFAULT_S)
            body = messages.Attach(key.slot, key.incarnation)
            reply = self._request(body, messages.Attachment, on_late=self._give_back)
            return self._attachments.add(reply, opened=False)

    def stream(self, name: str, *, device: Any = None, priority: int = 0) -> Stream:
        """A stream of this process, made as the specification `name` says: every worker's is equal.

        The first to name it decides device (the current one by default) and priority. DeviceMismatch for another
        device than that, or one that this process does not see.
        """
        _check_name(name)
        body = messages.OpenStream(
            name=name,
            device="" if device is None else uuid_of(devices.parse(device)),
            default_device=uuid_of(current_ordinal()),
            priority=priority,
        )
        spec = self._request(body, messages.StreamSpec)
        try:
            ordinal = ordinal_of(spec.device)
        except InvalidDevice as error:
            raise DeviceMismatch(f"the stream {name!r} is on a device that is not visible here: {error}") from None
        return Stream(ordinal, spec.priority)

    # --- lists --------------------------------------------------------------------------------------------------------

    def list_events(self, prefix: str = "") -> list[EventInfo]:
        """The shared events whose names begin with `prefix`, those in quarantine included."""
        return [EventInfo.of(row) for row in self._request(messages.ListEvents(prefix), messages.EventList).events]

    def list_sessions(self) -> list[SessionInfo]:
        """The sessions that live."""
        rows = self._request(messages.ListSessions(), messages.SessionList).sessions
        return [SessionInfo.of(row) for row in rows]

    def list_attachments(self, prefix: str = "", *, limit: int = 100_000) -> list[AttachmentInfo]:
        """Who records and who waits on the events whose names begin with `prefix`: the first `limit`, 0 to 100,000."""
        rows = self._request(messages.ListAttachments(prefix, limit), messages.AttachmentList).attachments
        return [AttachmentInfo.of(row) for row in rows]

    def stats(self, timeout: float = _DEFAULT_S) -> dict[str, Any]:
        """What the coordinator counts, and under `client` what this client does; `timeout` in seconds."""
        stats: dict[str, Any] = dict(self._request(messages.Stats(), messages.Counters, timeout).stats)
        stats["client"] = {"messages_sent": self.messages_sent, "full_ring_waits": self._lease.full_rings}
        return stats

    def check(self, device: Any = None) -> dict[str, dict[str, Any]]:
        """Which engines work between this process and the coordinator on a device, tried for real.

        {"event": {"ok": bool, "why": str}, "timeline": {…}}; `why` is empty where it works.
        """
        from ipcsync._session import probe as trial

        ordinal = devices.parse(device)
        reply = self._request(messages.Probe(uuid_of(ordinal)), messages.ProbeReply)
        return trial.of_engines(reply, ordinal, self._lease.board)

    def watch(self, prefix: str = "", *, timeout: float | None = None) -> Iterator[Notice]:
        """A snapshot as notices, then every change in order; ends when nothing came for `timeout` seconds.

        Sessions are told of whatever the `prefix`, which is of events' names. ValueError for a timeout that is negative
        or NaN.
        """
        return self._notices(prefix, timeout, self._look)

    def _notices(self, prefix: str, timeout: float | None, look: Callable[[], None]) -> Iterator[Notice]:
        """`watch`, ended by what `look` raises."""
        deadline_of(timeout)
        self._check()
        return feed.watch(
            context(),
            self._feed_endpoint,
            feed.Replay(prefix, self._session_prefix),
            timeout,
            lambda is_resync: self._request(messages.Snapshot(prefix, is_resync), messages.SnapshotReply),
            look,
        )

    def _look(self) -> None:
        self._check()
        self._lease.check_liveness()

    # --- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the session and all it has; twice does nothing, and so does a call in a forked child.

        It waits up to a second for work that is still in flight. What is not complete by then stays good for those who
        wait as long as this process lives to see it complete.
        """
        if fork.is_in_bad_fork():
            return
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
        self._attachments.close_all(_CLOSE_S)
        self._callbacks.join(1.0)
        self._ending.begin()
        devices.collectors.remove(self._attachments.collect)
        known.remove(self)
        self._ending.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "connected" if self.is_connected else "closed"
        return f"<ipcsync.Client {self.name!r} {state} {self.endpoint}>"


def _tracing(directory: str | os.PathLike[str], name: str) -> Tracing | None:
    """What the engines of a client named `name` write to, None without a directory."""
    if not os.fspath(directory):
        return None
    from ipcsync._engines.traced import Tracing
    from ipcsync._trace.writer import prepare

    return Tracing(prepare(directory), name)


def _check_name(name: str) -> None:
    if not isinstance(name, str):
        raise TypeError(f"a name is a str, but got {type(name).__name__}")
    reason = names.why_not(name)
    if reason:
        raise ProtocolError(f"the name {name!r:.80} {reason}", code="name")
