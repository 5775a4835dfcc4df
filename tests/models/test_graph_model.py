"""Brackets hold in every interleaving, and the model that says so finds the mistakes planted in it."""

from __future__ import annotations

import pytest

from tests.models.graph_model import FOUND, HOLDS, IN_ONE_QUEUE, ONE, TO_AND_FRO, Model, bracket

pytestmark = [pytest.mark.model, pytest.mark.timeout(3600)]


@pytest.mark.parametrize("name", HOLDS)
def test_it_holds(name: str) -> None:
    model = Model(HOLDS[name])
    assert model.explore() == []
    assert model.states > 100


@pytest.mark.parametrize("name", IN_ONE_QUEUE)
def test_it_holds_over_one_hardware_queue(name: str) -> None:
    assert Model(HOLDS[name], queues=ONE).explore() == []


@pytest.mark.parametrize("name", FOUND)
def test_a_planted_mistake_is_found(name: str) -> None:
    assert Model(FOUND[name]).explore()


def test_to_and_fro_over_one_hardware_queue_stands_still() -> None:
    assert any(fault.startswith("stands still") for fault in Model([TO_AND_FRO], queues=ONE).explore())


def test_a_point_that_nobody_ever_makes_holds_the_stream() -> None:
    faults = Model([bracket(1)], most=(0, 0), death=False).explore()
    assert faults
    assert all(fault.startswith("stands still") for fault in faults)
