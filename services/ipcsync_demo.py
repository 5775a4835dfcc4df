"""A pipeline of processes that hand GPU work on: `ipcsync demo`, and a program to copy from.

    FILE -> this process -> stage 1 -> stage 2 -> ... -> stage N -> this process, which compares

Each arrow is a hop: a ring of buffers in device memory, and a pipe for messages. `Sender` and `Receiver` are its ends.
Down the pipe goes a buffer's number with a point: the content is there once the point is complete. Back comes another
point: the buffer may be written again once that one is complete. Streams wait for points; a stage's host waits for no
GPU work. To copy: these two classes and `stage`, with your memory (torch's tensors, say) in place of `Memory`.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import stat
import struct
import sys
import time
from collections import deque
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, BinaryIO

import click

import ipcsync
from ipcsync.cli.output import Failed, WrongCall, one_line_for_errors, print_json
from ipcsync.testing import Memory, StreamGate
from ipcsync.typing import EngineChoice

TIMEOUT_S = 30.0  # of every wait for GPU work
BUFFERS = 2  # of a hop: one is read while the other is written
CHUNKS = 16  # even a small file is cut into about so many, so that each buffer is used often
SMALLEST, LARGEST, OF_A_PIPE = 64, 4 << 20, 64 << 10  # bytes of a chunk
HEAD = struct.Struct("<QQ")  # before a chunk: its number from 1, so that none looks like another one, and its length

SPAWN = multiprocessing.get_context("spawn")  # a process that has used CUDA cannot be forked
PEER_GONE = 3  # the exit status of a stage that ends because another process has
PEER_ERRORS = (EOFError, ConnectionError, ipcsync.RecorderLost, ipcsync.SessionLost)
"""What a process sees when another one dies: at the pipe, at a point, or, if the coordinator does, at any call."""

Report = dict[str, int]

# --- a hop ------------------------------------------------------------------------------------------------------------


class Sender:
    """The end of a hop that writes. It owns the buffers.

    `waits=False` leaves the waits out, here and in `Receiver`, to show what they are for.
    """

    def __init__(self, client: ipcsync.Client, stream: ipcsync.Stream, pipe: Connection, size: int, *, waits: bool):
        self._client, self._stream, self._pipe, self._waits = client, stream, pipe, waits
        self._buffers = [Memory(size) for _ in range(BUFFERS)]
        self._next = 0
        # Each side's first point opens its event on the other side. No later point costs a message to the coordinator.
        pipe.send(([buffer.handle() for buffer in self._buffers], bytes(client.record(stream))))
        self._free = [client.point(pipe.recv())] * BUFFERS  # when each buffer may be written

    def copy(self, content: Memory) -> None:
        """Have the stream copy `content` to the next buffer, and hand that on before any of it has happened."""
        if self._waits:
            self._free[self._next].wait(self._stream, timeout=TIMEOUT_S)
        self._buffers[self._next].copy_from(content, self._stream)
        self._hand_on()

    def write(self, content: bytes) -> None:
        """Write `content` to the next buffer now, and hand that on. The host writes, so the host waits."""
        if self._waits:
            self._free[self._next].synchronize(TIMEOUT_S)
        self._buffers[self._next].write(content)
        self._hand_on()

    def _hand_on(self) -> None:
        written = self._client.record(self._stream, timeout=TIMEOUT_S)
        self._pipe.send((self._next, bytes(written)))
        self._free[self._next] = self._client.point(self._pipe.recv())
        self._next = (self._next + 1) % BUFFERS

    def end(self, reports: list[Report]) -> None:
        """Say that no more comes, and stay until all is read: memory must outlive those who read it."""
        self._pipe.send((None, reports))
        for free in self._free:
            free.synchronize(TIMEOUT_S)


class Receiver:
    """The end of a hop that reads: what comes is copied to `content`, which is `pinned` host memory or a device's."""

    def __init__(
        self, client: ipcsync.Client, stream: ipcsync.Stream, pipe: Connection, size: int, *, waits: bool, pinned: bool
    ) -> None:
        self._client, self._stream, self._pipe, self._waits = client, stream, pipe, waits
        self.content = Memory(size, pinned=pinned)
        self.reports: list[Report] = []
        pipe.send(bytes(client.record(stream)))
        handles, first = pipe.recv()
        self._buffers = [Memory(size, handle=handle) for handle in handles]
        self._opened = client.point(first)

    def take(self) -> ipcsync.Point | None:
        """Have the stream copy the next buffer to `content`: the point behind that. None at the end."""
        number, message = self._pipe.recv()
        if number is None:
            self.reports = message
            return None
        if self._waits:
            self._client.point(message).wait(self._stream, timeout=TIMEOUT_S)
        self.content.copy_from(self._buffers[number], self._stream)
        taken = self._client.record(self._stream, timeout=TIMEOUT_S)
        if not self._waits:
            taken.synchronize(
                TIMEOUT_S
            )  # so that the copy surely is made before the writer's work, and the fault shows
        self._pipe.send(bytes(taken))
        return taken

    def read(self) -> bytes:
        """The bytes of the next buffer; none at the end. The host reads, so the host waits."""
        taken = self.take()
        if taken is None:
            return b""
        taken.synchronize(TIMEOUT_S)  # not stream.synchronize(), which may never return if the writer is killed
        return self.content.read()


