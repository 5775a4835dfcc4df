"""The protocol along chains holds in every interleaving, and the model that says so finds mistakes planted in it.

Most scenarios take seconds each; those that take minutes are `thorough`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.models.chain_model import explore
from tests.models.chain_world import MISTAKES, Op, Scenario
from tests.models.explorer import Violation

pytestmark = [pytest.mark.model, pytest.mark.timeout(3600)]

EVENT, TIMELINE = "event", "timeline"
REC: Op = ("rec",)
CLOSE: Op = ("close",)
OTHER_STREAM: Op = ("stream",)
OTHER: Op = ("other",)
BEATS: Op = ("beats",)


def _wait(slot: int, generation: int = 1) -> Op:
    return ("wait", slot, generation)


def _ahead(slot: int, generation: int = 1) -> Op:
    return ("ahead", slot, generation)


def _pair(first: str, second: str, **options: Any) -> Scenario:
    """The first records; the second records behind nothing, waits for the first, and records behind that."""
    values: dict[str, Any] = {"wanted": 2, "killable": (0,), **options}
    return Scenario(((REC,), (REC, _wait(0), REC)), (first, second), **values)


def _three(*engines: str, **options: Any) -> Scenario:
    values: dict[str, Any] = {"wanted": 1, "killable": (0,), **options}
    return Scenario(((REC,), (_wait(0), REC), (_wait(1), REC)), engines, **values)


def _two_waits(engine: str, *programs: Op, **options: Any) -> Scenario:
    return Scenario(((REC,), (REC,), programs), (engine,) * 3, **options)


_INTERRUPTED = ((REC,), (("interrupt", 0, 1), REC, _wait(0), BEATS, REC))
# Two streams: what is recorded on the other one is not behind the wait, and proves nothing of it.
_REPEATED = ((REC,), (_wait(0), ("fail",), OTHER, REC, BEATS, OTHER, REC))
_ELSEWHERE = ((REC,), (_wait(0), OTHER, REC, BEATS, OTHER, REC))
_BEHIND_TWO = (_wait(0), REC, _wait(1), REC)
_FIRST_THEN_LOST = ((REC,), (REC, _wait(0), REC), (_wait(1), REC))
_AGAIN = ((REC,), (_wait(0), REC, REC))
_BEHIND_EACH = ((REC, REC), (_wait(0, 1), REC, _wait(0, 2), REC))

QUICK: dict[str, Scenario] = {
    "event, one death": _pair(EVENT, EVENT, wanted=2),
    "timeline, one death": _pair(TIMELINE, TIMELINE),
    "event, timeline": _pair(EVENT, TIMELINE),
    "timeline, event": _pair(TIMELINE, EVENT),
    "the second one's first generation, timeline": _pair(TIMELINE, TIMELINE, wanted=1),
    "the first one stopped, timeline": _pair(TIMELINE, TIMELINE, stops=1, stoppable=(0,), kills=0),
    "recorded again behind what is settled, timeline": Scenario(_AGAIN, (TIMELINE, TIMELINE), 2, killable=(0,)),
    "a wait interrupted and repeated, event": Scenario(_INTERRUPTED, (EVENT, EVENT), 2, killable=(0,)),
    "ahead, the first one may close first": Scenario(
        ((CLOSE,), (_ahead(0), REC)), (TIMELINE, TIMELINE), 1, killable=(0,)
    ),
    "the first one closes, event": Scenario(((REC, CLOSE), (_wait(0), REC)), (EVENT, EVENT), 1, kills=0),
    "the first one closes, timeline": Scenario(((REC, CLOSE), (_wait(0), REC)), (TIMELINE, TIMELINE), 1, kills=0),
}

THOROUGH: dict[str, Scenario] = {
    "repeated on another stream, event": Scenario(_REPEATED, (EVENT, EVENT), 2, killable=(0,)),
    "another stream, behind all waits, event": Scenario(_ELSEWHERE, (EVENT, EVENT), 2, killable=(0,), behind_all=True),
    "a wait interrupted and repeated, timeline": Scenario(_INTERRUPTED, (TIMELINE, TIMELINE), 2, killable=(0,)),
    "repeated on another stream, timeline": Scenario(_REPEATED, (TIMELINE, TIMELINE), 2, killable=(0,)),
    "another stream, behind all waits, timeline": Scenario(
        _ELSEWHERE, (TIMELINE, TIMELINE), 2, killable=(0,), behind_all=True
    ),
    "the second one's first generation, event": _pair(EVENT, EVENT, wanted=1),
    "recorded again behind what is settled, event": Scenario(_AGAIN, (EVENT, EVENT), 2, killable=(0,)),
    "ahead, the first one records and closes": Scenario(
        ((REC, CLOSE), (_ahead(0), REC)), (TIMELINE, TIMELINE), 1, killable=(0,)
    ),
    "the first one stopped, event": _pair(EVENT, EVENT, stops=1, stoppable=(0,), kills=0),
    "behind each of two, event": Scenario(_BEHIND_EACH, (EVENT, EVENT), 1, killable=(0,)),
    "event, any two deaths": _pair(EVENT, EVENT, kills=2, killable=(0, 1)),
    "timeline, any two deaths": _pair(TIMELINE, TIMELINE, kills=2, killable=(0, 1)),
    "event, timeline, any two deaths": _pair(EVENT, TIMELINE, kills=2, killable=(0, 1)),
    "timeline, event, any two deaths": _pair(TIMELINE, EVENT, kills=2, killable=(0, 1)),
    "the second one stopped, event": _pair(EVENT, EVENT, stops=1, stoppable=(1,)),
    "the second one stopped, timeline": _pair(TIMELINE, TIMELINE, stops=1, stoppable=(1,)),
    "stopped, then killed, timeline": _pair(TIMELINE, TIMELINE, stops=1, stoppable=(0,)),
    "a line given anew, event": _pair(EVENT, EVENT, reuses=1),
    "a line given anew, timeline": _pair(TIMELINE, TIMELINE, reuses=1),
    "three, event": _three(EVENT, EVENT, EVENT),
    "three, timeline": _three(TIMELINE, TIMELINE, TIMELINE),
    "three, event, timeline, event": _three(EVENT, TIMELINE, EVENT),
    "three, the middle one killed, event": _three(EVENT, EVENT, EVENT, killable=(1,)),
    "three, the middle one stopped, timeline": _three(*(TIMELINE,) * 3, kills=0, stops=1, stoppable=(1,)),
    "three, a line given anew, event": _three(EVENT, EVENT, EVENT, reuses=1),
    "three, a line given anew, timeline": _three(TIMELINE, TIMELINE, TIMELINE, reuses=1),
    "two waits, a line given anew, event": _two_waits(EVENT, *_BEHIND_TWO, wanted=2, killable=(0,), reuses=1),
    "two waits, a line given anew, timeline": _two_waits(TIMELINE, *_BEHIND_TWO, wanted=2, killable=(0,), reuses=1),
    "two streams, a line given anew, event": _two_waits(
        EVENT, _wait(0), REC, OTHER_STREAM, _wait(1), REC, wanted=2, killable=(0,), reuses=1
    ),
    "two streams, a line given anew, timeline": _two_waits(
        TIMELINE, _wait(0), REC, OTHER_STREAM, _wait(1), REC, wanted=1, killable=(0,), reuses=1
    ),
    "two waits, the second one killed, event": _two_waits(EVENT, *_BEHIND_TWO, wanted=1, killable=(1,)),
    "two waits, both killed, event": _two_waits(EVENT, _wait(0), _wait(1), REC, wanted=1, killable=(0, 1), kills=2),
    "two waits, the first one killed, event": _two_waits(EVENT, *_BEHIND_TWO, wanted=2, killable=(0,)),
    "ahead, three": Scenario(((REC,), (_wait(0), REC), (_ahead(1), REC)), (TIMELINE,) * 3, 1, killable=(0,)),
    "the middle one's first, then lost, event": Scenario(_FIRST_THEN_LOST, (EVENT,) * 3, 1, killable=(0,)),
    "the middle one's first, then lost, timeline": Scenario(_FIRST_THEN_LOST, (TIMELINE,) * 3, 1, killable=(0,)),
}

FOUND_IN = {
    "liveness first": QUICK["event, one death"],
    "no closure": THOROUGH["three, event"],
    "publish unjudged": QUICK["event, one death"],
    "publish first": QUICK["event, one death"],
    "no valid_as_of": THOROUGH["a line given anew, event"],
    "valid_as_of late": THOROUGH["a line given anew, event"],
    "valid_as_of by force": THOROUGH["two streams, a line given anew, event"],
    "mark only": QUICK["the first one stopped, timeline"],
    "release first": QUICK["the first one stopped, timeline"],
    "ahead unmarked": QUICK["ahead, the first one may close first"],
    "word at break": QUICK["timeline, one death"],
    "word of the broken": QUICK["timeline, one death"],
    "break at once": THOROUGH["the middle one's first, then lost, timeline"],
    "cleared at loss": QUICK["event, one death"],
    "cleared too soon": dataclasses.replace(THOROUGH["behind each of two, event"], wanted=2),
    "no judge": QUICK["event, one death"],
    "lost by death": QUICK["event, one death"],
    "evidence unchecked": THOROUGH["three, a line given anew, event"],
    "all at once": THOROUGH["behind each of two, event"],
    "repeat proves": THOROUGH["repeated on another stream, event"],
    "proves all": THOROUGH["repeated on another stream, event"],
    "listed is queued": QUICK["a wait interrupted and repeated, event"],
}


@pytest.mark.parametrize("name", QUICK)
def test_no_interleaving_breaks_a_promise_along_a_chain(name: str) -> None:
    _explore(QUICK[name])


@pytest.mark.thorough
@pytest.mark.parametrize("name", THOROUGH)
def test_no_interleaving_of_the_larger_chains_does(name: str) -> None:
    _explore(THOROUGH[name])


def _explore(scenario: Scenario) -> None:
    counts = explore(scenario)
    # That nothing goes wrong is no proof if nothing ever goes right, or the loss is never seen.
    assert counts["states"] > 100
    assert (counts["good"] > 0) == (REC in scenario.programs[0])
    faulty = {*(scenario.killable if scenario.kills else ()), *(scenario.stoppable if scenario.stops else ())}
    assert (counts["lost"] > 0) == bool(_stands_behind(scenario, len(scenario.programs) - 1, scenario.wanted) & faulty)


def _stands_behind(scenario: Scenario, who: int, generation: int) -> set[int]:
    """Those behind whose records a generation of `who` was recorded, at any remove."""
    program = scenario.programs[who]
    records = [index for index, op in enumerate(program) if op == REC]
    found = set()
    for op in program[: records[generation - 1]] if len(records) >= generation else ():
        if op[0] in ("wait", "ahead"):
            found |= {op[1], *_stands_behind(scenario, op[1], op[2])}
    return found


@pytest.mark.parametrize(("engine", "lies"), [("event", True), ("event", False), ("timeline", True)])
def test_a_recorder_that_tells_nothing_breaks_them(engine: str, lies: bool) -> None:
    with pytest.raises(Violation):
        explore(_pair(engine, engine, is_today=True, lies=lies))


_SLOW = {"all at once", "valid_as_of by force", "break at once", "cleared too soon", "evidence unchecked", "no closure"}


@pytest.mark.parametrize(
    "mistake", [pytest.param(each, marks=pytest.mark.thorough) if each in _SLOW else each for each in MISTAKES]
)
def test_a_planted_mistake_is_found(mistake: str) -> None:
    scenario = dataclasses.replace(FOUND_IN[mistake], mistakes=frozenset({mistake}))
    with pytest.raises(Violation) as caught:
        explore(scenario)
    assert "\n" in str(caught.value), "it tells the steps that lead there"
