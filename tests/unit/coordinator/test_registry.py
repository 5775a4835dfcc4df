"""The registry's single transitions, one promise each; any order of them is tried in `test_registry_machine`."""

from __future__ import annotations

from typing import NoReturn

import pytest
from msgspec.structs import asdict

from ipcsync._wire.codec import Origin
from ipcsync.errors import (
    DeviceMismatch,
    EngineMismatch,
    EventClosed,
    ProtocolError,
    QuotaExceeded,
    RecorderLost,
    RecorderTaken,
)
from ipcsync_coordinator.registry import Registry
from ipcsync_coordinator.state import UNKNOWN, Session, Slot, Touched
from ipcsync_keeper.config import Settings


class Scene:
    """A registry, and the shortest words for what is done to it."""

    def __init__(self, limits: Settings | None = None) -> None:
        self.registry = Registry(limits or Settings(pool=4, max_sessions=4, max_attachments=3, max_streams=2))

    def session(self, name: str = "") -> Session:
        return self.registry.open_session(f"id-{name}", name)

    def open(
        self, session: Session, name: str, *, recorder: bool = False, device: str = "", engine: str = "auto"
    ) -> Slot:
        known = self.registry.names.get(name)
        if known is not None:
            self.registry.join(session, known, recorder=recorder, device=device, engine=engine)
            return known
        return self.registry.create(
            session, name, recorder=recorder, device=device or "gpu", engine="event", depth=1, ring=[]
        )

    def close(self, session: Session, slot: Slot, *, released: bool = True) -> None:
        self.registry.close(session, slot.index, slot.incarnation, released=released)

    def happened(self) -> list[str]:
        """What is touched, as it is now: sessions, then slots."""
        touched = self.registry.touched
        slots = sorted(touched.slots, key=lambda slot: slot.index)
        states = ["drained" if slot.state == "closed" and slot.is_drained else slot.state for slot in slots]
        found = [*sorted(session.state for session in touched.sessions), *states]
        self.registry.touched = Touched()
        return found


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_a_slot_is_opened_joined_closed_and_freed_in_this_order(scene: Scene) -> None:
    recorder, waiter = scene.session("r"), scene.session("w")
    slot = scene.open(recorder, "e", recorder=True)
    assert scene.open(waiter, "e") is slot
    assert scene.happened() == ["live", "live", "open"]
    scene.close(recorder, slot)
    assert scene.happened() == ["drained"]
    assert scene.registry.names.get("e") is None
    scene.close(waiter, slot)
    assert scene.happened() == ["free"]
    assert (slot.state, scene.registry.in_use) == ("free", 0)


def test_a_recorder_that_lingers_and_dies_breaks_what_it_left(scene: Scene) -> None:
    recorder, waiter = scene.session("r"), scene.session("w")
    slot = scene.open(recorder, "e", recorder=True)
    scene.open(waiter, "e")
    scene.close(recorder, slot, released=False)
    assert scene.happened()[-1] == "closed"
    scene.registry.release_dead(recorder)
    assert slot.state == "broken"


def test_a_recorder_that_dies_amid_its_drain_is_said_to_have_died(scene: Scene) -> None:
    recorder, waiter = scene.session("r"), scene.session("w")
    slot = scene.open(recorder, "e", recorder=True)
    scene.open(waiter, "e")
    scene.registry.end_session(recorder, released=False)
    assert (slot.state, slot.cause) == ("closed", "closed")
    scene.registry.release_dead(recorder)
    assert (slot.state, slot.cause) == ("broken", "died")


def test_a_recorder_that_lingers_attaches_anew_and_dies_breaks_what_it_left(scene: Scene) -> None:
    recorder, waiter = scene.session("r"), scene.session("w")
    slot = scene.open(recorder, "e", recorder=True)
    scene.open(waiter, "e")
    scene.close(recorder, slot, released=False)
    scene.registry.attach(recorder, slot.index, slot.incarnation)
    scene.happened()
    scene.registry.release_dead(recorder)
    assert slot.state == "broken"
    assert scene.happened() == ["gone", "broken"]


def test_a_recorder_that_released_its_slot_breaks_nothing_any_more(scene: Scene) -> None:
    recorder, waiter = scene.session("r"), scene.session("w")
    slot = scene.open(recorder, "e", recorder=True)
    scene.open(waiter, "e")
    scene.close(recorder, slot)
    scene.registry.attach(recorder, slot.index, slot.incarnation)
    scene.happened()
    scene.registry.release_dead(recorder)
    assert slot.state == "closed"
    assert scene.happened()[0] == "gone"


