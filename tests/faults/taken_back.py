"""Takes mendings back, one at a time, and has `interrupts` find what they mended: a check of the check.

    python -m tests.faults.taken_back

Prints a table of what was taken back, what then broke and at which point of which call, and ends with 1 if one of them
was not found.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import pytest

import ipcsync
from ipcsync._engines import Engine
from ipcsync._locks import Unwinding
from ipcsync._session.connection import Connection
from ipcsync._session.lease import SessionLease
from ipcsync._session.references import Opening
from ipcsync._session.session import Session
from ipcsync.client._unnamed import UnnamedEvents
from ipcsync.client.client import Client
from ipcsync.client.event import SharedEvent
from ipcsync.typing import EngineName
from tests.faults import interrupts
from tests.faults.interrupt_stage import Stage

Plant = Callable[[pytest.MonkeyPatch], None]


def _numbers_come_again(patch: pytest.MonkeyPatch) -> None:
    make = Engine._record

    def record(self: Any, *args: Any) -> int:
        self._begun = self._recorded  # what failed behind its number is forgotten
        return make(self, *args)

    patch.setattr(Engine, "_record", record)


def _locks_stay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Unwinding, "unwind", lambda self: None)


def _replies_are_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Connection, "abandon", lambda self, requests: None)


def _close_is_done_by_its_caller(patch: pytest.MonkeyPatch) -> None:
    run = SessionLease.run

    def until_stopped(self: SessionLease, _: Callable[[], bool]) -> None:
        with suppress(OSError, ValueError):  # its descriptors are closed under it
            run(self, lambda: self._closed)

    patch.setattr(SessionLease, "run", until_stopped)

    def close(self: Session) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._end()
            self._has_ended.set()

    patch.setattr(Session, "close", close)


def _connect_leaves_its_thread(patch: pytest.MonkeyPatch) -> None:
    run = SessionLease.run
    patch.setattr(Session, "_check_wanted", lambda self: None)

    def until_closed_by_its_user(self: SessionLease, until: Callable[[], bool]) -> None:
        run(self, lambda: False if not _claimed(self) else until())

    claimed: list[SessionLease] = []
    begin = Session.begin

    def begin_and_claim(self: Session, *args: Any) -> None:
        begin(self, *args)
        claimed.append(self.lease)

    def _claimed(lease: SessionLease) -> bool:
        return lease in claimed

    patch.setattr(Session, "begin", begin_and_claim)
    patch.setattr(SessionLease, "run", until_closed_by_its_user)


def _unnamed_events_stay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(UnnamedEvents, "_take_over", lambda self, key, depth: None)


def _connect_forgets_its_session(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Client, "_drop", lambda self: None)


def _copies_are_nobodys(patch: pytest.MonkeyPatch) -> None:
    def copy(self: SharedEvent) -> SharedEvent:
        opening = Opening()
        self._opening.share(opening)
        return SharedEvent(opening, is_recorder=self._is_recorder)

    patch.setattr(SharedEvent, "__copy__", copy)


class Mending(NamedTuple):
    """What is taken back, and where it is to be found."""

    plant: Plant
    engine: EngineName
    call: str

    def __str__(self) -> str:
        return self.plant.__name__.strip("_").replace("_", " ")


MENDINGS = (
    Mending(_numbers_come_again, "timeline", "record"),
    Mending(_locks_stay, "event", "record"),
    Mending(_locks_stay, "event", "event"),
    Mending(_locks_stay, "event", "stats"),
    Mending(_replies_are_lost, "event", "event"),
    Mending(_unnamed_events_stay, "event", "record, unnamed"),
    Mending(_close_is_done_by_its_caller, "event", "close of a client"),
    Mending(_connect_leaves_its_thread, "event", "connect"),
    Mending(_connect_forgets_its_session, "event", "connect"),
    Mending(_copies_are_nobodys, "event", "copy of an event"),
)


def find(mending: Mending, kind: str = "line") -> interrupts.Result:
    """What `interrupts` finds at points of a kind, up to its first failure, without the mending."""
    with ipcsync.launch(log_level="error", pool=96) as coordinator:
        stage = Stage(coordinator, mending.engine)
        stage.wait_s = 1.0
        gc.disable()  # it may end what a mistake leaves open, at a moment of its own
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(interrupts, "ENOUGH", 1)
                mending.plant(patch)
                return interrupts.interrupt(stage, mending.call, kind)
        finally:
            gc.enable()
            stage.unwind()
            stage.close()


def main() -> None:
    """All of them."""
    is_missed = False
    for mending in MENDINGS:
        result = find(mending)
        failure = result.failures[0] if result.failures else "NOT FOUND"
        is_missed |= not result.failures
        what, _, where = failure.partition("\n    interrupted at ")
        sys.stdout.write(
            f"{mending!s:32}{mending.call:20}{mending.engine:10}point {result.points:4}  {what[:90]}"
            f"  ({where.partition(' <')[0]})\n"
        )
        sys.stdout.flush()
    sys.exit(is_missed)


if __name__ == "__main__":
    main()
