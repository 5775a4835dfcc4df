"""One session with a coordinator, from the handshake to the goodbye: requests, attachments, waits, and the end."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, TypeVar, cast
from weakref import WeakValueDictionary

from msgspec.structs import replace

from ipcsync import _drivers
from ipcsync import _room as room
from ipcsync._board import Board, over
from ipcsync._deadline import bounded, deadline_of, left_of
from ipcsync._drivers import outliving
from ipcsync._native import device as devices
from ipcsync._native import fork
from ipcsync._native.context import count, current_ordinal, ordinal_of, uuid_of
from ipcsync._session import feed, handshake, sessions
from ipcsync._session.attachments import AttachmentTable, ClosedMeanwhile
from ipcsync._session.connection import Connection, Request, expect, zmq_context
from ipcsync._session.feed import Notice
from ipcsync._session.finished import Finished
from ipcsync._session.lease import LONGEST_BEAT_S, SessionLease
from ipcsync._session.references import AttachmentRef, Key, Opening
from ipcsync._session.shutdown import Shutdown
from ipcsync._session.waits import Waits
from ipcsync._wire import messages
from ipcsync._wire.messages import Message
from ipcsync._wire.point import PointKey
from ipcsync._worker import Latch, check_threads, start
from ipcsync.errors import ClientClosed, InvalidDevice, Reentered
from ipcsync.typing import EngineChoice

if TYPE_CHECKING:
    from ipcsync._engines import Engine
    from ipcsync._engines.traced import Tracing

log = logging.getLogger("ipcsync")

_JUDGING_S = 0.001  # to the next beat, while others judge what complete records here stand behind
_SOON_S = 0.1  # while what was given up is not given back yet

_M = TypeVar("_M", bound=Message)
_T = TypeVar("_T")

DEFAULT_TIMEOUT_S = 5.0
_DRAIN_S = 1.0
_END_S = 10.0  # longer than the end takes


class Session:
    """One session, with a lease that lives as long as this process does. Thread-safe.

    The heartbeat's thread begins and ends it. The calls ask that thread and wait, so an exception that ends a call
    leaves nothing half done. Construction opens nothing, so the caller of `begin` has the object when anything is
    opened.

    `shown(name)` is the user's name for an event of the coordinator's name.
    """

    connection: Connection
    lease: SessionLease
    attachments: AttachmentTable
    _shutdown: Shutdown

    def __init__(
        self, endpoint: str, name: str = "", *, behind_all: bool = False, shown: Callable[[str], str] = str
    ) -> None:
        self.endpoint = endpoint
        self.name = name
        self.timeout = DEFAULT_TIMEOUT_S  # of requests without one of their own
        self.engine: EngineChoice = "auto"  # of what it creates, where no other one is asked for
        self.is_closed: bool = False
        self._behind_all = behind_all
        self.waits: Waits = Waits()
        self._failure: BaseException | None = None
        self._has_begun = Latch()  # set also if it failed to
        self._has_ended = Latch()  # the part of the end that `close` waits for
        self._is_shut_down = False
        self._closer = 0  # the id of the thread that waits for the end
        self._shown = shown
        self._thread: threading.Thread | None = None
        self._finished: WeakValueDictionary[Key, AttachmentRef] = WeakValueDictionary()  # uses that are over

    def begin(
        self, timeout: float = DEFAULT_TIMEOUT_S, lease_ttl: float | None = None, tracing: Tracing | None = None
    ) -> None:
        """Open it, once. ConnectError if there is no coordinator, or one of another uid, protocol version or driver."""
        check_threads()
        _drivers.load()  # here, so that its errors and warnings are this caller's
        try:
            start(partial(self._run, timeout, lease_ttl, tracing), "ipcsync-heartbeat", self._fail)
            self._has_begun.wait()
            if self._failure is not None:
                raise self._failure
        except BaseException as error:
            self.drop()
            if (short := room.shortage(error, "a session")) is None:
                raise
            raise short from error

    def drop(self) -> None:
        """End it without waiting: no caller has it."""
        self.is_closed = True
        if self._has_begun.is_set and self._failure is None and not fork.is_in_bad_fork():
            self.lease.wake()

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        self._has_begun.set()

    def _run(self, timeout: float, lease_ttl: float | None, tracing: Tracing | None) -> None:
        """The thread's function: the session from its begin to its end."""
        self._thread = threading.current_thread()
        try:
            with ExitStack() as undo:
                self._begin(timeout, lease_ttl, tracing, undo)
                undo.pop_all()
        except BaseException as error:  # noqa: BLE001 - raised where the session was asked for
            self._fail(error)
            return
        finally:
            self._has_begun.set()
        self.lease.run(lambda: self.is_closed)
        if fork.is_in_bad_fork():
            return
        try:
            self._end()
        except Exception:
            log.exception("closing %r failed", self)
        finally:
            self._has_ended.set()
        if not self._is_shut_down:
            self.lease.run(self._shutdown.is_complete)
            self._shutdown.end()

    def _begin(self, timeout: float, lease_ttl: float | None, tracing: Tracing | None, undo: ExitStack) -> None:
        self.connection = connection = Connection(self.endpoint)
        undo.callback(connection.close)
        check = self._check_wanted_or_greeted
        welcome = handshake.greet(connection, self.name, timeout, lease_ttl, check, driver=_drivers.name())
        undo.callback(handshake.take_leave, connection, welcome.token)
        # Another thread may fork at any time, and the child's copy of the descriptor would keep the lifeline.
        board, forget_child = fork.keep_from_children(
            lambda: handshake.open_board(welcome, self.endpoint), Board.drop_descriptor
        )
        undo.callback(forget_child)
        undo.callback(board.close)  # which releases the lifeline, so that the line can be given to another session
        handshake.hold_lifeline(board, welcome.line, self.endpoint, timeout)
        self.epoch: bytes = welcome.epoch
        self.lease_ttl: float = welcome.lease_ttl
        self.id: str = welcome.session
        self.token: bytes = welcome.token
        self.feed_endpoint: str = welcome.feed
        connection.window = welcome.window
        connection.starts = lambda: board.starts
        self._sees_all_devices = {uuid_of(ordinal) for ordinal in range(count())}.issuperset(welcome.devices)
        self.lease = SessionLease(board, welcome, self.endpoint, self._at_beat)
        self.lease.stands_behind_all = self._behind_all
        undo.callback(self.lease.stop)
        self.attachments = AttachmentTable(board, self.lease, self._send_close, self.waits, tracing, self._shown)
        self._shutdown = Shutdown(connection, welcome.token, self.lease, self.attachments, forget_child)
        if not outliving.may_be_served():
            over.hold(board, board.session(welcome.line), by_exec=outliving.files_survive_exec())
        self.lease.show()  # first: from Ready on the coordinator waits for the mark
        connection.request(messages.Ready(), self.token, timeout, self._beat_and_check)
        self._check_wanted()
        devices.collectors.append(self.attachments.collect)
        sessions.add(self)

    def _beat_and_check(self) -> None:
        """Beat, since this thread waits for a reply, maybe of a coordinator that is just restarted."""
        self.lease.beat()
        self.lease.check_liveness()

    def _check_wanted(self) -> None:
        if self.is_closed:
            raise ClientClosed("the session was closed before it had begun", client=self.name, endpoint=self.endpoint)

    def _check_wanted_or_greeted(self) -> None:
        """As `_check_wanted`; but a greeting that was sent may open a session, so its reply is awaited."""
        if not self.connection.sent:
            self._check_wanted()

    def _end(self) -> None:
        """The part of the end that `close` waits for; what still drains afterwards does so without it."""
        self.attachments.close_all(_DRAIN_S, self._pause)
        self.waits.join(1.0, self._closer, self._pause)
        self._shutdown.begin(self.lease.show_heartbeat)
        devices.collectors.remove(self.attachments.collect)
        sessions.remove(self)
        if self._shutdown.is_complete():
            self._shutdown.end()
            self._is_shut_down = True

    def _pause(self, seconds: float) -> None:
        self.lease.beat()
        time.sleep(seconds)

    # --- checks -------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise ForkedProcessError, ClientClosed, or the error of a session that is lost."""
        fork.check()
        if self.is_closed:
            who = f"the client {self.name!r}" if self.name else "this client"
            raise ClientClosed(
                f"{who} of {self.endpoint} was closed by this process; connect again",
                client=self.name,
                endpoint=self.endpoint,
            )
        self.lease.check()

    def check_liveness(self) -> None:
        """As `check`, and ask the kernel whether the coordinator's process lives."""
        self.check()
        self.lease.check_liveness()

    @property
    def is_connected(self) -> bool:
        """Whether the session lives, as far as this process knows; sends nothing."""
        return not self.is_closed and not fork.is_in_bad_fork() and self.lease.is_good

    def _at_beat(self) -> float:
        """Called at each beat, on the heartbeat's thread; returns in how many seconds there is more to do."""
        self.connection.drain_late()
        is_judging = self.attachments.beat()
        self.attachments.closes.flush(wait=False, timeout=0.05)
        if self.is_closed:
            self._shutdown.at_beat()
        if is_judging:
            return _JUDGING_S
        return _SOON_S if self.connection.has_late or self.attachments.closes.has_any else LONGEST_BEAT_S

    # --- requests -----------------------------------------------------------------------------------------------------

    def request(self, body: Message, kind: type[_M], timeout: float | None = None) -> _M:
        """Send a request and return its reply, which is a `kind`; raises the error in the reply.

        `timeout` in seconds, the session's own by default.
        """
        self.check()
        seconds = self.timeout if timeout is None else timeout
        return expect(self.connection.request(body, self.token, seconds, self.check_liveness), kind)

    def _send_close(self, body: messages.Close | messages.Break, timeout: float) -> None:
        if threading.current_thread() is self._thread:
            self.lease.beat()  # many may be pending, and each may take its whole time
        self.connection.request(body, self.token, timeout, self.lease.check_coordinator)

    @property
    def _is_in_use_below(self) -> bool:
        """Whether a call of this session on this thread, which this one interrupts, has a lock."""
        return self.connection.is_in_use_below or self.attachments.is_in_use_below

    def check_not_below(self, what: str) -> None:
        """Raise Reentered within another call that has a lock: a thread may wait for it with what this one needs."""
        if self._is_in_use_below:
            raise Reentered(f"a call of this client is under way on this thread, and {what} interrupts it")

    def _change(self, timeout: float, fn: Callable[[float], _T]) -> _T:
        """`fn(seconds left)`, in the order of openings and closes."""
        self.check_not_below("an opening")
        deadline = deadline_of(timeout)
        try:
            return self.attachments.closes.change(timeout, lambda: fn(left_of(deadline)))
        except Exception as error:
            if (short := room.shortage(error, "an event")) is None:
                raise
            raise short from error

    def open_remote(
        self, bodies: Sequence[messages.Remote], openings: Sequence[Opening], timeout: float | None = None
    ) -> None:
        """Attach to events of other nodes, as `open` does to those here."""
        seconds = self.timeout if timeout is None else timeout
        self._change(seconds, partial(self._open, bodies, openings, seconds))

    def open(self, bodies: Sequence[messages.Open], openings: Sequence[Opening], timeout: float | None = None) -> None:
        """Attach to the events of `bodies`, each for the opening of its index: all or none, within `timeout` s in all.

        If an exception comes, also later, the caller has to `abandon` the openings.
        """
        seconds = self.timeout if timeout is None else timeout
        self._change(seconds, partial(self._open_in_order, bodies, openings, seconds))

    def _open_in_order(
        self, bodies: Sequence[messages.Open], openings: Sequence[Opening], timeout: float, left: float
    ) -> None:
        deadline = deadline_of(left)
        named_by_recorder = [body for body in bodies if body.recorder and body.name]
        if not named_by_recorder or self._sees_all_devices:
            self._open(bodies, openings, timeout, left)
            return
        # Attach as a waiter first: if this process cannot use the event, leaving later as its recorder would close it
        # for everybody.
        before = [Opening() for _ in named_by_recorder]
        try:
            self._open([replace(body, recorder=False) for body in named_by_recorder], before, timeout, left)
            self._open(bodies, openings, timeout, left_of(deadline))
            self.abandon(before)
        except BaseException:
            self.abandon(before)
            raise

    def _open(
        self,
        bodies: Sequence[messages.Open | messages.Remote],
        openings: Sequence[Opening],
        timeout: float,
        left: float,
    ) -> None:
        """`open` without the lock that orders it with closes; raises the first error of the replies.

        `left` seconds are left of the call's `timeout`.
        """
        self.check()
        deadline = deadline_of(left)
        requests = [Request(body, self._give_back) for body in bodies]
        try:
            self.connection.exchange(requests, self.token, left, self.check_liveness)
            for index, opening in enumerate(openings):
                self._take(requests, index, opening, timeout, deadline)
        except BaseException:
            self._abandon(requests)
            raise

    def _take(
        self, requests: list[Request], index: int, opening: Opening | None, timeout: float, deadline: int
    ) -> AttachmentRef:
        """Attach by the reply to a request; if the event was closed here meanwhile, tell that, and ask anew."""
        while True:
            reply = expect(self.connection.result_of(requests[index], timeout), messages.Attachment)
            try:
                attached = self.attachments.add(reply, opening)
            except ClosedMeanwhile:
                self.attachments.finish_close((reply.slot, reply.incarnation), timeout, deadline)
            else:
                requests[index].is_taken = True
                return attached
            # What these replies attached to has ended with that close.
            ended = [number for number in range(index, len(requests)) if _is_of_use(requests[number].reply, reply)]
            for number in ended:
                requests[number].is_taken = True
                requests[number] = Request(requests[number].body, self._give_back)
            again = [requests[number] for number in ended]
            self.connection.exchange(again, self.token, left_of(deadline), self.check_liveness)

    def _abandon(self, requests: Sequence[Request]) -> None:
        """Have the thread, which no exception ends, close what these requests attach to and no caller took."""
        self.connection.abandon(requests)
        self.lease.wake()

    def abandon(self, openings: Sequence[Opening]) -> None:
        """Close openings that no caller has; the thread sends the closes."""
        for opening in openings:
            opening.close(wait=False)
        self.lease.wake()

    def attach(self, key: PointKey, timeout: float | None = None) -> AttachmentRef:
        """The attachment to a point's event. Asks the coordinator only if this session has none to the event yet.

        Raises RecorderLost if the event is gone. A point of another epoch belongs to another node, which the bridge
        asks: NodeLost if there is no such node, or it is lost; NoBridge; StalePoint if there never was a bridge.
        """
        self.check()
        found = self._find(key)
        if found is not None:
            return found
        seconds = self.timeout if timeout is None else timeout
        self.attachments.relieve()
        return self._change(seconds, partial(self._attach, key, seconds))

    def _find(self, key: PointKey) -> AttachmentRef | None:
        if key.epoch != self.epoch:
            return self.attachments.find_mirror((key.epoch, key.slot, key.incarnation))
        use = key.slot, key.incarnation
        return self.attachments.find(use) or self._finished.get(use)

    def _attach(self, key: PointKey, timeout: float, left: float) -> AttachmentRef:
        found = self._find(key)
        if found is not None:
            return found
        self.check()
        if key.epoch == self.epoch:
            body: Message = messages.Attach(key.slot, key.incarnation)
        else:
            device = uuid_of(current_ordinal())
            body = messages.Remote("attach", "", "", key.epoch, key.slot, key.incarnation, device)
        deadline = deadline_of(left)
        requests = [Request(body, self._give_back)]
        try:
            self.connection.exchange(requests, self.token, left, self.check_liveness)
            if isinstance(remains := requests[0].reply, messages.Remains):
                return self._finish(remains)
            return self._take(requests, 0, None, timeout, deadline)
        except BaseException:
            self._abandon(requests)
            raise

    def _finish(self, remains: messages.Remains) -> AttachmentRef:
        try:
            ordinal = ordinal_of(remains.device)
        except InvalidDevice:
            ordinal = current_ordinal()  # nothing of it is used
        name = self._shown(remains.name)
        finished = Finished(self.lease.board, self.lease, remains, ordinal, name)
        found = AttachmentRef(self.waits, cast("Engine", finished))  # it has what a point asks of an engine
        self._finished[remains.slot, remains.incarnation] = found
        return found

    def _give_back(self, late: Message) -> None:
        """Release an attachment whose request was given up."""
        if isinstance(late, messages.Attachment):
            self.attachments.give_back(late)

    def notices(
        self, prefix: str, session_prefix: str, timeout: float | None, check: Callable[[], None] | None = None
    ) -> Iterator[Notice]:
        """The feed: a snapshot, then every change; ends after `timeout` seconds without one, or when `check` raises."""
        deadline_of(timeout)
        timeout = None if timeout is None else bounded(timeout)
        self.check()
        return feed.watch(
            zmq_context(),
            self.feed_endpoint,
            feed.Replay(prefix, session_prefix),
            timeout,
            lambda is_resync: self.request(messages.Snapshot(prefix, is_resync), messages.SnapshotReply),
            self.check_liveness if check is None else check,
        )

    # --- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the session, and wait up to 1 s for its work; nothing in a forked child.

        If an exception ends the wait, the end goes on, and another call waits for it again. Within a call of this
        session on the same thread (in a finalizer or a signal's handler) it does not wait.
        """
        if fork.is_in_bad_fork():
            return
        self.is_closed = True
        thread = threading.current_thread()
        if self._failure is not None or thread is self._thread:
            return
        self._closer = threading.get_ident()
        self.lease.wake()
        if self._is_in_use_below:
            return
        if self._has_ended.wait(_END_S) and self._is_shut_down and self._thread is not None:
            self._thread.join(_END_S)

    def __repr__(self) -> str:
        return f"<session {self.name!r} {'connected' if self.is_connected else 'closed'} {self.endpoint}>"


def _is_of_use(reply: Message | None, other: messages.Attachment) -> bool:
    """Whether a reply attaches to the same use of a slot as another one."""
    return isinstance(reply, messages.Attachment) and (reply.slot, reply.incarnation) == (other.slot, other.incarnation)
