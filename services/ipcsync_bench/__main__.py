"""`python -m ipcsync_bench`, which `ipcsync bench` executes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import click

from ipcsync.cli.output import Failed, one_line_for_errors

if TYPE_CHECKING:
    from ipcsync_bench.rows import Row

BENCHMARKS: dict[str, tuple[str, str]] = {
    "rates": ("control", "requests a second, 1 to 32 clients, 1 and 64 in flight"),
    "round_trip": ("control", "one request in flight, p50 and p99"),
    "open_close": ("control", "open a named event and close it"),
    "fan_out": ("control", "an announcement to 32 subscribers"),
    "hand_over": ("handover", "a record until the peer's synchronize returns, both engines"),
    "records": ("calls", "record without waiters, both engines, own and foreign streams"),
    "loaded": ("busy", "record while the process's other threads compute, compiled and in pure Python"),
    "completed": ("calls", "wait and query on a completed point"),
    "pending": ("calls", "wait on a pending point"),
    "chained": ("calls", "wait on a pending point and record behind it"),
    "wake_up": ("wake_up", "a wait on the host for work that lasts milliseconds (not on the host driver)"),
    "beside_torch": ("beside_torch", "record, wait and a tensor's hand-over beside torch's own (on a GPU with torch)"),
    "attach": ("start", "many processes attach to the same events"),
    "start": ("start", "import, coordinator ready, first event"),
    "memory": ("start", "the coordinator's, and a client's share"),
}
"""The benchmarks: a function of that name in that module, and its description."""

FLEET: dict[str, tuple[str, str]] = {
    "words": ("fleet", "between nodes: a word on one to a word on the other, and to a stream that goes on"),
    "flat_out": ("fleet", "between nodes: generations a second, beside bare messages"),
    "opening": ("fleet", "between nodes: opening a name"),
    "idle": ("fleet", "processor time of idle bridges"),
    "beside": ("fleet", "local requests of a node with a bridge, beside one without"),
}
"""The same between nodes: --fleet."""


def measure(name: str, rounds: int, scale: float) -> Iterator[Row]:
    """The rows of one benchmark."""
    import importlib

    module = importlib.import_module(f"ipcsync_bench.{(BENCHMARKS | FLEET)[name][0]}")
    function: Callable[[int, float], Iterator[Row]] = getattr(module, name)
    yield from function(rounds, scale)


@click.command("bench")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
@click.option("--quick", is_flag=True, help="Fewer operations and three rounds: a look, not a figure.")
@click.option("--rounds", type=click.IntRange(1, 100), default=None, help="Rounds of each row (5; 3 with --quick).")
@click.option(
    "--only", type=click.Choice([*BENCHMARKS, *FLEET]), multiple=True, help="Only this benchmark; may be repeated."
)
@click.option("--fleet", is_flag=True, help="Between two nodes, beside bare nats-py; needs nats-server and the extra.")
@click.option("--plot", type=click.Path(dir_okay=False, writable=True), help="Also draw the ratios into this SVG file.")
@click.option("--markdown", type=click.Path(dir_okay=False, writable=True), help="Also write the table to this file.")
@click.option(
    "--before", type=click.Path(exists=True, dir_okay=False), help="Show an older run, its --json, beside it."
)
@click.option(
    "--held-to",
    type=click.FloatRange(min=0, min_open=True),
    help="With --before, the goal of each row: at most so many times the older figure.",
)
@one_line_for_errors()
def main(
    as_json: bool,
    quick: bool,
    rounds: int | None,
    only: tuple[str, ...],
    fleet: bool,
    plot: str | None,
    markdown: str | None,
    before: str | None,
    held_to: float | None,
) -> None:
    """Measure ipcsync beside its peers and beside the limit, in turn, in the same run.

    Redis is a peer where redis-server is installed. Figures are the median of the rounds, with their spread; a ratio is
    ipcsync / peer. A goal is what the project wants of a quiet machine. Exit status 0 whatever the figures are: they
    are for reading.

    \b
    Examples:
      ipcsync bench --quick
      ipcsync bench --only hand_over --only records
      ipcsync bench --json > bench.json
      ipcsync bench --fleet
      IPCSYNC_DRIVER=cuda ipcsync bench --plot bench.svg
    """
    import ipcsync
    from ipcsync_bench import report

    ipcsync.driver_name()  # so that this process warns about the driver, and no other one does
    scale = 0.1 if quick else 1.0
    count = rounds or (3 if quick else 5)
    rows: list[Row] = []
    chosen = only or (FLEET if fleet else BENCHMARKS)
    if any(name in FLEET for name in chosen):
        from ipcsync_bench.fleet import why_not

        reason = why_not()
        if reason:
            raise Failed(f"nothing can be measured between nodes here: {reason}")
    for name in chosen:
        print(f"{name}: {(BENCHMARKS | FLEET)[name][1]}", file=sys.stderr, flush=True)
        rows += measure(name, count, scale)
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


if __name__ == "__main__":
    main(prog_name="ipcsync bench")
