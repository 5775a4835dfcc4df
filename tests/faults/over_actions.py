"""What a recorder does before it dies, in the tests of what is left of it."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from ipcsync._board import over
from tests.faults import actions
from tests.faults.forking import FORKS

_LONGEST_S = 100.0


def fork_sleeper(kind: str, tester: int, generations: int = 1) -> int:
    """Fork a child (or a child's child) that lives until it is killed or `tester` is gone; its pid."""
    read, write = os.pipe()
    if FORKS[kind]() == 0:
        if generations > 1 and FORKS[kind]() != 0:
            os._exit(0)
        os.write(write, str(os.getpid()).encode())
        _sleep_beside(tester)
        os._exit(0)
    os.close(write)
    pid = int(os.read(read, 16))
    os.close(read)
    return pid


def _sleep_beside(tester: int) -> None:
    end = time.monotonic() + _LONGEST_S
    while time.monotonic() < end and os.path.exists(f"/proc/{tester}"):
        time.sleep(0.02)


def spawn_sleeper() -> int:
    """Start a program, with all open files of this process that are not closed at exec; its pid."""
    return os.posix_spawn(sys.executable, [sys.executable, "-c", "import time; time.sleep(100)"], os.environ)


def call_exec() -> None:
    """Become another program."""
    os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(100)"])


def end(pid: int) -> None:
    """SIGKILL what nobody here waits for."""
    subprocess.run(["kill", "-9", str(pid)], check=False, capture_output=True)


def connect_often(endpoint: str, times: int) -> int:
    """Have so many sessions, one after the other; how many locks of coordinators this process keeps afterwards."""
    for _ in range(times):
        actions.connect(endpoint, "again")
        actions.close_client()
    return len(over._held)
