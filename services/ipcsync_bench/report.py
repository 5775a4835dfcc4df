"""How a benchmark is shown: a table for people, JSON for machines."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

import ipcsync
from ipcsync_bench.rows import Row


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
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


HEADS = ("row", "peer", "ipcsync", "peer's", "unit", "ratio", "spread", "goal", "reached")


def figure(value: float) -> str:
    """A number in few digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def cells(row: Row) -> list[str]:
    """What stands in each column."""
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
    """Print the whole run."""
    if as_json:
        print(json.dumps({"machine": machine(), "rows": [asdict(row) for row in rows]}))
        return
    table = Table(title=f"{device()}: median of the rounds; ratio is ipcsync / peer")
    for name in HEADS:
        table.add_column(name, justify="left" if name in ("row", "peer", "goal", "reached") else "right")
    for row in rows:
        table.add_row(*cells(row))
    Console(width=None if os.isatty(1) else 200).print(table)