@pytest.mark.parametrize("is_released", [True, False])
@pytest.mark.parametrize("end", ["died", "expired"])
def test_an_event_whose_work_was_all_complete_is_closed_however_its_recorder_ends(
    scene: Scene, end: str, is_released: bool
) -> None:
    recorder, waiter = scene.session("r"), scene.session("w")
    slot = scene.open(recorder, "e", recorder=True)
    scene.open(waiter, "e")
    scene.registry.close(recorder, slot.index, slot.incarnation, released=is_released, drained=True)
    if is_released:  # by a point of its own, as any session
        scene.registry.attach(recorder, slot.index, slot.incarnation)
    if end == "died":
        scene.registry.release_dead(recorder)
    else:
        scene.registry.lose(recorder, "expired")
    assert (slot.state, slot.cause) == ("closed", "closed")


def test_an_expired_session_loses_name_and_role_at_once_and_its_slot_only_by_proof(scene: Scene) -> None:
    silent, other = scene.session("silent"), scene.session("other")
    slot = scene.open(silent, "e", recorder=True)
    scene.registry.lose(silent, "expired")
    assert (slot.state, scene.registry.in_use) == ("broken", 1)
    again = scene.open(other, "e", recorder=True)
    assert again is not slot
    scene.close(silent, slot)
    assert scene.registry.in_use == 1


def test_a_session_that_drains_and_is_silent_breaks_what_it_has_not_drained_and_releases_nothing(scene: Scene) -> None:
    silent, waiter = scene.session("silent"), scene.session("w")
    slots = [scene.open(silent, name, recorder=True) for name in ("drained", "drains")]
    for slot in slots:
        scene.open(waiter, slot.name)
    scene.close(silent, slots[0])
    scene.close(silent, slots[1], released=False)
    assert not scene.registry.drained_by(silent), "its lease is judged as any"
    scene.registry.end_session(silent, released=False)
    assert scene.registry.drained_by(silent)
    scene.happened()
    scene.registry.break_drained(silent)
    assert [slot.state for slot in slots] == ["closed", "broken"]
    assert scene.happened() == ["broken"]
    assert not scene.registry.drained_by(silent), "once"
    assert scene.registry.in_use == 2


def test_who_closed_a_use_is_forgotten_with_its_session_and_not_kept_by_the_slot(scene: Scene) -> None:
    host = scene.session("host")
    slot = scene.open(host, "e", recorder=True)
    for _ in range(100):
        guest = scene.session("guest")
        scene.open(guest, "e")
        scene.close(guest, slot)
        scene.registry.end_session(guest, released=True)
    assert not slot.draining
    assert len(slot.active) == 1
    assert sum(len(value) for value in asdict(slot).values() if isinstance(value, (set, dict, list))) == 1


def test_a_slot_index_is_used_again_with_the_next_incarnation(scene: Scene) -> None:
    session = scene.session()
    first = scene.open(session, "e", recorder=True)
    key = (first.index, first.incarnation)
    scene.close(session, first)
    second = scene.open(session, "e", recorder=True)
    assert (second.index, second.incarnation) == (key[0], key[1] + 1)
    scene.registry.close(session, *key, released=True)
    assert second.state == "open"
    with pytest.raises(RecorderLost) as gone:
        scene.registry.attach(session, *key)
    assert gone.value.cause == "gone"


def test_an_eighth_of_the_slots_rest_and_the_longest_free_is_used_first() -> None:
    scene = Scene(Settings(pool=32))
    session = scene.session()
    opened = []
    for _ in range(9):
        slot = scene.open(session, "e", recorder=True)
        opened.append((slot.index, slot.incarnation))
        scene.close(session, slot)
    assert opened == [(0, 1), (1, 1), (2, 1), (3, 1), (4, 1), (0, 2), (1, 2), (2, 2), (3, 2)]


