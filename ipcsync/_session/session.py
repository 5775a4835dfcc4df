"""One session with a coordinator, and the sessions of this process.

The thread that owns a session has its request socket, its table of attachments and its lease. It makes no driver call
that may block and runs no user's code. Each call of another thread is a job that is handed to it, one after the other,
and whose end is awaited.
"""

from __future__ import annotations

import atexit
import functools
import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from contextlib import ExitStack, suppress
from functools import partial
from typing import TypeVar

from msgspec.structs import replace

from ipcsync import _drivers
from ipcsync import _room as room
from ipcsync._board import Board
from ipcsync._deadline import bounded, deadline_of, left_of
from ipcsync._engines import Engine, queued
from ipcsync._engines.core import import_count
from ipcsync._native import device as devices
from ipcsync._native import fork, pinned
from ipcsync._native.context import count, current_ordinal, uuid_of
from ipcsync._session import handshake
from ipcsync._session.attachments import MANY_POINTS, AttachmentRef, AttachmentTable, Life, NewEngine, Use
from ipcsync._session.connection import Connection, Request, expect
from ipcsync._session.driving import Driving
from ipcsync._session.owner import LONGEST_BEAT_S, Owner, SessionLease, block_signals
from ipcsync._session.waits import Waits
from ipcsync._threads import Job, beats, check_may_wait, check_threads, has_a_beat, start
from ipcsync._wire import messages
from ipcsync._wire.codec import PointKey
from ipcsync._wire.messages import Message
from ipcsync.errors import (
    ClientClosed,
    ConnectError,
    EventClosed,
    IpcSyncError,
    QuotaExceeded,
    SessionLost,
    WaitTimeout,
)
from ipcsync.typing import EngineChoice

log = logging.getLogger("ipcsync")

_M = TypeVar("_M", bound=Message)
_T = TypeVar("_T")

DEFAULT_TIMEOUT_S = 5.0
_END_S = 10.0  # longer than the end takes
_TOLD_S = 0.5  # for which a close waits until it is told
_CALL_S = 1.0  # for which it waits for other threads' calls
_SLICE_S = 0.25
_PATIENCE_NS = 1_000_000_000  # behind a call's deadline, which the owner sees first
_DRAIN_S = 1.0
_SOON_S = 0.1  # to the next beat, while what was given up is not given back yet; for what follows the end
_BEAT_S = 0.05  # for a request at a beat


_register_at_exit = functools.cache(atexit.register)
living: list[Session] = []  # some still drain after they were closed


