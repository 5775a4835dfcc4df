"""The compiled core's steps along chains are the chain model's, in its order; planted mistakes are found.

As in `test_board_order`: whoever moves a step in the code moves it in `chain_recorder` or `chain_model` too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ipcsync._board import BROKEN, LIVE
from ipcsync._engines.loss import Loss
from tests.faults.compiled_rig import DIED, MINE, OTHERS, STREAM, THIRD, Case, Changes, Rig, built, core, end
from tests.kit.boards import bits_of, store_bits
from tests.models import chain_world
from tests.models.chain_model import Model
from tests.models.chain_world import Scenario, World

pytestmark = pytest.mark.core

# What stands in the code for one step of the model.
_RECORD = {
    "loads newest": ["load newest"],
    "checks whom it stands behind": ["recorder alive?"],
    "stores bits": ["store bits"],
    "stores valid_as_of": ["store valid_as_of"],
    "stores behind": ["store first_dependent", "fence"],
    "the driver's record": ["cuEventRecord"],
    "publishes 1": ["store recorded", "fence"],
}
_ACCEPT = {
    "waiter: the driver says complete": ["cuEventQuery"],
    "waiter: loads valid_as_of": ["load first_dependent", "load valid_as_of"],
    "waiter: loads bits": ["load bits"],
    "waiter: 0 lives": ["session good?"],
    "waiter: accepts": ["recorder alive?", "load state"],
}
_JUDGE = {
    "stores completed 1": ["store completed"],
    "stores behind 0": ["store first_dependent", "fence"],
    "stores bits 0": ["store bits"],
    "stores lost 1": ["store root_cause", "store lost", "fence", "wake"],
}
_LINKS = ("store bits", "store valid_as_of", "store first_dependent")
_PAIR = Scenario(((("rec",),), (("wait", 0, 1), ("rec",))), ("event", "event"), 1)
_NEWEST = 7


class Chain(Rig):
    """An event of session 1's, whose stream has waited for generation 1 of an event of session 0's."""

    def __init__(self, case: Case, directory: Path, module: ModuleType = core, handle: int = 0) -> None:
        super().__init__(case, directory, module, handle)
        self.board.newest = _NEWEST
        self.above = self.board.slot(1)
        self.above.open(1)
        self.above.recorder = OTHERS
        self.above.publish(1)
        self.view = self.made(1, recorder=False)
        self.wait = self.queued(1)
        self.log.clear()

    def queued(self, generation: int, stream: int = 1, view: Any = None) -> Any:
        """A listed wait that the driver has."""
        view = view or self.view
        view.open_first(generation)
        wait = self.core.add(stream, view, generation, stream)
        wait.is_queued = True
        return wait

    def go_to(self, stream: int) -> None:
        """The next record is on another stream."""
        self.stream = stream

    @property
    def entries(self) -> list[tuple[Any, ...]]:
        """What its records stand behind."""
        entries = self.engine.chain.entries.values()
        return [(each.wait, each.first, each.last, each.proof, each.bits) for each in entries]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Callable[..., Chain]]:
    """Makes the two events, over the shipped core or another build of it."""
    core.drop(core.of(None))  # with a wait that an earlier test left, a rig would have a chain before the test begins
    rigs: list[Chain] = []

    def make(case: Case | None = None, module: ModuleType = core) -> Chain:
        folder = tmp_path / str(len(rigs))
        folder.mkdir()
        rigs.append(Chain(case or Case("record", depth=4), folder, module))
        return rigs[-1]

    yield make
    end(rigs)


def _steps_of(labels: list[str], stands_for: dict[str, list[str]]) -> list[str]:
    return [step for label in labels for step in stands_for.get(label, ())]


def _done(log: list[str], stands_for: dict[str, list[str]]) -> list[str]:
    """The code's steps that the model has; of several loads of one word in a row, one."""
    wanted = {step for steps in stands_for.values() for step in steps}
    return [step for step, _ in groupby(step for step in log if step in wanted)]


def _run(
    moves: Callable[[World], Iterator[tuple[str, World]]], world: World, until: Callable[[World], bool]
) -> list[str]:
    labels = []
    while not until(world):
        label, world = next(moves(world))
        labels.append(label)
    return labels


def _started(**second: Any) -> tuple[Model, World]:
    """The first session has recorded, and its driver calls that complete; the second one is about to go on."""
    model = Model(_PAIR)
    world = model.start().slot(0, recorded=1, sent=2, physical=2, truth=2)
    return model, world.stage(1, **second)


def _model_of_a_record() -> list[str]:
    model, world = _started(op=1, waits=((0, 1),))
    return _run(lambda world: model.session(world, 1), world, lambda world: world.slots[1].recorded == 1)


