"""A pipeline of processes that hand GPU work on: `ipcsync demo`, and a program to copy from.

    FILE -> source -> stage 1 -> stage 2 -> ... -> stage N -> sink, which checks

Each is a process, each arrow a hop: a ring of buffers in device memory, and a pipe for messages. `Sender` and
`Receiver` are its ends. Down the pipe goes a buffer's number with a point: the content is there once the point is
complete. Back comes another point: the buffer may be written again once that one is complete. Streams wait for points;
a stage's host waits for no GPU work. To copy: these two classes and `stage`, with your memory (torch's tensors, say)
for `Memory`.
"""

import hashlib
import multiprocessing
import os
import signal
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, get_args

import click

import ipcsync
from ipcsync.cli.output import Command, Failed, WrongCall, one_line_for_errors, print_json
from ipcsync.testing import Memory, StreamGate
from ipcsync.typing import EngineChoice

TIMEOUT_S = 30.0  # of every wait for GPU work
BUFFERS = 2  # of a hop: one is read while the other is written
CHUNKS = 16  # even a small file is cut into about so many, so that each buffer is used often
SMALLEST, LARGEST, OF_A_PIPE = 64, 4 << 20, 64 << 10  # bytes of a chunk
HEAD = struct.Struct("<QQ32s")  # before a chunk: its number from 1, so that none looks like another, length and SHA-256

SPAWN = multiprocessing.get_context("spawn")  # a process that has used CUDA cannot be forked
PEER_GONE = 3  # the exit status of a process that ends because another one has
PEER_ERRORS = (EOFError, ConnectionError, ipcsync.RecorderLost, ipcsync.SessionLost)
"""What a process sees when another one dies: at the pipe, at a point, or, if the coordinator does, at any call."""

Report = dict[str, Any]

# --- a hop ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Me:
    """What a process works with. `waits=False` leaves the waits out, to show what they are for."""

    client: ipcsync.Client
    stream: ipcsync.Stream
    size: int  # of a buffer, in bytes
    waits: bool

    def wait(self, point: ipcsync.Point) -> None:
        """Have what is submitted to the stream from now on wait for the point."""
        if self.waits:
            point.wait(self.stream, timeout=TIMEOUT_S)

    def record(self) -> ipcsync.Point:
        """A point behind all that was submitted to the stream."""
        return self.client.record(self.stream, timeout=TIMEOUT_S)


class Sender:
    """The end of a hop that writes. It owns the buffers."""

    def __init__(self, me: Me, pipe: Connection) -> None:
        self._me, self._pipe = me, pipe
        self._buffers = [Memory(me.size) for _ in range(BUFFERS)]
        self._next = 0
        # Each side's first point opens its event on the other side. No later point costs a message to the coordinator.
        pipe.send(([buffer.handle() for buffer in self._buffers], bytes(me.record())))
        self._free = [me.client.point(pipe.recv())] * BUFFERS  # when each buffer may be written

    def copy(self, content: Memory) -> ipcsync.Point:
        """Have the stream copy `content` to the next buffer, and hand it on before that has happened: the point."""
        self._me.wait(self._free[self._next])
        self._buffers[self._next].copy_from(content, self._me.stream)
        written = self._me.record()
        self._pipe.send((self._next, bytes(written)))
        self._free[self._next] = self._me.client.point(self._pipe.recv())
        self._next = (self._next + 1) % BUFFERS
        return written

    def end(self, reports: list[Report]) -> None:
        """Say that no more comes, and stay until all is read: memory must outlive those who read it."""
        self._pipe.send((None, reports))
        for free in self._free:
            free.synchronize(TIMEOUT_S)


class Receiver:
    """The end of a hop that reads: what comes is copied to `content`, which is `pinned` host memory or a device's."""

    def __init__(self, me: Me, pipe: Connection, *, pinned: bool) -> None:
        self._me, self._pipe = me, pipe
        self.content = Memory(me.size, pinned=pinned)
        self.reports: list[Report] = []
        pipe.send(bytes(me.record()))
        handles, first = pipe.recv()
        self._buffers = [Memory(me.size, handle=handle) for handle in handles]
        self._opened = me.client.point(first)

    def take(self) -> ipcsync.Point | None:
        """Have the stream copy the next buffer to `content`: the point behind that. None at the end."""
        number, message = self._pipe.recv()
        if number is None:
            self.reports = message
            return None
        self._me.wait(self._me.client.point(message))
        self.content.copy_from(self._buffers[number], self._me.stream)
        taken = self._me.record()
        if not self._me.waits:
            taken.synchronize(TIMEOUT_S)  # so that the copy surely is made before the writer's, and the fault shows
        self._pipe.send(bytes(taken))
        return taken


