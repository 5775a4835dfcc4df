"""The processes of a benchmark: each runs functions, and keeps its state between calls."""

from __future__ import annotations

from collections.abc import Callable
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
