"""The worker processes of a pipeline: started, told when to go and when to end, and asked why one is gone."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

from ipcsync.cli.output import Failed
from ipcsync_demo.link import Control, Link, pair
from ipcsync_demo.plan import Plan

_END_S = 2.0
_PAUSE_S = 0.01


class Crew:
    """All stages, a process each. `first` and `last` are our ends of the first and the last link."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._processes: list[subprocess.Popen[bytes]] = []
        self.controls: list[Control] = []
        self.first: Link | None = None
        self.last: Link | None = None

    def start(self, endpoint: str, driver: str, memory_fd: int) -> None:
        """Start every stage."""
        first, up = pair()
        self.first = Link(first)
        for number in range(1, self._plan.workers + 1):
            theirs, down = pair()
            self._start_one(number, endpoint, driver, {"memory": memory_fd}, up, theirs)
            up = down
        self.last = Link(up)

    def _start_one(
        self, number: int, endpoint: str, driver: str, fds: dict[str, int], up: socket.socket, down: socket.socket
    ) -> None:
        ours, theirs = pair()
        self.controls.append(Control(ours))
        inherited = {**fds, "up": up.fileno(), "down": down.fileno(), "control": theirs.fileno()}
        setup = {
            "parent": os.getpid(),
            "plan": self._plan.as_dict(),
            "number": number,
            "endpoint": endpoint,
            "fds": inherited,
        }
        environment = {**os.environ, "IPCSYNC_DRIVER": driver, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        process = subprocess.Popen(
            [sys.executable, "-m", "ipcsync_demo.stage", json.dumps(setup)],
            pass_fds=list(inherited.values()),
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is our business, and we end them in order
        )
        self._processes.append(process)
        for end in (up, down, theirs):
            end.close()  # so that its end is seen when the stage is gone

    def pid(self, number: int) -> int:
        """A stage's process id."""
        return self._processes[number - 1].pid

    def hear(self, number: int) -> dict[str, Any]:
        """What a stage says, of which something must have come. Failed if it failed or is gone."""
        said = self.controls[number - 1].receive()
        if said is None:
            raise self.blame(f"stage {number} (pid {self.pid(number)}) is gone")
        if "failed" in said:
            text = f"stage {number} (pid {self.pid(number)}) failed: {said['failed']}"
            raise self.blame(text) if said["lost"] else Failed(text)
        return said

    def go(self) -> None:
        """Let every stage begin; NeighbourGoneError if one is gone."""
        for control in self.controls:
            control.send({"go": True})

    def blame(self, otherwise: str) -> Failed:
        """Which stage died, else what `otherwise` says. A death may be noticed before its process can be reaped."""
        deadline = time.monotonic() + _END_S
        while time.monotonic() < deadline:
            for number, process in enumerate(self._processes, 1):
                if process.poll() is not None:
                    return Failed(f"stage {number} (pid {process.pid}) died: {_how(process.returncode)}")
            time.sleep(_PAUSE_S)
        return Failed(otherwise)

    def dismiss(self) -> None:
        """Tell every stage to end, and see that it does; Failed if one does so badly. For a run without a fault."""
        self._close_ends()
        deadline = time.monotonic() + 5 * _END_S
        for number, process in enumerate(self._processes, 1):
            try:
                status = process.wait(max(deadline - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                raise Failed(f"stage {number} (pid {process.pid}) did its work, but does not end") from None
            if status:
                raise Failed(f"stage {number} (pid {process.pid}) did its work, but died after: {_how(status)}")

    def close(self) -> None:
        """End every stage, killing those that do not end by themselves; twice is nothing."""
        self._close_ends()
        deadline = time.monotonic() + _END_S
        for process in self._processes:
            _end(process, max(deadline - time.monotonic(), 0.0))

    def _close_ends(self) -> None:
        for end in (*self.controls, self.first, self.last):
            if end is not None:
                end.close()


def _end(process: subprocess.Popen[bytes], seconds: float) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _how(status: int) -> str:
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