# --- the processes ----------------------------------------------------------------------------------------------------


def stage(me: Me, number: int, up: Connection, down: Connection) -> None:
    """Hand on every chunk that comes, from one neighbour to the other."""
    receiver, sender = Receiver(me, up, pinned=False), Sender(me, down)
    chunks, before = 0, me.client.messages_sent
    while receiver.take():
        # The gate stands for kernels that take long. It holds this stream until the next process has queued its work on
        # the chunk: without the wait for its point, the fault shows every time, not once in a thousand.
        with StreamGate(me.stream):
            sender.copy(receiver.content)
        chunks += 1
    report = {"stage": number, "pid": os.getpid(), "chunks": chunks, "messages": me.client.messages_sent - before}
    sender.end([*receiver.reports, report])


def source(me: Me, file: Connection, down: Connection) -> None:
    """Read the file into pinned memory, and hand it on. The host writes there, so the host waits."""
    sender, content = Sender(me, down), Memory(me.size, pinned=True)
    digest, chunks, count = hashlib.sha256(), 0, 0
    while data := os.read(file.fileno(), me.size - HEAD.size):
        digest.update(data)
        chunks, count = chunks + 1, count + len(data)
        head = HEAD.pack(chunks, len(data), hashlib.sha256(data).digest())
        content.write((head + data).ljust(me.size, b"\0"))
        sender.copy(content).synchronize(TIMEOUT_S)
    sender.end([{"bytes": count, "sha256": digest.hexdigest()}])


def sink(me: Me, up: Connection, result: Connection) -> None:
    """Check what comes out, and send the result. The host reads, so the host waits."""
    receiver = Receiver(me, up, pinned=True)
    digest, chunks, corrupt = hashlib.sha256(), 0, list[int]()
    began = time.monotonic()
    while taken := receiver.take():
        taken.synchronize(TIMEOUT_S)  # torch.cuda.synchronize() may never return if the writer is killed
        content = receiver.content.read()
        number, length, expected = HEAD.unpack_from(content)
        data = content[HEAD.size : HEAD.size + length]
        digest.update(data)
        if (number, expected) != (chunks + 1, hashlib.sha256(data).digest()):
            corrupt.append(chunks)
        chunks += 1
    went_in, *stages = receiver.reports
    result.send({
        "engine": me.client.list_events()[0].engine,
        "bytes": went_in["bytes"],
        "chunks": chunks,
        "seconds": round(time.monotonic() - began, 3),
        "sha256": digest.hexdigest(),
        "expected_sha256": went_in["sha256"],
        "corrupt_chunks": len(corrupt),
        "first_corrupt": corrupt[0] if corrupt else None,
        "stages": stages,
    })  # fmt: skip


def run(work: Callable[..., None], size: int, waits: bool, name: str, *arguments: Any) -> None:
    """In a process: do its work with a client and a stream of its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process: the first one ends the others
    threading.Thread(target=end_with_parent, daemon=True).start()
    try:
        with ipcsync.connect(name=f"demo {name}") as client:
            work(Me(client, ipcsync.Stream(), size, waits), *arguments)
    except PEER_ERRORS:
        sys.exit(PEER_GONE)  # its work is lost, and so is what waits for it: whoever started it may start it again


def end_with_parent() -> None:
    """Wait for the end of the process that started this one, and end: nobody needs it any more."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(PEER_GONE)


# --- the process that starts them -------------------------------------------------------------------------------------


