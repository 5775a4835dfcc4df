"""Chains in the compiled core: the chain model's steps in its order, on the binary that runs; and planted mistakes.

As in `test_compiled_order`: a shortcut takes all steps, or it changes nothing and leaves the call to the Python engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from ipcsync._engines.chains import Entry
from ipcsync._engines.queued_wait import Wait

from ipcsync._board import BROKEN, INT64_MAX, LIVE
from ipcsync._board.session_line import SessionLine
from ipcsync._engines.loss import Loss
from tests.faults.chain_world import World
from tests.faults.compiled_rig import Rig, built, end
from tests.faults.test_board_order import Case
from tests.faults.test_chain_order import _done, _run, _started, _steps_of
from tests.faults.test_compiled_order import _CHANGES, core, translated

pytestmark = pytest.mark.core

__all__ = ["translated"]

_STREAM = 1
_OTHERS, _MINE, _THIRD = 1 << 16, 1 << 16 | 1, 1 << 16 | 2  # serials: who is waited for, who records, one more
_RECORD = {
    "loads newest": ["load newest"],
    "checks whom it stands behind": ["recorder alive?"],
    "stores bits": ["store bits"],
    "stores as_of": ["store as_of"],
    "stores behind": ["store behind"],
    "the driver's record": ["cuEventRecord"],
    "publishes 1": ["store recorded"],
}
_ACCEPT = {
    "waiter: the driver says complete": ["cuEventQuery"],
    "waiter: loads as_of": ["load behind", "load as_of"],
    "waiter: loads bits": ["load bits"],
    "waiter: 0 lives": ["session good?"],
    "waiter: accepts": ["recorder alive?", "load state"],
}
_NEWEST = 7


class Chain(Rig):
    """An event of session 1's, whose stream has waited for generation 1 of an event of session 0's."""

    def __init__(self, module: ModuleType, directory: Path, case: Case) -> None:
        super().__init__(module, directory, case)
        self.board.set_newest(_NEWEST)
        for index in range(3):
            line = self.board.session(index)
            line.assign(1 << 16 | index, 1, 1, 1, 1)
            self.hold(line, 0x77)
        self.above = self.board.slot(1)
        self.above.open(1)
        self.above.set_recorder(_OTHERS)
        self.above.publish(1)
        self.view = type(self.engine)()
        self.view.line = self.above
        self.view.incarnation, self.view.base, self.view.depth = 1, 0, 4
        self.view._lost_from = 1 << 62
        self.view._lock, self.view._record_lock = module.Lock(), module.Lock()
        self.view.shorten(self.session_check, True, self.links)
        self.engine._last_key = (_STREAM, _STREAM)
        self.wait = self.queued(1)
        self.waits[_STREAM] = {id(self.view): self.wait}

    def queued(self, generation: int, stream: int = _STREAM) -> Wait:
        """A wait for the other event that the driver has."""
        wait = Wait(self.view, generation, stream, stream)
        wait.is_queued = True
        return wait

    def hold(self, line: SessionLine, owner: int) -> None:
        """A thread holds the session's word, or the kernel has marked it."""
        self.board.words[line.indices[1]] = owner


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Callable[..., Chain]]:
    """Makes the two events, over the shipped core or another build of it."""
    rigs: list[Chain] = []

    def make(case: Case | None = None, module: ModuleType = core) -> Chain:
        folder = tmp_path / str(len(rigs))
        folder.mkdir()
        rigs.append(Chain(module, folder, case or Case("record", depth=4)))
        return rigs[-1]

    yield make
    end(core, rigs)


def _model_of_a_record() -> list[str]:
    model, world = _started(op=1, waits=((0, 1),))
    return _run(lambda world: model.session(world, 1), world, lambda world: world.slots[1].recorded == 1)


def _model_of_a_waiter() -> list[str]:
    model, world = _started()
    world = world.slot(1, recorded=1, sent=2, physical=2, truth=2, behind=1, bits=1, as_of=2)
    done: Callable[[World], bool] = lambda world: world.waiter.step == "good"  # noqa: E731 - typed
    return _run(model.waiter, world, done)


# --- record -----------------------------------------------------------------------------------------------------------


def test_a_record_tells_whom_it_stands_behind_in_the_models_order(rig: Any) -> None:
    made = rig()
    steps, outcome = made.call()
    assert outcome != "NotMeError"
    assert _done(steps, _RECORD) == _steps_of(_model_of_a_record(), _RECORD)
    assert steps.index("lock") < steps.index("store bits")
    assert steps[steps.index("store behind") + 1] == "fence"
    line = made.line
    assert (line.bits, line.as_of, line.behind, line.recorded) == (0b1, _NEWEST, 1, 1)
    assert made.chain._entries == [Entry(1, 1, _STREAM, (made.wait,), 0b1)]
    assert made.engine.has_chain


