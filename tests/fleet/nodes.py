"""Nodes for tests: a nats-server, and for each node a coordinator and a bridge, all real processes."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ipcsync
from ipcsync._linux.child import environment
from tests.kit.until import DEADLINE_S, until

NATS_SERVER = shutil.which("nats-server", path=f"{os.environ.get('PATH', '')}:/usr/sbin")


def why_not() -> str | None:
    """Why there can be no fleet here, None if there can."""
    try:
        import nats  # noqa: F401 - whether it is there
    except ImportError:
        return "nats-py is not installed: pip install -e '.[fleet]'"
    return None if NATS_SERVER else "there is no nats-server: apt-get install nats-server"


class Server:
    """One nats-server on a loopback port, with JetStream unless not wanted, whose files outlive it."""

    def __init__(
        self,
        directory: Path,
        *arguments: str,
        prefix: Sequence[str] = (),
        host: str = "127.0.0.1",
        has_jetstream: bool = True,
    ) -> None:
        assert NATS_SERVER is not None
        self._ports = directory / "ports"
        self._ports.mkdir(parents=True, exist_ok=True)
        self._log = directory / "nats.log"
        self._command = [
            *prefix, NATS_SERVER, *(["-js", "-sd", str(directory / "store")] if has_jetstream else []), "-a", host,
            "--ports_file_dir", str(self._ports), *arguments,
        ]  # fmt: skip
        self._port = "-1"
        self.host = host
        self.start()

    def start(self) -> None:
        """Start it, on the port that it had before."""
        for old in self._ports.iterdir():
            old.unlink()
        with self._log.open("ab") as log:
            self.process = subprocess.Popen([*self._command, "-p", self._port], stdout=log, stderr=log)
        self._port = until(self._read_port, "the nats-server to listen")

    def _read_port(self) -> str:
        assert self.process.poll() is None, self._log.read_text()
        for path in self._ports.glob("*.ports"):
            text = path.read_text()
            if text.endswith("}"):
                url: str = json.loads(text)["nats"][0]
                return url.rpartition(":")[2]
        return ""

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"nats://{self.host}:{self._port}"

    def kill(self) -> None:
        """End it as a power failure would."""
        self.process.kill()
        self.process.wait(DEADLINE_S)


def with_client(server: Server, work: Callable[[Any], Awaitable[None]]) -> None:
    """Run something with a client of the server's own."""
    import nats

    async def run() -> None:
        client = await nats.connect(server.url)
        await work(client)
        await client.close()

    asyncio.run(run())


@contextmanager
def listening(server: Server, subject: str, heard: Callable[[Any], Awaitable[None]]) -> Iterator[None]:
    """Call `heard` with each message that comes on a subject meanwhile, those sent before the end included."""
    import nats

    from ipcsync_bridge.transport import flushed

    is_there, is_over = threading.Event(), threading.Event()

    async def listen() -> None:
        client = await nats.connect(server.url)
        await client.subscribe(subject, cb=heard)
        await flushed(client, DEADLINE_S)
        is_there.set()
        await asyncio.to_thread(is_over.wait)
        await flushed(client, DEADLINE_S)
        await client.close()

    thread = threading.Thread(target=lambda: asyncio.run(listen()))
    thread.start()
    assert is_there.wait(DEADLINE_S)
    yield
    is_over.set()
    thread.join()


class Node:
    """A coordinator of its own, and the bridge beside it."""

    def __init__(self, name: str, servers: Sequence[str], *arguments: str, **settings: object) -> None:
        self.name = name
        self.coordinator = ipcsync.launch(**settings)  # type: ignore[arg-type] # settings as they are
        self._arguments = [*(part for server in servers for part in ("--nats", server)), *arguments]
        self.bridge: subprocess.Popen[bytes] | None = None
        self.clients: list[ipcsync.Client] = []
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the node

    @property
    def flags(self) -> list[str]:
        """What a bridge, or the doctor, is told to be this node."""
        return ["--node", self.name, *self._arguments, "--runtime-dir", self.coordinator.runtime_dir]

    def start_bridge(self, *arguments: str) -> None:
        """Start the bridge; it may take a moment until it serves."""
        command = [sys.executable, "-m", "ipcsync_bridge", *self.flags, *arguments, "--log-level", "debug"]
        self.bridge = subprocess.Popen(command, env=environment(), stdout=self.log, stderr=self.log)

    def await_bridge(self) -> None:
        """Wait until the bridge answers."""
        client = self.client("await-bridge")
        until(lambda: self._answers(client), f"the bridge of {self.name} to answer")

    def _answers(self, client: ipcsync.Client) -> bool:
        assert self.bridge is not None
        assert self.bridge.poll() is None, f"the bridge ended:\n{self.text()}"
        try:
            return client.nodes(timeout=5.0)[0].name == self.name
        except (ipcsync.NoBridge, ipcsync.FleetUnavailable, ipcsync.WaitTimeout):
            return False

    def client(self, name: str = "worker", **options: object) -> ipcsync.Client:
        """A client of this node, in this process."""
        client = ipcsync.connect(self.coordinator.endpoint, name=name, **options)  # type: ignore[arg-type]
        client.timeout = DEADLINE_S
        self.clients.append(client)
        return client

    def end_bridge(self, number: int = signal.SIGTERM) -> int:
        """End the bridge by a signal; its exit status."""
        assert self.bridge is not None
        self.bridge.send_signal(number)
        return self.bridge.wait(DEADLINE_S)

    def text(self) -> str:
        """What the bridge has logged."""
        self.log.seek(0)
        return self.log.read().decode(errors="replace")

    def close(self) -> None:
        """End all of it."""
        for client in self.clients:
            client.close()
        if self.bridge is not None and self.bridge.poll() is None:
            self.bridge.send_signal(signal.SIGCONT)
            self.bridge.terminate()
            try:
                self.bridge.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                self.bridge.kill()
                self.bridge.wait()
        self.coordinator.stop()
        self.log.close()
