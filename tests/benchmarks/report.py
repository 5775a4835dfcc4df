"""Rows of the laboratory, and the tables of RESULTS.md: each row beside what an older run had."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from typing import Any

from ipcsync_bench.rows import HEADS, Row, Target, cells, device, figure

Older = Mapping[tuple[str, str], Mapping[str, Any]]
"""The rows of an older run, by row and peer."""


def at_least(ratio: float) -> Target:
    """A rate of at least `ratio` times the peer's."""
    return Target(f">= {ratio:g} x", lambda _ours, _theirs, measured: measured >= ratio)


def alone(row: str, ours: list[float], unit: str, target: Target | None = None) -> Row:
    """A row without a peer."""
    value = statistics.median(ours)
    met = None if target is None else target.holds(value, 0.0, 1.0)
    return Row(row, "", value, 0.0, unit, 1.0, (min(ours), max(ours)), target.text if target else "", met)


def read(path: str) -> Older:
    """An older run, as `--json` printed it."""
    with open(path) as file:
        return {(row["row"], row["peer"]): row for row in json.load(file)["rows"]}


def markdown(rows: list[Row], older: Older) -> str:
    """The rows as a Markdown table, in fewer columns: a page is narrower than a terminal."""
    heads = [*HEADS[:2], *(["before, ratio before"] if older else []), *HEADS[2:-2], "goal: reached"]
    lines = [heads, ["---"] * len(heads), *(_narrowed(row, older) for row in rows)]
    return "\n".join([f"{device()}:", "", *(f"| {' | '.join(line)} |" for line in lines)]) + "\n"


def _narrowed(row: Row, older: Older) -> list[str]:
    *shown, goal, reached = cells(row)
    if older:
        shown.insert(2, _before(row, older))
    return [*shown, f"{goal}: {reached}" if goal else ""]


def _before(row: Row, older: Older) -> str:
    """An older run's figure, and its ratio to the same peer."""
    was = older.get((row.row, row.peer))
    if was is not None:
        return f"{figure(was['ours'])}, {was['ratio']:.2f}" if row.peer else figure(was["ours"])
    return next((figure(each["ours"]) for (name, _), each in older.items() if name == row.row), "")