def test_a_second_record_behind_the_same_wait_lengthens_the_entry(rig: Any) -> None:
    made = rig()
    for _ in range(3):
        made.call()
    assert made.chain._entries == [Entry(1, 3, _STREAM, (made.wait,), 0b1)]
    assert (made.line.behind, made.line.recorded) == (1, 3)


def test_a_record_behind_another_wait_is_an_entry_of_its_own(rig: Any) -> None:
    made = rig()
    made.call()
    made.above.publish(2)
    later = made.queued(2)
    made.waits[_STREAM] = {id(made.view): later}
    made.call()
    assert [entry[:4] for entry in made.chain._entries] == [(1, 1, _STREAM, (made.wait,)), (2, 2, _STREAM, (later,))]
    assert (made.line.behind, made.line.recorded) == (1, 2)


def test_a_record_takes_over_whom_the_other_one_stands_behind(rig: Any) -> None:
    made = rig()
    made.above.store_bits(0b100)
    made.above.store_as_of(1)
    made.above.store_behind(1)
    made.call()
    assert made.line.bits == 0b101
    assert made.chain._entries[0].bits == 0b101


def test_only_the_recorder_can_judge_when_an_older_record_is_in_doubt(rig: Any) -> None:
    made = rig()
    made.call()
    made.above.publish(2)
    made.waits[_STREAM] = {id(made.view): made.queued(2)}
    made.line.store_bits(0b101)  # as of another wait
    made.hold(made.board.session(2), 0x4000_0077)
    made.call()
    assert made.line.bits == 0b111
    assert made.chain._entries[-1].bits == 0b011


def test_what_is_complete_is_dropped_and_not_stood_behind(rig: Any) -> None:
    made = rig()
    made.above.store_completed(1)
    steps, _ = made.call()
    assert made.line.recorded == 1
    assert not [step for step in steps if step in ("store bits", "store as_of", "store behind")]
    assert (made.dropped, made.wait.verdict, made.chain._entries, made.engine.has_chain) == (
        [made.wait],
        True,
        [],
        False,
    )


def test_an_event_of_the_same_session_is_not_stood_behind(rig: Any) -> None:
    made = rig()
    made.above.set_recorder(_MINE)
    made.call()
    assert (made.line.recorded, made.line.behind, made.chain._entries) == (1, 0, [])


def _go_to(made: Chain, stream: int, *, knows_list: bool = True) -> None:
    """The next record is on another stream, on which the event was recorded before the last one."""
    made.case = replace(made.case, stream=stream)
    made.engine._last_stream = stream
    made.engine._last_stream = _STREAM
    if knows_list:
        made.engine._last_key = (stream, stream)


@pytest.mark.parametrize("waits", [True, False])
def test_a_record_on_another_stream_follows_the_last_one_and_is_stood_behind_there(rig: Any, waits: bool) -> None:
    made = rig()
    made.call()
    _go_to(made, 2)
    other = made.queued(1, stream=2)
    if waits:
        made.waits[2] = {id(made.view): other}
    made.log.clear()
    steps, outcome = made.call()
    assert outcome != "NotMeError"
    assert [step for step in steps if step.startswith("cu")][-2:] == ["cuStreamWaitEvent", "cuEventRecord"]
    own = made.waits[2][id(made.engine)]  # of which the stream's next record, of whatever event, is to know
    assert (own.view, own.generation, own.key, own.stream, own.is_queued) == (made.engine, 1, 2, 2, True)
    second = [Entry(2, 2, 2, (other,), 0b1)] if waits else []
    assert made.chain._entries == [Entry(1, 1, _STREAM, (made.wait,), 0b1), *second]
    assert (made.line.behind, made.line.recorded) == (1, 2)


def test_the_wait_for_the_last_record_is_said_to_be_queued_only_once_the_driver_has_it(rig: Any) -> None:
    made = rig()
    made.call()
    _go_to(made, 2)
    seen: list[bool] = []

    def wait() -> int:
        seen.append(made.waits[2][id(made.engine)].is_queued)
        return 1

    made.on_wait = wait
    assert made.call()[1] == "NotMeError", "the driver refused"
    assert (seen, made.waits[2][id(made.engine)].is_queued, made.line.recorded) == ([False], False, 1)


def test_a_record_on_another_stream_that_follows_nothing_unsettled_leaves_no_wait(rig: Any) -> None:
    made = rig(Case("record", made=1, recorded=1, depth=4))
    _go_to(made, 2)
    steps, outcome = made.call()
    assert outcome != "NotMeError"
    assert "cuStreamWaitEvent" in steps
    assert list(made.waits) == [_STREAM]
    assert (made.chain._entries, made.line.behind, made.line.recorded) == ([], 0, 2)


