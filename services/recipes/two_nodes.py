"""Prefill on one node, decode on another: the cache goes over the network, and the news that it is there by a bridge.

Without ipcsync: CUDA's events end at the host, so the decode node polls, or waits for a message that a CPU sends and a
CPU forwards to its GPU; when the prefill node dies in the middle, it waits for ever, or goes on with a cache that is
half there. Here the decode node's stream waits for the prefill node's record, and a death anywhere is an error within a
bound. What ipcsync cannot know is whether your transfer is over: record once it is complete, not once it is posted.

    python services/recipes/two_nodes.py            # needs nats-server, and the extra ipcsync[fleet]
    python services/recipes/two_nodes.py --break    # records when the transfer is merely posted: decode reads too early
"""

import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection

from processes import DEADLINE_S, SPAWN, run

import ipcsync
from ipcsync.testing import Memory

REQUESTS = 3
SIZE = 1 << 16
SLOW_S = 0.2  # what the transfer takes


def prefill(endpoint: str, card: Connection, decode: Connection, breaks: bool) -> None:
    """Compute, have the cache written into the other node's memory, and record once that is done."""
    with ipcsync.connect(endpoint, name="prefill") as client:
        stream = ipcsync.Stream()
        ready = client.event("kv/ready", recorder=True, engine="timeline")
        for request in range(1, REQUESTS + 1):
            stream.synchronize()  # the cache is computed
            card.send(request)  # the transfer is posted
            if not breaks:
                card.recv()  # and complete
            decode.send((request, bytes(ready.record(stream))))
            decode.recv()  # the next request's transfer overwrites the cache
        if breaks:
            for _ in range(REQUESTS):
                card.recv()


def decode(endpoint: str, card: Connection, prefill: Connection) -> None:
    """Copy each request's cache as soon as it is said to be there, and check that it is that request's."""
    with ipcsync.connect(endpoint, name="decode") as client:
        stream, cache, mine = ipcsync.Stream(), Memory(SIZE), Memory(SIZE)
        writing = threading.Thread(target=_network_card, args=(card, cache), daemon=True)
        writing.start()
        for _ in range(REQUESTS):
            request, data = prefill.recv()
            point = client.point(data)
            point.wait(stream, timeout=30)
            mine.copy_from(cache, stream)
            client.record(stream).synchronize(30)
            if not mine.holds(request):
                raise SystemExit(f"decode: the cache of request {request} was read before it was there")
            print(f"decode: request {request} has its own cache, from node {point.node}", flush=True)
            prefill.send("read")
        writing.join(30)


def _network_card(card: Connection, cache: Memory) -> None:
    """Stands for RDMA: writes into this node's memory what the other one posts, and says when that is done."""
    stream = ipcsync.Stream()
    for _ in range(REQUESTS):
        request = card.recv()
        time.sleep(SLOW_S)
        cache.fill(request, stream)
        stream.synchronize()
        card.send("done")


@contextmanager
def server() -> Iterator[str]:
    """A nats-server of one's own, and where it listens."""
    program = shutil.which("nats-server") or "/usr/sbin/nats-server"
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as store:
        command = [program, "-js", "-sd", store, "-a", "127.0.0.1", "-p", str(port)]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
            try:
                yield f"nats://127.0.0.1:{port}"
            finally:
                process.kill()


@contextmanager
def node(name: str, url: str) -> Iterator[str]:
    """A node: a coordinator and a bridge, and where the coordinator is."""
    with ipcsync.launch(log_level="error") as coordinator, ipcsync.connect(coordinator.endpoint) as client:
        command = [sys.executable, "-m", "ipcsync_bridge", "--node", name, "--nats", url]
        command += ["--runtime-dir", coordinator.runtime_dir, "--log-level", "error"]
        with subprocess.Popen(command) as bridge:
            try:
                deadline = time.monotonic() + DEADLINE_S
                while not has_bridge(client):
                    if bridge.poll() is not None or time.monotonic() > deadline:
                        raise SystemExit("the bridge did not start")
                    time.sleep(0.05)
                yield coordinator.endpoint
            finally:
                bridge.terminate()


def has_bridge(client: ipcsync.Client) -> bool:
    """Whether a bridge beside the client's coordinator is in the fleet."""
    with suppress(ipcsync.NoBridge, ipcsync.FleetUnavailable):
        return bool(client.nodes())
    return False


if __name__ == "__main__":
    breaks = "--break" in sys.argv
    to_card, from_card = SPAWN.Pipe()
    to_decode, to_prefill = SPAWN.Pipe()
    with server() as url, node("prefill-0", url) as first, node("decode-0", url) as second:
        run((prefill, first, to_card, to_decode, breaks), (decode, second, from_card, to_prefill))
    print(f"{REQUESTS} caches handed over between two nodes")
