"""A user's program: it sends functions that name `ipcsync`, and points, to workers of a library that it has for that.

`python -m tests.client.shipping cloudpickle|loky|distributed ENDPOINT`; one line for each task, what it returned.
Run as a program, its functions are those of `__main__`, which these libraries ship by value.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import cloudpickle

import ipcsync

Ship = Callable[[Callable[[], object]], object]


def _tasks(client: ipcsync.Client, endpoint: str) -> list[Callable[[], object]]:
    point = client.record()

    def waits() -> str:
        with ipcsync.connect(endpoint):
            point.synchronize(20)
            return f"generation {point.generation}"

    def fails() -> str:
        try:
            point.synchronize(0)  # of a process without a client
        except ipcsync.ConnectError as error:
            return type(error).__name__
        return "no error"

    return [lambda: ipcsync.driver_name(), waits, fails, lambda: ipcsync]  # noqa: PLW0108 - the module's name in it


def _with_cloudpickle(tasks: list[Callable[[], object]]) -> list[object]:
    return [cloudpickle.loads(cloudpickle.dumps(task))() for task in (tasks[0], tasks[1], tasks[3])]


def _with_loky(tasks: list[Callable[[], object]]) -> list[object]:
    from loky import get_reusable_executor

    executor = get_reusable_executor(max_workers=1)
    try:
        return [executor.submit(task).result(60) for task in tasks]
    finally:
        executor.shutdown(kill_workers=True)


def _with_distributed(tasks: list[Callable[[], object]]) -> list[object]:
    from distributed import Client

    make: Any = Client  # without types
    with make(n_workers=1, threads_per_worker=1, processes=True, dashboard_address=None) as cluster:
        return [cluster.submit(task, pure=False).result(60) for task in tasks]


if __name__ == "__main__":
    library, endpoint = sys.argv[1:]
    ship = {"cloudpickle": _with_cloudpickle, "loky": _with_loky, "distributed": _with_distributed}[library]
    with ipcsync.connect(endpoint) as client:
        for result in ship(_tasks(client, endpoint)):
            assert result is ipcsync or isinstance(result, str)
            sys.stdout.write(f"{'the module' if result is ipcsync else result}\n")
