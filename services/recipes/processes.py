"""What every recipe has around it: a coordinator, and processes that end together."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any

import ipcsync

DEADLINE_S = 60.0

SPAWN = multiprocessing.get_context("spawn")
"""A process that used CUDA cannot be forked, so each of these starts as a fresh interpreter."""


def close(things: Iterable[object]) -> None:
    """Close the connections among these things, also those in lists."""
    for thing in things:
        if isinstance(thing, Connection):
            thing.close()
        elif isinstance(thing, list):
            close(thing)


@contextmanager
def coordinator() -> Iterator[str]:
    """The endpoint of the coordinator at $IPCSYNC_ENDPOINT, else of one that runs for this block."""
    endpoint = os.environ.get("IPCSYNC_ENDPOINT")
    if endpoint:
        yield endpoint
        return
    with ipcsync.launch(log_level="error") as own:
        yield own.endpoint


def run(*workers: tuple[Callable[..., None], tuple[Any, ...]]) -> None:
    """Run each function in a process of its own until all have ended.

    Raises SystemExit, and kills the others, as soon as one fails or when they take longer than 60 s. Connections in
    their arguments are theirs: each is closed here, so that a `recv()` raises EOFError once the process at the other
    end has died.
    """
    processes = [
        SPAWN.Process(target=function, args=args, name=function.__name__, daemon=True) for function, args in workers
    ]
    for process in processes:
        process.start()
    for _, args in workers:
        close(args)
    deadline = time.monotonic() + DEADLINE_S
    try:
        while None in (codes := [process.exitcode for process in processes]) or any(codes):
            for process, code in zip(processes, codes, strict=True):
                if code:
                    raise SystemExit(f"{process.name} failed with status {code}")
            running = [process for process, code in zip(processes, codes, strict=True) if code is None]
            if not wait([process.sentinel for process in running], max(0.0, deadline - time.monotonic())):
                raise SystemExit(f"not done within {DEADLINE_S:g} s: {', '.join(process.name for process in running)}")
    finally:
        for process in processes:
            process.kill()
            process.join()
