"""The doctor's processes, and what two of them do together over a coordinator.

Each answers in time or is killed: a driver that hangs must not hang the doctor.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from ipcsync._linux import child
from ipcsync.cli.doctor import actions
from ipcsync.errors import IpcSyncError
from ipcsync.typing import EngineName

START_S = 60.0
"""For a process's first answer: it imports modules and creates a GPU's context."""
ANSWER_S = 20.0
_RELEASE_S = 2.0  # the coordinator, and drivers that release, take less than a tenth of this


class CheckFailed(child.WorkerError, IpcSyncError):  # noqa: N818 - a finding of the doctor, whom it does not end
    """A process of the doctor could not start, failed, ended, or did not answer in time; the message says which."""


class Worker(child.Worker):
    """One process, which runs functions of `actions`. CheckFailed says why it did not."""

    error: type[child.WorkerError] = CheckFailed

    def __init__(self, name: str) -> None:
        self._seconds = START_S
        super().__init__(name, output=subprocess.DEVNULL)  # against output of libraries

    def call(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """The function's result. A process that does not answer in time is killed."""
        self.begin(function, *arguments, **keywords)
        if not self.has_spoken(self._seconds):
            self.kill()
            raise CheckFailed(f"the {self.name} process did not finish {function.__name__!r} in time, and was killed")
        self._seconds = ANSWER_S
        return self.result(0.0)


class Workers(ExitStack):
    """The recorder and the waiter, started at the first use, and again after one was killed. None outlives the block.

    `endpoint` is that of the coordinator over which they work. CheckFailed says why a trial could not be completed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.endpoint = ""
        self._by_name: dict[str, Worker] = {}

    def __getitem__(self, name: str) -> Worker:
        worker = self._by_name.get(name)
        if worker is None or worker.status is not None:
            try:
                worker = self._by_name[name] = self.enter_context(Worker(name))
            except OSError as error:
                raise CheckFailed(f"cannot start the {name} process: {error.strerror}") from None
        return worker

    def hand_over(self, engine: EngineName, device: int) -> None:
        """A record in one process that a stream of another waits for, and goes on behind. CheckFailed if it fails."""
        self._wait_behind(engine, device)
        self["recorder"].call(actions.close)  # its stream goes on, and what it recorded can be waited for
        outcome, goes_on = self._finish(actions.SOON_S)
        if not goes_on:
            raise CheckFailed("the waiting stream did not go on when the other process's work was done")
        if outcome != "complete":
            raise CheckFailed(f"the waiter got {outcome!r} for work that is complete")

    def release(self) -> bool:
        """Whether a stream that waits ahead goes on when the coordinator releases it: by a plain store."""
        recorder = self["recorder"]
        name = recorder.call(actions.open_recorder, self.endpoint, "timeline", 0, records=False)
        self["waiter"].call(actions.join, self.endpoint, name, 0, ahead=True)
        recorder.call(actions.close)
        return self._finish(actions.SOON_S)[1]

    def death(self, engine: EngineName) -> tuple[str, bool]:
        """Kill a recorder by SIGKILL amid its work, for which a stream of another process waits.

        The waiter's outcome, and whether its stream went on.
        """
        self._wait_behind(engine, 0)
        self["recorder"].kill()
        return self._finish(_RELEASE_S)

    def _wait_behind(self, engine: EngineName, device: int) -> None:
        """A record behind a held stream of one process, for which a stream of the other waits. CheckFailed if not."""
        name = self["recorder"].call(actions.open_recorder, self.endpoint, engine, device, records=True)
        if not self["waiter"].call(actions.join, self.endpoint, name, device, ahead=False):
            raise CheckFailed("the waiting stream did not wait for the other process's unfinished work")

    def _finish(self, seconds: float) -> tuple[str, bool]:
        """The waiter's outcome, and whether its stream goes on by itself; it is killed if its stream never will."""
        outcome, goes_on = self["waiter"].call(actions.finish, seconds)
        if not goes_on:
            self["waiter"].kill()
        return outcome, goes_on
