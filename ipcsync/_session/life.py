"""The life of a session, from the handshake to the goodbye, on the thread that owns it.

That thread has the request socket, the table of attachments and the lease. It makes no driver call that may block and
runs no user's code.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, TypeVar

from ipcsync import _drivers
from ipcsync._board import Board, liveness
from ipcsync._deadline import deadline_of, left_of
from ipcsync._drivers import outliving
from ipcsync._engines import imports
from ipcsync._native import device as devices
from ipcsync._native import fork, pinned
from ipcsync._native.context import count, uuid_of
from ipcsync._session import handshake
from ipcsync._session.attachments import AttachmentTable
from ipcsync._session.connection import Connection
from ipcsync._session.driving import Driving
from ipcsync._session.lease import LONGEST_BEAT_S, SessionLease
from ipcsync._session.owner import Owner, OwnerGone, block_signals
from ipcsync._session.trials import Trials
from ipcsync._session.waits import Waits
from ipcsync._wire import messages
from ipcsync._worker import Job, Latch
from ipcsync.errors import ClientClosed, ConnectError, IpcSyncError, QuotaExceeded, WaitTimeout

if TYPE_CHECKING:
    from ipcsync._session.traced import Tracing

log = logging.getLogger("ipcsync")

_T = TypeVar("_T")

TOLD_S = 0.5  # for which a close waits until it is told
CALL_S = 1.0  # for which it waits for other threads' calls
_SOON_S = 0.1  # to the next beat, while what was given up is not given back yet
_DRAIN_S = 1.0
_BEAT_S = 0.05  # for a request at a beat


class SessionLife:
    """What the owner's thread does for one session. Construction opens nothing.

    `shown(name)` is the user's name for an event of the coordinator's name.
    """

    connection: Connection
    lease: SessionLease
    owner: Owner
    attachments: AttachmentTable
    driving: Driving
    trials: Trials

    def __init__(
        self, endpoint: str, name: str = "", *, behind_all: bool = False, shown: Callable[[str], str] = str
    ) -> None:
        self.endpoint = endpoint
        self.name = name
        self.is_closed: bool = False
        self._behind_all = behind_all
        self.waits: Waits = Waits()
        self._begun: Job[None] | None = None
        self._has_ended = Latch()  # the part of the end that `close` waits for
        self._closer = 0  # the id of the thread that waits for the end
        self._shown = shown
        self._thread: threading.Thread | None = None
        self._has_said_goodbye = False
        self._forget_child: Callable[[], None]

    @property
    def _has_begun(self) -> bool:
        return self._begun is not None and self._begun.has_succeeded

    def drop(self) -> None:
        """End it without waiting: no caller has it."""
        self.is_closed = True
        if self._has_begun:
            self.owner.ring()

    # --- the begin ----------------------------------------------------------------------------------------------------

    def _run(self, begun: Job[None]) -> None:
        """The thread's function: the session from its begin to its end."""
        self._thread = threading.current_thread()
        block_signals()
        begun.run()
        if not begun.has_succeeded:
            return
        try:
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
            self._has_ended.set()

    def _begin(self, timeout: float, lease_ttl: float | None, tracing: Tracing | None) -> None:
        """Open everything, or nothing."""
        with ExitStack() as undo:
            self._open(timeout, lease_ttl, tracing, undo)
            undo.pop_all()

    def _open(self, timeout: float, lease_ttl: float | None, tracing: Tracing | None, undo: ExitStack) -> None:
        self.connection = connection = Connection(self.endpoint)
        connection.blocks_signals = True
        undo.callback(connection.close)
        check = self._check_wanted_or_greeted
        welcome = handshake.greet(connection, self.name, timeout, lease_ttl, check, driver=_drivers.name())
        undo.callback(handshake.take_leave, connection, welcome.token)
        # Another thread may fork at any time, and the child's copy of the descriptor would keep the lifeline.
        board, self._forget_child = fork.keep_from_children(
            lambda: handshake.open_board(welcome, self.endpoint), Board.drop_descriptor
        )
        undo.callback(self._forget_child)
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
        self.lease = SessionLease(board, welcome, self.endpoint, self._rung)
        self.lease.depends_on_all = self._behind_all
        undo.callback(self.lease.stop)
        self.owner = Owner(self.lease)
        self.attachments = AttachmentTable(self.lease, connection, self.waits, tracing, self._shown)
        self.driving = Driving(self.attachments, self.lease, self.owner, self.lease.period_s)
        self.trials = Trials(self.lease.line, self.check)
        if not outliving.may_be_served():
            liveness.show_end(board, board.session(welcome.line), by_exec=outliving.files_survive_exec())
        self.lease.show()  # first: from Ready on the coordinator waits for the mark
        connection.request(messages.Ready(), self.token, timeout, self._beat_and_check)
        self._check_wanted()
        self._driver_thread = threading.Thread(target=self.driving.run, name="ipcsync-driver", daemon=True)
        self._driver_thread.start()
        devices.collectors.append(self._collect)
        living.append(self)

    def _check_wanted(self) -> None:
        if self.is_closed:
            raise ClientClosed("the session was closed before it had begun", client=self.name, endpoint=self.endpoint)

    def _check_wanted_or_greeted(self) -> None:
        """As `_check_wanted`; but a greeting that was sent may open a session, so its reply is awaited."""
        if not self.connection.sent:
            self._check_wanted()

    def _work(self) -> None:
        """Do the jobs, and tell what came of them."""
        self.owner.work()
        if self.attachments.is_due and not self.is_closed:
            self.attachments.tell()

    def _at_beat(self) -> float:
        """Called at each beat; returns in how many seconds there is more to do."""
        self.connection.drain_late()
        self.attachments.beat()
        self.driving.standing_s()
        self.driving.wake()
        if self.is_closed:
            if not self._has_said_goodbye:
                self._say_goodbye(_BEAT_S)
            if self._drains:
                self.lease.show_heartbeat()
        return _SOON_S if self.connection.has_late or self.attachments.has_closes else LONGEST_BEAT_S

    def _rung(self) -> None:
        """Another process waits for what only this one can say."""
        self.driving.wake()

    def _beat_and_check(self) -> None:
        """In each slice of the first request: beat, and look whether it goes on."""
        self.lease.beat()
        self.lease.check_liveness()

    # --- whether it goes on -------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise ForkedProcessError, ClientClosed, or the error of a session that is lost."""
        fork.check()
        if self.is_closed:
            raise self._closed()
        self.lease.check()

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
        return not self.is_closed and not fork.is_in_bad_fork() and self.lease.is_good

    def _call(self, function: Callable[[], _T], deadline: int, timeout: float) -> _T:
        """What the function returns, which the owner calls; WaitTimeout behind the `deadline` of `timeout` seconds."""
        try:
            return self.owner.call(function, deadline, timeout)
        except OwnerGone:
            self.check()
            raise self._closed() from None

    def _collect(self) -> int:
        """For `ipc_collect`: close unused attachments; returns how many imports were closed."""
        before = imports.count()
        with suppress(IpcSyncError):  # this session's own calls raise it
            self._call(self.attachments.end_unused, deadline_of(TOLD_S), TOLD_S)
            self.driving.look()
        return max(before - imports.count(), 0)

    # --- the end ------------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        """Close, drain, say goodbye. `close` waits for that, but not for what still drains then."""
        table, deadline = self.attachments, deadline_of(CALL_S)
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
            table.tell(TOLD_S)
        self.waits.join(1.0, self._closer, self._pause)
        self.lease.say_goodbye()
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
        return self.attachments.is_draining or self.trials.are_under_way

    def _say_goodbye(self, timeout: float) -> None:
        """Tell the coordinator that the session is over, except for what still drains; else a later beat does."""
        if not self.lease.coordinator_is_alive():
            return
        released = not self._drains
        if released:  # a coordinator may be there to read it only once this process is gone
            self.lease.line.say_goodbye()
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
        """Whether everything is released, and a living coordinator was told of it."""
        if not self.lease.coordinator_is_alive():
            return True
        return self._has_said_goodbye and not self._drains and not self.attachments.has_closes

    def _stop(self) -> None:
        """Take no more calls; those that came are answered."""
        self.owner.is_over = True
        with suppress(ValueError):  # these modules were reloaded meanwhile
            living.remove(self)
            devices.collectors.remove(self._collect)
        self.connection.close()
        self._work()

    def _release(self) -> None:
        """Release everything, as the owner's thread ends."""
        self._stop()
        self.driving.stop()
        self._driver_thread.join(CALL_S)
        self.lease.stop()
        # While the coordinator lives, attachments are released only once none of their work is queued. If it is lost,
        # work queued here may still write the board's words: then those pages stay registered and mapped.
        board, is_quiet = self.lease.board, self.lease.coordinator_is_alive()
        is_used = self.trials.are_under_way or self._driver_thread.is_alive()  # which may register a page at any moment
        board.close(keep_mapping=True)
        self._forget_child()  # only now: a child's copy of the descriptor keeps the lifeline
        self._has_ended.set()  # what follows may stand still behind a stream of the process
        is_pinned = pinned.is_any(board.address, board.length)
        if not is_used and (not is_pinned or (is_quiet and pinned.unpin(board.address, board.length))):
            board.let_go()

    def __repr__(self) -> str:
        return f"<session {self.name!r} {'connected' if self.is_connected else 'closed'} {self.endpoint}>"


living: list[SessionLife] = []  # some still drain after they were closed
