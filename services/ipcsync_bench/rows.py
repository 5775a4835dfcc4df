"""Rows: each compares ipcsync with a peer on the same work, measured in turn in the same run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
Figures = Mapping[str, list[float]]
"""The figures of each contestant, one a round."""


@dataclass(frozen=True)
class Target:
    """The goal of a row. `text` is what it says; `holds(ours, theirs, ratio)` whether it is reached."""

    text: str
    holds: Callable[[float, float, float], bool]


def at_most(ratio: float) -> Target:
    """A time of at most `ratio` times the peer's."""
    return Target(f"<= {ratio:g} x", lambda _ours, _theirs, measured: measured <= ratio)


def at_most_more(extra: float, unit: str, ratio: float = 1.0) -> Target:
    """At most `extra` more than `ratio` times the peer's."""
    theirs = "theirs" if ratio == 1 else f"{ratio:g} x"
    return Target(f"<= {theirs} + {extra:g} {unit}", lambda ours, theirs, _ratio: ours <= ratio * theirs + extra)


def below(limit: float, unit: str) -> Target:
    """At most `limit`, whatever a peer does."""
    return Target(f"<= {limit:g} {unit}", lambda ours, _theirs, _ratio: ours <= limit)


@dataclass(frozen=True)
class Row:
    """One comparison. `ratio` is the median of ipcsync / peer over the rounds, `spread` its least and greatest.

    Without a peer (`peer` is empty) theirs is 0 and the ratio 1; the goal then speaks of `ours` alone.
    """

    row: str
    peer: str
    ours: float
    theirs: float
    unit: str
    ratio: float
    spread: tuple[float, float]
    goal: str
    is_reached: bool | None


def interleave(contestants: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Each contestant's figures, measured in turn, `rounds` times each.

    Every second round has the opposite order, so that other load of the machine affects all alike.
    """
    figures: dict[str, list[T]] = {name: [] for name in contestants}
    for number in range(rounds):
        order = list(contestants.items())
        for name, measure in order if number % 2 == 0 else reversed(order):
            figures[name].append(measure())
    return figures


def compare(row: str, figures: Figures, unit: str, targets: Mapping[str, Target]) -> list[Row]:
    """A row for each peer of ipcsync in `figures`."""
    return [
        _row(row, peer, figures["ipcsync"], theirs, unit, targets.get(peer))
        for peer, theirs in figures.items()
        if peer != "ipcsync"
    ]


def _row(row: str, peer: str, ours: list[float], theirs: list[float], unit: str, target: Target | None) -> Row:
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    ratio = statistics.median(ratios)
    mine, other = statistics.median(ours), statistics.median(theirs)
    met = None if target is None else target.holds(mine, other, ratio)
    text = target.text if target else ""
    return Row(row, peer, mine, other, unit, ratio, (min(ratios), max(ratios)), text, met)


def percentile(values: list[float], percent: float) -> float:
    """The value under which `percent` per cent of the values lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]
