"""The board protocol holds in every interleaving, and the model that says so finds mistakes that are planted in it."""

from __future__ import annotations

import dataclasses

import pytest

from tests.models.board_model import MISTAKES, Scenario, explore
from tests.models.explorer import Violation

pytestmark = [pytest.mark.model, pytest.mark.timeout(3600)]

CALLS = ("query", "synchronize", "wait")
_FIRST = frozenset({1})


def _one(call: str, generation: int) -> tuple[tuple[tuple[str, int], ...], ...]:
    return (((call, generation),),)


SCENARIOS: dict[str, Scenario] = {
    "two records": Scenario(calls=((("synchronize", 1), ("query", 2)),), depth=2, streams=(1, 2)),
    "two waiters, the recorder dies": Scenario(calls=((("synchronize", 1),), (("wait", 1),)), recorded=1, dies=True),
    "another waiter is attached and dies, the recorder dies, reuse": Scenario(
        calls=((("query", 1),), ()), recorded=1, dies=True, waiters_die=True, closers=_FIRST, reuse=True
    ),
    "the heartbeat harvests, the recorder dies": Scenario(
        calls=_one("query", 1), recorded=1, dies=True, heartbeat=True
    ),
    "the heartbeat harvests, the recorder expires": Scenario(
        calls=_one("query", 1), recorded=1, expires=True, heartbeat=True
    ),
    "an expired recorder goes on, closes, and the slot is used anew": Scenario(
        streams=(1, 1), recorded=1, depth=2, expires=True, closes=True, reuse=True
    ),
    "what was seen complete stays so": Scenario(
        calls=((("query", 1), ("query", 1)),), recorded=1, expires=True, dies=True
    ),
    "synchronize, the recorder closes and dies": Scenario(
        calls=_one("synchronize", 1), recorded=1, closes=True, dies=True
    ),
}
for _call in CALLS:
    SCENARIOS |= {
        f"{_call}, a ring of one, two streams, the recorder dies": Scenario(
            calls=_one(_call, 1), streams=(1, 2), dies=True
        ),
        f"{_call}, a ring of two, two streams, the recorder expires": Scenario(
            calls=_one(_call, 2), streams=(1, 2), depth=2, recorded=1, expires=True
        ),
        f"{_call}, another thread closes, the recorder dies, reuse": Scenario(
            calls=_one(_call, 1), recorded=1, dies=True, closers=_FIRST, reuse=True
        ),
        f"{_call}, a ring of one, the heartbeat harvests, the coordinator dies": Scenario(
            calls=_one(_call, 1), streams=(1, 1), recorded=1, orphans=True, heartbeat=True
        ),
        f"{_call}, another thread closes, the coordinator dies": Scenario(
            calls=_one(_call, 1), recorded=1, orphans=True, closers=_FIRST
        ),
        f"{_call}, recorder and coordinator die": Scenario(calls=_one(_call, 1), recorded=1, dies=True, orphans=True),
    }

SCENARIOS |= {
    "a wait is queued while the ring goes round": Scenario(calls=_one("wait", 1), streams=(1, 1)),
    "two waits are queued while a ring of two goes round": Scenario(
        calls=((("wait", 1),), (("wait", 2),)), streams=(1, 1, 1), depth=2, recorded=1
    ),
    "a wait is queued while the ring goes round, waiters die": Scenario(
        calls=_one("wait", 1), streams=(1, 1), waiters_die=True
    ),
    "waits are queued while the ring goes round twice, the heartbeat harvests": Scenario(
        calls=((("wait", 1), ("wait", 2)),), streams=(1, 1, 1), recorded=1, heartbeat=True
    ),
}
SCENARIOS["two sleep"] = Scenario(calls=((("synchronize", 1),), (("synchronize", 2),)), depth=2, streams=(1, 1))

