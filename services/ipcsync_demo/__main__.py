"""`python -m ipcsync_demo`, which `ipcsync demo` executes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

import click

from ipcsync.cli.output import Failed, WrongCall, one_line_for_errors
from ipcsync.typing import EngineChoice

MAX_WORKERS = 16
_TEXT = Path(__file__).with_name("text.txt")


@click.command("demo")
@click.argument("file", metavar="[FILE]", required=False, default=None)
@click.option(
    "--workers",
    type=click.IntRange(1, MAX_WORKERS),
    default=4,
    show_default=True,
    metavar="N",
    help=f"Stages of the pipeline, a process each: 1 to {MAX_WORKERS}.",
)
@click.option(
    "--engine",
    type=click.Choice(["auto", "event", "timeline"]),
    default="auto",
    show_default=True,
    help="How the stages' GPU work is ordered.",
)
@click.option(
    "--break",
    "without_waits",
    is_flag=True,
    help="Leave the waits out. The result must then be corrupt, which shows that the check can fail.",
)
@click.option(
    "--kill-coordinator",
    is_flag=True,
    help="Kill the coordinator as soon as the first chunk is through: its keeper starts another one.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, for a program.")
@one_line_for_errors()
def main(
    file: str | None,
    workers: int,
    engine: EngineChoice,
    without_waits: bool,
    kill_coordinator: bool,
    as_json: bool,
) -> None:
    """Send FILE through a pipeline of processes, and check what comes out.

    \b
    Examples:
      ipcsync demo
      ipcsync demo model.bin --workers 8
      ipcsync demo --engine timeline --json
      ipcsync demo --break
      ipcsync demo --kill-coordinator
      IPCSYNC_DRIVER=host ipcsync demo

    It starts a coordinator of its own and N worker processes. FILE (a text that comes with ipcsync by default) goes
    from worker to worker in chunks, through shared memory. Each worker copies a chunk in, stamps and turns it, and
    copies it out, all on its stream, and hands it on as a point before any of that has happened: the next worker's
    stream waits for it, its host does not. Every eighth chunk is held back until the next worker has queued its
    work, and buffers are reused as soon as points allow it. Without a wait, a stage reads data that is not there yet.

    The result must have the sha256 of the same work done in this one process. The table shows for each stage its
    chunks, MB/s, the time of a hand-over (from the message, or from when the stage is free for it, until the stage's
    stream waits; median and 99th percentile in microseconds), and the messages sent to the coordinator after set-up,
    of which there must be none.

    With --kill-coordinator the coordinator is killed (SIGKILL) on the way; every session must survive, and a second
    coordinator must know them all.

    Exit status: 0 if all of that holds; 1, with a reason, if not, so always with --break; 2 if FILE cannot be read.
    """
    from ipcsync_demo import report
    from ipcsync_demo.pipeline import run

    with _open(file) as source:
        size = _size(source)
        with report.Progress(size) as progress:
            result = run(
                source,
                size,
                workers=workers,
                engine=engine,
                without_waits=without_waits,
                kill_coordinator=kill_coordinator,
                progress=progress.show,
            )
    report.present(result, as_json=as_json)
    reason = result.reason
    if reason is not None:
        raise Failed(reason)


def _open(file: str | None) -> BinaryIO:
    path = _TEXT if file is None else file
    try:
        return open(path, "rb", buffering=0)
    except OSError as error:
        raise WrongCall(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:  # a NUL in the name
        raise WrongCall(f"cannot read {path!r}: {error}") from None


def _size(source: BinaryIO) -> int | None:
    """The file's size in bytes, None for a pipe or a device."""
    import stat

    status = os.fstat(source.fileno())
    return status.st_size if stat.S_ISREG(status.st_mode) else None


if __name__ == "__main__":
    main(prog_name="ipcsync demo")
