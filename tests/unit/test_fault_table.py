"""The table of faults names what exists, and no row is without a test."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

_FAULTS = Path(__file__).parents[1] / "faults"
_ROWS = [
    re.match(r"\| (\d+) \|.*\| (.*) \|$", line)
    for line in (_FAULTS / "README.md").read_text().splitlines()
    if re.match(r"\| \d+ \|", line)
]


def test_the_table_has_all_rows_once() -> None:
    rows = [int(row.group(1)) for row in _ROWS if row]
    assert rows == sorted(set(rows))
    assert set(range(1, 41)) <= set(rows)


@pytest.mark.parametrize("row", [(int(row.group(1)), row.group(2)) for row in _ROWS if row], ids=str)
def test_each_row_has_its_tests_where_the_table_says(row: tuple[int, str]) -> None:
    number, cell = row
    files = re.findall(r"\]\((\S+)\)", cell)
    assert files
    for name in files:
        assert f"def test_row_{number:02d}_" in (_FAULTS / name).read_text(), name