def _model_of_a_waiter() -> list[str]:
    model, world = _started()
    world = world.slot(1, recorded=1, sent=2, physical=2, truth=2, behind=1, bits=1, valid_as_of=2)
    return _run(model.waiter, world, lambda world: bool(world.waiter.step == "good"))


# --- record -----------------------------------------------------------------------------------------------------------


def test_a_record_tells_whom_it_stands_behind_in_the_models_order(rig: Any) -> None:
    made = rig()
    steps, outcome = made.call()
    assert outcome == ""
    assert _done(steps, _RECORD) == _steps_of(_model_of_a_record(), _RECORD)
    assert steps.index("lock") < steps.index("store bits")
    assert (bits_of(made.line), made.line.valid_as_of, made.line.first_dependent, made.line.recorded) == (
        0b1,
        _NEWEST,
        1,
        1,
    )
    assert made.entries == [(made.wait, 1, 1, 1, 0b1)]
    assert made.engine.chain.is_needed


def test_a_second_record_behind_the_same_wait_lengthens_the_entry(rig: Any) -> None:
    made = rig()
    for _ in range(3):
        made.call()
    assert made.entries == [(made.wait, 1, 3, 1, 0b1)]
    assert (made.line.first_dependent, made.line.recorded) == (1, 3)


def test_a_record_behind_another_wait_is_an_entry_of_its_own(rig: Any) -> None:
    made = rig()
    made.call()
    made.above.publish(2)
    later = made.queued(2)
    made.call()
    assert [entry[:4] for entry in made.entries] == [(made.wait, 1, 1, 1), (later, 2, 2, 2)]
    assert (made.line.first_dependent, made.line.recorded) == (1, 2)


def test_what_is_between_two_records_behind_a_wait_that_neither_proves_is_not_lost_with_it(rig: Any) -> None:
    made = rig()
    made.wait.is_queued = False  # another thread is about to queue it
    for stream in (1, 2, 1):
        made.go_to(stream)
        made.call()
    assert sorted(entry[1:3] for entry in made.entries) == [(1, 1), (3, 3)]
    assert made.engine.chain.resolve(made.engine, 1) == 1
    made.hold(made.board.session(0), DIED)
    assert made.engine.chain.resolve(made.engine, 2) == 2
    assert made.engine.chain.lost_from == 3


def test_records_of_several_streams_behind_a_wait_that_the_first_one_proves_are_one_entry(rig: Any) -> None:
    made = rig()
    for stream in (1, 2, 1):
        made.go_to(stream)
        made.call()
    assert made.entries == [(made.wait, 1, 3, 1, 0b1)]


def test_a_record_takes_over_whom_the_other_one_stands_behind(rig: Any) -> None:
    made = rig()
    store_bits(made.above, 0b100)
    made.above.valid_as_of = 1
    made.above.first_dependent = 1
    made.call()
    assert bits_of(made.line) == made.entries[0][-1] == 0b101


def test_only_the_recorder_can_judge_when_an_older_record_is_in_doubt(rig: Any) -> None:
    made = rig()
    made.call()
    made.above.publish(2)
    made.queued(2)
    store_bits(made.line, 0b101)  # as of another wait
    made.hold(made.board.session(2), DIED)
    made.call()
    assert [bits for *_, bits in made.entries] == [0b011, 0b001]
    assert bits_of(made.line) == 0b111  # what is there stays until it is judged


def test_what_is_complete_is_dropped_and_not_stood_behind(rig: Any) -> None:
    made = rig()
    made.above.store_completed(1)
    steps, _ = made.call()
    assert not set(_LINKS) & {*steps}
    assert (made.line.recorded, made.wait.outcome, made.entries, core.of(None)) == (1, True, [], [])
    assert not made.engine.chain.is_needed


@pytest.mark.parametrize("waits", [True, False])
def test_a_record_on_another_stream_follows_the_last_one_and_is_stood_behind_there(rig: Any, waits: bool) -> None:
    made = rig()
    made.call()
    made.go_to(2)
    other = made.queued(1, stream=2) if waits else None
    made.log.clear()
    steps, _ = made.call()
    assert [step for step in steps if step.startswith("cu")][-2:] == ["cuStreamWaitEvent", "cuEventRecord"]
    (own,) = [wait for wait in core.of(2) if wait.view is made.engine]  # of which the stream's next record is to know
    assert (own.generation, own.key, own.stream, own.is_queued) == (1, 2, 2, True)
    assert made.entries == [(made.wait, 1, 1, 1, 0b1), *([(other, 2, 2, 2, 0b1)] if waits else [])]
    assert (made.line.first_dependent, made.line.recorded) == (1, 2)