TIMELINES: dict[str, Scenario] = {
    "ahead, the recorder expires": Scenario(
        engine="timeline", calls=_one("ahead", 2), streams=(1, 1), recorded=1, expires=True
    ),
    "ahead, another thread closes, the recorder expires": Scenario(
        engine="timeline", calls=_one("ahead", 2), recorded=1, expires=True, closers=_FIRST
    ),
    "ahead, another thread closes, the recorder dies, reuse": Scenario(
        engine="timeline", calls=_one("ahead", 2), recorded=1, dies=True, closers=_FIRST, reuse=True
    ),
    "an expired recorder's writes pull the word down, reuse": Scenario(
        engine="timeline", streams=(1, 2), recorded=1, expires=True, closes=True, reuse=True
    ),
    "query, two streams, the recorder dies": Scenario(
        engine="timeline", calls=_one("query", 2), streams=(1, 2), dies=True
    ),
    "wait, the recorder closes and dies": Scenario(
        engine="timeline", calls=_one("wait", 1), recorded=1, closes=True, dies=True
    ),
    "synchronize, another thread closes, the recorder dies, reuse": Scenario(
        engine="timeline", calls=_one("synchronize", 1), recorded=1, dies=True, closers=_FIRST, reuse=True
    ),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_no_interleaving_of_the_event_engine_breaks_a_promise(name: str) -> None:
    _explore(name, SCENARIOS[name])


@pytest.mark.parametrize("name", TIMELINES)
def test_no_interleaving_of_the_timeline_engine_breaks_a_promise(name: str) -> None:
    _explore(name, TIMELINES[name])


def _explore(name: str, scenario: Scenario) -> None:
    result = explore(scenario)
    print(f"{name}: {result.states} states, {result.transitions} transitions")  # noqa: T201 - for who runs it with -s
    assert result.states > 100
    for number, calls in enumerate(scenario.calls, 1):
        if not calls:
            continue
        outcomes = result.outcomes[f"waiter {number}"]
        passed = {"query": "True", "synchronize": "ok", "wait": "ok", "ahead": "ok"}
        # That nothing goes wrong is no proof if nothing ever goes right, or the recorder's loss is never seen.
        assert ",".join(passed[call] for call, _ in calls) in outcomes
        assert any("lost" in outcome for outcome in outcomes) == (scenario.dies or scenario.expires)
        assert any("orphaned" in outcome for outcome in outcomes) == scenario.orphans


FOUND_IN: dict[str, Scenario] = {
    "publish before record": SCENARIOS["query, a ring of one, two streams, the recorder dies"],
    "record into a full ring": Scenario(calls=_one("wait", 1), streams=(1, 1)),
    "harvest after overwrite": Scenario(calls=_one("query", 1), streams=(1, 1)),
    "reuse before detach": SCENARIOS["query, another thread closes, the recorder dies, reuse"],
    "alive before query": SCENARIOS["query, another thread closes, the recorder dies, reuse"],
    "no look at the recorder": SCENARIOS["wait, another thread closes, the recorder dies, reuse"],
    "no look at the state": SCENARIOS["query, a ring of two, two streams, the recorder expires"],
    "wake before state": SCENARIOS["synchronize, a ring of two, two streams, the recorder expires"],
    "wake before publish": SCENARIOS["synchronize, a ring of one, two streams, the recorder dies"],
    "watermark not taken": SCENARIOS["synchronize, the recorder closes and dies"],
    "completed whatever the state": SCENARIOS["the heartbeat harvests, the recorder expires"],
    "wait before recorded": SCENARIOS["wait, a ring of one, two streams, the recorder dies"],
    "no following": SCENARIOS["two records"],
    "no last look": SCENARIOS["query, another thread closes, the recorder dies, reuse"],
    "let go while inside": SCENARIOS["synchronize, another thread closes, the recorder dies, reuse"],
    "inside after the look": SCENARIOS["query, another thread closes, the recorder dies, reuse"],
    "let go without the lock": SCENARIOS["query, another thread closes, the recorder dies, reuse"],
    "release before state": TIMELINES["ahead, the recorder expires"],
    "release once": TIMELINES["ahead, another thread closes, the recorder expires"],
    "no look at the coordinator": SCENARIOS["wait, a ring of one, the heartbeat harvests, the coordinator dies"],
    "no last look at an orphan": SCENARIOS["query, another thread closes, the coordinator dies"],
    "told of an orphan": SCENARIOS["query, a ring of one, the heartbeat harvests, the coordinator dies"],
    "awaited before publish": SCENARIOS["two records"],
    "asleep unawaited": SCENARIOS["two records"],
    "room without a look": SCENARIOS["a wait is queued while the ring goes round"],
    "look at hazards too early": SCENARIOS["a wait is queued while the ring goes round"],
    "look before the hazard": SCENARIOS["a wait is queued while the ring goes round"],
    "retract too early": SCENARIOS["a wait is queued while the ring goes round"],
    "wait for the dead": SCENARIOS["a wait is queued while the ring goes round, waiters die"],
    "let go undrained": TIMELINES["an expired recorder's writes pull the word down, reuse"],
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_found(mistake: str) -> None:
    scenario = dataclasses.replace(FOUND_IN[mistake], mistakes=frozenset({mistake}))
    with pytest.raises(Violation) as caught:
        explore(scenario)
    assert "\n" in str(caught.value), "it tells the steps that lead there"
