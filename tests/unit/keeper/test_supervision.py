"""When a keeper takes a coordinator for hung, and when it replaces one by new code, while a driver's call hangs."""

from __future__ import annotations

import math
import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest

from ipcsync_keeper.keeper import _PATIENCE_S, _START_S, Keeper, Restarts
from ipcsync_keeper.resources import CURRENT_REQUEST, IS_ENDING, KILLED_FROM_OUTSIDE, REPLIES


def _child(**state: Any) -> Any:
    known = {"is_asking": False, "has_config": True, "pid": 1, "versions": {"wire": "1"}, "began": time.monotonic()}
    calls: list[str] = []
    child = SimpleNamespace(calls=calls, is_serving=True, is_dead=False, refusal="", **{**known, **state})
    for name in ("kill", "dismiss", "end"):
        setattr(child, name, lambda *_, name=name: calls.append(name))
    return child


def _keeper(serving: Any) -> Any:
    keeper: Any = object.__new__(Keeper)
    keeper._active, keeper._spare, keeper._candidate = serving, None, None
    keeper._versions = {"wire": "1"}
    keeper._unserved_ns, keeper._kill_at = 0, 0.0
    keeper._resources = SimpleNamespace(board=SimpleNamespace(heartbeat=7))
    ends: list[str] = []
    keeper.ends = ends
    keeper._wants_reload, keeper._reload_began_ns = False, 1
    keeper._end_reload = ends.append
    return keeper


@pytest.mark.parametrize(
    ("state", "patiences", "is_killed"),
    [
        ({}, 2, True),
        ({"is_asking": True}, 2, False),
        ({"is_asking": True}, 5, True),
        ({"has_config": False}, 5, False),
    ],
)
def test_a_coordinator_hangs_if_its_heart_stands_still_though_nothing_keeps_it(
    state: dict[str, bool], patiences: int, is_killed: bool
) -> None:
    child = _child(**state)
    keeper = _keeper(child)
    now = time.monotonic()
    keeper._beat, keeper._looked_at = 2 * 7 + child.is_asking, now
    keeper._beat_at = now - patiences * _PATIENCE_S
    keeper._check_heartbeat()
    assert ("kill" in child.calls) == is_killed


def test_a_coordinator_that_has_its_answer_has_time_to_go_on() -> None:
    child = _child(is_asking=True)
    keeper = _keeper(child)
    keeper._beat, keeper._looked_at = 2 * 7 + 1, time.monotonic()
    keeper._beat_at = keeper._looked_at - 3 * _PATIENCE_S
    keeper._check_heartbeat()
    child.is_asking = False
    keeper._check_heartbeat()
    assert child.calls == []


def test_new_code_waits_for_the_drivers_call_of_the_old_one() -> None:
    old, new = _child(is_asking=True), _child()
    keeper = _keeper(old)
    keeper._candidate = new
    keeper._supervise_candidate()
    assert (old.calls, keeper._candidate) == ([], new), "nobody could tell the new one to serve"
    old.is_asking = False
    keeper._supervise_candidate()
    assert (old.calls, keeper._spare) == (["dismiss"], new)


def test_a_coordinator_that_is_late_to_end_is_killed_and_then_waited_for() -> None:
    """If a driver holds it in the kernel, the keeper does not spin meanwhile."""
    old = _child(was_started=True, was_dismissed=True)
    keeper = _keeper(old)
    keeper._supervise_active()
    keeper._supervise_active()
    assert (old.calls, keeper._kill_at) == (["kill"], math.inf)


def test_and_is_given_up_if_that_call_does_not_end() -> None:
    old, new = _child(is_asking=True), _child(began=time.monotonic() - 2 * _START_S)
    keeper = _keeper(old)
    keeper._candidate = new
    keeper._supervise_candidate()
    assert (old.calls, new.calls, keeper._candidate) == ([], ["end"], None)
    assert "a driver call did not end within" in keeper.ends[0]


@pytest.mark.parametrize(("has_served", "is_blamed"), [(True, False), (False, True)])
def test_a_kill_of_who_took_no_request_says_nothing_of_an_earlier_ones(has_served: bool, is_blamed: bool) -> None:
    """The one before it died of its request by itself, and the next one reads the word for that."""
    words = {IS_ENDING: 0, REPLIES: 0, CURRENT_REQUEST: 7, KILLED_FROM_OUTSIDE: 0}
    known = {"was_started": True, "was_dismissed": False, "was_killed": False, "has_hung": False}
    child = _child(**known, how_it_ended=lambda: "killed")
    keeper = _keeper(child)
    keeper._is_ready, keeper._restarts, keeper._status, keeper._reload_began_ns = True, Restarts(), None, 0
    keeper._resources = SimpleNamespace(
        journal=SimpleNamespace(words=words),
        board=SimpleNamespace(starts=2 if has_served else 1),
        starts=2,
        restarts={"died": 0},
    )
    keeper._see_end(child, -signal.SIGKILL)
    assert (words[KILLED_FROM_OUTSIDE] == 0) == is_blamed
    assert keeper._resources.restarts == {"died": 1}