class Session:
    """One session, with a lease that lives as long as this process does. Thread-safe.

    Construction opens nothing, so the caller of `begin` has the object when anything is opened. The calls ask the
    owner's thread and wait, so an exception that ends a call leaves nothing half done. `shown(name)` is the user's name
    for an event of the coordinator's name.
    """

    connection: Connection
    lease: SessionLease
    owner: Owner
    attachments: AttachmentTable
    driving: Driving

    timeout = DEFAULT_TIMEOUT_S  # of requests without one of their own
    engine: EngineChoice = "auto"  # of what it creates, where no other one is asked for
    depth = 0  # likewise

    def __init__(
        self, endpoint: str, name: str = "", *, behind_all: bool = False, shown: Callable[[str], str] = str
    ) -> None:
        self.endpoint = endpoint
        self.name = name
        self.is_closed: bool = False
        self._behind_all = behind_all
        self.waits: Waits = Waits()
        self._begun: Job[None] | None = None
        self._has_ended: Job[None] = Job(lambda: None)  # it stands for the part of the end that `close` waits for
        self._closer = 0  # the id of the thread that waits for the end
        self._shown = shown
        self._has_said_goodbye = False

    @property
    def _has_begun(self) -> bool:
        return self._begun is not None and self._begun.has_succeeded

    def drop(self) -> None:
        """Have it end, and wait for nothing."""
        self._closer = threading.get_ident()  # first: the end waits for no callback of this thread
        self.is_closed = True
        if self._has_begun:
            self.owner.ring()

    def begin(
        self, timeout: float = DEFAULT_TIMEOUT_S, lease_ttl: float | None = None, new_engine: NewEngine = Engine
    ) -> None:
        """Open it, once. ConnectError if there is no coordinator, or one of another uid, protocol version or driver."""
        timeout = bounded(timeout)
        check_threads()
        _drivers.load()  # here, so that its errors and warnings are this caller's
        _register_at_exit(_end_at_exit)  # once
        begun = self._begun = Job(partial(self._begin, timeout, lease_ttl, new_engine))
        try:
            start(partial(self._run, begun), "ipcsync-owner", begun.fail)
            while not begun.wait(_SLICE_S):
                fork.check()  # a signal's handler may have forked
            begun.result()
        except BaseException as error:
            self.drop()
            if (short := room.shortage(error, "a session")) is None:
                raise
            raise short from error

    def close(self) -> None:
        """End the session, and wait up to 1 s for its work; nothing in a forked child.

        If an exception ends the wait, the end goes on, and another call waits for it again. In a finalizer on a
        session's own thread it does not wait.
        """
        if fork.is_in_bad_fork():
            return
        self.drop()
        if not self._has_begun:
            return
        if has_a_beat() or threading.current_thread() in (self._thread, self._driver_thread, self.lease.mark.thread):
            return
        if self._has_ended.wait(_END_S):
            self._thread.join(_SOON_S)  # its last step may stand still behind any stream of the process

    # --- whether it goes on -------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise ForkedProcessError, ClientClosed, or the error of a session that is lost."""
        fork.check()
        self._check_open()
        self.lease.check()

    def _check_open(self) -> None:
        if self.is_closed:
            raise self._closed()

    def _closed(self) -> ClientClosed:
        who = f"the client {self.name!r}" if self.name else "this client"
        text = f"{who} of {self.endpoint} was closed by this process; connect again"
        return ClientClosed(text, client=self.name, endpoint=self.endpoint)

    def check_liveness(self) -> None:
        """As `check`, and ask the kernel whether the coordinator's process lives."""
        self.check()
        self.lease.check_liveness()

    @property
    def is_connected(self) -> bool:
        """Whether the session lives, as far as this process knows; sends nothing."""
        if self._has_begun:
            with suppress(IpcSyncError):
                self.check()
                return True
        return False

    def _call(self, function: Callable[[], _T], deadline: int, timeout: float) -> _T:
        """What the function returns, which the owner calls. An exception that ends the wait gives up its request.

        WaitTimeout behind the `deadline` of `timeout` seconds; Reentered on a thread that owns a session.
        """
        check_may_wait()
        job = Job(function)
        try:
            self.owner.post(partial(self.owner.do, job))
            return self._result_of(job, deadline, timeout)
        except BaseException:
            job.give_up()
            raise

    def _result_of(self, job: Job[_T], deadline: int, timeout: float) -> _T:
        owner = self.owner
        while not job.wait(0 if owner.is_over else min(_SLICE_S, left_of(deadline) + 0.001)):
            fork.check()
            if owner.is_over or sys.is_finalizing():
                self.check()
                raise self._closed()
            if time.monotonic_ns() >= deadline + (_PATIENCE_NS if job.has_begun else 0):
                text = f"no answer within {timeout} s: other requests of this client may have taken all of them"
                raise WaitTimeout(text, timeout=timeout)
        return job.result()

    def _collect(self) -> int:
        """For `ipc_collect`: close unused attachments; returns how many imports were closed."""
        before = import_count()
        with suppress(IpcSyncError):  # this session's own calls raise it
            self._call(self.attachments.end_unused, deadline_of(_TOLD_S), _TOLD_S)
            self.driving.look()
        return max(before - import_count(), 0)

    # --- calls --------------------------------------------------------------------------------------------------------

    def request(self, body: Message, kind: type[_M], timeout: float | None = None) -> _M:
        """Send a request and return its reply, which is a `kind`; raises the error in the reply.

        `timeout` in seconds, the session's own by default.
        """
        self.check()
        seconds = self.timeout if timeout is None else timeout
        deadline, request = deadline_of(seconds), Request(body)
        self._call(partial(self._exchange, [request], deadline), deadline, seconds)
        return expect(self.connection.result_of(request, seconds), kind)

    def _exchange(self, requests: Sequence[Request], deadline: int) -> None:
        self.check()
        self.connection.exchange(requests, self.token, deadline, self._check_asked)

    def _check_asked(self) -> None:
        """In each slice of a call's request: beat, and look whether it goes on."""
        self.lease.beat()
        self.check_liveness()
        self._check_caller()

    def _check_caller(self) -> None:
        """Raise once nobody waits for the job under way, or the client was closed meanwhile."""
        if (job := self.owner.job) is not None:
            self._check_open()
            if not job.is_wanted:
                raise CancelledError  # which nobody gets

    def open(
        self,
        bodies: Sequence[messages.Open | messages.Remote],
        openings: Sequence[AttachmentRef],
        timeout: float | None = None,
        began: int = 0,
    ) -> None:
        """Attach to the events of `bodies`, each for the opening of its index: all or none, within `timeout` s in all.

        It counts from `began` in ns. If an exception comes, also later, the caller has to `abandon` the openings.
        """
        seconds = self.timeout if timeout is None else timeout
        deadline = deadline_of(seconds, began)
        named = [body for body in bodies if isinstance(body, messages.Open) and body.recorder and body.name]
        first = [] if self._sees_all_devices else [replace(body, recorder=False) for body in named]
        before = [AttachmentRef() for _ in first]
        try:
            if first:
                # As a waiter: if this process cannot use the event, leaving as its recorder would close it for all.
                self._attach(first, before, deadline, seconds)
            self._attach(bodies, openings, deadline, seconds)
        finally:
            self.abandon(before)

    def attach(self, key: PointKey, timeout: float | None = None) -> AttachmentRef:
        """The attachment to a point's event. Asks the coordinator only if this session has none to the event yet.

        Raises RecorderLost if the event is gone. A point of another epoch belongs to another node, which the bridge
        asks: NodeLost if there is no such node, or it is lost; NoBridge; StalePoint if there never was a bridge.
        """
        self.check()
        if (found := self.attachments.find(key)) is not None:
            return found
        if key.epoch == self.epoch:
            body: Message = messages.Attach(key.slot, key.incarnation)
        else:
            device = uuid_of(current_ordinal())
            body = messages.Remote("attach", "", "", key.epoch, key.slot, key.incarnation, device)
        seconds = self.timeout if timeout is None else timeout
        return self._attach([body], [], deadline_of(seconds), seconds, key)[0]

    def _attach(
        self,
        bodies: Sequence[Message],
        openings: Sequence[AttachmentRef],
        deadline: int,
        timeout: float,
        key: PointKey | None = None,
    ) -> list[AttachmentRef]:
        """`openings` are empty for a point, that of `key`. What was attached to is tried on the caller's thread."""
        self.check()
        table, here = self.attachments, current_ordinal()

        def attach() -> list[AttachmentRef]:
            if key is not None and (known := table.find(key)) is not None:
                return [known]
            if table.since_beat >= MANY_POINTS:
                # A thread that attaches in a loop holds slots for which others wait, and beats may be rare.
                table.end_unused()
                self.driving.wake()
            self.check()
            table.tell_all(timeout, deadline)
            requests = [Request(body, table.give_back) for body in bodies]
            found: list[AttachmentRef] = []
            try:
                self._exchange(requests, deadline)
                for index, request in enumerate(requests):
                    reply = self.connection.result_of(request, timeout)
                    if key is None or not isinstance(reply, messages.Remains):
                        expect(reply, messages.Attachment)
                    found.append(table.add(reply, here, openings[index] if openings else None))
            except BaseException:
                for request in requests[len(found) :]:
                    if request.reply is not None:
                        table.give_back(request.reply)
                raise
            return found

        try:
            found = self._call(attach, deadline, timeout)
            for attached in found:
                if attached.use is not None:
                    self.driving.test(attached.engine, left_of(deadline))
        except BaseException as error:
            if key is not None:  # also of a job that had ended
                self.owner.post(partial(table.give_up, key))
            if isinstance(error, Exception) and (short := room.shortage(error, "an event")) is not None:
                raise short from error
            raise
        return found

    def abandon(self, openings: Sequence[AttachmentRef]) -> None:
        if openings and self._has_begun and not fork.is_in_bad_fork():
            self.owner.post(partial(self._close, openings))

    def _close(self, openings: Sequence[AttachmentRef]) -> None:
        if self.attachments.close(openings):
            self.driving.wake()

    def close_opening(self, opening: AttachmentRef) -> None:
        """Close an opening; the last one ends the attachment. Twice does nothing.

        It waits until the coordinator has that, or for half a second; not in a finalizer on a session's own thread.
        """
        if has_a_beat() or self.owner.is_over:
            self.abandon([opening])
            return
        use, closing = opening.use, Job(partial(self.attachments.close, [opening]))
        try:
            if use is not None and use.openings == {opening}:
                use.engine.await_calls(_CALL_S)
        finally:  # an exception that ends the wait must not leave it open
            self.owner.post(partial(self.owner.do, closing))
        with suppress(WaitTimeout, ClientClosed, SessionLost):
            for ended in self._result_of(closing, deadline_of(_TOLD_S), _TOLD_S):
                tell = partial(self._tell, ended, self.driving.progress(ended))
                self._call(tell, deadline_of(_TOLD_S), _TOLD_S)

    def _tell(self, use: Use, life: Life) -> None:
        self.attachments.advance(use, life)
        self.attachments.tell(_TOLD_S)

    # --- the owner's thread: the begin --------------------------------------------------------------------------------

    def _run(self, begun: Job[None]) -> None:
        block_signals()
        begun.run()
        if not begun.has_succeeded:
            return
        try:
            beats[threading.get_ident()] = self.lease.beat
            self.owner.run(lambda: self.is_closed, self._at_beat, self._work)
            if fork.is_in_bad_fork():
                return
            self._end()
            self._release()
        except BaseException as error:
            # What it had stays in use, so this process keeps the lifeline: for others the session expires.
            log.exception("%r ends: its own thread failed", self)
            self.lease.lose(IpcSyncError(f"the session's own thread failed, and with it the session: {error!r}"))
            if not self.owner.is_over:
                self._stop()
        finally:
            beats.pop(threading.get_ident(), None)  # none if the module was reloaded meanwhile
            self._has_ended.set()

    def _begin(self, timeout: float, lease_ttl: float | None, new_engine: NewEngine) -> None:
        with ExitStack() as undo:
            self.connection = connection = Connection(self.endpoint)
            undo.callback(connection.close)
            connection.blocks_signals = True
            deadline = deadline_of(timeout)

            def check() -> None:
                if not connection.sent:  # one that was sent may open a session, so its reply is awaited
                    self._check_open()

            welcome = handshake.greet(connection, self.name, timeout, lease_ttl, check, driver=_drivers.name())
            undo.callback(handshake.take_leave, connection, welcome.token)
            # Another thread may fork at any time, and the child's copy of the descriptor would keep the lifeline.
            board, self._forget_child = fork.keep_from_children(
                lambda: handshake.open_board(welcome, self.endpoint), Board.drop_descriptor
            )
            undo.callback(self._forget_child)
            undo.callback(board.close)  # which releases the lifeline, so that the line can be given to another session
            handshake.hold_lifeline(board, welcome, self.endpoint, deadline)
            self.epoch: bytes = welcome.epoch
            self.token: bytes = welcome.token
            self.feed_endpoint: str = welcome.feed
            connection.window = welcome.window
            connection.starts = lambda: board.starts
            self._sees_all_devices = {uuid_of(ordinal) for ordinal in range(count())}.issuperset(welcome.devices)
            self.lease = SessionLease(board, welcome, self.endpoint)
            self.lease.depends_on_all = self._behind_all
            undo.callback(self.lease.mark.end)
            self.owner = Owner(self.lease)
            self.attachments = AttachmentTable(
                self.lease, connection, self.waits, new_engine, self._shown, self._check_caller
            )
            self.driving = Driving(self.attachments, self.lease, self.owner, self.check)
            self.lease.mark.on_ring = self.driving.wake  # another process waits for what only this one can say
            if not _drivers.may_be_served():
                board.show_end(welcome.serial, by_exec=_drivers.files_survive_exec())
            self.lease.mark.show()  # first: from Ready on the coordinator waits for the mark
            connection.exchange([ready := Request(messages.Ready())], self.token, deadline, self.lease.beat_and_check)
            connection.result_of(ready, timeout)
            self._check_open()
            self._thread = threading.current_thread()
            self._driver_thread = threading.Thread(target=self.driving.run, name="ipcsync-driver", daemon=True)
            self._driver_thread.start()
            devices.collectors.append(self._collect)
            living.append(self)
            undo.pop_all()

    def _work(self) -> None:
        self.owner.work()
        if self.attachments.is_due and not self.is_closed:
            self.attachments.tell()

    def _at_beat(self) -> float:
        self.connection.drain_late()
        self.attachments.beat()
        self.driving.standing_s()
        self.driving.wake()
        with suppress(QuotaExceeded):
            self.waits.watch()
        if not self.lease.is_judged:  # behind the first goodbye; one amid a close would give back what is in use
            if not self._has_said_goodbye:
                self._say_goodbye(_BEAT_S)
            if self._drains:
                self.lease.show_heartbeat()
        return _SOON_S if self.connection.has_late or self.attachments.has_closes else LONGEST_BEAT_S

    # --- the owner's thread: the end ----------------------------------------------------------------------------------

    def _end(self) -> None:
        """Close, drain, say goodbye. `close` waits for that, but not for what still drains then."""
        table, deadline = self.attachments, deadline_of(_CALL_S)
        for use in list(table.uses.values()):
            while not use.engine.await_calls(min(_BEAT_S, left_of(deadline))) and left_of(deadline):
                self._pause(0)
        table.close_all(self.lease.beat)
        deadline, pause_s = deadline_of(_DRAIN_S), 0.0005
        while self._drains and left_of(deadline):
            self.driving.wake()
            self._pause(pause_s)
            pause_s = min(2 * pause_s, 0.02)
        if self._drains:  # other processes may wait for recorders that are drained, and the draining ones here for them
            table.tell(_TOLD_S)
        self.waits.join(1.0, self._closer, self._pause)
        self.lease.is_judged = False
        self._say_goodbye(1.0)
        if not self._is_complete():
            self._has_ended.set()
            self.owner.run(self._is_complete, self._at_beat, self._work)

    def _pause(self, seconds: float) -> None:
        self.lease.beat()
        self._work()
        time.sleep(seconds)

    @property
    def _drains(self) -> bool:
        """Whether anything is not released, or a call may make what is to be, since the client was closed meanwhile."""
        return self.attachments.is_draining or self.driving.is_trying

    def _say_goodbye(self, timeout: float) -> None:
        """Tell the coordinator that the session is over, except for what still drains; else a later beat does."""
        if not self.lease.coordinator_is_alive():
            return
        released = not self._drains
        if released:  # a coordinator may be there to read it only once this process is gone
            self.lease.line.say_goodbye(self.lease.welcome.serial)
        try:
            self.connection.request(messages.Bye(released=released), self.token, timeout, self.lease.show_heartbeat)
        except (WaitTimeout, ConnectError, QuotaExceeded) as error:
            log.info("the coordinator did not take the goodbye: %s", error)
            return
        except IpcSyncError as error:
            log.info("the coordinator does not know the session any more: %s", error)
        self._has_said_goodbye = True
        if released:
            self.attachments.forget_closes()

    def _is_complete(self) -> bool:
        if not self.lease.coordinator_is_alive():
            return True
        return self._has_said_goodbye and not self._drains and not self.attachments.has_closes

    def _stop(self) -> None:
        self.owner.is_over = True
        with suppress(ValueError):  # these modules were reloaded meanwhile
            living.remove(self)
            devices.collectors.remove(self._collect)
        self.connection.close()
        self._work()

    def _release(self) -> None:
        self._stop()
        self.driving.stop()
        self._driver_thread.join(_CALL_S)
        self.lease.mark.end()
        # While the coordinator lives, attachments are released only once none of their work is queued. If it is lost,
        # work queued here may still write the board's words, as that of a trial may: then those pages stay registered.
        board, is_quiet = self.lease.board, self.lease.coordinator_is_alive() and not self.driving.is_trying
        board.close()
        self._forget_child()  # only now: a child's copy of the descriptor keeps the lifeline
        self._has_ended.set()  # what follows may stand still behind a stream of the process
        if is_quiet:
            pinned.unpin(board.address, board.length)

    def __repr__(self) -> str:
        return f"<session {self.name!r} {'connected' if self.is_connected else 'closed'} {self.endpoint}>"