# --- a stage: a process of its own ------------------------------------------------------------------------------------


def stage(
    number: int, endpoint: str, engine: EngineChoice, size: int, waits: bool, up: Connection, down: Connection
) -> None:
    """Hand on every chunk that comes, from one neighbour to the other."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process: the first one ends the others
    try:
        with ipcsync.connect(endpoint, name=f"demo stage {number}", engine=engine) as client:
            stream = ipcsync.Stream()
            receiver = Receiver(client, stream, up, size, waits=waits, pinned=False)
            sender = Sender(client, stream, down, size, waits=waits)
            chunks, before = 0, client.messages_sent
            while receiver.take():
                # The gate stands for kernels that take long. It holds this stream until the next process has queued its
                # work on the chunk: without the wait for its point, the fault shows every time, not once in a thousand.
                with StreamGate(stream):
                    sender.copy(receiver.content)
                chunks += 1
            report = {"stage": number, "pid": os.getpid(), "chunks": chunks, "messages": client.messages_sent - before}
            sender.end([*receiver.reports, report])
    except PEER_ERRORS:
        sys.exit(PEER_GONE)  # its work is lost, and so is what waits for it: whoever started the stages may start again


# --- the process that starts them -------------------------------------------------------------------------------------


class Stages:
    """The stages. `first` and `last` are this process's ends of the pipes to the outer two.

    A context manager that leaves none running. A peer's death in its block is raised as Failed, with who died and how.
    """

    def __init__(self, coordinator: ipcsync.Coordinator) -> None:
        self._coordinator = coordinator
        self._processes: list[SpawnProcess] = []

    def start(self, workers: int, engine: EngineChoice, size: int, *, waits: bool) -> None:
        """Start them."""
        self.first, up = SPAWN.Pipe()
        for number in range(1, workers + 1):
            down, next_up = SPAWN.Pipe()
            arguments = (number, self._coordinator.endpoint, engine, size, waits, up, down)
            process = SPAWN.Process(target=stage, args=arguments, daemon=True)
            process.start()
            self._processes.append(process)
            up.close()  # here, so that a neighbour's recv() raises EOFError when the stage is gone
            down.close()
            up = next_up
        self.last = up

    def read(self, source: BinaryIO, size: int) -> bytes:
        """Up to `size` bytes of the file, none at its end. EOFError if a process ends before they come."""
        file, coordinator = source.fileno(), os.pidfd_open(self._coordinator.pid)
        ready = wait([file, coordinator, *(process.sentinel for process in self._processes)])
        os.close(coordinator)
        if file not in ready:
            raise EOFError("a process has ended")
        try:
            return os.read(file, size)
        except OSError as error:
            raise WrongCall(f"cannot read {source.name}: {error.strerror}") from None

    def join(self) -> None:
        """Wait until all have ended. EOFError if one does not, or ends with an error."""
        for number, process in enumerate(self._processes, 1):
            process.join(TIMEOUT_S)
            if process.exitcode != 0:
                raise EOFError(f"stage {number} (pid {process.pid}) has done its work, but does not end as it should")

    def _culprit(self) -> str | None:
        """Who died: the others end by themselves, with PEER_GONE. None if that is not known within some seconds."""
        deadline = time.monotonic() + 5.0
        while time.monotonic() < deadline:
            if not self._coordinator.is_running:
                return f"the coordinator (pid {self._coordinator.pid}) has died"
            for number, process in enumerate(self._processes, 1):
                code = process.exitcode
                if code not in (None, 0, PEER_GONE):
                    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
                    return f"stage {number} (pid {process.pid}) died: {how}"
            wait([process.sentinel for process in self._processes if process.exitcode is None], 0.1)
        return None

    def __enter__(self) -> Stages:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        is_a_death = isinstance(error, PEER_ERRORS)
        culprit = self._culprit() if is_a_death else None
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        if is_a_death:
            raise Failed(culprit or str(error)) from error


def run(source: BinaryIO, workers: int, engine: EngineChoice, *, waits: bool) -> dict[str, Any]:
    """Send the file through the stages, and compare what comes out: the result, as --json prints it."""
    chunk = chunk_size(source)
    size = HEAD.size + chunk
    os.environ["IPCSYNC_DRIVER"] = driver = ipcsync.driver_name()  # the same for all, and one warning if it is software
    with (
        ipcsync.launch(log_level="error") as coordinator,
        ipcsync.connect(coordinator.endpoint, name="demo", engine=engine) as client,
        Stages(coordinator) as stages,
    ):
        stages.start(workers, engine, size, waits=waits)
        stream = ipcsync.Stream()
        sender = Sender(client, stream, stages.first, size, waits=waits)
        receiver = Receiver(client, stream, stages.last, size, waits=waits, pinned=True)
        check, in_flight = Check(), deque[bytes]()
        began = time.monotonic()
        while data := stages.read(source, chunk):
            if len(in_flight) == workers:  # every stage has one
                check.compare(in_flight.popleft(), receiver.read())
            in_flight.append(check.expect(data, size))
            sender.write(in_flight[-1])
        sender.end([])
        while content := receiver.read():
            check.compare(in_flight.popleft(), content)
        seconds = time.monotonic() - began
        used = client.list_events()[0].engine
        stages.join()
    reason = check.failure(receiver.reports, waits=waits)
    return {
        "ok": reason is None,
        "reason": reason,
        "driver": driver,
        "engine": used,
        "without_waits": not waits,
        "bytes": check.bytes,
        "chunks": check.chunks,
        "seconds": round(seconds, 3),
        "sha256": check.came_out.hexdigest(),
        "expected_sha256": check.went_in.hexdigest(),
        "corrupt_chunks": len(check.corrupt),
        "first_corrupt": check.corrupt[0] if check.corrupt else None,
        "stages": receiver.reports,
    }


def chunk_size(source: BinaryIO) -> int:
    """The bytes of the file in a chunk, at most."""
    status = os.fstat(source.fileno())
    return min(max(status.st_size // CHUNKS, SMALLEST), LARGEST) if stat.S_ISREG(status.st_mode) else OF_A_PIPE


class Check:
    """What went in, and what came out. `corrupt` are numbers of chunks, counted from 0."""

    def __init__(self) -> None:
        self.went_in, self.came_out = hashlib.sha256(), hashlib.sha256()
        self.bytes = self.chunks = 0
        self.corrupt: list[int] = []

    def expect(self, data: bytes, size: int) -> bytes:
        """The buffer of `size` bytes that the next chunk is sent in."""
        self.went_in.update(data)
        self.bytes += len(data)
        self.chunks += 1
        return (HEAD.pack(self.chunks, len(data)) + data).ljust(size, b"\0")

    def compare(self, expected: bytes, content: bytes) -> None:
        """Compare a chunk's buffer with what came out."""
        number, length = HEAD.unpack_from(expected)
        self.came_out.update(content[HEAD.size : HEAD.size + length])
        if content != expected:
            self.corrupt.append(number - 1)

    def failure(self, reports: list[Report], *, waits: bool) -> str | None:
        """Why the run failed; None if it did not."""
        if self.corrupt:
            cause = "although every stage waits" if waits else "without the waits"
            return (
                f"the result is corrupt {cause}: {len(self.corrupt)} of {self.chunks} chunks differ from the file's, "
                f"the first is number {self.corrupt[0]}"
            )
        if not waits:
            why = "so the check proves nothing" if self.chunks else "there was nothing to hand on"
            return f"the waits were left out, and the result is not corrupt: {why}"
        for report in reports:
            if report["messages"]:
                return f"stage {report['stage']} sent {report['messages']} messages to the coordinator after set-up"
        return None