def test_refusals_say_why_and_change_nothing(scene: Scene) -> None:
    recorder, other = scene.session("r"), scene.session("o")
    recorder.pid = 17
    slot = scene.open(recorder, "e", recorder=True)
    scene.happened()
    with pytest.raises(
        RecorderTaken, match=r"^the session 'r' \(pid 17\) records on 'e', .* give each .* closed it$"
    ) as taken:
        scene.open(other, "e", recorder=True)
    assert (taken.value.recorder, taken.value.event, taken.value.pid) == ("r", "e", 17)
    with pytest.raises(DeviceMismatch, match=r"^the event 'e' is on device gpu, not other$"):
        scene.open(other, "e", device="other")
    with pytest.raises(EngineMismatch, match=r"^the event 'e' has engine 'event', not 'timeline': ask for none$"):
        scene.open(other, "e", engine="timeline")
    for index, incarnation in ((slot.index, 2), (slot.index + 1, 1)):
        with pytest.raises(EventClosed, match=f"^no slot {index} with incarnation {incarnation}$"):
            scene.registry.close(other, index, incarnation, released=True)
        with pytest.raises(EventClosed, match=f"^no slot {index} with incarnation {incarnation}$"):
            scene.registry.break_event(other, index, incarnation)
        with pytest.raises(RecorderLost, match=rf"\(slot {index}, use {incarnation}\) is gone:"):
            scene.registry.attach(other, index, incarnation)
    with pytest.raises(EventClosed, match=r"^this session is not attached to slot 0: it cannot close it for others$"):
        scene.close(other, slot)
    with pytest.raises(EventClosed, match=r"^this session does not record on slot 0: it cannot break it$"):
        scene.registry.break_event(other, 0, 1)
    for call, what in (
        (lambda: scene.open(other, "../e"), "an event's name"),
        (lambda: scene.registry.stream(other, "../s", "", "gpu", 0), "a stream's name"),
        (lambda: scene.session("a\x00"), "a session's name"),
    ):
        with pytest.raises(ProtocolError, match=f"^{what} ") as caught:
            call()
        assert caught.value.code == "name"
    assert scene.happened() == []
    assert not other.attached


def test_each_limit_is_told_and_a_close_makes_room(scene: Scene) -> None:
    sessions = [scene.session(str(number)) for number in range(4)]
    with pytest.raises(QuotaExceeded, match=r"^there are 4 sessions already \(--max-sessions\)$") as caught:
        scene.session()
    assert caught.value.limit == 4
    slots = [scene.open(sessions[0], f"e{number}", recorder=True) for number in range(3)]
    with pytest.raises(
        QuotaExceeded, match=r"^this session is attached to 3 events already \(--max-attachments\)$"
    ) as caught:
        scene.open(sessions[0], "e3")
    assert caught.value.limit == 3
    scene.open(sessions[1], "e3")
    with pytest.raises(QuotaExceeded, match=r"^all 4 shared events are in use \(--pool\)$") as caught:
        scene.open(sessions[1], "e4")
    assert caught.value.limit == 4
    scene.close(sessions[0], slots[0])
    scene.open(sessions[1], "e4")
    assert scene.registry.high_water == 4
    scene.registry.stream(sessions[0], "a", "", "gpu", 0)
    scene.registry.stream(sessions[0], "b", "", "gpu", 0)
    with pytest.raises(QuotaExceeded, match=r"^there are 2 named streams already \(--max-streams\)$") as caught:
        scene.registry.stream(sessions[0], "c", "", "gpu", 0)
    assert caught.value.limit == 2


def test_a_named_stream_is_as_the_first_said_until_the_last_is_gone(scene: Scene) -> None:
    first, second = scene.session("1"), scene.session("2")
    assert scene.registry.stream(first, "s", "", "gpu", -3) == ("gpu", -3)
    assert scene.registry.stream(second, "s", "", "other", 0) == ("gpu", -3)
    assert scene.registry.stream(second, "s", "gpu", "other", 0) == ("gpu", -3)
    with pytest.raises(DeviceMismatch, match=r"^the stream 's' is on device gpu, not other$"):
        scene.registry.stream(second, "s", "other", "other", 0)
    scene.registry.end_session(first, released=True)
    assert scene.registry.stream(second, "s", "", "x", 0) == ("gpu", -3)
    scene.registry.release_dead(second)
    assert not scene.registry.streams


def test_an_event_without_a_recorder_ends_with_the_last_who_has_it_open(scene: Scene) -> None:
    first, second = scene.session("1"), scene.session("2")
    slot = scene.open(first, "e")
    scene.open(second, "e")
    scene.registry.lose(first, "expired")
    assert scene.registry.names.get("e") is slot
    scene.close(second, slot, released=False)
    assert slot.state == "closed"
    assert scene.registry.names.get("e") is None
    scene.close(second, slot)
    assert scene.registry.in_use == 1
    scene.registry.release_dead(first)
    assert scene.registry.in_use == 0


