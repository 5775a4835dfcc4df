"""A short soak of hosts, and that its checker finds what is wrong."""

from __future__ import annotations

import pytest

from tests.fleet import hosts, soak


@pytest.mark.process
@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_fleet_soak() -> None:
    reason = hosts.why_not()
    if reason:
        pytest.skip(reason)
    said: list[str] = []
    assert soak.run(20.0, 2, 7, said.append) == [], said


@pytest.mark.parametrize(
    ("seen", "what"),
    [
        ([("a", "a/1", 4, "complete")], "and 3 were recorded"),
        ([("a", "a/2", 1, "complete")], "and 0 were recorded"),
        ([("a", "a/1", 2, "NodeLost"), ("a", "a/1", 3, "complete")], "after #2 was lost"),
        ([("a", "a/1", 2, "complete"), ("a", "a/1", 1, "RecorderLost")], "after #2 was seen complete"),
    ],
)
def test_the_checker_finds_a_violation(seen: list[tuple[str, str, int, str]], what: str) -> None:
    (wrong,) = soak.check({"a/1": 3}, seen)
    assert what in wrong


def test_the_checker_takes_what_is_right() -> None:
    seen = [("a", "a/1", 1, "complete"), ("a", "a/1", 3, "complete"), ("a", "a/1", 4, "NodeLost")]
    assert soak.check({"a/1": 3}, seen) == []
