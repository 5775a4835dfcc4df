"""Rows of a benchmark: what they compare, and how they are shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import ipcsync
from ipcsync_bench import rows
from ipcsync_bench.rows import Row, show
from tests.benchmarks import report

_FIGURES = {"ipcsync": [3.0, 1.0, 2.0], "one <peer>": [1.0, 2.0, 4.0], "another": [4.0, 4.0, 4.0]}


@pytest.fixture
def measured() -> list[Row]:
    """Two rows beside a peer, one with a goal that was missed, and one without a peer."""
    targets = {"one <peer>": rows.at_most(0.4)}
    return [
        *rows.compare("work", _FIGURES, "µs", targets),
        report.alone("size", [5000.0], "kB", rows.below(6000, "kB")),
    ]


@pytest.fixture
def older(measured: list[Row], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> report.Older:
    """The same rows as an older run's file has them, but for one."""
    file = tmp_path / "older.json"
    show(measured, as_json=True)
    content = json.loads(capsys.readouterr().out)
    content["rows"] = [row for row in content["rows"] if row["peer"] != "another"]
    file.write_text(json.dumps(content))
    return report.read(str(file))


def test_a_row_has_medians_and_the_median_of_each_rounds_ratio(measured: list[Row]) -> None:
    row = measured[0]
    assert (row.row, row.peer, row.ours, row.theirs) == ("work", "one <peer>", 2.0, 2.0)
    assert (row.ratio, row.spread) == (0.5, (0.5, 3.0))
    assert (row.goal, row.is_reached) == ("<= 0.4 x", False)
    assert (measured[1].goal, measured[1].is_reached) == ("", None)
    assert (measured[2].ours, measured[2].ratio, measured[2].is_reached) == (5000.0, 1.0, True)


@pytest.mark.parametrize(
    ("target", "reached", "missed"),
    [
        (report.at_least(2), (4.0, 2.0), (3.0, 2.0)),
        (rows.at_most(2), (4.0, 2.0), (5.0, 2.0)),
        (rows.at_most_more(1, "µs"), (3.0, 2.0), (3.5, 2.0)),
        (rows.below(7, "µs"), (7.0, 1.0), (8.0, 9.0)),
    ],
    ids=lambda value: value.text if isinstance(value, rows.Target) else None,
)
def test_a_goal_is_reached_at_its_limit_and_not_beyond(
    target: rows.Target, reached: tuple[float, float], missed: tuple[float, float]
) -> None:
    for figures, is_reached in ((reached, True), (missed, False)):
        ours, theirs = figures
        (row,) = rows.compare("work", {"ipcsync": [ours], "peer": [theirs]}, "µs", {"peer": target})
        assert row.is_reached is is_reached


def test_contestants_are_measured_in_turn_and_every_second_round_in_the_opposite_order() -> None:
    order: list[str] = []

    def measuring(name: str) -> Callable[[], float]:
        def measure() -> float:
            order.append(name)
            return float(len(order))

        return measure

    figures = rows.interleave({name: measuring(name) for name in "abc"}, 3)
    assert "".join(order) == "abccbaabc"
    assert figures == {"a": [1.0, 6.0, 7.0], "b": [2.0, 5.0, 8.0], "c": [3.0, 4.0, 9.0]}


def test_a_percentile_is_one_of_the_values() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert [rows.percentile(values, percent) for percent in (0, 50, 99, 100)] == [1.0, 51.0, 100.0, 100.0]


def test_an_older_run_stands_beside_the_rows_that_it_has(measured: list[Row], older: report.Older) -> None:
    for run, columns in ({}, 8), (older, 9):
        where, _, *lines = report.markdown(measured, run).splitlines()
        assert ipcsync.get_device_properties(0).name in where
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        assert len(cells) == 2 + len(measured)
        assert {len(line) for line in cells} == {columns}
        assert cells[2][-1] == "<= 0.4 x: not here"
        assert cells[4][:2] == ["size", ""]
        assert "5,000" in cells[4]
    assert cells[2][2] == "2, 0.50"
    assert cells[3][2] == "2", "the row's own figure, but no ratio to a peer that it was not held against"


def test_the_table_is_printed_whole(measured: list[Row], capfd: pytest.CaptureFixture[str]) -> None:
    show(measured, as_json=False)
    said = capfd.readouterr().out
    assert all(word in said for word in ("one <peer>", "another", "size", "0.5 to 3", "not here"))
