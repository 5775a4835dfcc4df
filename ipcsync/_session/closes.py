"""The closes that the coordinator is still to be told of, and their order towards what is opened.

Of a close that was put off and a new attachment to the same slot, the coordinator must see the one that is true. So
every request that attaches is sent by `change`, after the closes that are pending.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Literal, TypeAlias, TypeVar

from msgspec.structs import replace

from ipcsync._engines import Engine, deadline_of
from ipcsync._locks import CallLock
from ipcsync._session.references import Key
from ipcsync._wire.messages import Attachment, Break, Close
from ipcsync.errors import ClientClosed, ConnectError, IpcSyncError, Reentered, WaitTimeout

log = logging.getLogger("ipcsync")

T = TypeVar("T")
_Whose: TypeAlias = Literal["recorder", "other", "late"]

_BREAK_S = 0.05


class PendingCloses:
    """Those of one client. `send` is the request to the coordinator, `engines` what is open now, by its use.

    `draining` is what was closed and may still touch its slot.
    """

    def __init__(self, send: Callable[[Close | Break, float], object], engines: Mapping[Key, Engine]) -> None:
        self._send = send
        self._engines = engines
        self.draining: list[Engine] = []
        self._pending: list[tuple[Close, _Whose]] = []
        self.changing: CallLock = CallLock()
        """Held across each request that attaches or closes, and what follows from it here."""

    @property
    def has_any(self) -> bool:
        """Whether any close is still to be told."""
        return bool(self._pending)

    @property
    def is_in_use_below(self) -> bool:
        """Whether a call of this thread, which this one interrupts, is inside `change` or `flush`."""
        lock = self.changing
        return lock.is_mine() and lock.is_held_below()

    def add(self, engine: Engine, *, let_go: bool = True, drained: bool = False) -> None:
        """A use was closed. `let_go`: it touches the slot no more; `drained`: all that it recorded is complete."""
        close = Close(engine.slot, engine.incarnation, let_go=let_go, drained=drained)
        self._pending.append((close, "recorder" if engine.is_recorder else "other"))

    def add_late(self, late: Attachment) -> None:
        """Nobody has taken what a request brought."""
        self._pending.append((Close(late.slot, late.incarnation), "late"))

    def drop(self) -> None:
        """The session is over: its end told all."""
        self._pending.clear()

    def end(self) -> None:
        """The session is over: forget what it was asked through, which would keep the session for the collector."""
        self._send = _nobody_to_tell

    def change(self, timeout: float, fn: Callable[[], T]) -> T:
        """`fn()` with `changing` held, after what is closed was told.

        WaitTimeout if other threads keep it for `timeout` seconds, or if the coordinator does not take an earlier
        close: told after a new attachment, it would end that. Reentered within another change of this thread.
        """
        deadline_of(timeout)  # a wrong one is a ValueError
        lock = self.changing
        if lock.is_mine() and lock.is_held_below():
            raise Reentered("an event is opened or closed on this thread, which an opening here interrupts")
        try:
            if not lock.acquire(timeout=min(timeout, threading.TIMEOUT_MAX)):
                raise WaitTimeout(f"other requests of this client took all of the {timeout} s", timeout=timeout)
            self._flush(timeout)
            if self._pending:
                raise WaitTimeout(f"the coordinator did not take an earlier close within {timeout} s", timeout=timeout)
            result = fn()
            lock.release()
        except BaseException:
            lock.unwind()
            raise
        return result

    def flush(self, timeout: float, *, wait: bool) -> None:
        """Tell the coordinator of closes; what it does not take in `timeout` seconds each is told by a later beat.

        `wait`: as long for another thread's request that attaches or closes, too. Within a change of this thread, the
        heartbeat's thread tells it.
        """
        lock = self.changing
        if not self._pending or (lock.is_mine() and lock.is_held_below()):
            return
        try:
            if lock.acquire(timeout=min(timeout, threading.TIMEOUT_MAX) if wait else 0):
                self._flush(timeout)
                lock.release()
        except BaseException:
            lock.unwind()
            raise

    def _flush(self, timeout: float) -> None:
        while pending := self._pending[:1]:
            if not self._flush_one(*pending[0], timeout):
                return
            with suppress(ValueError):  # the goodbye, on the session's thread, has told it meanwhile
                self._pending.remove(pending[0])

    def _flush_one(self, body: Close, whose: _Whose, timeout: float) -> bool:
        key = (body.slot, body.incarnation)
        engine = self._engines.get(key)  # first: a use drains before it is taken out there
        is_draining = any((old.slot, old.incarnation) == key for old in list(self.draining))
        if engine is not None and (whose != "recorder" or engine.is_recorder):
            return True  # attached anew since: the two uses are one to the coordinator
        if whose == "late" and is_draining:
            return True  # the use that still drains has not let go yet, and will tell it
        if is_draining or engine is not None:
            body = replace(body, let_go=False)  # this use is over, but another one here still touches the slot
        try:
            self._send(body, timeout)
        except (WaitTimeout, ConnectError, Reentered):
            return False  # under a new id then: closing twice is nothing
        except IpcSyncError as error:
            log.debug("closing slot %d: %s", body.slot, error)  # its session or use is over already
        return True

    def ask_for_break(self, engine: Engine) -> None:
        """Have the coordinator break an event of which part is lost: once, and all before that is settled."""
        if engine.chain.has_asked:
            return
        try:
            self._send(Break(engine.slot, engine.incarnation), _BREAK_S)
        except (WaitTimeout, ConnectError, Reentered):
            return  # a later beat asks again: twice is nothing
        except IpcSyncError as error:
            log.debug("breaking slot %d: %s", engine.slot, error)  # its session or use is over already
        engine.chain.has_asked = True


def _nobody_to_tell(body: Close | Break, _timeout: float) -> object:
    raise ClientClosed(f"the session is over; the close of slot {body.slot} went with it")
