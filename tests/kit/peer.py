"""A second process for a test: told which functions to run, killed if need be, never orphaned."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ipcsync._linux.child import Worker, WorkerError, at_end
from tests.kit.until import DEADLINE_S

__all__ = ["Peer", "PeerError", "at_end"]

T = TypeVar("T")

# What a dead process left undone its own streams may wait for to the end: a close gives such work a second.
_HURRY = """
import sys
session = sys.modules.get("ipcsync._session.session")
if session is not None:
    session._DRAIN_S = 0.2
"""


class PeerError(AssertionError):
    """The function raised in the peer (the text has its traceback), or the peer ended without an answer."""


class Peer(Worker):
    """A fresh Python process that imports what it is asked to run, and shares nothing with this one but `env`."""

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        # Warnings are errors there too, as they are in the tests themselves.
        super().__init__("peer", env={"PYTHONWARNINGS": "error", **(env or {})})

    def call(self, function: Callable[..., T], *arguments: Any, timeout: float = DEADLINE_S, **keywords: Any) -> T:
        """What `function(*arguments)` returns there; it is one of a module. PeerError if it raises, or is late."""
        self.begin(function, *arguments, **keywords)
        answer: T = self.result(timeout)
        return answer

    def begin(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> None:
        """Have it begin `function(*arguments)`, one of a module."""
        try:
            super().begin(function, *arguments, **keywords)
        except WorkerError as error:
            raise PeerError(str(error)) from None

    @property
    def has_result(self) -> bool:
        """Whether what was begun has returned already."""
        return self.connection.poll(0)

    def result(self, seconds: float = DEADLINE_S) -> Any:
        """What the function begun first returned."""
        try:
            return super().result(seconds)
        except WorkerError as error:
            raise PeerError(f"in the peer:\n{error.trace}" if error.trace else str(error)) from None

    def signal(self, number: int) -> None:
        """Send it a signal; does nothing once it has ended."""
        self._process.send_signal(number)

    def dismiss(self) -> None:
        """Tell it to end soon, unless it is inside a call, and wait for nothing: its test is over."""
        if not self._owed:
            with contextlib.suppress(OSError):  # it has ended, or was told to
                self.connection.send((exec, (_HURRY, {}), {}))
            self.connection.close()

    def close(self, seconds: float = DEADLINE_S) -> int | None:
        """Let it end by itself, or kill it if it is inside a call. AssertionError if it does not end."""
        is_late = self.status is None and not self._owed and not self._ends(seconds)
        status = super().close(0.0 if is_late else seconds)
        assert not is_late, f"the peer {self.pid} did not end within {seconds:g} s of being told"
        return status

    def _ends(self, seconds: float) -> bool:
        self.connection.close()
        return self.wait(seconds)
