"""Round trips to the coordinator, beside a bare pyzmq server that sends back what comes."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import zmq

import ipcsync
from ipcsync_bench.rows import Row, at_most, compare, interleave, percentile
from ipcsync_bench.workers import Worker, own_directory

_FRAME = bytes(64)  # about a request's size


def serve_echo(_state: dict[str, Any], endpoint: str, feed: str) -> None:
    """A bare ROUTER that sends back what comes, and a PUB that announces each frame that begins with `!`."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router, publisher = context.socket(zmq.ROUTER), context.socket(zmq.PUB)
    router.bind(endpoint)
    publisher.bind(feed)
    while True:
        parts = router.recv_multipart()
        if parts[1] == b"stop":
            break
        if parts[1][:1] == b"!":
            publisher.send(parts[1])
        router.send_multipart(parts)
    context.destroy(linger=0)


class Echo:
    """The limit of a request: a bare pyzmq ROUTER in a process of its own."""

    def __init__(self) -> None:
        self._directory = own_directory()
        self.endpoint = f"ipc://{self._directory}/echo.sock"
        self.feed = f"ipc://{self._directory}/feed.sock"
        self._worker = Worker()
        self._worker.begin(serve_echo, self.endpoint, self.feed)

    def close(self) -> None:
        """End it."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        with context.socket(zmq.DEALER) as dealer:
            dealer.linger = 1000
            dealer.connect(self.endpoint)
            dealer.send(b"stop")
            self._worker.result()
        context.term()
        self._worker.close()
        shutil.rmtree(self._directory)


def _connect(state: dict[str, Any], endpoint: str, echo: str) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    state["client"] = ipcsync.connect(endpoint)
    socket = state["echo"] = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.connect(echo)


def _round_trips(state: dict[str, Any], peer: str, count: int) -> list[float]:
    """Seconds of each of `count` round trips, one in flight."""
    echo = state["echo"]

    def bare() -> None:
        echo.send(_FRAME)
        echo.recv()

    once: Callable[[], object] = state["client"].list_events if peer == "ipcsync" else bare
    times = []
    for _ in range(count):
        start = time.perf_counter()
        once()
        times.append(time.perf_counter() - start)
    return times


def round_trip(rounds: int, scale: float) -> Iterator[Row]:
    """One request in flight: p50 and p99."""
    with ExitStack() as stack:
        coordinator = stack.enter_context(ipcsync.launch(log_level="error"))
        echo, worker = stack.enter_context(closing(Echo())), stack.enter_context(closing(Worker()))
        worker.call(_connect, coordinator.endpoint, echo.endpoint)
        count = max(200, int(2000 * scale))
        times: dict[str, list[list[float]]] = {"ipcsync": [], "bare ROUTER/DEALER": []}

        def measure(peer: str) -> float:
            times[peer].append(worker.call(_round_trips, peer, count))
            return 0.0

        interleave({peer: lambda peer=peer: measure(peer) for peer in times}, rounds)  # type: ignore[misc]
        for percent, limit in ((50, 1.5), (99, 2.0)):
            figures = {peer: [percentile(run, percent) * 1e6 for run in runs] for peer, runs in times.items()}
            yield from compare(f"round trip p{percent}", figures, "µs", {"bare ROUTER/DEALER": at_most(limit)})
