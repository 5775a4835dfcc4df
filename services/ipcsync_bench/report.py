"""How a benchmark is shown: a table for people, JSON for machines, a plot."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from html import escape
from typing import Any

from rich.console import Console
from rich.table import Table

import ipcsync
from ipcsync_bench import rows as kinds
from ipcsync_bench.rows import Row


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    model = ""
    with open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
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


def as_json(rows: list[Row]) -> dict[str, Any]:
    """The whole run."""
    fields = ("row", "peer", "ours", "theirs", "unit", "ratio", "spread", "goal", "is_reached")
    return {
        "machine": machine(),
        "rows": [{name: getattr(row, name) for name in fields} for row in rows],
    }


Older = Mapping[tuple[str, str], Mapping[str, Any]]
"""The rows of an older run, by row and peer."""


def read(path: str) -> Older:
    """An older run, as `as_json` wrote it."""
    with open(path) as file:
        return {(row["row"], row["peer"]): row for row in json.load(file)["rows"]}


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _before(row: Row, older: Older) -> tuple[float | None, float | None]:
    """An older run's figure, and its ratio to the same peer."""
    was = older.get((row.row, row.peer))
    if was is not None:
        return was["ours"], was["ratio"] if row.peer else None
    return next((each["ours"] for (name, _), each in older.items() if name == row.row), None), None


def held_to(rows: list[Row], older: Older, factor: float) -> list[Row]:
    """The rows, each with the goal of being at most `factor` times what it was."""
    return [kinds.held_to(row, _before(row, older)[0], factor) for row in rows]


_HEADS = ("row", "peer", "ipcsync", "peer's", "unit", "ratio", "spread", "goal", "reached")


def _cells(row: Row, older: Older) -> list[str]:
    """What stands in each column; with an older run, its figure and ratio in front of ours."""
    ours, ratio = _before(row, older)
    before = ["" if ours is None else _figure(ours), "" if ratio is None else f"{ratio:.2f}"] if older else []
    return [
        row.row,
        row.peer,
        *before,
        _figure(row.ours),
        _figure(row.theirs) if row.peer else "",
        row.unit,
        f"{row.ratio:.2f}" if row.peer else "",
        f"{_figure(row.spread[0])} to {_figure(row.spread[1])}",
        row.goal,
        {True: "yes", False: "not here", None: ""}[row.is_reached],
    ]


def _heads(older: Older) -> list[str]:
    return [*_HEADS[:2], *(["before", "ratio before"] if older else []), *_HEADS[2:]]


def table(rows: list[Row], older: Older) -> Table:
    """The rows, for people."""
    made = Table(title=f"{device()}: median of the rounds; ratio is ipcsync / peer")
    for name in _heads(older):
        made.add_column(name, justify="left" if name in ("row", "peer", "goal", "reached") else "right")
    for row in rows:
        made.add_row(*_cells(row, older))
    return made


def markdown(rows: list[Row], older: Older) -> str:
    """The rows as a Markdown table, in fewer columns: a page is narrower than a terminal."""
    lines = [_narrowed(_heads(older), older), *(_narrowed(_cells(row, older), older) for row in rows)]
    columns = lines[0].count("|") - 1
    return "\n".join([f"{device()}:", "", lines[0], "|" + "---|" * columns, *lines[1:]]) + "\n"


def _narrowed(cells: list[str], older: Older) -> str:
    """One line, with a figure and its ratio in one cell, and a goal and whether it was reached."""
    *cells, goal, reached = cells
    cells.append(f"{goal}: {reached}" if goal else "")
    if older:
        cells[2:4] = [", ".join(filter(None, cells[2:4]))]
    return "| " + " | ".join(cells) + " |"


def plot(rows: list[Row]) -> str:
    """An SVG with a bar a row: the ratio on a logarithmic scale, its spread as a line, 1 in the middle."""
    import math

    shown = [row for row in rows if row.peer]
    height, left, width = 22, 420, 480
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 90}" height="{height * (len(shown) + 3)}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{left + width / 2}" y="16" text-anchor="middle">ipcsync / peer, logarithmic: 0.01 to 100</text>',
    ]

    def x(ratio: float) -> float:
        return left + width * (min(max(math.log10(max(ratio, 1e-9)), -2.0), 2.0) + 2) / 4

    bottom = height * (len(shown) + 2)
    lines.append(f'<line x1="{x(1):.1f}" y1="{height}" x2="{x(1):.1f}" y2="{bottom}" stroke="#888"/>')
    for number, row in enumerate(shown):
        y = height * (number + 1.5)
        begin, end = sorted((x(1), x(row.ratio)))
        colour = {True: "#2a7", False: "#c33", None: "#58a"}[row.is_reached]
        label = escape(f"{row.row} / {row.peer}")
        lines += [
            f'<text x="{left - 8}" y="{y + 12:.1f}" text-anchor="end">{label}</text>',
            f'<rect x="{begin:.1f}" y="{y:.1f}" width="{max(end - begin, 1):.1f}" height="14" fill="{colour}"/>',
            f'<line x1="{x(row.spread[0]):.1f}" y1="{y + 7:.1f}" x2="{x(row.spread[1]):.1f}" y2="{y + 7:.1f}" '
            'stroke="black"/>',
            f'<text x="{left + width + 8}" y="{y + 12:.1f}">{row.ratio:.2f}</text>',
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


def show(rows: list[Row], older: Older) -> None:
    """Print the table."""
    console = Console(width=None if os.isatty(1) else 200)
    console.print(table(rows, older))
