"""The processes of a benchmark: each runs functions, and keeps its state between calls."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from ipcsync._linux import child

_ANSWER_S = 120.0
_state: dict[str, Any] = {}


def _run(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    return function(_state, *arguments, **keywords)


def _close_all() -> None:
    for value in _state.values():
        close = getattr(value, "close", None)
        if close is not None:
            close()


child.at_end.append(_close_all)


class Worker(child.Worker):
    """One process. The first argument of each function is a dict of the worker, for its state between calls."""

    def begin(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> None:
        """Have it run a module-level function."""
        super().begin(_run, function, *arguments, **keywords)

    def result(self, seconds: float = _ANSWER_S) -> Any:
        """What the function returned. RuntimeError, with its traceback if there is one, if there is no result."""
        try:
            return super().result(seconds)
        except child.WorkerError as error:
            raise RuntimeError(error.trace or str(error)) from None

    def call(self, function: Callable[..., Any], *arguments: Any, timeout: float = _ANSWER_S, **keywords: Any) -> Any:
        """`begin` and `result`."""
        return super().call(function, *arguments, timeout=timeout, **keywords)


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