# --- the sessions of this process -------------------------------------------------------------------------------------


def is_here(epoch: bytes, serial: int) -> bool:
    return any(session.epoch == epoch and session.lease.welcome.serial == serial for session in living.copy())


def session_of(epoch: bytes) -> Session:
    """This process's session for a point's epoch; for another node's the first, if all are of one coordinator.

    ConnectError if there is none.
    """
    fork.check()
    connected = [session for session in living.copy() if session.is_connected]
    found = [session for session in connected if session.epoch == epoch]
    if not found and len({session.epoch for session in connected}) == 1:
        found = connected
    if not found:
        raise ConnectError(
            "this point needs a client of its coordinator in this process: call ipcsync.connect(), or await "
            "ipcsync.aconnect(), first; or, among clients of several, ask the right one: client.point(bytes(point))"
        )
    return found[0]


def _hush_daemons() -> None:
    """Silence the errors of daemon threads whose waits end because the program does."""
    told = threading.excepthook

    def tell(args: threading.ExceptHookArgs) -> None:
        is_end = issubclass(args.exc_type, EventClosed | ClientClosed)
        if not (is_end and args.thread is not None and args.thread.daemon):
            told(args)

    threading.excepthook = tell


def _end_at_exit() -> None:
    """Close the sessions that the program left open: an exit without a goodbye counts as a death."""
    try:
        _hush_daemons()
        queued.log_at_exit()  # while the boards, by which it is known, are mapped
        for session in (sessions := living.copy()):
            session.drop()  # so that a silent coordinator is waited for once
        for session in sessions:
            try:
                session.close()
            except Exception:  # noqa: PERF203 - one that fails must not stop the others
                log.exception("closing %r failed", session)
    finally:
        for session in living.copy():  # they drain: C's exit handlers, a driver's too, come next and may take long
            session.lease.mark.give_up()
