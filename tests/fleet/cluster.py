"""Three nats-servers that know each other, and nodes over them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.fleet.nodes import Node, Server


class Cluster:
    """Three servers on loopback, or on an address of the network in which `prefix` starts a command."""

    def __init__(self, path: Path, prefix: Sequence[str] = (), host: str = "127.0.0.1") -> None:
        ports = [_free_port() for _ in range(3)]
        routes = ",".join(f"nats-route://{host}:{port}" for port in ports)
        self.servers = [
            Server(
                path / f"n{number}", "-n", f"n{number}", "-cluster_name", "fleet", "-cluster",
                f"nats://{host}:{port}", "-routes", routes, prefix=prefix, host=host,
            )
            for number, port in enumerate(ports)
        ]  # fmt: skip

    @property
    def urls(self) -> list[str]:
        """Where they listen."""
        return [server.url for server in self.servers]

    @contextmanager
    def nodes(self, one: str, other: str) -> Iterator[tuple[Node, Node]]:
        """Two nodes, whose bridges wait for each other as long as a leader's election takes."""
        with ExitStack() as stack:
            pair = (self._node(stack, one), self._node(stack, other))
            for node in pair:
                self._start(node)
            yield pair

    def _node(self, stack: ExitStack, name: str) -> Node:
        node = Node(name, self.urls, "--replicas", "3", "--link-ttl", "30")
        stack.callback(node.close)
        return node

    def _start(self, node: Node) -> None:
        for _ in range(10):  # until there is a leader
            node.start_bridge()
            try:
                node.await_bridge()
                return
            except AssertionError:
                assert "store" in node.text()
        raise AssertionError(f"no leader was elected: {node.text()}")

    def close(self) -> None:
        """End them."""
        for server in self.servers:
            server.kill()


def leader(urls: Sequence[str]) -> int:
    """The number of the server that leads the store of names; -1 while there is none, or none is in reach."""
    import nats

    async def ignore(_error: Exception) -> None:
        """It asks once: whatever is wrong, it is known soon that there is no answer."""

    async def ask() -> str:
        once: Any = {"max_reconnect_attempts": 1, "reconnect_time_wait": 0.1, "connect_timeout": 1}
        try:
            client = await nats.connect(list(urls), error_cb=ignore, **once)
        except (nats.errors.Error, OSError, asyncio.TimeoutError):
            return ""
        try:
            info = await client.jetstream(timeout=1.0).stream_info("KV_ipcsync_main")
            return (info.cluster and info.cluster.leader) or ""
        except (nats.errors.Error, asyncio.TimeoutError):
            return ""
        finally:
            await client.close()

    name = asyncio.run(ask())
    return int(name.removeprefix("n")) if name else -1


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
