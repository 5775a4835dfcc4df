"""The coordinator's driver work: done in this process, or by the keeper."""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import msgspec

from ipcsync._logs import fields
from ipcsync._wire import codec
from ipcsync._wire.messages import Failure
from ipcsync.errors import IpcSyncError, WaitTimeout
from ipcsync_holdings.events import EventStore, SharedCudaEvent
from ipcsync_holdings.link import Link

log = logging.getLogger("ipcsync.coordinator")

_PATIENCE_S = 10.0

Made = list[SharedCudaEvent]


class DriverWork(Protocol):
    """The driver operations. They raise the driver's errors, and WaitTimeout if a keeper does not answer in 10 s."""

    def make(self, device: str, count: int) -> Made:
        """New interprocess events, numbered and exported."""

    def make_ahead(self, device: str, count: int, then: Callable[[Made | IpcSyncError], None]) -> None:
        """As `make`, without waiting: `then` is called with the result, at once or from the loop."""

    def destroy(self, serials: list[int], then: Callable[[list[int]], None]) -> None:
        """Destroy these events, at once or soon; `then` gets those that are kept, since a record of them is pending."""

    def probe(self, device: str) -> bytes:
        """The handle of an event that is kept for tests whether handles open."""

    def why_not_timeline(self, device: str) -> str | None:
        """Why timeline words do not work on the device, None if they do; tested with real calls."""


class OwnDriver:
    """The driver of this process itself."""

    def __init__(self, events: EventStore) -> None:
        self.make = events.make
        self.probe = events.probe
        self.why_not_timeline = events.why_not_timeline
        self._events = events

    def make_ahead(self, device: str, count: int, then: Callable[[Made | IpcSyncError], None]) -> None:
        """Make them at once."""
        try:
            made: Made | IpcSyncError = self.make(device, count)
        except IpcSyncError as error:
            made = error
        then(made)

    def destroy(self, serials: list[int], then: Callable[[list[int]], None]) -> None:
        """Destroy them at once."""
        then(self._events.destroy(serials))


class KeepersDriver:
    """The keeper's driver, asked over the link by numbered requests, which are answered in order."""

    def __init__(self, link: Link, numbers: itertools.count[int]) -> None:
        self._link = link
        self._numbers = numbers
        self._then: dict[int, Callable[[Any], None]] = {}
        self._timelines: dict[str, str | None] = {}
        self._late = -1  # the last question that was not answered in time

    def make(self, device: str, count: int) -> Made:
        """New events; waits for them. Events that come too late are destroyed."""
        return msgspec.convert(self._ask("make", device, count, if_late=self._destroy_late), Made)

    def _destroy_late(self, answer: Any) -> None:
        if not isinstance(answer, IpcSyncError):
            self.destroy([made.serial for made in msgspec.convert(answer, Made)], lambda _: None)  # never recorded

    def make_ahead(self, device: str, count: int, then: Callable[[Made | IpcSyncError], None]) -> None:
        """New events, which `then` gets from a later `drain`."""

        def convert(answer: Any) -> None:
            then(answer if isinstance(answer, IpcSyncError) else msgspec.convert(answer, Made))

        self._post("make", [device, count], convert)

    def destroy(self, serials: list[int], then: Callable[[list[int]], None]) -> None:
        """Ask the keeper to destroy them, without waiting: `then` is called from a later `drain`."""

        def convert(answer: Any) -> None:
            _log_failure(answer)
            # A keeper of an earlier version says None.
            then([] if isinstance(answer, IpcSyncError) or answer is None else msgspec.convert(answer, list[int]))

        self._post("destroy", [serials], convert)

    def probe(self, device: str) -> bytes:
        """The handle, made at the first call."""
        return bytes(self._ask("probe", device))

    def why_not_timeline(self, device: str) -> str | None:
        """The keeper's test result."""
        if device not in self._timelines:
            self._timelines[device] = msgspec.convert(self._ask("why_not_timeline", device), str | None)
        return self._timelines[device]

    def tell_serving(self) -> None:
        """Tell the keeper that requests are served."""
        self._post("serving", [], _log_failure)

    def drain(self) -> None:
        """From the loop: read answers, and send what had no room. EOFError if the keeper is gone."""
        while self._take_one(0.0):
            continue

    def _post(self, op: str, arguments: list[Any], then: Callable[[Any], None]) -> int:
        number = next(self._numbers)
        self._then[number] = then
        try:
            self._link.send(number, op, arguments)
        except EOFError:
            _end_at_once()
        return number

    def _ask(self, op: str, *arguments: Any, if_late: Callable[[Any], None] = lambda _: None) -> Any:
        answers: list[Any] = []
        if self._late in self._then:
            self._drain_or_end()
        if self._late in self._then:  # the answers come in order, and the loop must not wait for each once more
            raise WaitTimeout("the keeper has not answered an earlier request yet", timeout=_PATIENCE_S)
        number = self._post(op, list(arguments), answers.append)
        deadline = time.monotonic() + _PATIENCE_S
        while not answers:
            left = deadline - time.monotonic()
            try:
                has_one = left > 0 and self._take_one(left)
            except EOFError:
                _end_at_once()
            if not has_one:
                self._then[number], self._late = if_late, number
                raise WaitTimeout(f"the keeper did not answer within {_PATIENCE_S:g} s", timeout=_PATIENCE_S)
        if isinstance(answers[0], IpcSyncError):
            raise answers[0]
        return answers[0]

    def _drain_or_end(self) -> None:
        try:
            self.drain()
        except EOFError:
            _end_at_once()

    def _take_one(self, timeout: float) -> bool:
        message = self._link.receive(timeout)
        if message is None:
            return False
        number, is_error, value = message
        self._then.pop(number)(codec.error_of(msgspec.convert(value, Failure)) if is_error else value)
        return True


def _log_failure(answer: Any) -> None:
    if isinstance(answer, IpcSyncError):
        log.error("the keeper could not do a request", extra=fields(why=answer))


def _end_at_once() -> NoReturn:
    """End as if killed: the keeper has let go of this process, perhaps in the middle of a request.

    What is not committed did not happen, and has no answer: the client asks the next coordinator. Any other end would
    commit a part of it, or answer it.
    """
    os._exit(1)
