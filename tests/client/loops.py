"""Asyncio clients for the tests: pairs of them, a coordinator that stands still, and turns of the loop."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest

import ipcsync
from ipcsync._linux.process import is_stopped
from tests.kit.until import until

LONG_S = 30.0
TURNS = 20  # of the loop: enough for a task to get to where it waits


@asynccontextmanager
async def two_clients(endpoint: str) -> AsyncIterator[tuple[ipcsync.AsyncClient, ipcsync.AsyncClient]]:
    """Two clients of one coordinator, closed at the end."""
    async with await ipcsync.aconnect(endpoint, name="one") as one, await ipcsync.aconnect(endpoint, name="two") as two:
        yield one, two


@contextmanager
def stopped(coordinator: ipcsync.Coordinator) -> Iterator[Callable[[], None]]:
    """A coordinator that answers nothing until it is told to go on."""

    def go_on() -> None:
        os.kill(coordinator.pid, signal.SIGCONT)

    os.kill(coordinator.pid, signal.SIGSTOP)
    try:
        until(lambda: is_stopped(coordinator.pid), "it is stopped: kill(2) does not wait for that")
        yield go_on
    finally:
        go_on()


async def turns() -> None:
    """Let the loop go round so often that every task is where it waits."""
    for _ in range(TURNS):
        await asyncio.sleep(0)


async def turns_until(condition: Callable[[], object], what: str) -> None:
    """Let the loop go round until a condition holds; AssertionError if it does not within `LONG_S`."""
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {LONG_S:g} s: {what}"
        await asyncio.sleep(0)


async def cancel(task: asyncio.Future[Any]) -> None:
    """Cancel a task, which ends by that."""
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def threads_named(name: str) -> set[threading.Thread]:
    """This process's threads whose names begin so."""
    return {thread for thread in threading.enumerate() if thread.name.startswith(name)}