# --- the command ------------------------------------------------------------------------------------------------------


@click.command("demo")
@click.argument("file", metavar="[FILE]", default=__file__)
@click.option("--workers", type=click.IntRange(1, 16), default=4, show_default=True, help="Stages, a process each.")
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
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, for a program.")
@one_line_for_errors()
def main(file: str, workers: int, engine: EngineChoice, without_waits: bool, as_json: bool) -> None:
    """Send FILE through a pipeline of processes, and check what comes out.

    \b
    Examples:
      ipcsync demo
      ipcsync demo model.bin --workers 8
      ipcsync demo --engine timeline --json
      ipcsync demo --break

    It starts a coordinator of its own and N worker processes. FILE (the demo's own program by default) goes from worker
    to worker in chunks, through device memory. Each worker copies a chunk in and out on its stream, and hands it on as
    a point before any of that has happened: the next worker's stream waits for it, its host does not. Each chunk is
    held back until the next worker has queued its work, and buffers are reused as soon as points allow it. Without a
    wait, a worker reads data that is not there yet.

    What comes out must be FILE, and no worker may send a message to the coordinator after set-up.

    Exit status: 0 if all of that holds; 1, with a reason, if not, so always with --break; 2 if FILE cannot be read.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    try:
        with opened(file) as source:
            result = run(source, workers, engine, waits=not without_waits)
    except KeyboardInterrupt:
        raise Failed("interrupted") from None
    if as_json:
        print_json(result)
    else:
        show(result)
    if result["reason"] is not None:
        raise Failed(result["reason"])


def opened(file: str) -> BinaryIO:
    """The file, to be read as it comes."""
    try:
        return open(file, "rb", buffering=0)
    except OSError as error:
        raise WrongCall(f"cannot read {file}: {error.strerror}") from None


def show(result: dict[str, Any]) -> None:
    """Print the result for people."""
    click.echo(
        f"{result['bytes']:,} bytes in {result['chunks']} chunks through {len(result['stages'])} processes in "
        f"{result['seconds']:.2f} s (driver {result['driver']}, engine {result['engine']})\n"
    )
    for row in result["stages"]:
        click.echo(
            f"stage {row['stage']} (pid {row['pid']}): {row['chunks']} chunks handed on, "
            f"{row['messages']} messages to the coordinator after set-up"
        )
    click.echo(f"\nsha256 of the file    {result['expected_sha256']}\nsha256 of the result  {result['sha256']}")
    if result["ok"]:
        click.echo("equal: no stage read data that was not there yet")


if __name__ == "__main__":
    main(prog_name="ipcsync demo")
