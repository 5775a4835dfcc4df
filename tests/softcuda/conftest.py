"""The self tests count the processes and the memory of a segment, so they run by themselves, each worker in its own."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from typing import Any

import pytest

_ALONE = "IPCSYNC_TEST_SOFTCUDA"


def pytest_ignore_collect() -> bool | None:
    """Collect nothing where another driver, or another test's segment, is under test."""
    return None if _ALONE in os.environ else True


if _ALONE in os.environ:
    os.environ["IPCSYNC_HOST_SEGMENT"] = f"selftest-{os.getpid()}"
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    os.environ["IPCSYNC_HOST_DEATH"] = "complete"  # so that nobody hangs; a test of the default sets "pending"
    multiprocessing.set_start_method("spawn", force=True)  # cuda.core warns of fork, whoever forks
    from cuda.bindings import driver as drv

    from tests.softcuda.kit import Latch, ok, start, stat
    from tests.softcuda.processes import MakeServers, Server


@pytest.fixture
def ctx() -> Iterator[Any]:
    """The current context."""
    context = start()
    yield context
    Latch.open_all()
    ok(drv.cuCtxSetCurrent(context))


@pytest.fixture
def servers(ctx: Any) -> Iterator[MakeServers]:
    """Makes processes that obey orders; none outlives the test."""
    made: list[Server] = []

    def make(count: int | None = None, kind: type[Server] = Server) -> list[Server] | Server:
        new = [kind() for _ in range(count or 1)]
        made.extend(new)
        return new[0] if count is None else new

    yield make
    for server in made:
        if server.p.is_alive():
            server.kill()
        server.p.join()
    stat("reap")