def test_a_recorder_has_its_event_broken_once_and_its_name_is_free(scene: Scene) -> None:
    recorder, waiter = scene.session("r"), scene.session("w")
    slot = scene.open(recorder, "e", recorder=True)
    scene.open(waiter, "e")
    scene.happened()
    for session, incarnation in ((waiter, 1), (recorder, 2)):
        with pytest.raises(EventClosed):
            scene.registry.break_event(session, slot.index, incarnation)
    scene.registry.break_event(recorder, slot.index, 1)
    scene.registry.break_event(recorder, slot.index, 1)
    assert scene.happened() == ["broken"]
    assert scene.registry.names.get("e") is None
    assert slot.index in recorder.attached  # which goes on, and may still touch it
    anew = scene.open(recorder, "e", recorder=True)
    assert anew is not slot
    scene.close(recorder, slot)
    scene.happened()
    scene.close(waiter, slot)
    assert scene.happened() == ["free"]
    scene.registry.break_event(recorder, slot.index, 1)  # late: the slot is free
    assert scene.happened() == []


def test_what_a_recorder_closed_may_still_be_broken_unless_all_of_it_is_complete(scene: Scene) -> None:
    recorder, waiter = scene.session("r"), scene.session("w")
    for drained, kind in ((False, "broken"), (True, "drained")):
        slot = scene.open(recorder, f"e{drained}", recorder=True)
        scene.open(waiter, f"e{drained}")
        scene.registry.close(recorder, slot.index, slot.incarnation, released=False, drained=drained)
        scene.registry.break_event(recorder, slot.index, slot.incarnation)
        assert scene.happened()[-1] == kind


@pytest.mark.parametrize(("released", "was_broken"), [(False, True), (True, False)])
def test_a_slot_that_is_freed_says_whether_it_was_broken(scene: Scene, released: bool, was_broken: bool) -> None:
    recorder = scene.session("r")
    slot = scene.open(recorder, "e", recorder=True)
    if released:
        scene.close(recorder, slot)
    scene.registry.release_dead(recorder)
    assert (slot.state, slot.ended) == ("free", "broken" if was_broken else "closed")


def test_how_a_session_ended_is_told_and_the_first_end_counts(scene: Scene) -> None:
    states = []
    for end in (
        lambda it: scene.registry.lose(it, "expired"),
        scene.registry.release_dead,
        lambda it: scene.registry.end_session(it, released=True),
    ):
        session = scene.session("s")
        end(session)
        states.append(session.state)
        scene.registry.release_dead(session)
        states.append(session.state)
    assert states == ["expired", "gone", "gone", "gone", "gone", "gone"]


def test_a_use_of_which_nothing_is_known_is_broken_once_its_recorder_is_ended(scene: Scene) -> None:
    recorder = scene.session("r")
    slot = scene.open(recorder, "e", recorder=True)
    scene.happened()
    scene.registry.break_slot(slot)
    assert (slot.state, recorder.state, scene.registry.names.get("e")) == ("broken", "expired", None)
    assert (scene.registry.touched.slots, scene.registry.touched.sessions) == ({slot}, {recorder})
    assert scene.happened() == ["expired", "broken"]
    scene.registry.break_slot(slot)  # the journal had it broken already
    assert scene.happened() == ["broken"]


def test_a_use_of_which_only_is_known_that_all_was_complete_ends_no_session(scene: Scene) -> None:
    recorder, waiter = scene.session("r"), scene.session("w")
    slot = scene.open(recorder, "e", recorder=True)
    scene.open(waiter, "e")
    scene.close(recorder, slot)
    scene.happened()
    scene.registry.break_slot(slot)
    assert (slot.state, recorder.state, scene.happened()) == ("broken", "live", ["broken"])


def test_a_mirror_whose_state_is_unknown_breaks_and_its_bridge_goes_on(scene: Scene) -> None:
    bridge, waiter = scene.registry.open_session("id-b", "b", "bridge"), scene.session("w")
    slot = scene.registry.create(bridge, "", recorder=True, device="gpu", origin=Origin(b"e" * 16, 1, 1), node="n")
    scene.registry.attach(waiter, slot.index, slot.incarnation)
    scene.happened()
    scene.registry.break_slot(slot)
    assert (slot.state, bridge.state, scene.happened()) == ("broken", "live", ["broken"])


