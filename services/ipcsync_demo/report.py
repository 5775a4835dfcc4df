"""The result of a run of the demo, and its output."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import click

from ipcsync.cli.output import is_terminal, print_json, print_table
from ipcsync.typing import EngineChoice

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from typing_extensions import Self


@dataclass(frozen=True)
class StageRow:
    """One stage. Times of hand-overs in microseconds, None without any; `messages` to the coordinator after set-up."""

    stage: int
    pid: int
    chunks: int
    mb_per_s: float
    hand_over_p50_us: float | None
    hand_over_p99_us: float | None
    messages: int


@dataclass(frozen=True)
class Restart:
    """The state after the coordinator was killed on the way."""

    starts: int
    sessions: int
    expected_sessions: int

    @property
    def reason(self) -> str | None:
        """Why it failed; None if it did not."""
        if self.starts < 2:
            return "the coordinator was killed, and no other one was started"
        if self.sessions != self.expected_sessions:
            return f"the coordinator was killed, and {self.sessions} of {self.expected_sessions} sessions are left"
        return None


@dataclass(frozen=True)
class Result:
    """A completed run. `first_corrupt` is the number of a chunk, counted from 0."""

    driver: str
    engine: EngineChoice
    without_waits: bool
    bytes: int
    chunks: int
    seconds: float
    sha256: str
    expected_sha256: str
    corrupt_chunks: int
    first_corrupt: int | None
    stages: list[StageRow]
    restart: Restart | None = None

    @property
    def reason(self) -> str | None:
        """Why the run failed; None if it did not."""
        if self.sha256 != self.expected_sha256:
            cause = "without the waits" if self.without_waits else "although every stage waits"
            return (
                f"the result is corrupt {cause}: {self.corrupt_chunks} of {self.chunks} chunks differ from the same "
                f"work in one process, the first is number {self.first_corrupt}"
            )
        if self.without_waits:
            why = "there was nothing to hand on" if not self.chunks else "so the check proves nothing"
            return f"the waits were left out, and the result is not corrupt: {why}"
        talkative = [row for row in self.stages if row.messages]
        if talkative:
            return f"stage {talkative[0].stage} sent {talkative[0].messages} messages to the coordinator after set-up"
        return None if self.restart is None else self.restart.reason

    def as_dict(self) -> dict[str, Any]:
        """For JSON: all fields, and whether it is a success."""
        return {"ok": self.reason is None, "reason": self.reason, **asdict(self)}


def present(result: Result, *, as_json: bool) -> None:
    """Print the result on stdout."""
    if as_json:
        print_json(result.as_dict())
        return
    click.echo(
        f"{result.bytes:,} bytes in {result.chunks} chunks through {len(result.stages)} processes in "
        f"{result.seconds:.2f} s (driver {result.driver}, engine {result.engine})\n"
    )
    print_table(
        ("stage", "pid", "chunks", "MB/s", "hand-over p50 us", "p99 us", "messages after set-up"),
        [
            (row.stage, row.pid, row.chunks, row.mb_per_s, row.hand_over_p50_us, row.hand_over_p99_us, row.messages)
            for row in result.stages
        ],
    )
    click.echo(f"\nsha256 of the result          {result.sha256}")
    click.echo(f"the same work in one process  {result.expected_sha256}")
    if result.reason is None:
        click.echo("equal: no stage read data that was not there yet")
    if result.restart is not None and result.restart.reason is None:
        click.echo(
            f"the coordinator was killed on the way: start {result.restart.starts} knows all "
            f"{result.restart.sessions} sessions"
        )


class Progress:
    """A progress bar on stderr if that is a terminal, for a file of `size` bytes (None: unknown)."""

    def __init__(self, size: int | None) -> None:
        self._size = size
        self._bar: Bar | None = None

    def __enter__(self) -> Self:
        if is_terminal(sys.stderr):
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task("starting", total=self._size)
        return self

    def show(self, what: str, done: int) -> None:
        """Show the current step, and how many bytes of the file are through."""
        if self._bar is not None:
            self._bar.update(self._task, description=what, completed=done)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
