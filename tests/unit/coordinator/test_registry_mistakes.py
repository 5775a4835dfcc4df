"""The machine that tries the registry is worth what it finds: each mistake planted here, it must."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import Phase, Verbosity, settings
from hypothesis.stateful import run_state_machine_as_test

from ipcsync_coordinator.registry import Registry
from ipcsync_coordinator.state import Session, SessionEnd, Slot
from tests.unit.coordinator.test_registry_machine import SETTINGS, Machine


class _ReleasesOnExpiry(Registry):
    def lose(self, session: Session, end: SessionEnd) -> None:
        self._end(session, "expired", end, released=True)


class _KeepsTheNameAtABreak(Registry):
    def _finish(self, slot: Slot, state: Any) -> None:
        self.names, kept = {}, self.names
        super()._finish(slot, state)
        self.names = kept


class _GivesTheRoleTwice(Registry):
    def join(self, session: Session, slot: Slot, *, recorder: bool, device: str, engine: str) -> None:
        if recorder:
            slot.recorder = None
        super().join(session, slot, recorder=recorder, device=device, engine=engine)


class _ForgetsThatTheRecorderIsPending(Registry):
    def _attach(self, session: Session, slot: Slot) -> None:
        if session.serial in slot.draining:
            slot.is_drained = True
        super()._attach(session, slot)


class _ReleasesWhileOthersLinger(Registry):
    def _leave(self, slot: Slot, session: Session, *, breaks: bool, released: bool, drained: bool = False) -> None:
        if released:
            slot.draining.clear()
        super()._leave(slot, session, breaks=breaks, released=released, drained=drained)


class _ReleasesNobodyUnlessARecorderCame(Registry):
    def _drain(self, slot: Slot) -> None:
        if slot.recorder is not None:
            super()._drain(slot)


class _SaysNothingOfAClose(Registry):
    def _finish(self, slot: Slot, state: Any) -> None:
        super()._finish(slot, state)
        if state == "closed":
            slot.told = "closed"


class _ReusesTheLineOfAnExpiredSession(Registry):
    def lose(self, session: Session, end: SessionEnd) -> None:
        super().lose(session, end)
        if session.line not in self._free_lines:
            self._free_lines.append(session.line)


class _FreesWhatAGpuMayTouch(Registry):
    def release_dead(self, session: Session, *, held: int = 0) -> None:
        super().release_dead(session)


class _KeepsNothingOverARestart(Registry):
    def restore(self, sessions: list[Session], slots: list[Slot], free_lines: Iterable[int]) -> None:
        super().restore(sessions, slots, free_lines)
        self.kept.by_recorder.clear()


class _GivesOutWhatIsKept(Registry):
    def _release(self, slot: Slot) -> None:
        super()._release(slot)
        if slot.state == "kept":
            self._free.append(slot.index)


class _LetsAnybodyBreak(Registry):
    def break_event(self, session: Session, index: int, incarnation: int) -> None:
        recorder = self.slots[index].recorder
        super().break_event(self.sessions[recorder.serial] if recorder else session, index, incarnation)


class _BreaksWhatIsWell(Registry):
    def break_event(self, session: Session, index: int, incarnation: int) -> None:
        slot = self.slots[index]
        if (
            slot.incarnation == incarnation
            and slot.is_recorded_by(session)
            and slot.is_drained
            and slot.state == "closed"
        ):
            self.break_slot(slot)
        else:
            super().break_event(session, index, incarnation)


@pytest.mark.planted
@pytest.mark.parametrize(
    "mistaken",
    [
        _ReleasesOnExpiry,
        _KeepsTheNameAtABreak,
        pytest.param(_GivesTheRoleTwice, marks=pytest.mark.thorough),
        pytest.param(_ForgetsThatTheRecorderIsPending, marks=pytest.mark.thorough),
        _ReleasesWhileOthersLinger,
        _ReleasesNobodyUnlessARecorderCame,
        _SaysNothingOfAClose,
        _ReusesTheLineOfAnExpiredSession,
        _FreesWhatAGpuMayTouch,
        _KeepsNothingOverARestart,
        _GivesOutWhatIsKept,
        _LetsAnybodyBreak,
        pytest.param(_BreaksWhatIsWell, marks=pytest.mark.thorough),
    ],
)
def test_the_machine_finds_a_registry_that_is_mistaken(mistaken: type[Registry]) -> None:
    machine: Any = type("Mistaken", (Machine,), {"registry_type": mistaken})
    search = settings(
        SETTINGS,
        max_examples=20_000,  # it ends with the first that shows the mistake
        derandomize=True,  # the same examples in each run: a search that depends on luck fails some day
        phases=[Phase.generate],
        report_multiple_bugs=False,
        print_blob=False,
        verbosity=Verbosity.quiet,
    )
    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(machine, settings=search)
