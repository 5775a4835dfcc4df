"""What a recorder does before it dies, in the tests of what is left of it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time

from ipcsync._board import board
from tests.faults import actions
from tests.faults.forking import FORKS
from tests.kit import remote

_LONGEST_S = 100.0
_AWAKE_S = 8.0
_TRIES = 3


def fork_sleeper(kind: str, tester: int, generations: int = 1) -> int:
    """Fork a child (or a child's child) that lives until it is killed or `tester` is gone; its pid.

    One that C forks at a bad moment never runs (`forking`): it is killed, and forked anew.
    """
    for _ in range(_TRIES):
        read, write = os.pipe()
        pid = FORKS[kind]()
        if pid == 0:
            if generations > 1 and (grandchild := FORKS[kind]()) != 0:
                os.write(write, b"%d\n" % grandchild)
                os._exit(0)
            os.write(write, b"!")
            _sleep_beside(tester)
            os._exit(0)
        os.close(write)
        said = _said(read, b"!\n" if generations > 1 else b"!")
        if generations > 1 and b"\n" in said:
            pid = int(said.replace(b"!", b""))
        if b"!" in said:
            return pid
        os.kill(pid, signal.SIGKILL)
    raise AssertionError(f"no child of {_TRIES} began to run")


def _said(read: int, wanted: bytes) -> bytes:
    """What comes until each of the bytes has come; what came by then if it takes too long."""
    said = b""
    while not set(wanted) <= set(said) and select.select([read], [], [], _AWAKE_S)[0]:
        if not (chunk := os.read(read, 16)):
            break
        said += chunk
    os.close(read)
    return said


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
        remote.close_client()
    return len(board._held)