@pytest.mark.parametrize("lock", ["lists", "event", "records"])
def test_a_record_that_finds_a_lock_held_is_left_with_nothing_changed(rig: Any, lock: str) -> None:
    made = rig()
    made.call()
    _go_to(made, 2)
    entries = made.chain._entries
    locks = {"lists": made.links.lock, "event": made.engine._lock, "records": made.engine._record_lock}
    with locks[lock]:
        assert made.call()[1] == "NotMeError"
    assert (list(made.waits), made.line.recorded, made.chain._entries is entries) == ([_STREAM], 1, True)
    assert made.call()[1] != "NotMeError", "each lock was given back"


def _kill_the_recorder(made: Chain) -> None:
    made.hold(made.board.session(0), 0x4000_0077)


def _close_the_view(made: Chain) -> None:
    made.view.is_closed = True


def _lose_the_wait(made: Chain) -> None:
    made.wait.verdict = Loss("died", _OTHERS, "a", 7)


def _stand_behind_the_dead(made: Chain) -> None:
    made.above.store_bits(0b100)
    made.above.store_as_of(1)
    made.above.store_behind(1)
    made.hold(made.board.session(2), 0x4000_0077)


def _chain_the_own_one(made: Chain) -> None:
    made.above.set_recorder(_MINE)
    made.above.store_behind(1)


def _take_a_new_stream(made: Chain) -> None:
    made.case = replace(made.case, stream=2)
    made.engine._last_key = (2, 2)
    made.waits[2] = made.waits[_STREAM]


_LEFT: dict[str, Callable[[Chain], object]] = {
    "the recorder died": _kill_the_recorder,
    "its session ended": lambda made: made.board.session(0).set_state(LIVE + 1),
    "it is broken": lambda made: made.above.break_at(0),
    "it is released": lambda made: made.above.store_completed(INT64_MAX),
    "it is lost": lambda made: made.above.lose(1, _THIRD),
    "nobody records it": lambda made: made.above.set_recorder(0),
    "it is not recorded yet": lambda made: made.above.publish(0),
    "its use here is closed": _close_the_view,
    "the driver does not have the wait yet": lambda made: setattr(made.wait, "is_queued", False),
    "the wait is lost": _lose_the_wait,
    "it stands behind the dead": _stand_behind_the_dead,
    "it is the session's own, and stands behind something": _chain_the_own_one,
    "the own event is lost": lambda made: setattr(made.chain, "_loss", Loss("behind", _THIRD, "c", 7)),
    "the chain is long": lambda made: setattr(made.chain, "judge_at", 0),
    "the chain holds nothing yet": lambda made: setattr(made.chain, "_is_holder", False),
    "the stream's list is not known": lambda made: _go_to(made, 2, knows_list=False),
    "a stream that it was not recorded on": _take_a_new_stream,
    "the own event is broken": lambda made: made.put("state", BROKEN),
}


@pytest.mark.parametrize("what", _LEFT)
def test_what_is_not_plain_is_left_to_the_python_engine_with_nothing_changed(rig: Any, what: str) -> None:
    made = rig()
    _LEFT[what](made)
    steps, outcome = made.call()
    assert outcome == "NotMeError"
    assert not [step for step in steps if step.startswith(_CHANGES)]
    assert (made.line.bits, made.line.behind, made.chain._entries) == (0, 0, [])
    assert steps.count("lock") == steps.count("unlock")


def test_a_record_goes_by_its_own_streams_list_whichever_was_used_last(rig: Any) -> None:
    """While the ring was looked at, another thread had another stream wait for the recorder's own event."""
    made = rig()

    def publish() -> None:
        made.engine._room, made.engine._last_key = 4, (5, 5)

    made.engine._try_publish, made.engine._room, made.engine.has_chain = publish, 0, True
    assert made.call()[1] != "NotMeError"
    assert made.chain._entries == [Entry(1, 1, _STREAM, (made.wait,), 0b1)]


def test_a_chain_that_changes_meanwhile_is_left_to_the_python_engine(rig: Any) -> None:
    made = rig()
    changed = [Entry(1, 1, 5, (), 0)]

    def step(number: int) -> None:
        Rig.step(made, number)
        if made.log[-1] == "lock":
            made.chain._entries = changed

    made.step = step
    made._hook = type(made._hook)(step)
    steps, outcome = made.call()
    assert outcome == "NotMeError"
    assert made.chain._entries is changed
    assert not [name for name in steps if name.startswith(_CHANGES)]


