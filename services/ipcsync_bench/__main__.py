"""`python -m ipcsync_bench`, which `ipcsync bench` executes."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING

import click

from ipcsync.cli.output import one_line_for_errors

if TYPE_CHECKING:
    from ipcsync_bench.rows import Row

Benchmarks = Mapping[str, tuple[str, str]]
"""A function of that name in that module, and its description."""

BENCHMARKS: dict[str, tuple[str, str]] = {
    "records": ("ipcsync_bench.calls", "record without waiters, both engines, own and foreign streams"),
    "completed": ("ipcsync_bench.calls", "wait and query on a completed point"),
    "pending": ("ipcsync_bench.calls", "wait on a pending point"),
    "chained": ("ipcsync_bench.calls", "wait on a pending point and record behind it"),
    "hand_over": ("ipcsync_bench.handover", "a record until the peer's synchronize returns, both engines"),
    "wake_up": ("ipcsync_bench.wake_up", "a wait on the host for work that lasts milliseconds"),
    "round_trip": ("ipcsync_bench.round_trip", "one request in flight, p50 and p99"),
    "graphs": ("ipcsync_bench.graphs", "a replay of a graph that waits for points and records"),
    "deaths": ("ipcsync_bench.deaths", "a recorder is killed, until a wait on the host raises"),
}


def measure(benchmarks: Benchmarks, name: str, rounds: int, scale: float) -> Iterator[Row]:
    """The rows of one benchmark."""
    function: Callable[[int, float], Iterator[Row]] = getattr(importlib.import_module(benchmarks[name][0]), name)
    yield from function(rounds, scale)


def command(name: str, text: str, benchmarks: Benchmarks, usual: Collection[str]) -> click.Command:
    """A command line that measures these; the usual ones unless `--only` names some."""

    @click.command(name, help=text)
    @click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
    @click.option("--quick", is_flag=True, help="Fewer operations and three rounds: a look, not a figure.")
    @click.option("--rounds", type=click.IntRange(1, 100), default=None, help="Rounds of each row (5; 3 with --quick).")
    @click.option("--only", type=click.Choice([*benchmarks]), multiple=True, help="Only this one; may be repeated.")
    @click.option("--plot", type=click.Path(dir_okay=False, writable=True), help="Also draw the ratios into this SVG.")
    @click.option("--markdown", type=click.Path(dir_okay=False, writable=True), help="Also write the table there.")
    @click.option(
        "--before", type=click.Path(exists=True, dir_okay=False), help="Show an older run, its --json, beside it."
    )
    @click.option(
        "--held-to",
        type=click.FloatRange(min=0, min_open=True),
        help="With --before, the goal of each row: at most so many times the older figure.",
    )
    @one_line_for_errors()
    def run(
        as_json: bool,
        quick: bool,
        rounds: int | None,
        only: tuple[str, ...],
        plot: str | None,
        markdown: str | None,
        before: str | None,
        held_to: float | None,
    ) -> None:
        import ipcsync
        from ipcsync_bench import report

        ipcsync.driver_name()  # so that this process warns about the driver, and no other one does
        rows: list[Row] = []
        for each in only or usual:
            print(f"{each}: {benchmarks[each][1]}", file=sys.stderr, flush=True)
            rows += measure(benchmarks, each, rounds or (3 if quick else 5), 0.1 if quick else 1.0)
        older = report.read(before) if before else {}
        if held_to is not None:
            rows = report.held_to(rows, older, held_to)
        if plot:
            with open(plot, "w") as file:
                file.write(report.plot(rows))
        if markdown:
            with open(markdown, "w") as file:
                file.write(report.markdown(rows, older))
        if as_json:
            print(json.dumps(report.as_json(rows)))
        else:
            report.show(rows, older)

    return run


main = command(
    "bench",
    """Measure ipcsync beside the limit, the bare call or message, in turn, in the same run.

    Calls are counted in bursts of at most 100, after which the stream is drained, and one each 100 µs, as a server
    makes them. Figures are the median of the rounds, with their spread; a ratio is ipcsync / bare. A goal is what the
    project wants of a quiet machine. Exit status 0 whatever the figures are: they are for reading.

    \b
    Examples:
      ipcsync bench --quick
      ipcsync bench --only hand_over --only records
      ipcsync bench --json > bench.json
      IPCSYNC_DRIVER=cuda ipcsync bench --plot bench.svg
    """,
    BENCHMARKS,
    BENCHMARKS,
)


if __name__ == "__main__":
    main(prog_name="ipcsync bench")