def test_what_is_kept_counts_within_its_own_limits_after_a_restart_too(scene: Scene) -> None:
    recorder = scene.session("r")
    slot = scene.open(recorder, "e", recorder=True)
    slot.engine, slot.ring = "event", [7]
    scene.registry.release_dead(recorder, held=UNKNOWN)
    assert (slot.state, scene.registry.in_use) == ("kept", 0)
    after = Registry(scene.registry.limits)
    after.restore([], [slot], range(4))
    assert (after.in_use, after.kept.counts(0)["event"]) == (0, 1)
    after.end_held(recorder.serial)
    assert (slot.state, after.in_use, after.kept.counts(0)["event"]) == ("free", 0, 0)


def test_slots_are_used_again_in_the_order_in_which_they_were_freed_after_a_restart_too(scene: Scene) -> None:
    session = scene.session("s")
    slots = [scene.open(session, name) for name in "abc"]
    scene.close(session, slots[2])
    scene.close(session, slots[0])
    after = Registry(scene.registry.limits)
    after.restore([session], slots, range(1, 4))
    after.close(session, slots[1].index, slots[1].incarnation, released=True)
    assert sorted(slots, key=lambda slot: slot.freed) == [slots[2], slots[0], slots[1]]


def test_a_slot_whose_numbers_are_used_up_is_not_used_again_and_counts_for_the_pool(scene: Scene) -> None:
    bases = {0: 0, 1: 1 << 62}
    scene.registry = Registry(Settings(pool=2, max_sessions=2), bases.__getitem__)
    session = scene.session("s")
    scene.close(session, scene.open(session, "e"))
    bases[0] = (1 << 62) + 1
    slot = scene.open(session, "e")
    assert (slot.index, slot.base, scene.registry.in_use) == (1, 1 << 62, 2)
    with pytest.raises(QuotaExceeded):
        scene.open(session, "f")
    scene.close(session, slot)
    assert scene.open(session, "f") is slot


def test_a_stream_that_is_named_is_found_without_a_list_of_all_names(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = scene.session(), scene.session()
    scene.registry.stream(first, "s", "gpu", "", -1)
    monkeypatch.delattr(Registry, "streams")  # many processes name the same ones, and the loop waits meanwhile
    assert scene.registry.stream(second, "s", "", "other", 0) == ("gpu", -1)


@pytest.mark.parametrize(
    ("engine", "kept_slots", "why"),
    [("timeline", 2, "2 slots"), ("event", 2, "2 slots"), ("event", 3, "3 CUDA events")],
)
def test_new_events_of_an_engine_are_refused_once_too_much_of_it_is_kept(
    engine: str, kept_slots: int, why: str
) -> None:
    scene = Scene(Settings(pool=2 * kept_slots, max_sessions=4, max_cuda_events=6))
    recorder = scene.session("r")
    for name, rings in (("a", [1, 2]), ("b", [3])):
        slot = scene.open(recorder, name, recorder=True)
        slot.engine, slot.ring = engine, rings if engine == "event" else []
    other = {"timeline": "event", "event": "timeline"}[engine]
    scene.registry.kept.check(engine, 0)
    scene.registry.release_dead(recorder, held=UNKNOWN)
    assert (scene.registry.in_use, scene.registry.kept.counts(0)[engine]) == (0, 2 if engine == "timeline" else 3)
    scene.registry.kept.check(other, 0)
    with pytest.raises(QuotaExceeded, match=f"{engine!r} are refused: {why} of dead recorders are kept.*MPS"):
        scene.registry.kept.check(engine, 0)
    scene.registry.end_held(recorder.serial)
    scene.registry.kept.check(engine, 0)
    assert scene.registry.kept.counts(0)[engine] == 0


def test_an_open_looks_at_nothing_that_is_kept() -> None:
    scene = Scene(Settings(pool=8, max_sessions=4))
    recorder, other = scene.session("r"), scene.session("o")
    for name in "abc":
        scene.open(recorder, name, recorder=True)
    scene.registry.release_dead(recorder, held=UNKNOWN)

    class Unseen(dict[int, list[Slot]]):
        def values(self) -> NoReturn:
            raise AssertionError("tens of thousands may be kept, and each open asks")

    scene.registry.kept.by_recorder = Unseen(scene.registry.kept.by_recorder)
    scene.registry.kept.check("event", 0)
    scene.open(other, "d", recorder=True)
    assert (scene.registry.in_use, scene.registry.kept.counts(0)) == (1, {"timeline": 0, "event": 0})
