"""One session with a coordinator: what other threads than its owner's ask of it, and the sessions of this process.

Each call is a job that is handed to the owner's thread, one after the other, and whose end is awaited.
"""

from __future__ import annotations

import atexit
import functools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar, cast

from msgspec.structs import replace

from ipcsync import _drivers
from ipcsync import _room as room
from ipcsync._deadline import bounded, deadline_of
from ipcsync._engines import queued
from ipcsync._native import fork
from ipcsync._native.context import current_ordinal, uuid_of
from ipcsync._session import feed
from ipcsync._session.attachments import MANY_POINTS, AttachmentRef, Opening
from ipcsync._session.connection import Request, expect, zmq_context
from ipcsync._session.feed import Notice
from ipcsync._session.life import CALL_S, TOLD_S, SessionLife, living
from ipcsync._session.owner import CallerGone, OwnerGone
from ipcsync._wire import messages
from ipcsync._wire.messages import Message
from ipcsync._wire.point import PointKey
from ipcsync._worker import Job, check_threads, has_a_beat, start
from ipcsync.errors import ClientClosed, ConnectError, EventClosed, WaitTimeout
from ipcsync.typing import EngineChoice

if TYPE_CHECKING:
    from ipcsync._session.traced import Tracing

log = logging.getLogger("ipcsync")

_M = TypeVar("_M", bound=Message)
_S = TypeVar("_S", bound=SessionLife)

DEFAULT_TIMEOUT_S = 5.0
_END_S = 10.0  # longer than the end takes


class Session(SessionLife):
    """One session, with a lease that lives as long as this process does. Thread-safe.

    Its owner's thread begins and ends it. The calls ask that thread and wait, so an exception that ends a call leaves
    nothing half done. Construction opens nothing, so the caller of `begin` has the object when anything is opened.
    """

    timeout = DEFAULT_TIMEOUT_S  # of requests without one of their own
    engine: EngineChoice = "auto"  # of what it creates, where no other one is asked for
    depth = 0  # likewise

    def begin(
        self, timeout: float = DEFAULT_TIMEOUT_S, lease_ttl: float | None = None, tracing: Tracing | None = None
    ) -> None:
        """Open it, once. ConnectError if there is no coordinator, or one of another uid, protocol version or driver."""
        check_threads()
        _drivers.load()  # here, so that its errors and warnings are this caller's
        _arm_exit()
        begun = self._begun = Job(partial(self._begin, timeout, lease_ttl, tracing))
        try:
            start(partial(self._run, begun), "ipcsync-owner", begun.fail)
            begun.wait()
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
        self._closer = threading.get_ident()
        self.drop()
        if not self._has_begun:
            return
        if has_a_beat() or threading.current_thread() is self._driver_thread:
            return
        if self._has_ended.wait(_END_S) and self.owner.is_over and self._thread is not None:
            self._thread.join(CALL_S)

    def request(self, body: Message, kind: type[_M], timeout: float | None = None) -> _M:
        """Send a request and return its reply, which is a `kind`; raises the error in the reply.

        `timeout` in seconds, the session's own by default.
        """
        self.check()
        seconds = self.timeout if timeout is None else timeout
        deadline = deadline_of(seconds)
        return self._call(partial(self._ask, Request(body), kind, deadline, seconds), deadline, seconds)

    def _ask(self, request: Request, kind: type[_M], deadline: int, timeout: float) -> _M:
        self._exchange([request], deadline)
        return expect(self.connection.result_of(request, timeout), kind)

    def _exchange(self, requests: Sequence[Request], deadline: int) -> None:
        """On the owner's thread, as all that it is called by."""
        self.check()
        self.connection.exchange(requests, self.token, deadline, self._check_asked)

    def _check_asked(self) -> None:
        """In each slice of a call's request: beat, and look whether it goes on."""
        self.lease.beat()
        self.check_liveness()
        if self.owner.is_unwanted:
            raise CallerGone

    def open(
        self,
        bodies: Sequence[messages.Open | messages.Remote],
        openings: Sequence[Opening],
        timeout: float | None = None,
    ) -> None:
        """Attach to the events of `bodies`, each for the opening of its index: all or none, within `timeout` s in all.

        If an exception comes, also later, the caller has to `abandon` the openings.
        """
        seconds = self.timeout if timeout is None else timeout
        deadline = deadline_of(seconds)
        named = [body for body in bodies if isinstance(body, messages.Open) and body.recorder and body.name]
        first = [] if self._sees_all_devices else [replace(body, recorder=False) for body in named]
        before = [Opening() for _ in first]
        try:
            if first:
                # Attach as a waiter first: if this process cannot use the event, leaving later as its recorder would
                # close it for everybody.
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
        if (found := self.find(key)) is not None:
            return found
        if key.epoch == self.epoch:
            body: Message = messages.Attach(key.slot, key.incarnation)
        else:
            device = uuid_of(current_ordinal())
            body = messages.Remote("attach", "", "", key.epoch, key.slot, key.incarnation, device)
        seconds = self.timeout if timeout is None else timeout
        return self._attach([body], [], deadline_of(seconds), seconds, key)[0]

    def find(self, key: PointKey) -> AttachmentRef | None:
        """The attachment to a point's event, if there is one."""
        return self.attachments.find(key)

    def _attach(
        self,
        bodies: Sequence[Message],
        openings: Sequence[Opening],
        deadline: int,
        timeout: float,
        key: PointKey | None = None,
    ) -> list[AttachmentRef]:
        """`openings` are empty for a point, that of `key`. What was attached to is tried on the caller's thread."""
        self.check()
        try:
            job = partial(self._do_attach, bodies, openings, deadline, timeout, current_ordinal(), key)
            found = self._call(job, deadline, timeout)
            for attached in found:
                self.trials.test(attached.engine)
        except BaseException as error:
            if key is not None:  # also of a job that had ended
                self.owner.post(partial(self.attachments.give_up, key))
            if isinstance(error, Exception) and (short := room.shortage(error, "an event")) is not None:
                raise short from error
            raise
        return found

    def _do_attach(
        self,
        bodies: Sequence[Message],
        openings: Sequence[Opening],
        deadline: int,
        timeout: float,
        here: int,
        key: PointKey | None,
    ) -> list[AttachmentRef]:
        table = self.attachments
        if key is not None and (known := self.find(key)) is not None:
            return [known]
        if table.since_beat >= MANY_POINTS:
            # A thread that attaches in a loop holds slots for which others wait, and beats are rare with a long TTL.
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
                found.append(table.add(reply, here, openings[index] if openings else None, self))
        except BaseException:
            for request in requests[len(found) :]:
                if request.reply is not None:
                    table.give_back(request.reply)
            raise
        return found

    def abandon(self, openings: Sequence[Opening]) -> None:
        """Close openings that no caller has."""
        if openings and self._has_begun and not fork.is_in_bad_fork():
            self.owner.post(partial(self._close, openings))

    def _close(self, openings: Sequence[Opening]) -> None:
        if self.attachments.close(openings):
            self.driving.wake()

    def share(self, opening: Opening, another: Opening) -> None:
        """Have `another` be a further opening of the same use. EventClosed if `opening` is closed."""
        try:
            job = partial(self.attachments.share, opening, another, self)
            self._call(job, deadline_of(self.timeout), self.timeout)
        except BaseException:
            self.abandon([another])
            raise

    def close_opening(self, opening: Opening, *, wait: bool) -> None:
        """Close the share of one event object; the last one ends the attachment.

        `wait`: until the coordinator has that, or for half a second; not in a finalizer on a session's own thread.
        """
        if not wait or has_a_beat() or self.owner.is_over:
            self.abandon([opening])
            return
        use = opening.use
        try:
            if use is not None and use.openings == {opening}:
                use.engine.await_calls(CALL_S)
        finally:  # an exception that ends the wait must not leave it open
            job = self.owner.submit(Job(partial(self.attachments.close, [opening])))
        with suppress(WaitTimeout, ClientClosed, OwnerGone):
            for ended in self.owner.result_of(job, deadline_of(TOLD_S), TOLD_S):
                self.driving.settle(ended)
                self._call(partial(self.attachments.tell, TOLD_S), deadline_of(TOLD_S), TOLD_S)

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


