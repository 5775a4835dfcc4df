"""`ipcsync bench` with the rows of the laboratory, by the same options: `python -m tests.benchmarks`."""

from __future__ import annotations

import click

from ipcsync.cli.output import one_line_for_errors
from ipcsync_bench.__main__ import BENCHMARKS, measure
from ipcsync_bench.rows import show
from tests.benchmarks import report

LABORATORY: dict[str, tuple[str, str]] = {
    "records": (
        "tests.benchmarks.calls",
        "record without waiters, both engines, own and foreign streams, now and then",
    ),
    "completed": ("tests.benchmarks.calls", "wait and query on a completed point, and the first wait on one's own"),
    "chained": ("tests.benchmarks.calls", "wait on a pending point and record behind it"),
    "wake_up": ("tests.benchmarks.wake_up", "a wait on the host for work that lasts milliseconds"),
    "graphs": ("tests.benchmarks.graphs", "a replay of a graph that waits for points and records"),
    "deaths": ("tests.benchmarks.deaths", "a recorder is killed, until a wait on the host raises"),
    "rates": ("tests.benchmarks.control", "requests a second, 1 to 32 clients, 1 and 64 in flight"),
    "round_trip": ("tests.benchmarks.control", "one request in flight, p50 and p99, beside Redis and a Manager"),
    "open_close": ("tests.benchmarks.control", "open a named event and close it"),
    "fan_out": ("tests.benchmarks.control", "an announcement to 32 subscribers"),
    "hand_over": (
        "tests.benchmarks.handover",
        "a record until the peer's wait returns, beside its alternatives",
    ),
    "loaded": ("tests.benchmarks.busy", "record while other threads compute"),
    "beside_torch": ("tests.benchmarks.beside_torch", "record, wait and a tensor's hand-over beside torch's own"),
    "attach": ("tests.benchmarks.start", "many processes attach to the same events"),
    "start": ("tests.benchmarks.start", "import, coordinator ready, first event"),
    "memory": ("tests.benchmarks.start", "the coordinator's, and a client's share"),
}
"""What stands beside the rows of `ipcsync bench`, or in their place."""

FLEET: dict[str, tuple[str, str]] = {
    "words": ("tests.benchmarks.fleet", "between nodes: a word on one to a word on the other, and to a stream"),
    "flat_out": ("tests.benchmarks.fleet", "between nodes: generations a second, beside bare messages"),
    "opening": ("tests.benchmarks.fleet", "between nodes: opening a name"),
    "idle": ("tests.benchmarks.fleet", "processor time of idle bridges"),
    "beside": ("tests.benchmarks.fleet", "local requests of a node with a bridge, beside one without"),
}
"""Between two nodes: these need nats-server and nats-py, and run if `--only` names them."""

ALL = {**BENCHMARKS, **LABORATORY}


@click.command("benchmarks")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
@click.option("--quick", is_flag=True, help="Fewer operations and three rounds: a look, not a figure.")
@click.option("--rounds", type=click.IntRange(1, 100), default=None, help="Rounds of each row (5; 3 with --quick).")
@click.option("--only", type=click.Choice([*ALL, *FLEET]), multiple=True, help="Only this one; may be repeated.")
@click.option("--markdown", type=click.Path(dir_okay=False, writable=True), help="Also write a table there.")
@click.option(
    "--before", type=click.Path(exists=True, dir_okay=False), help="With an older run, its --json, beside it."
)
@one_line_for_errors()
def main(
    as_json: bool, quick: bool, rounds: int | None, only: tuple[str, ...], markdown: str | None, before: str | None
) -> None:
    """Measure ipcsync beside its peers and beside the limit, in turn, in the same run.

    Redis is a peer where redis-server is installed, torch on a GPU. Rows between nodes run if --only names them.

    \b
    Examples:
      python -m tests.benchmarks --quick
      python -m tests.benchmarks --only words --only opening
    """
    rows = measure({**ALL, **FLEET}, only or ALL, rounds, quick=quick)
    if markdown:
        with open(markdown, "w") as file:
            file.write(report.markdown(rows, report.read(before) if before else {}))
    show(rows, as_json=as_json)


if __name__ == "__main__":
    main(prog_name="python -m tests.benchmarks")