def send_through(file: Connection, workers: int, engine: EngineChoice, *, waits: bool) -> Report:
    """Send the file through the stages: the result, as --json prints it. Failed, with who died and how."""
    status = os.stat(file.fileno())
    chunk = min(max(status.st_size // CHUNKS, SMALLEST), LARGEST) if stat.S_ISREG(status.st_mode) else OF_A_PIPE
    driver = ipcsync.driver_name()  # the same for all, and one warning if it is software
    processes: list[SpawnProcess] = []
    with ipcsync.launch(log_level="error", driver=driver) as coordinator:
        os.environ.update(IPCSYNC_DRIVER=driver, IPCSYNC_ENDPOINT=coordinator.endpoint, IPCSYNC_ENGINE=engine)
        ipcsync.connect().close()  # what nobody can connect with is said once, and not by each process

        def start(work: Callable[..., None], name: str, *arguments: Any) -> None:
            all_arguments = (work, HEAD.size + chunk, waits, name, *arguments)
            process = SPAWN.Process(target=run, args=all_arguments, name=name, daemon=True)
            try:
                process.start()
            except OSError as error:
                raise Failed(f"cannot start the {name}: {error.strerror}") from None
            processes.append(process)
            for pipe in arguments:  # here, so that a neighbour's recv() raises EOFError when the process is gone
                if isinstance(pipe, Connection):
                    pipe.close()

        try:
            up, down = SPAWN.Pipe()
            start(source, "source", file, down)
            for number in range(1, workers + 1):
                next_up, down = SPAWN.Pipe()
                start(stage, f"stage {number}", number, up, down)
                up = next_up
            result, results = SPAWN.Pipe(duplex=False)
            start(sink, "sink", up, results)
            watch(processes, coordinator)
            found: Report = result.recv()
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()
    reason = why_failed(found, waits=waits)
    return {"ok": reason is None, "reason": reason, "driver": driver, "without_waits": not waits, **found}


def watch(processes: list[SpawnProcess], coordinator: ipcsync.Coordinator) -> None:
    """Wait until all have ended. Failed as soon as one dies: the others then end by themselves, with PEER_GONE."""
    while any(codes := [process.exitcode for process in processes]) or None in codes:
        for process, code in zip(processes, codes, strict=True):
            if code not in (None, 0, PEER_GONE):
                how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
                raise Failed(f"{process.name} (pid {process.pid}) died: {how}")
        if not coordinator.is_running:
            raise Failed(f"the coordinator (pid {coordinator.pid}) has died")
        if None not in codes:
            raise Failed("a process took another one for dead")
        wait([process.sentinel for process, code in zip(processes, codes, strict=True) if code is None], 0.5)


def why_failed(found: Report, *, waits: bool) -> str | None:
    if found["corrupt_chunks"]:
        cause = "although every stage waits" if waits else "without the waits"
        return (
            f"the result is corrupt {cause}: {found['corrupt_chunks']} of {found['chunks']} chunks differ from the "
            f"file's, the first is number {found['first_corrupt']}"
        )
    if not waits:
        why = "so the check proves nothing" if found["chunks"] else "there was nothing to hand on"
        return f"the waits were left out, and the result is not corrupt: {why}"
    for report in found["stages"]:
        if report["messages"]:
            return f"stage {report['stage']} sent {report['messages']} messages to the coordinator after set-up"
    return None


# --- the command ------------------------------------------------------------------------------------------------------


@click.command("demo", cls=Command, context_settings={"show_default": True})
@click.argument("file", metavar="[FILE]", default=__file__)
@click.option("--workers", type=click.IntRange(1, 16), default=4, help="Stages, a process each.")
@click.option(
    "--engine", type=click.Choice(get_args(EngineChoice)), default="auto", envvar="IPCSYNC_ENGINE", help="For events."
)
@click.option("--break", "without_waits", is_flag=True, help="Leave the waits out: the result must be corrupt then.")
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
        try:
            with open(file, "rb", buffering=0) as opened:  # once: a pipe, or /dev/stdin, is this process's alone
                content = Connection(os.dup(opened.fileno()), writable=False)  # which can be handed to another
        except OSError as error:
            raise WrongCall(f"cannot read {file}: {error.strerror}") from None
        result = send_through(content, workers, engine, waits=not without_waits)
    except KeyboardInterrupt:
        raise Failed("interrupted") from None
    print_json(result) if as_json else show(result)
    if result["reason"] is not None:
        raise Failed(result["reason"])


def show(result: Report) -> None:
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