def test_a_record_on_another_stream_that_follows_nothing_unsettled_leaves_no_wait(rig: Any) -> None:
    made = rig(Case("record", made=1, recorded=1, depth=4))
    made.go_to(2)
    steps, _ = made.call()
    assert "cuStreamWaitEvent" in steps
    assert core.of(None) == [made.wait]
    assert (made.entries, made.line.first_dependent, made.line.recorded) == ([], 0, 2)


def _stand_behind_the_dead(made: Chain) -> None:
    store_bits(made.above, 0b100)
    made.above.valid_as_of = 1
    made.above.first_dependent = 1
    made.hold(made.board.session(2), DIED)


def _chain_the_own_one(made: Chain) -> None:
    made.above.recorder = MINE
    made.above.first_dependent = 1


_LOSSES: dict[str, Callable[[Chain], object]] = {
    "the recorder died": lambda made: made.hold(made.board.session(0), DIED),
    "it is broken": lambda made: made.above.break_at(0),
    "it is lost": lambda made: made.above.lose(1, THIRD),
    "the wait is lost": lambda made: setattr(made.wait, "outcome", Loss("died", OTHERS, "a", 7)),
    "the own event is lost": lambda made: setattr(made.engine.chain, "loss", Loss("behind", THIRD, "c", 7)),
    "the own event is broken": lambda made: made.put("state", BROKEN),
}
_BITS: dict[str, tuple[int, Callable[[Chain], object]]] = {
    "its session ended": (0b10, lambda made: setattr(made.board.session(0), "state", LIVE + 1)),
    "nobody records it": (0b10, lambda made: setattr(made.above, "recorder", 0)),
    "it is not recorded yet": (0b10, lambda made: made.above.publish(0)),
    "it stands behind the dead": (0b10, _stand_behind_the_dead),
    "it is of the same session, and stands behind something": (0, _chain_the_own_one),
}


@pytest.mark.parametrize("what", _LOSSES)
def test_a_record_behind_what_is_lost_changes_nothing_and_raises(rig: Any, what: str) -> None:
    made = rig()
    _LOSSES[what](made)
    steps, outcome = made.call()
    assert outcome == ("EventClosed" if what == "the own event is broken" else "RecorderLost")
    assert not {*_LINKS, "cuEventRecord", "store recorded"} & {*steps}
    assert (bits_of(made.line), made.line.first_dependent, made.entries) == (0, 0, [])
    assert steps.count("lock") == steps.count("unlock")


@pytest.mark.parametrize("what", _BITS)
def test_what_no_waiter_can_see_only_the_recorder_judges(rig: Any, what: str) -> None:
    made = rig()
    bits, change = _BITS[what]
    change(made)
    assert made.call()[1] == ""
    assert (bits_of(made.line), made.line.first_dependent, len(made.entries)) == (bits, 1, 1)


def test_an_event_of_the_same_session_is_not_stood_behind(rig: Any) -> None:
    made = rig()
    made.above.recorder = MINE
    made.call()
    assert (made.line.recorded, made.line.first_dependent, made.entries) == (1, 0, [])


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_recorder_tells_its_judgement_in_the_models_order(rig: Any, is_lost: bool) -> None:
    model, world = _started(op=2, made=1, entries=(chain_world.Entry(1, ((0, 1),), 2),))
    world = world.slot(1, recorded=1, sent=2, physical=2, behind=1, bits=2)
    labels = _run(
        lambda world: model.session(world, 1),
        world.line(0, mark=True) if is_lost else world,
        lambda world: world.slots[1].lost == 1 or (world.stages[1].entries, world.stages[1].step) == ((), "next"),
    )
    made = rig(Case("record", says_complete=True))
    made.call()
    if is_lost:
        made.hold(made.board.session(0), DIED)
    else:
        made.above.store_completed(1)
    made.log.clear()
    with made.hooked():
        made.engine.publish_completed()
    assert _done(made.log, _JUDGE) == _steps_of(labels, _JUDGE)
    assert (made.line.lost, made.line.first_dependent) == ((1, 1) if is_lost else (0, 0))


# --- wait and query ---------------------------------------------------------------------------------------------------


def _chained(make: Any, call: str, module: ModuleType = core) -> Chain:
    made: Chain = make(Case(call, recorded=1, says_complete=call != "wait"), module)
    store_bits(made.line, 0b1)
    made.line.valid_as_of = 2
    made.line.first_dependent = 1
    return made


