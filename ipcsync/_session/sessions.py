"""The sessions of this process: which one a point belongs to, and how they end with the program."""

from __future__ import annotations

import atexit
import functools
import logging
import threading
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol, TypeVar

from ipcsync._engines import queued
from ipcsync._native import fork
from ipcsync.errors import ClientClosed, ConnectError, EventClosed

if TYPE_CHECKING:
    from ipcsync._session.attachments import AttachmentRef
    from ipcsync._session.lease import SessionLease
    from ipcsync._wire.point import PointKey

log = logging.getLogger("ipcsync")


class Session(Protocol):
    """The part of a session that this module and its users need."""

    epoch: bytes
    timeout: float
    lease: SessionLease

    @property
    def is_connected(self) -> bool:
        """Whether the session lives, as far as this process knows."""

    def check(self) -> None:
        """Raise the error of a session that is over."""

    def attach(self, key: PointKey, timeout: float | None = None) -> AttachmentRef:
        """The attachment to a point's event."""

    def close(self) -> None:
        """End the session."""


_S = TypeVar("_S", bound=Session)

_sessions: list[Session] = []  # some still drain after they were closed


def add(session: Session) -> None:
    """Add a session, until `remove`."""
    _sessions.append(session)
    _arm_exit()


def remove(session: Session) -> None:
    """Remove a session whose thread ends."""
    with suppress(ValueError):  # this module was reloaded meanwhile
        _sessions.remove(session)


def has(epoch: bytes, serial: int) -> bool:
    """Whether that session of a coordinator is one of this process."""
    return any(session.epoch == epoch and session.lease.welcome.serial == serial for session in _sessions.copy())


def session_of(epoch: bytes) -> Session:
    """This process's session for a point's epoch, as `first_of` finds it. ConnectError if there is none."""
    fork.check()
    session = first_of(epoch, _sessions.copy())
    if session is None:
        raise ConnectError(
            "this point needs a client of its coordinator in this process: call ipcsync.connect(), or await "
            "ipcsync.aconnect(), first"
        )
    return session


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
    for session in _sessions.copy():
        _close(session)


def _close(session: Session) -> None:
    try:
        session.close()
    except Exception:  # one that fails must not stop the others
        log.exception("closing %r failed", session)


def _announce_death() -> None:
    """Announce the death of draining sessions: C's exit handlers, a driver's too, come next and may take long."""
    for session in _sessions.copy():
        session.lease.announce_death()


@functools.cache
def _arm_exit() -> None:
    atexit.register(_announce_death)  # runs after the next one
    atexit.register(_close_at_exit)
