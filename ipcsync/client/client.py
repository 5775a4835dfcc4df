"""The client: a user's object over one session with a coordinator."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from operator import methodcaller
from threading import get_ident
from types import MappingProxyType
from typing import Any, NoReturn, cast

from msgspec.structs import replace

from ipcsync._closing import Closing
from ipcsync._deadline import deadline_of
from ipcsync._engines import queued
from ipcsync._native import device as devices
from ipcsync._native import fork
from ipcsync._native.context import DEFAULT_STREAMS, current_ordinal, ordinal_of, uuid_of
from ipcsync._native.stream import Stream, stream_handle
from ipcsync._session.attachments import AttachmentRef
from ipcsync._session.feed import Notice, watch
from ipcsync._session.session import DEFAULT_TIMEOUT_S, Session, living
from ipcsync._wire import codec as wire
from ipcsync._wire import endpoints, messages
from ipcsync._wire.messages import AttachmentInfo, BridgeInfo, EventInfo, NodeInfo, SessionInfo
from ipcsync._wire.names import plain
from ipcsync.client._twins import ClientView, several, warn_if_dropped
from ipcsync.client.event import SharedEvent, check_engine, check_name, check_node, depth_of, open_events, short
from ipcsync.client.graphs import GraphRecord, GraphWait, Replaying, Upcoming, beside, end_all
from ipcsync.client.point import Point, bound, looks
from ipcsync.client.unnamed import RING, Reservation, UnnamedEvents
from ipcsync.errors import ConnectError, DeviceMismatch, InvalidDevice, IpcSyncError, WaitTimeout
from ipcsync.typing import Chains, DeviceLike, EngineChecks, EngineChoice, Stats, StreamLike


class Client(ClientView, Closing):
    """One session with a coordinator, with a lease that lives as long as this process does. Thread-safe.

    Made by `connect`. A context manager that closes it. In a forked child all but `close` raises ForkedProcessError.

    A method that asks the coordinator waits for its reply at most `timeout` seconds; None means `client.timeout`. It
    raises WaitTimeout after them; ClientClosed, CoordinatorLost or SessionExpired if the session is over; ValueError
    for a timeout that is negative or NaN; Reentered in a finalizer on a thread of ipcsync's own.
    """

    _shows_prefix = False  # in names, takes them with it or without it, and shows only sessions whose names have it

    def __init__(
        self,
        endpoint: str | None = None,
        name: str | None = None,
        *,
        prefix: str = "",
        chains: Chains = "stream",
        engine: EngineChoice = "auto",
        depth: int | None = None,
    ) -> None:
        if chains not in ("stream", "session"):
            raise ValueError(f"chains is 'stream' or 'session', but got {chains!r}")
        prefix = self._prefix = plain(prefix, "a prefix")
        if prefix:
            check_name(f"{prefix}x", f"the prefix {short(prefix)}, with a name of one byte behind it,")
        self._session_prefix = prefix if self._shows_prefix else ""
        without = methodcaller("removeprefix", prefix)
        self._taken: Callable[[str], str] = without if self._shows_prefix else str  # a name without the prefix
        self._shown: Callable[[str], str] = str if self._shows_prefix else without  # also one to which a point has led
        name = plain("" if name is None else name)
        if name:
            check_name(name, f"the session's name {short(name)}")
        try:
            address = endpoints.default_endpoint() if endpoint is None else plain(endpoint, "an endpoint")
            address = endpoints.absolute(address)
        except (ValueError, FileNotFoundError) as error:
            raise ConnectError(f"the default endpoint cannot be used: {error}") from None
        self._session = Session(address, name, behind_all=chains == "session", shown=self._shown)
        check_engine(engine)
        if engine == "auto":
            engine = cast("EngineChoice", os.environ.get("IPCSYNC_ENGINE") or "auto")
            check_engine(engine, "IPCSYNC_ENGINE")
        self._session.engine, self._session.depth = engine, depth_of(depth)
        self._unnamed = UnnamedEvents(self._session)
        self._finalizer = warn_if_dropped(self, self._session)

    def _begin(
        self,
        timeout: float = DEFAULT_TIMEOUT_S,
        lease_ttl: float | None = None,
        trace: str | os.PathLike[str] | None = None,
    ) -> None:
        """Open the session. Whoever calls it drops that if an exception comes before anybody has the client."""
        directory = os.environ.get("IPCSYNC_TRACE", "") if trace is None else trace
        if not os.fspath(directory):
            self._session.begin(timeout, lease_ttl)
            return
        from ipcsync._session.traced import traced_engines
        from ipcsync._trace.file import prepare

        self._session.begin(timeout, lease_ttl, traced_engines(prepare(directory), self.name, self._session.waits))

    def _full(self, name: str) -> str:
        """The coordinator's name, and so every other client's: with the prefix. ProtocolError if it is invalid."""
        name = self._taken(plain(name))
        check_name(name, f"the name {short(name)}")
        if self._prefix:
            check_name(self._prefix + name, f"the name {short(name)}, behind the prefix {short(self._prefix)},")
        return self._prefix + name

    def _full_prefix(self, prefix: str) -> str:
        """The coordinator's prefix for names that begin with `prefix` here."""
        return self._prefix + self._taken(plain(prefix, "a prefix"))

    # --- events -------------------------------------------------------------------------------------------------------

    def event(
        self,
        name: str,
        *,
        recorder: bool = False,
        device: DeviceLike | None = None,
        engine: EngineChoice = "auto",
        depth: int | None = None,
        timeout: float | None = None,
        node: str | None = None,
        fleet: bool = False,
    ) -> SharedEvent:
        """Open the shared event `name`, or create it if there is none. Recorder and waiters may open it in any order.

        `recorder=True` makes this session its recorder. `device` is by default the event's own if it exists, else the
        current one. `engine` is "event", "timeline", or "auto" for the client's (see `connect`). `depth`, 1 to
        1024, is how many records may be in flight on the `event` engine, the client's by default; the creator's holds.

        `node` opens an event of another node, for waiting only; its recorder and waiters may open it in any order.
        `fleet=True` opens an event with one recorder in the whole fleet, on any node, on the `timeline` engine; waiters
        find it once its recorder has opened it. Both need a bridge (`ipcsync bridge`): NoBridge if there is none,
        NodeLost if there is no such node, EventClosed if that does not export the name, FleetUnavailable if the store
        of the fleet's names does not answer.

        Raises RecorderTaken, InvalidDevice, DeviceMismatch, EngineMismatch, QuotaExceeded, WaitTimeout, ProtocolError
        for an invalid name, and ValueError for an invalid depth, engine, timeout or combination.
        """
        return self._open([name], device, engine, depth, timeout, recorder=recorder, node=node, fleet=fleet)[0]

    def nodes(self, *, timeout: float | None = None) -> list[NodeInfo]:
        """The nodes of the fleet, as this node's bridge sees them, this node first.

        At most 400 others are listed: those that are linked or lost before those that are only known. Raises NoBridge
        if there is no bridge, and FleetUnavailable if the store of the fleet's names does not answer.
        """
        return self._session.request(messages.Remote("nodes"), messages.NodeList, timeout).nodes

    def bridge(self, *, timeout: float | None = None) -> BridgeInfo:
        """The bridge beside this coordinator, and what it has counted.

        Nothing but the bridge is asked, so it may be asked again and again. Raises NoBridge if there is none.
        """
        return self._session.request(messages.Remote("bridge"), messages.BridgeInfo, timeout)

    def events(
        self,
        names: Iterable[str],
        *,
        recorder: bool = False,
        device: DeviceLike | None = None,
        engine: EngineChoice = "auto",
        depth: int | None = None,
        timeout: float | None = None,
        node: str | None = None,
    ) -> list[SharedEvent]:
        """Open many shared events as `event` does, in order: all or none, within `timeout` seconds in all.

        The requests are pipelined, so a hundred events take little more time than a few. `timeout` is by default
        `client.timeout`. Raises the errors of `event`: what it opened as recorder is closed then, and over for waiters.
        """
        if isinstance(names, str):
            raise TypeError(f"names are several names, but got one str, {names!r:.80}: open one by `event`")
        return self._open(
            several(names, "names", "names"), device, engine, depth, timeout, recorder=recorder, node=node
        )

    def _open(self, names: Sequence[str], *options: Any, **where: Any) -> list[SharedEvent]:
        full = [self._full(name) for name in names]
        openings = [AttachmentRef() for _ in full]
        try:
            return open_events(self._session, full, openings, *options, **where)
        except BaseException as error:
            self._session.abandon(openings)
            if isinstance(error, IpcSyncError) and (event := getattr(error, "event", "")):
                error.event = self._shown(event)  # type: ignore[attr-defined] # asked for above
            raise

    def record(
        self,
        stream: StreamLike | None = None,
        *,
        engine: EngineChoice = "auto",
        timeout: float | None = None,
        depth: int | None = None,
        after: Iterable[Point] = (),
    ) -> Point:
        """Record on this client's unnamed event for `stream`: the usual way to hand work on.

        On the `event` engine it blocks while `depth` records of the stream are in flight (1 to 1024, the client's by
        default; that of the stream's first record holds), at most `timeout` seconds. The first record on a stream asks
        the coordinator, at most `client.timeout` seconds; later ones send nothing. Once the client has 32 such events,
        a new stream takes over the event of one whose work is complete, and lost events are closed, points and all, so
        a program may make a stream for each piece of work. It depends on the same waits as `SharedEvent.record`. Once
        part of its work is lost, a new event takes its place. Raises as `SharedEvent.record`, the first as `event` too.
        """
        self._session.check()
        handle, ordinal = stream_handle(stream)
        # A reused address means the old stream is gone, so its event can serve the new one. The default streams'
        # handles may mean another stream in each thread.
        address = int(handle)
        key = (address, get_ident() if address in DEFAULT_STREAMS else 0, ordinal, engine)
        points, timeout = bound(after, timeout) if after else ((), timeout)
        return self._unnamed.record(key, depth, handle, timeout, points)

    def record_all(
        self,
        device: DeviceLike | None = None,
        *,
        streams: Iterable[StreamLike | None] | None = None,
        engine: EngineChoice = "auto",
        timeout: float | None = None,
        after: Iterable[Point] = (),
    ) -> Point:
        """A point behind everything submitted so far to a device (the current one by default), on any stream.

        It replaces `torch.cuda.synchronize()` before a hand-over, and the host does not wait. It covers the context of
        the device that is current on this thread, else the primary one, which torch uses, with its green contexts. The
        point depends on every wait of this process: if one was lost, RecorderLost is raised until that stream is
        resumed. If that stream is gone, name the other `streams`: the point then covers all that was submitted to
        these, on any device. `engine`, `timeout` and `after` are as in `record`.

        Raises StreamCapturing while a stream of the context is being captured. The capture stays valid if ipcsync made
        the stream, if it is a current one of this thread, or a blocking one. CUDA invalidates a capture on any other
        stream, as in `torch.cuda.synchronize()`, and the error says so. If others may capture, name the `streams`.

        With a driver before CUDA 12.5, which cannot record a context, the point covers only the streams that ipcsync
        knows, and a RuntimeWarning says how many. Raises InvalidDevice, ValueError for no `streams`, and as `record`.
        """
        self._session.check()
        points, timeout = bound(after, timeout)
        return self._unnamed.record_behind(self._unnamed.join(device, streams), engine, timeout, points)

    def reserve(
        self, *, device: DeviceLike | None = None, engine: EngineChoice = "auto", timeout: float | None = None
    ) -> Reservation:
        """A point that this session will record later, on any stream of `device` (the current one by default).

        For programs that must send the point before its record. Each reservation takes a slot until it is closed.
        Raises InvalidDevice, DeviceMismatch, EngineMismatch, QuotaExceeded, WaitTimeout; ValueError as `event`.
        """
        openings = [AttachmentRef()]
        try:
            (event,) = open_events(self._session, [""], openings, device, engine, RING, timeout, recorder=True)
            return Reservation(event)
        except BaseException:
            self._session.abandon(openings)
            raise

    def replay(
        self,
        waits: Mapping[GraphWait, Point],
        records: Mapping[GraphRecord, SharedEvent] = MappingProxyType({}),
        *,
        stream: StreamLike | None = None,
        timeout: float | None = None,
        ahead: bool = False,
    ) -> Replaying:
        """A block for the launch of CUDA graphs in which these waits and records were captured.

            with client.replay({kv: point}, {done: event}, stream=stream, timeout=5) as replay:
                graph.replay()
            connection.send(bytes(replay[done]))

        In it, graphs are launched on `stream` (the current one by default): each wait lets its graph go on once its
        point is complete (one not named here never does), and each record is made when the graph comes there. Several
        records may be of one event: its generations are in the order of capture. A block that raises makes no record.

        Entering blocks until each point is recorded, there is room for the records and few enough replays are in
        flight, `timeout` seconds at most. `ahead=True` does not wait for the points' records: for those another process
        makes behind this replay's own. What nobody records then holds the stream until its recorder closes or dies.

        Entering raises what the waits and the records would, with nothing queued, or, for what ends meanwhile, with all
        queued and ended: then `is_used` is True. RecorderLost, EventClosed, NotRecorder, DeviceMismatch, WaitTimeout,
        StreamCapturing; EngineMismatch for a pending point of another process on the `event` engine, for more records
        of an event than its depth, and for `ahead` where `Point.wait` refuses it; CaptureError while another
        replay on the stream, or with one of these waits and records, is open, and if torch's current stream is another.
        Leaving raises what a record raised, once all is queued; with no record made, StreamCapturing, and WaitTimeout
        if another thread's call on one of the events lasts for `timeout` seconds.
        """
        return Replaying(self._session, waits, records, stream, timeout, ahead)

    def next(
        self,
        waits: Mapping[GraphWait, Point],
        records: Mapping[GraphRecord, SharedEvent] = MappingProxyType({}),
        *,
        timeout: float | None = None,
        ahead: bool = False,
    ) -> Upcoming:
        """A block as of `replay`, for graphs that torch replays within it, on whichever stream is current then.

        For launches deep within an engine. The first of them enters the replay, and raises what that would; the end of
        the block ends it. A block in which this thread replays nothing queues nothing: `replay.is_used` is False.

        Raises IpcSyncError unless `ipcsync.integrations.torch.install` was called.
        """
        return Upcoming(Replaying(self._session, waits, records, None, timeout, ahead))

    def resume(self, stream: StreamLike | None = None, timeout: float | None = None) -> None:
        """Block until `stream` is past the waits that were lost, at most `timeout` seconds, and forget them.

        Records on it raise RecorderLost until then. The caller has to repeat the work that ran behind the lost waits.
        What it waited for earlier of the same events, and what is still open, is waited for as before.
        The legacy default stream and all blocking streams of a device count as one: all of them have to be past these.
        WaitTimeout if the stream does not get past them, which a driver may never allow: use a new stream then.
        StreamCapturing, and the capture stays valid. Reentered in a handler within a call that waits or records.
        """
        self._resume(stream, timeout, self._session.check_liveness)

    def _resume(self, stream: StreamLike | None, timeout: float | None, check: Callable[[], None]) -> None:
        self._session.check()
        deadline = deadline_of(timeout)
        first, ordinal = stream_handle(stream)
        for handle in (first, *(each._handle for each in beside(first, ordinal))):
            while lost := queued.lost_on(handle, ordinal):  # again: one that is released meanwhile leaves another there
                if not queued.await_passed(lost, handle, ordinal, deadline, check):
                    text = f"the stream was not past its lost waits within {timeout} s: go on with a new stream"
                    raise WaitTimeout(text, timeout=timeout)
                queued.drop(lost)
                for session in living.copy():  # any client's event may depend on them
                    session.driving.look(settles=False)  # which is lost then: the next record takes another one
        self._unnamed.forget_lost()

    def point(self, data: bytes | bytearray | memoryview, *, timeout: float | None = None) -> Point:
        """The point in 48 bytes from any process. Asks the coordinator only at the event's first point.

        If its sender has closed or died by now, the point is complete if it was known complete, and else raises
        RecorderLost at its use. Once another event has its slot, after a while, this raises RecorderLost of cause
        "gone". Raises ProtocolError for invalid bytes, StalePoint for a point of an earlier coordinator, after which
        this client is as good as before. Where a bridge runs or ran, a point of another epoch is another node's:
        NodeLost if that node is lost or not known, NoBridge if no bridge runs.
        """
        self._session.check()
        key = wire.unpack(data)
        return Point(self._session.attach(key, timeout), key.generation)

    def wait_over(self, point: Point, timeout: float | None = None) -> bool:
        """Block until the GPU work of the lost recorder of `point` has ended: memory that it wrote may then be reused.

        True once its process has ended, and every child forked from it: a child keeps the driver's files open, and so
        GPU work under way. False after `timeout` seconds (None: no limit), for example while the recorder lives, also
        if its lease expired. False at once if it is never known: for a recorder in this process or on another node, and
        under CUDA MPS, whose server goes on with its work. `RecorderLost.over` has what was known when it was raised.

        Raises EventClosed, CoordinatorLost or SessionExpired if this client's own use ends first; TypeError for an
        argument that is not a point, ValueError for a timeout that is negative or NaN.
        """
        self._session.check()
        if not isinstance(point, Point):
            raise TypeError(f"wait_over takes a point, but got {type(point).__name__}")
        attached, left = point._bound_within(timeout)
        for is_over, pause_s in looks(attached.engine, left):
            if is_over:
                return True
            time.sleep(pause_s)
        return False

    def stream(
        self, name: str, *, device: DeviceLike | None = None, priority: int = 0, timeout: float | None = None
    ) -> Stream:
        """A new stream of this process with the named specification, which is the same for every worker.

        The first session that opens the name decides device (the current one by default) and priority, a number from
        -1024 to 1024. Raises DeviceMismatch if `device` is another one, or if this process does not see the
        specification's; InvalidDevice, QuotaExceeded, and ProtocolError for an invalid name or priority.
        """
        body = messages.OpenStream(
            name=self._full(name),
            device="" if device is None else uuid_of(devices.parse(device)),
            default_device=uuid_of(current_ordinal()),
            priority=priority,
        )
        spec = self._session.request(body, messages.StreamSpec, timeout)
        try:
            return Stream(ordinal_of(spec.device), spec.priority)
        except InvalidDevice as error:
            raise DeviceMismatch(f"the stream {name!r} is on a device that is not visible here: {error}") from None

    # --- lists --------------------------------------------------------------------------------------------------------

    def list_events(
        self, prefix: str = "", *, node: str | None = None, timeout: float | None = None
    ) -> list[EventInfo]:
        """The shared events whose names begin with `prefix`, those in quarantine included.

        `node`: the events of another node that can be waited for here. It raises NoBridge, NodeLost, and QuotaExceeded
        if they do not fit in one message; ValueError for an invalid name.
        """
        begin = self._full_prefix(prefix)
        if node is not None:
            check_node(node)
        body = messages.ListEvents(begin) if node is None else messages.Remote("events", node, begin)
        rows = self._session.request(body, messages.EventList, timeout).events
        return [replace(row, name=self._shown(row.name)) for row in rows] if self.prefix else rows

    def list_sessions(self, *, timeout: float | None = None) -> list[SessionInfo]:
        """The live sessions."""
        rows = self._session.request(messages.ListSessions(), messages.SessionList, timeout).sessions
        return [row for row in rows if row.name.startswith(self._session_prefix)]

    def list_attachments(
        self, prefix: str = "", *, limit: int = 100_000, timeout: float | None = None
    ) -> list[AttachmentInfo]:
        """Who records and who waits on the events whose names begin with `prefix`: the first `limit`, 0 to 100,000.

        Raises ProtocolError for another `limit`.
        """
        body = messages.ListAttachments(self._full_prefix(prefix), limit)
        rows = self._session.request(body, messages.AttachmentList, timeout).attachments
        return [replace(row, event=self._shown(row.event)) for row in rows] if self.prefix else rows

    def stats(self, *, timeout: float | None = None) -> Stats:
        """The coordinator's counts, and this client's under `client`."""
        stats: dict[str, Any] = dict(self._session.request(messages.Stats(), messages.Counters, timeout).stats)
        lease = self._session.lease
        stats["client"] = {
            "messages_sent": self.messages_sent,
            "full_ring_waits": lease.full_rings,
            "shortcuts": lease.session_check.shortcuts,
            "slow_calls": lease.session_check.slow_calls,
            "driver_stands_s": self._session.driving.standing_s(),
        }
        return cast("Stats", stats)

    def check(self, device: DeviceLike | None = None, *, timeout: float | None = None) -> EngineChecks:
        """Which engines work between this process and the coordinator on a device, tested with real calls.

        {"event": {"ok": bool, "why": str}, "timeline": {…}}; `why` is empty where it works. The coordinator makes a
        CUDA context on the device for it, as for an event of the engine `event`, and keeps it.

        Raises InvalidDevice and TypeError as `set_device`; DeviceMismatch if the coordinator does not serve the device;
        WaitTimeout if `timeout` seconds in all did not tell.
        """
        ordinal, deadline = devices.parse(device), deadline_of(self.timeout if timeout is None else timeout)
        reply = self._session.request(messages.Probe(uuid_of(ordinal)), messages.ProbeReply, timeout)
        return self._session.driving.check_engines(reply, ordinal, deadline)

    def watch(self, prefix: str = "", *, timeout: float | None = None) -> Iterator[Notice]:
        """A snapshot as notices, then every change in order; ends after `timeout` seconds without one.

        `prefix` selects events by name; sessions are always included. The kinds are those of `Notice`, among them
        "recorder_died", "recorder_expired" and "recorder_closed", which tell a recorder's death from its close:

            for notice in client.watch("kv/"):
                if notice.kind in ("recorder_died", "recorder_expired"):
                    print(f"{notice.name}: {notice.session} (pid {notice.pid}) {notice.cause}")

        ValueError for a timeout that is negative or NaN. Reading raises CoordinatorLost, SessionExpired, ClientClosed;
        WaitTimeout if the coordinator is silent where a snapshot is due.
        """
        return self._notices(prefix, timeout)

    def _notices(
        self, prefix: str, timeout: float | None, check: Callable[[], None] | None = None
    ) -> Generator[Notice, None, None]:
        begin = self._full_prefix(prefix)
        deadline_of(timeout)  # raises for what is no timeout
        self._session.check()
        notices = watch(self._session, begin, self._session_prefix, timeout, check or self._session.check_liveness)
        return (
            notice if notice.kind.startswith("session_") else dataclasses.replace(notice, name=self._shown(notice.name))
            for notice in notices
            if not fork.check()  # type: ignore[func-returns-value] # None: what the parent has read is no child's news
        )

    def close(self) -> None:
        """Close the session and all that it opened. A second call, and a call in a forked child, do nothing.

        It waits up to a second each for calls of other threads, work in flight, done callbacks, and the coordinator.
        Waiters for the rest still get it if this process lives on.
        """
        self._session.drop()  # first: an exception in what follows leaves a session that ends
        end_all(self._session)
        self._session.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a client is one session of one process: connect again in the process that needs one")
