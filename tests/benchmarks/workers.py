"""Many processes of a benchmark at once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from ipcsync_bench.workers import Worker


class Workers:
    """Several processes that run the same at once."""

    def __init__(self, count: int) -> None:
        self._stack = ExitStack()
        with ExitStack() as started:
            self.all = [started.enter_context(Worker()) for _ in range(count)]
            self._stack = started.pop_all()

    def together(self, count: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What the function returned in each of the first `count`."""
        for worker in self.all[:count]:
            worker.begin(function, *arguments)
        return [worker.result() for worker in self.all[:count]]

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for worker in self.all:  # all are started before the first result is awaited
            worker.connection.close()
        self._stack.close()
