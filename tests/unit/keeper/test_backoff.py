"""When a keeper starts the next coordinator, and when it gives up: told the time, so no clock runs."""

from __future__ import annotations

import pytest

from ipcsync_keeper.keeper import Restarts


def _end(restarts: Restarts, now: float, **how: float) -> bool:
    lived_s = how.get("lived_s", 0.5)
    return restarts.see_end(
        lived_s, now, has_replied=bool(how.get("has_replied")), is_own_doing=bool(how.get("is_own_doing", True))
    )


@pytest.mark.parametrize("how", [{"has_replied": True}, {"lived_s": 10.0}])
def test_after_one_that_was_of_use_the_next_starts_at_once_however_many_there_were(how: dict[str, float]) -> None:
    restarts = Restarts()
    for now in range(1, 20):
        assert not _end(restarts, now, **how)
        assert restarts.at == now


def test_pauses_grow_while_ends_come_to_nothing_and_begin_anew_afterwards() -> None:
    restarts = Restarts()
    pauses = []
    for _ in range(9):
        _end(restarts, 100.0, is_own_doing=False)
        pauses.append(restarts.at - 100.0)
    assert pauses == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0])
    _end(restarts, 200.0, has_replied=True)
    assert restarts.at == 200.0
    _end(restarts, 300.0)
    assert restarts.at == pytest.approx(300.05)


def test_three_ends_of_its_own_doing_that_came_to_nothing_are_enough() -> None:
    restarts = Restarts()
    assert [_end(restarts, now) for now in range(3)] == [False, False, True]


def test_ends_by_somebody_elses_kill_are_never_enough() -> None:
    restarts = Restarts()
    assert not any(_end(restarts, now, is_own_doing=False) for now in range(100))


def test_a_reply_between_makes_the_account_clean() -> None:
    restarts = Restarts()
    for _ in range(5):
        assert [_end(restarts, 1.0), _end(restarts, 2.0)] == [False, False]
        assert not _end(restarts, 3.0, has_replied=True)


def test_a_machine_that_starts_no_process_is_tried_again_and_again() -> None:
    restarts = Restarts()
    for _ in range(5000):
        restarts.see_none_started(7.0)
    assert restarts.at == 9.0
