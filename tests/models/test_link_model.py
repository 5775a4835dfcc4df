"""The link's protocol holds in every state of its model, which finds planted mistakes (test_link_order: the code's)."""

from __future__ import annotations

import pytest

from tests.models import link_model

pytestmark = [pytest.mark.model, pytest.mark.timeout(3600)]

_MOST = 40_000


def test_link_model_holds_for_one_use_in_every_state() -> None:
    assert link_model.explore(1) > 1_000


@pytest.mark.thorough
def test_link_model_holds_for_two_uses_as_far_as_it_is_walked() -> None:
    assert link_model.explore(2, most=_MOST) >= _MOST


@pytest.mark.parametrize("mistake", link_model.MISTAKES)
def test_a_planted_mistake_is_found(mistake: str) -> None:
    with pytest.raises(link_model.Violation):
        link_model.explore(2 if mistake == "no identity" else 1, mistake, most=_MOST)
