"""The worker processes of a pipeline: their start, their end, and why one is gone."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from typing import Any

from ipcsync import Coordinator
from ipcsync._linux.child import Child, in_words
from ipcsync.cli.output import Failed
from ipcsync_demo import stage
from ipcsync_demo.link import Link, NeighbourGoneError, hear, pair
from ipcsync_demo.plan import Plan

_END_S = 2.0
_PAUSE_S = 0.01


class Stages:
    """All stages, a process each. `first` and `last` are this process's ends of the first and the last link."""

    def __init__(self, plan: Plan, coordinator: Coordinator) -> None:
        self._plan = plan
        self._coordinator = coordinator
        self._children: list[Child] = []
        self.first: Link | None = None
        self.last: Link | None = None

    def start(self, driver: str, memory_fd: int) -> None:
        """Start every stage."""
        first, up = pair()
        self.first = Link(first)
        for number in range(1, self._plan.workers + 1):
            theirs, down = pair()
            fds = {"memory": memory_fd, "up": up.fileno(), "down": theirs.fileno()}
            self._children.append(
                Child(
                    stage.main,
                    self._plan,
                    number,
                    self._coordinator.endpoint,
                    fds,
                    env={"IPCSYNC_DRIVER": driver},
                    fds=list(fds.values()),
                )
            )
            for end in (up, theirs):
                end.close()  # so that the link ends when the stage is gone
            up = down
        self.last = Link(up)

    @property
    def controls(self) -> list[Connection]:
        """This process's ends of the pipes to the stages, in order."""
        return [child.connection for child in self._children]

    def pid(self, number: int) -> int:
        """A stage's process id."""
        return self._children[number - 1].pid

    def hear(self, number: int) -> dict[str, Any]:
        """A stage's message, which must have come. Failed if the stage failed or is gone."""
        said = hear(self._children[number - 1].connection)
        if said is None:
            raise self.blame(f"stage {number} (pid {self.pid(number)}) is gone")
        if "failed" in said:
            text = f"stage {number} (pid {self.pid(number)}) failed: {said['failed']}"
            raise self.blame(text) if said["lost"] else Failed(text)
        return said

    def go(self) -> None:
        """Let every stage begin; NeighbourGoneError if one is gone."""
        try:
            for control in self.controls:
                control.send({"go": True})
        except (BrokenPipeError, ConnectionResetError) as error:
            raise NeighbourGoneError from error

    def blame(self, otherwise: str) -> Failed:
        """The error that names the dead process, else one with `otherwise`. A death may be seen before it is reaped."""
        deadline = time.monotonic() + _END_S
        while time.monotonic() < deadline:
            for number, child in enumerate(self._children, 1):
                if child.status is not None:
                    return Failed(f"stage {number} (pid {child.pid}) died: {in_words(child.status)}")
            if not self._coordinator.is_running:
                return Failed(f"the coordinator (pid {self._coordinator.pid}) has died")
            time.sleep(_PAUSE_S)
        return Failed(otherwise)

    def dismiss(self) -> None:
        """Tell every stage to end, and wait for that; Failed if one ends with an error. For a run without a fault."""
        self._close_ends()
        deadline = time.monotonic() + 5 * _END_S
        for number, child in enumerate(self._children, 1):
            if not child.wait(max(deadline - time.monotonic(), 0.0)):
                raise Failed(f"stage {number} (pid {child.pid}) did its work, but does not end")
            if child.status:
                raise Failed(f"stage {number} (pid {child.pid}) did its work, but died after: {in_words(child.status)}")

    def close(self) -> None:
        """End every stage, and kill those that do not end by themselves; a second call does nothing."""
        self._close_ends()
        deadline = time.monotonic() + _END_S
        for child in self._children:
            child.close(max(deadline - time.monotonic(), 0.0))

    def _close_ends(self) -> None:
        for end in (*self.controls, self.first, self.last):
            if end is not None:
                end.close()
