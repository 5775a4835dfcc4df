"""How a benchmark is shown: a table for people, JSON for machines, a plot."""

from __future__ import annotations

import os
import platform
from html import escape
from typing import Any

from rich.console import Console
from rich.table import Table

import ipcsync
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
        "kernel": platform.release(),
        "python": platform.python_version(),
        "driver": ipcsync.driver_name(),
        "device": ipcsync.get_device_properties(0).name,
        "host_async": os.environ.get("IPCSYNC_HOST_ASYNC", "0") == "1",
    }


def as_json(rows: list[Row]) -> dict[str, Any]:
    """The whole run."""
    fields = ("row", "peer", "ours", "theirs", "unit", "ratio", "spread", "target", "met")
    return {
        "machine": machine(),
        "rows": [{name: getattr(row, name) for name in fields} for row in rows],
    }


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def table(rows: list[Row]) -> Table:
    """The rows, for people."""
    made = Table(title="ipcsync beside its peers (median of the rounds; ratio is ipcsync / peer)")
    for name in ("row", "peer"):
        made.add_column(name)
    for name in ("ipcsync", "peer's", "unit", "ratio", "spread"):
        made.add_column(name, justify="right")
    made.add_column("target")
    made.add_column("met")
    for row in rows:
        made.add_row(
            row.row,
            row.peer or "-",
            _figure(row.ours),
            _figure(row.theirs) if row.peer else "-",
            row.unit,
            f"{row.ratio:.2f}" if row.peer else "-",
            f"{_figure(row.spread[0])} to {_figure(row.spread[1])}",
            row.target or "-",
            {True: "yes", False: "NO", None: "-"}[row.met],
        )
    return made


def markdown(rows: list[Row]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| row | peer | ipcsync | peer's | unit | ratio | spread | target | met |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        spread = f"{_figure(row.spread[0])} to {_figure(row.spread[1])}"
        met = {True: "yes", False: "**no**", None: ""}[row.met]
        cells = [row.row, row.peer, _figure(row.ours), _figure(row.theirs) if row.peer else "", row.unit]
        cells += [f"{row.ratio:.2f}" if row.peer else "", spread, row.target, met]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


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
        colour = {True: "#2a7", False: "#c33", None: "#58a"}[row.met]
        label = escape(f"{row.row} / {row.peer}")
        lines += [
            f'<text x="{left - 8}" y="{y + 12:.1f}" text-anchor="end">{label}</text>',
            f'<rect x="{begin:.1f}" y="{y:.1f}" width="{max(end - begin, 1):.1f}" height="14" fill="{colour}"/>',
            f'<line x1="{x(row.spread[0]):.1f}" y1="{y + 7:.1f}" x2="{x(row.spread[1]):.1f}" y2="{y + 7:.1f}" '
            'stroke="black"/>',
            f'<text x="{left + width + 8}" y="{y + 12:.1f}">{row.ratio:.2f}</text>',
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


def show(rows: list[Row]) -> None:
    """Print the table."""
    console = Console(width=None if os.isatty(1) else 200)
    console.print(table(rows))
