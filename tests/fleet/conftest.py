"""Servers and nodes, all ended after the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fleet.cluster import Cluster
from tests.fleet.nodes import Node, Server, why_not


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A nats-server of the test's own."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    one = Server(tmp_path)
    yield one
    one.kill()


@pytest.fixture
def new_node(server: Server) -> Iterator[Callable[..., Node]]:
    """Starts nodes of the fleet."""
    nodes: list[Node] = []

    def start(name: str, *arguments: str, has_bridge: bool = True, **settings: object) -> Node:
        node = Node(name, [server.url], *arguments, **settings)
        nodes.append(node)
        if has_bridge:
            node.start_bridge()
        return node

    yield start
    for node in nodes:
        node.close()


def _two(new_node: Callable[..., Node], *arguments: str, **settings: object) -> tuple[Node, Node]:
    nodes = (new_node("a", *arguments, **settings), new_node("b", *arguments, **settings))
    for node in nodes:
        node.await_bridge()
    return nodes


@pytest.fixture
def pair(new_node: Callable[..., Node]) -> tuple[Node, Node]:
    """Two nodes, `a` and `b`, with their bridges, none of which is lost for being slow on a machine that is busy."""
    return _two(new_node, "--link-ttl", "30", lease_ttl=30)


@pytest.fixture
def default_pair(new_node: Callable[..., Node]) -> tuple[Node, Node]:
    """The same with the TTLs that nodes have by default."""
    return _two(new_node)


@pytest.fixture
def patient_pair(new_node: Callable[..., Node]) -> tuple[Node, Node]:
    """The same with TTLs that are longer than a bridge takes to start on a machine that is busy."""
    return _two(new_node, "--link-ttl", "600", lease_ttl=600)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Three servers of the test's own."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    one = Cluster(tmp_path)
    yield one
    one.close()
