"""Closes not sent to the coordinator yet, and their order with requests that attach.

If a slot was closed and attached to again, the coordinator must see the close first. So every request that attaches is
sent in a `change`, after the pending closes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Literal, TypeAlias, TypeVar

from msgspec.structs import replace

from ipcsync._deadline import deadline_of, left_of
from ipcsync._engines import Engine
from ipcsync._locks import CallLock, take
from ipcsync._session.references import Key
from ipcsync._wire.messages import Attachment, Break, Close
from ipcsync.errors import (
    ClientClosed,
    ConnectError,
    EventClosed,
    IpcSyncError,
    QuotaExceeded,
    Reentered,
    SessionLost,
    WaitTimeout,
)

log = logging.getLogger("ipcsync")

T = TypeVar("T")
_Whose: TypeAlias = Literal["recorder", "other", "late"]

_FLUSH_S = 0.5
_BREAK_S = 0.05


class PendingCloses:
    """The pending closes of one client. `send` is the request to the coordinator, `engines` are the open uses.

    `draining` are the uses that were closed and may still touch their slots.
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
        """Whether any close is pending."""
        return bool(self._pending)

    @property
    def is_in_use_below(self) -> bool:
        """Whether a call of this thread, which this one interrupts, is inside `change` or `flush`."""
        lock = self.changing
        return lock.is_mine() and lock.is_held_below()

    def add(self, engine: Engine, *, released: bool = True, drained: bool = False) -> None:
        """Add a close. `released`: the use touches the slot no more; `drained`: all its records are complete."""
        close = Close(engine.slot, engine.incarnation, released=released, drained=drained)
        self._pending.append((close, "recorder" if engine.is_recorder else "other"))

    def add_late(self, late: Attachment) -> None:
        """Add a close of an attachment that no caller took."""
        self._pending.append((Close(late.slot, late.incarnation), "late"))

    def drop(self) -> None:
        """Forget all: the goodbye of the session covers them."""
        self._pending.clear()

    def end(self) -> None:
        """Forget `send`, which would keep the session alive until the garbage collector runs."""
        self._send = _nobody_to_tell

    def change(self, timeout: float, fn: Callable[[], T]) -> T:
        """Flush the pending closes, then return `fn()`, all with `changing` held.

        WaitTimeout if other threads hold it for `timeout` seconds, or if the coordinator does not take an earlier
        close: sent later, that would end the new attachment. QuotaExceeded if it has no memory for that close.
        Reentered within another change or request of this thread.
        """
        deadline = deadline_of(timeout)
        lock = self.changing
        if lock.is_mine() and lock.is_held_below():
            raise Reentered("an event is opened or closed on this thread, which an opening here interrupts")
        try:
            if not take(lock, min(timeout, threading.TIMEOUT_MAX)):
                raise WaitTimeout(f"other requests of this client took all of the {timeout} s", timeout=timeout)
            with lock:
                lock.release()
                self.tell(timeout, deadline)
                return fn()
        except BaseException:
            lock.unwind()
            raise

    def tell(self, timeout: float, deadline: int, key: Key | None = None) -> None:
        """Send the pending closes, or only those of one use, within a change.

        WaitTimeout, with the `timeout` of the call, if that is not done by `deadline`.
        """
        while pending := self._pending_of(key)[:1]:  # a call within this one may add one at any moment
            if not self._flush_one(*pending[0], left_of(deadline)):
                text = f"the coordinator did not take an earlier close within {timeout} s"
                raise WaitTimeout(text, timeout=timeout)
            self._forget(pending[0])

    def _pending_of(self, key: Key | None) -> list[tuple[Close, _Whose]]:
        return [each for each in list(self._pending) if key is None or (each[0].slot, each[0].incarnation) == key]

    def _forget(self, close: tuple[Close, _Whose]) -> None:
        with suppress(ValueError):  # the goodbye, on the session's thread, sent it meanwhile
            self._pending.remove(close)

    def has_recorders(self, key: Key) -> bool:
        """Whether a close of that use by its recorder is pending."""
        return any(whose == "recorder" for _, whose in self._pending_of(key))

    def flush(self, *, wait: bool, timeout: float | None = None) -> None:
        """Send the pending closes; a later beat repeats those that the coordinator does not take in `timeout` seconds.

        `timeout` is half a second if it is None. `wait`: wait as long for another thread's request that
        attaches or closes, too. Within a change or request of this thread nothing is sent, and the heartbeat's
        thread does it later.
        """
        timeout = _FLUSH_S if timeout is None else timeout
        lock = self.changing
        if not self._pending or (lock.is_mine() and lock.is_held_below()):
            return
        try:
            if lock.acquire(timeout=min(timeout, threading.TIMEOUT_MAX) if wait else 0):
                with lock:
                    lock.release()
                    with suppress(Reentered, QuotaExceeded):
                        self._flush(timeout)
        except BaseException:
            lock.unwind()
            raise

    def _flush(self, timeout: float) -> bool:
        """Whether all were sent."""
        while pending := self._pending[:1]:
            if not self._flush_one(*pending[0], timeout):
                return False
            self._forget(pending[0])
        return True

    def _flush_one(self, body: Close, whose: _Whose, timeout: float) -> bool:
        key = (body.slot, body.incarnation)
        engine = self._engines.get(key)  # first: a use drains before it is taken out there
        # A released use stands in the list until its close was added, which may be the very one that is sent here.
        is_draining = any((old.slot, old.incarnation) == key and not old.is_released for old in list(self.draining))
        if engine is not None and not engine.is_closed and (whose != "recorder" or engine.is_recorder):
            return True  # attached again since: to the coordinator the two uses are one
        if whose == "late" and is_draining:
            return True  # the use that still drains is sent later
        if is_draining or engine is not None:
            body = replace(body, released=False)  # another use of this process still touches the slot
        try:
            self._send(body, timeout)
        except (WaitTimeout, ConnectError):
            return False  # sent again later, under a new id: a second close does nothing
        except (Reentered, QuotaExceeded):
            raise  # it stays pending
        except (SessionLost, EventClosed, ClientClosed) as error:
            log.debug("closing slot %d: %s", body.slot, error)  # its session or use is over already
        except IpcSyncError as error:
            log.warning("slot %d may stay open until this client is closed: %s", body.slot, error)
        return True

    def ask_for_break(self, engine: Engine) -> None:
        """Have the coordinator break an event of which part is lost: once, and all before that is settled."""
        if engine.chain.has_asked:
            return
        try:
            self._send(Break(engine.slot, engine.incarnation), _BREAK_S)
        except (WaitTimeout, ConnectError, QuotaExceeded, Reentered):
            return  # a later beat asks again: a second break does nothing
        except IpcSyncError as error:
            log.debug("breaking slot %d: %s", engine.slot, error)  # its session or use is over already
        engine.chain.has_asked = True


def _nobody_to_tell(body: Close | Break, _timeout: float) -> object:
    raise ClientClosed(f"the session is over; the close of slot {body.slot} went with it")