# --- the sessions of this process -------------------------------------------------------------------------------------


def is_here(epoch: bytes, serial: int) -> bool:
    """Whether that session of a coordinator is one of this process."""
    return any(session.epoch == epoch and session.lease.welcome.serial == serial for session in living.copy())


def session_of(epoch: bytes) -> Session:
    """This process's session for a point's epoch, as `first_of` finds it. ConnectError if there is none."""
    fork.check()
    session = first_of(epoch, living.copy())
    if session is None:
        raise ConnectError(
            "this point needs a client of its coordinator in this process: call ipcsync.connect(), or await "
            "ipcsync.aconnect(), first"
        )
    return cast("Session", session)


def first_of(epoch: bytes, sessions: Iterable[_S]) -> _S | None:
    """Of those that live, the first of an epoch; for another node's, the first, if all are of one coordinator."""
    living = [session for session in sessions if session.is_connected]
    of_epoch = [session for session in living if session.epoch == epoch]
    is_of_one = len({session.epoch for session in living}) == 1
    return next(iter(of_epoch or (living if is_of_one else [])), None)


def _hush_daemons() -> None:
    """Silence the errors of daemon threads whose waits end because the program does."""
    told = threading.excepthook

    def tell(args: threading.ExceptHookArgs) -> None:
        is_end = issubclass(args.exc_type, EventClosed | ClientClosed)
        if not (is_end and args.thread is not None and args.thread.daemon):
            told(args)

    threading.excepthook = tell


def _close_at_exit() -> None:
    """Close the sessions that the program left open: an exit without a goodbye counts as a death."""
    _hush_daemons()
    queued.log_at_exit()  # while the boards, by which it is known, are mapped
    for session in living.copy():
        _close(cast("Session", session))


def _close(session: Session) -> None:
    try:
        session.close()
    except Exception:  # one that fails must not stop the others
        log.exception("closing %r failed", session)


def _announce_death() -> None:
    """Announce the death of draining sessions: C's exit handlers, a driver's too, come next and may take long."""
    for session in living.copy():
        session.lease.announce_death()


@functools.cache
def _arm_exit() -> None:
    atexit.register(_announce_death)  # runs after the next one
    atexit.register(_close_at_exit)
