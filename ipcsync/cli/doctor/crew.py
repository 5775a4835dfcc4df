"""The doctor's processes. Each answers in time or is killed: a driver that hangs must not hang the doctor."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ipcsync.errors import IpcSyncError

if TYPE_CHECKING:
    from typing_extensions import Self

START_S = 60.0
"""For the first answer of a process: it imports, and a GPU's context is made."""
ANSWER_S = 20.0
_END_S = 5.0


class TrialError(IpcSyncError):
    """A process of the doctor failed, ended, or did not answer in time; the message says which."""


class Member:
    """One process, which does what it is told by name. TrialError says why it did not."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._buffer = b""
        self._deadline = START_S
        command = [sys.executable, "-m", "ipcsync.cli.doctor.actions", str(os.getpid())]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
        self._process = subprocess.Popen(
            command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env
        )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def call(self, action: str, **arguments: Any) -> Any:
        """What the action returns there. A process that does not answer in time is killed."""
        self.begin(action, **arguments)
        return self.result(action)

    def begin(self, action: str, **arguments: Any) -> None:
        """Have it begin; `result` fetches what comes of it."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"action": action, "arguments": arguments}).encode() + b"\n")
        except BrokenPipeError:
            raise self._ended() from None

    def result(self, action: str) -> Any:
        """What the action begun last returned."""
        line = self._read_line(time.monotonic() + self._deadline, action)
        self._deadline = ANSWER_S
        answer = json.loads(line)
        if "error" in answer:
            raise TrialError(answer["error"])
        return answer["value"]

    def _read_line(self, deadline: float, action: str) -> bytes:
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                self.kill()
                raise TrialError(f"the {self.name} process did not answer to {action!r} in time, and was killed")
            chunk = os.read(fd, 65536)
            if not chunk:
                raise self._ended()
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _ended(self) -> TrialError:
        self.kill()
        return TrialError(f"the {self.name} process ended with status {self._process.returncode}")

    @property
    def is_running(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    def kill(self) -> None:
        """End it by SIGKILL, and reap it. One that cannot be killed (stuck in the kernel) is left to its fate."""
        self._process.kill()
        self._reap()

    def end(self) -> None:
        """Let it end by itself; it is killed if it does not."""
        if self.is_running and self._process.stdin is not None:
            self._process.stdin.close()
            if not self._reap():
                self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not pipe.closed:
                pipe.close()

    def _reap(self) -> bool:
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return False
        return True


class Crew:
    """The processes by name, started when first asked for, and again after one was killed. None outlives the block."""

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}
        self._all: list[Member] = []

    def __getitem__(self, name: str) -> Member:
        member = self._members.get(name)
        if member is None or not member.is_running:
            member = self._members[name] = Member(name)
            self._all.append(member)
        return member

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for member in self._all:
            member.end()
