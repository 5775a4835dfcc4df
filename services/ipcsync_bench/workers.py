"""The processes of a benchmark: spawned, told what to run over a pipe, and ended with it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

_ANSWER_S = 120.0


def _serve(pipe: Connection) -> None:
    state: dict[str, Any] = {}
    while True:
        try:
            fn, args = pipe.recv()
        except EOFError:
            break
        pipe.send(fn(state, *args))
    for value in state.values():
        close = getattr(value, "close", None)
        if close is not None:
            close()


class Worker:
    """One process. A function that it runs gets a dict of the worker's own first, for what it keeps between calls."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process.pid is not None
        return self._process.pid

    def begin(self, fn: Callable[..., Any], *args: Any) -> None:
        """Have it run a module-level function."""
        self._pipe.send((fn, args))

    def result(self) -> Any:
        """What the function returned. RuntimeError if the process ended or took two minutes."""
        try:
            if not self._pipe.poll(_ANSWER_S):
                raise RuntimeError(f"a benchmark's process did not answer within {_ANSWER_S:g} s")
            return self._pipe.recv()
        except EOFError:
            raise RuntimeError("a benchmark's process ended; its traceback is above") from None

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        """`begin` and `result`."""
        self.begin(fn, *args)
        return self.result()

    def close(self) -> None:
        """End it."""
        self._pipe.close()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


class Workers:
    """Several processes that run the same at once."""

    def __init__(self, count: int) -> None:
        self.all = [Worker() for _ in range(count)]

    def together(self, count: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """What `fn` returned in each of the first `count`."""
        for worker in self.all[:count]:
            worker.begin(fn, *args)
        return [worker.result() for worker in self.all[:count]]

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for worker in self.all:
            worker.close()
