"""Two nodes on this machine for a benchmark: two coordinators, two bridges, and a nats-server between them."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import ipcsync
from ipcsync._linux.child import PYTHON, environment
from ipcsync.cli.output import Failed
from tests.benchmarks.workers import Worker

WAIT_S = 30.0


def why_not() -> str | None:
    """Why none of this can be measured here, None if it can."""
    try:
        import nats  # noqa: F401 - whether it is there
    except ModuleNotFoundError:
        return "nats-py is not installed (the extra ipcsync[fleet])"
    return None if _program() else "there is no nats-server"


def _program() -> str | None:
    return shutil.which("nats-server", path=f"{os.environ.get('PATH', '')}:/usr/sbin")


@contextmanager
def _server() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    program = _program()
    assert program is not None
    with tempfile.TemporaryDirectory() as store:
        process = subprocess.Popen(
            [program, "-js", "-sd", store, "-a", "127.0.0.1", "-p", str(port)], stderr=subprocess.DEVNULL
        )
        try:
            yield f"nats://127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()


class Fleet:
    """Nodes `a` and `b` with a worker each: the worker on `a` records, the one on `b` waits."""

    def __init__(self, stack: ExitStack) -> None:
        self.url = stack.enter_context(_server())
        self.bridges: dict[str, subprocess.Popen[bytes]] = {}
        self.endpoints = {name: self._node(stack, name) for name in ("a", "b")}
        self.a, self.b = stack.enter_context(Worker()), stack.enter_context(Worker())
        self.a.call(connect, self.endpoints["a"])
        self.b.call(connect, self.endpoints["b"])

    def _node(self, stack: ExitStack, name: str) -> str:
        coordinator = stack.enter_context(ipcsync.launch(log_level="error", lease_ttl=30))
        command = [*PYTHON, "-m", "ipcsync_bridge", "--node", name, "--nats", self.url]
        command += ["--runtime-dir", coordinator.runtime_dir, "--log-level", "error", "--link-ttl", "30"]
        bridge = self.bridges[name] = subprocess.Popen(command, env=environment())
        stack.callback(bridge.wait)
        stack.callback(bridge.terminate)
        with ipcsync.connect(coordinator.endpoint) as client:
            deadline = time.monotonic() + WAIT_S
            while not _answers(client) and time.monotonic() < deadline:
                time.sleep(0.05)
        return coordinator.endpoint


def _answers(client: ipcsync.Client) -> bool:
    try:
        return bool(client.nodes())
    except (ipcsync.NoBridge, ipcsync.FleetUnavailable):
        return False


@contextmanager
def two_nodes() -> Iterator[Fleet]:
    """The two, for as long as the block. `Failed` where there can be none."""
    if reason := why_not():
        raise Failed(f"nothing can be measured between nodes here: {reason}")
    with ExitStack() as stack:
        yield Fleet(stack)


def connect(state: dict[str, Any], endpoint: str) -> None:
    """In a worker: its client."""
    state["client"] = ipcsync.connect(endpoint, timeout=WAIT_S)
    state["client"].timeout = WAIT_S
