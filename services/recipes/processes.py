"""What every recipe has around it: a coordinator, and processes that end together."""

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

import ipcsync

DEADLINE_S = 60.0

SPAWN = multiprocessing.get_context("spawn")
"""A process that used CUDA cannot be forked, so each of these starts as a fresh interpreter."""


@contextmanager
def coordinator() -> Iterator[None]:
    """Where $IPCSYNC_ENDPOINT names no coordinator, have it name one that runs for this block: `connect` goes there."""
    if os.environ.get("IPCSYNC_ENDPOINT"):
        yield
        return
    with ipcsync.launch(log_level="error") as own:
        os.environ["IPCSYNC_ENDPOINT"] = own.endpoint
        yield


def start(function: Callable[..., None], *arguments: Any) -> SpawnProcess:
    """Run the function in a process of its own.

    Connections among its arguments are its own: closed here, so that a peer's `recv()` raises EOFError once it is dead.
    """
    process = SPAWN.Process(target=function, args=arguments, name=function.__name__, daemon=True)
    process.start()
    for argument in arguments:
        if isinstance(argument, Connection):
            argument.close()
    return process


def run(*workers: tuple[Any, ...]) -> None:
    """Start a process for each (function, *arguments), and wait until all have ended.

    Raises SystemExit, and kills the others, as soon as one fails or when they take longer than 60 s.
    """
    deadline = time.monotonic() + DEADLINE_S
    running = [start(*worker) for worker in workers]
    try:
        while running:
            ended = wait([process.sentinel for process in running], max(0.0, deadline - time.monotonic()))
            if not ended:
                raise SystemExit(f"not done within {DEADLINE_S:g} s: {', '.join(process.name for process in running)}")
            for process in [process for process in running if process.sentinel in ended]:
                running.remove(process)
                process.join()
                if process.exitcode:
                    raise SystemExit(f"{process.name} failed with status {process.exitcode}")
    finally:
        for process in running:
            process.kill()
            process.join()
