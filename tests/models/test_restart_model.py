"""The protocol of journal, effects and replies, walked with a death at each step (test_restart_order: the code's)."""

from __future__ import annotations

import dataclasses

import pytest

from tests.models.restart_model import ENGINES, FOUND_IN, SCENARIOS, Found, explore
from tests.models.restart_world import MISTAKES

pytestmark = [pytest.mark.model, pytest.mark.timeout(3600)]

_ONE = SCENARIOS["one death of the coordinator"]


@pytest.mark.parametrize("engine", ENGINES)
def test_one_death_of_the_coordinator_at_any_step_breaks_nothing(engine: str) -> None:
    """The other scenarios, of millions of states: python -m tests.models.restart_model."""
    states, _ = explore(dataclasses.replace(_ONE, engine=engine))
    assert states > 1000


_SLOW = {"held not rebuilt", "given up for good"}
"""Found only in scenarios that take a minute or more: python -m tests.models.restart_model 'held not rebuilt'."""


@pytest.mark.parametrize("mistake", [mistake for mistake in MISTAKES if mistake not in _SLOW])
def test_a_planted_mistake_is_found(mistake: str) -> None:
    scenario = FOUND_IN.get(mistake, _ONE)
    with pytest.raises(Found):
        explore(dataclasses.replace(scenario, mistakes=frozenset({mistake})))
