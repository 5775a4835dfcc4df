"""The doctor's processes. Each answers in time or is killed: a driver that hangs must not hang the doctor."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from ipcsync._linux import child
from ipcsync.errors import IpcSyncError

START_S = 60.0
"""For a process's first answer: it imports modules and creates a GPU's context."""
ANSWER_S = 20.0


class CheckFailed(child.WorkerError, IpcSyncError):  # noqa: N818 - a finding of the doctor, whom it does not end
    """A process of the doctor could not start, failed, ended, or did not answer in time; the message says which."""


class Worker(child.Worker):
    """One process, which runs functions of `actions`. CheckFailed says why it did not."""

    error: type[child.WorkerError] = CheckFailed

    def __init__(self, name: str) -> None:
        self._seconds = START_S
        super().__init__(name, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # against output of libraries

    def call(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """The function's result. A process that does not answer in time is killed."""
        self.begin(function, *arguments, **keywords)
        if not self.has_spoken(self._seconds):
            self.kill()
            raise CheckFailed(f"the {self.name} process did not finish {function.__name__!r} in time, and was killed")
        self._seconds = ANSWER_S
        return self.result(0.0)


class Workers(ExitStack):
    """The processes by name, started at the first use, and again after one was killed. None outlives the block."""

    def __init__(self) -> None:
        super().__init__()
        self._by_name: dict[str, Worker] = {}

    def __getitem__(self, name: str) -> Worker:
        worker = self._by_name.get(name)
        if worker is None or worker.status is not None:
            try:
                worker = self._by_name[name] = self.enter_context(Worker(name))
            except OSError as error:
                raise CheckFailed(f"cannot start the {name} process: {error.strerror}") from None
        return worker