@pytest.mark.parametrize("call", ["query", "synchronize"])
def test_a_waiter_looks_whom_it_stands_behind_after_the_driver_said_complete(rig: Any, call: str) -> None:
    steps, outcome = _chained(rig, call).call()
    assert outcome in ("True", "ok")
    wanted = _steps_of(_model_of_a_waiter(), _ACCEPT)
    assert _done(steps[steps.index("cuEventQuery") :], _ACCEPT)[: len(wanted)] == wanted


def test_a_wait_looks_whom_it_stands_behind_once_it_is_queued(rig: Any) -> None:
    steps, outcome = _chained(rig, "wait").call()
    assert outcome == "ok"
    assert steps.index("session good?") > steps.index("cuStreamWaitEvent")


@pytest.mark.parametrize("refused", [False, True])
def test_a_wait_is_said_to_be_queued_only_once_the_driver_has_it(rig: Any, refused: bool) -> None:
    made = _chained(rig, "wait")
    seen: list[bool] = []
    made.within["cuStreamWaitEvent"] = lambda: seen.extend(
        wait.is_queued for wait in core.of(None) if wait.view is made.engine
    )
    made.results = {"cuStreamWaitEvent": 1} if refused else {}
    assert made.call()[1] == ("DriverError cuStreamWaitEvent" if refused else "ok")
    (listed,) = [wait for wait in core.of(None) if wait.view is made.engine]
    assert (seen, listed.is_queued) == ([False], not refused)


def test_a_wait_that_another_stream_of_the_list_did_not_get_is_not_said_to_be_queued(rig: Any) -> None:
    made = _chained(rig, "wait")
    other = core.add(1, made.engine, 1, STREAM)
    assert made.call()[1] == "ok"
    both = [wait for wait in core.of(1) if wait.view is made.engine]
    assert both[0] is other
    assert [(wait.stream, wait.is_queued) for wait in both] == [(STREAM, False), (1, True)]


@pytest.mark.parametrize("call", ["query", "wait"])
@pytest.mark.parametrize("how", ["dead", "own", "newer"])
def test_who_stands_behind_the_dead_or_the_unknown_is_not_told_that_it_is_complete(
    rig: Any, call: str, how: str
) -> None:
    made = _chained(rig, call)
    if how == "dead":
        made.hold(made.board.session(0), DIED)
    elif how == "own":
        store_bits(made.line, 0b10)
    else:
        made.line.valid_as_of = 0
    assert made.call()[1] == ("False" if call == "query" else "ok")
    assert made.engine.known_complete == 0


# --- mistakes ---------------------------------------------------------------------------------------------------------


_NEWEST_KEPT = "        self.newest = newest\n"
_VALID = "                store(view.place, VALID_AS_OF, self.newest)\n"
_BITS_STORED = "                store_bits(view, bits, True)  # those of the others are there\n"
_FIRST_STORED = "                    store_first(view, generation)\n"
_MADE = "                found = make_record(self, handle, stream, generation, refusal)\n"
_MISTAKES: dict[str, Changes] = {
    "stored behind the record": [
        (_BITS_STORED, ""),
        (_MADE, _MADE + "            store_bits(self, 1, True)\n"),
    ],
    "the first that depends stored behind the record": [
        (_FIRST_STORED, "                    pass\n"),
        (_MADE, _MADE + "            store_first(self, generation)\n"),
    ],
    "newest loaded late": [
        (
            _NEWEST_KEPT,
            '        step(b"load newest")\n        newest = ipcsync_load(view.header + NEWEST)\n' + _NEWEST_KEPT,
        )
    ],
    "valid_as_of first": [(_VALID, ""), (_BITS_STORED, _VALID + _BITS_STORED)],
}


@pytest.mark.planted
@pytest.mark.process
@pytest.mark.parametrize("mistake", _MISTAKES, ids=[name.replace(" ", "-") for name in _MISTAKES])
def test_a_mistake_in_a_record_behind_others_is_found(mistake: str, tmp_path: Path, rig: Any) -> None:
    steps, outcome = rig(None, built(tmp_path / "core", _MISTAKES[mistake])).call()
    assert outcome == ""
    assert _done(steps, _RECORD) != _steps_of(_model_of_a_record(), _RECORD)


@pytest.mark.planted
@pytest.mark.process
def test_a_waiter_that_does_not_look_whom_it_stands_behind_is_found(tmp_path: Path, rig: Any) -> None:
    looks = "        if not is_clear(self, generation):\n            return False\n"
    made = _chained(rig, "query", built(tmp_path / "core", [(looks, "")]))
    made.hold(made.board.session(0), DIED)
    assert made.call()[1] == "True", "a silent pass: the test above would see it"
