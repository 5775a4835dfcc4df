"""What a soak has left behind: of slots, sessions, descriptors, memory and files."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import select
import signal
import time
from typing import Any

import ipcsync
from ipcsync._board import layout
from tests.kit.descriptors import descriptors
from tests.kit.zygote import children_of
from tests.soak.processes import fork


def ask(endpoint: str, seconds: float) -> dict[str, Any]:
    """The coordinator's counts once nothing but the asker is left, or as they are after so long.

    Asked by a child, since this process uses no driver.
    """
    read, write = os.pipe()

    def run() -> None:
        os.close(read)
        with ipcsync.connect(endpoint, name="soak", timeout=20.0) as client:
            deadline = time.monotonic() + seconds
            while True:
                stats = client.stats()
                left = (stats["pool_in_use"], stats["quarantined"], stats["events"], stats["sessions"] - 1)
                if not any(left) or time.monotonic() > deadline:
                    break
                select.select([], [], [], 0.1)
            rows = [repr(event) for event in client.list_events()]
        os.write(write, json.dumps({**stats, "rows": rows[:20]}).encode())

    pid = fork(run)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        data = file.read()
    os.waitpid(pid, 0)
    answer: dict[str, Any] = json.loads(data) if data else {}
    return answer


def warm_up(endpoint: str) -> None:
    """Have the coordinator open what it opens once: a context, its probes, a step of the pool."""

    def run() -> None:
        stream = ipcsync.Stream()
        with ipcsync.connect(endpoint, name="warm-up", timeout=20.0) as client:
            for engine in ("event", "timeline"):
                with client.event(f"warm-up-{engine}", recorder=True, engine=engine) as event:
                    event.record(stream).synchronize(10)

    _, status = os.waitpid(fork(run), 0)
    if status:
        raise RuntimeError("no session with a fresh coordinator")


def kill_children_of(keeper: int) -> int:
    """Kill the coordinator that a keeper has started; how many there were."""
    children = children_of(keeper)
    for child in children:
        with contextlib.suppress(ProcessLookupError):  # it has died by itself, which the next start tells
            os.kill(child, signal.SIGKILL)
    return len(children)


def starts_of(path: str) -> int:
    """How many coordinators have served over the board at `path`."""
    with open(path, "rb") as file:
        file.seek(8 * layout.H_STARTS)
        return int.from_bytes(file.read(8), "little")


def private_kib(pid: int) -> int:
    """The private memory of a process that is resident.

    Shared memory is left out: what a process touched of the software driver's tables grows up to their size.
    """
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon:"))


def shared_files(segment: str, board: str) -> set[str]:
    """The files in shared memory that are of this soak."""
    return {name for name in os.listdir("/dev/shm") if segment in name or name == os.path.basename(board)}


def board_of(pid: int, runtime_dir: str) -> str:
    """The path of the board that a coordinator has open."""
    files = {_inode(f"/proc/{pid}/fd/{fd}") for fd in descriptors(pid)} - {None}
    boards = glob.glob(f"{runtime_dir}/board-*") + glob.glob(f"/dev/shm/ipcsync-board-{os.getuid()}-*")
    (found,) = [path for path in boards if _inode(path) in files]
    return found


def _inode(path: str) -> tuple[int, int] | None:
    """What tells a file from others, None if it is gone."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino
