"""Rows: each compares ipcsync with a peer on the same work, measured in turn in the same run. How they are shown."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import ipcsync

T = TypeVar("T")
HEADS = ("row", "peer", "ipcsync", "peer's", "unit", "ratio", "spread", "goal", "reached")
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
    ours, rows = figures["ipcsync"], []
    for peer in (name for name in figures if name != "ipcsync"):
        ratios = [mine / other for mine, other in zip(ours, figures[peer], strict=True)]
        mine, other, ratio = map(statistics.median, (ours, figures[peer], ratios))
        goal = targets.get(peer)
        text, is_reached = (goal.text, goal.holds(mine, other, ratio)) if goal else ("", None)
        rows.append(Row(row, peer, mine, other, unit, ratio, (min(ratios), max(ratios)), text, is_reached))
    return rows


def percentile(values: list[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


# --- how they are shown: a table for people, JSON for machines --------------------------------------------------------


def machine() -> dict[str, Any]:
    with open("/proc/cpuinfo") as file:
        model = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "")
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release().partition("-")[0],  # without what a distributor adds
        "python": platform.python_version(),
        "driver": ipcsync.driver_name(),
        "device": ipcsync.get_device_properties(0).name,
        "profile": os.environ.get("IPCSYNC_HOST_PROFILE", ""),
        "host_async": os.environ.get("IPCSYNC_HOST_ASYNC", "0") == "1",
    }


def device() -> str:
    """What the figures are of: the device, the driver, and whose times a software driver takes."""
    told = machine()
    profile = f", with the times of {told['profile']}" if told["profile"] else ""
    return f"{told['device']}, driver {told['driver']}{profile}"


def figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def cells(row: Row) -> list[str]:
    return [
        row.row,
        row.peer,
        figure(row.ours),
        figure(row.theirs) if row.peer else "",
        row.unit,
        f"{row.ratio:.2f}" if row.peer else "",
        f"{figure(row.spread[0])} to {figure(row.spread[1])}",
        row.goal,
        {True: "yes", False: "not here", None: ""}[row.is_reached],
    ]


def show(rows: list[Row], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"machine": machine(), "rows": [asdict(row) for row in rows]}))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{device()}: median of the rounds; ratio is ipcsync / peer")
    for name in HEADS:
        table.add_column(name, justify="left" if name in ("row", "peer", "goal", "reached") else "right")
    for row in rows:
        table.add_row(*cells(row))
    Console(width=None if os.isatty(1) else 200).print(table)