def test_a_number_that_was_given_to_a_record_which_failed_is_for_the_python_engine(rig: Any) -> None:
    made = rig()
    made.chain._entries, made.engine.has_chain = [Entry(1, 1, 5, (made.wait,), 0b1)], True
    _go_to(made, 2)
    steps, outcome = made.call()
    assert outcome == "NotMeError"
    assert not [step for step in steps if step.startswith(_CHANGES)]


# --- wait and query ---------------------------------------------------------------------------------------------------


def _chained(make: Any, call: str, module: ModuleType = core) -> Chain:
    made: Chain = make(Case(call, recorded=1, says_complete=call == "query"), module)
    made.line.store_bits(0b1)
    made.line.store_as_of(2)
    made.line.store_behind(1)
    return made


def test_a_waiter_looks_whom_it_stands_behind_after_the_driver_said_complete(rig: Any) -> None:
    steps, outcome = _chained(rig, "query").call()
    assert outcome == "True"
    wanted = _steps_of(_model_of_a_waiter(), _ACCEPT)
    assert _done(steps[steps.index("cuEventQuery") :], _ACCEPT)[: len(wanted)] == wanted


def test_a_wait_looks_whom_it_stands_behind_once_it_is_queued(rig: Any) -> None:
    steps, outcome = _chained(rig, "wait").call()
    assert outcome == "ok"
    assert steps.index("session good?") > steps.index("cuStreamWaitEvent")


def test_a_wait_is_said_to_be_queued_only_once_the_driver_has_it(rig: Any) -> None:
    made = _chained(rig, "wait")
    made.waits.clear()
    seen: list[bool] = []

    def wait(*_: Any) -> int:
        seen.append(made.waits[_STREAM][id(made.engine)].is_queued)
        return 0

    made.on_wait = wait
    assert made.call()[1] == "ok"
    (listed,) = made.waits[_STREAM].values()
    assert (seen, listed.is_queued) == ([False], True)


def test_a_wait_that_another_stream_of_the_list_did_not_get_is_not_said_to_be_queued(rig: Any) -> None:
    made = _chained(rig, "wait")
    other = Wait(made.engine, 1, _STREAM, _STREAM + 1)
    made.waits[_STREAM] = {id(made.engine): other}
    assert made.call()[1] == "ok"
    (listed,) = made.waits[_STREAM].values()
    assert (listed.stream, listed.is_queued, other.is_queued) == (_STREAM, True, False)


@pytest.mark.parametrize(("listed", "waited"), [(2, [1, 2]), (1, [1])])
def test_a_listed_wait_stands_for_an_earlier_one_once_its_stream_waits_for_that(
    rig: Any, listed: int, waited: list[int]
) -> None:
    made = _chained(rig, "wait")
    later = Wait(made.engine, listed, _STREAM, _STREAM)
    made.waits[_STREAM] = {id(made.engine): later}
    assert made.call()[1] == "ok"
    assert (list(made.waits[_STREAM].values()), later.waited) == ([later], waited)


def test_a_wait_in_the_place_of_an_earlier_one_stands_for_that(rig: Any) -> None:
    made = rig(Case("wait", recorded=2, generation=2))
    made.waits[_STREAM] = {id(made.engine): Wait(made.engine, 1, _STREAM, _STREAM)}
    assert made.call()[1] == "ok"
    (listed,) = made.waits[_STREAM].values()
    assert (listed.generation, listed.since) == (2, 1)


@pytest.mark.parametrize("call", ["query", "wait"])
@pytest.mark.parametrize("how", ["dead", "own", "newer"])
def test_what_stands_behind_the_dead_or_the_unknown_is_for_the_python_engine(rig: Any, call: str, how: str) -> None:
    made = _chained(rig, call)
    if how == "dead":
        _kill_the_recorder(made)
    elif how == "own":
        made.line.store_bits(0b10)
    else:
        made.line.store_as_of(0)
    assert made.call()[1] in ("NotMeError", "QueuedError")


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.process
@pytest.mark.parametrize("mistake", [9, 10, 11], ids=["stored-behind-the-record", "newest-loaded-late", "as_of-first"])
def test_a_mistake_in_a_record_behind_others_is_found(mistake: int, translated: Path, rig: Any) -> None:
    steps, outcome = rig(None, built(translated, mistake)).call()
    assert outcome != "NotMeError"
    assert _done(steps, _RECORD) != _steps_of(_model_of_a_record(), _RECORD)


@pytest.mark.thorough
@pytest.mark.process
def test_a_waiter_that_does_not_look_whom_it_stands_behind_is_found(translated: Path, rig: Any) -> None:
    made = _chained(rig, "query", built(translated, 12))
    _kill_the_recorder(made)
    assert made.call()[1] == "True", "a silent pass: the test above would see it"
