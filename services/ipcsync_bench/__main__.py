"""`python -m ipcsync_bench`, which `ipcsync bench` executes."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import click

from ipcsync.cli.output import Command, one_line_for_errors

if TYPE_CHECKING:
    from ipcsync_bench.rows import Row

BENCHMARKS: dict[str, tuple[str, str]] = {
    "records": ("ipcsync_bench.calls", "record without waiters, both engines"),
    "completed": ("ipcsync_bench.calls", "wait and query on a completed point"),
    "pending": ("ipcsync_bench.calls", "wait on a pending point"),
    "hand_over": ("ipcsync_bench.handover", "a record until the peer's synchronize returns, both engines"),
    "graphs": ("ipcsync_bench.graphs", "a replay of a graph that waits for points and records"),
}
"""A function of that name in that module, and its description."""


def measure(
    benchmarks: Mapping[str, tuple[str, str]], names: Iterable[str], rounds: int | None, *, quick: bool
) -> list[Row]:
    """The rows of these benchmarks; what is measured now is said on stderr."""
    import ipcsync

    ipcsync.driver_name()  # so that this process warns about the driver, and no other one does
    rows: list[Row] = []
    for name in names:
        module, text = benchmarks[name]
        print(f"{name}: {text}", file=sys.stderr, flush=True)
        function: Callable[[int, float], Iterator[Row]] = getattr(importlib.import_module(module), name)
        rows += function(rounds or (3 if quick else 5), 0.1 if quick else 1.0)
    return rows


@click.command("bench", cls=Command)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
@click.option("--quick", is_flag=True, help="Fewer operations and three rounds: a look, not a figure.")
@click.option("--rounds", type=click.IntRange(1, 100), default=None, help="Rounds of each row (5; 3 with --quick).")
@click.option("--only", type=click.Choice([*BENCHMARKS]), multiple=True, help="Only this one; may be repeated.")
@one_line_for_errors()
def main(as_json: bool, quick: bool, rounds: int | None, only: tuple[str, ...]) -> None:
    """Measure ipcsync beside the limit, the bare call or a bare futex, in turn, in the same run.

    Calls are counted in bursts of at most 100, after which the stream is drained. Figures are the median of the rounds,
    with their spread. A goal is what the project wants of a quiet machine. Exit status 0 whatever the figures are.

    \b
    Examples:
      ipcsync bench --quick
      ipcsync bench --only hand_over --only records
      ipcsync bench --json > bench.json
    """
    from ipcsync_bench.rows import show

    show(measure(BENCHMARKS, only or BENCHMARKS, rounds, quick=quick), as_json=as_json)


if __name__ == "__main__":
    main(prog_name="ipcsync bench")
