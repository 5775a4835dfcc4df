# ruff: noqa: T201 - a recipe says what it did
"""An HTTP server with workers started ahead, each of which uses the GPU.

Without ipcsync: such a server usually forks its workers, and one innocent call in the parent, such as asking whether
there is a GPU, makes CUDA unusable in all of them. Some calls fail there, others hang, and an event made by the
parent seems to be there and belongs to no process. So the parent here binds the port and touches nothing else before
`spawn`; each worker connects by itself, and waits for the weights by name, whichever of the two is first. Should
a process fork after all, the child's first call raises ForkedProcessError, which this recipe tries at its end.

    python services/recipes/preforked_http.py
"""

from __future__ import annotations

import os
import socket
import sys
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from multiprocessing.connection import Connection
from threading import Barrier
from typing import Any

from processes import DEADLINE_S, SPAWN, coordinator

import ipcsync
from ipcsync.testing import Memory

WORKERS = 2
REQUESTS = 6
SIZE = 1 << 12
WEIGHTS = 5


def worker(endpoint: str, listener: socket.socket, handle: Connection, all_there: Barrier) -> None:
    """Answer requests on the port that the parent has bound; the kernel gives each connection to one worker."""
    with ipcsync.connect(endpoint, name="http worker") as client, client.event("weights/ready") as ready:
        weights = Memory(SIZE, handle=handle.recv())
        server = HTTPServer(listener.getsockname(), _handler(client, weights, ready.at(1)), bind_and_activate=False)
        server.socket.close()
        server.socket = listener
        all_there.wait(DEADLINE_S)
        server.serve_forever()


def _handler(client: ipcsync.Client, weights: Memory, ready: ipcsync.Point) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            """Answer with the first byte of the weights, and who answered."""
            stream, output = ipcsync.Stream(), Memory(SIZE)
            ready.wait(stream, timeout=30)
            output.copy_from(weights, stream)  # stands for a forward pass
            client.record(stream).synchronize(30)  # RecorderLost if the loader died before the weights were there
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"%d from %d" % (output.read()[0], os.getpid()))

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name for it
            """Log nothing."""

    return Handler


def loader(endpoint: str, handles: list[Connection], stop: Connection) -> None:
    """Load the weights once, and keep them until told to stop."""
    with ipcsync.connect(endpoint, name="loader") as client, client.event("weights/ready", recorder=True) as ready:
        stream, weights = ipcsync.Stream(), Memory(SIZE)
        for handle in handles:
            handle.send(weights.handle())
        weights.fill(WEIGHTS, stream)
        ready.record(stream)
        stop.poll(DEADLINE_S)


def serve(endpoint: str) -> list[bytes]:
    """Start the loader and the workers, ask them, and end them; what they answered."""
    pipes, (stop, stopped) = [SPAWN.Pipe() for _ in range(WORKERS)], SPAWN.Pipe()
    all_there = SPAWN.Barrier(WORKERS + 1)
    listener = socket.create_server(("127.0.0.1", 0))
    jobs: list[tuple[Callable[..., None], tuple[Any, ...]]] = [(loader, (endpoint, [a for a, _ in pipes], stopped))]
    jobs += [(worker, (endpoint, listener, theirs, all_there)) for _, theirs in pipes]
    processes = [SPAWN.Process(target=function, args=args) for function, args in jobs]
    for process in processes:
        process.start()
    try:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        all_there.wait(DEADLINE_S)
        return [_get(url) for _ in range(REQUESTS)]
    finally:
        stop.send(None)
        for process in processes[1:]:
            process.kill()  # they serve until they are ended; their leases go with them
        for process in processes:
            process.join(DEADLINE_S)
        listener.close()


def _get(url: str) -> bytes:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(url, timeout=DEADLINE_S) as response:
        answer: bytes = response.read()
    return answer


def what_a_forked_worker_gets() -> str:
    """What a child that was forked after its parent had used the GPU is told at its first call."""
    ipcsync.device_count()
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            ipcsync.Stream()
            os.write(write, b"nothing, it seemed to work")
        except ipcsync.ForkedProcessError as error:
            os.write(write, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as answer:
        text = answer.read().decode()
    os.waitpid(child, 0)
    return text


if __name__ == "__main__":
    with coordinator() as endpoint:
        answers = serve(endpoint)
    print(f"{len(answers)} requests answered by {len({answer.split()[-1] for answer in answers})} of {WORKERS} workers")
    refusal = what_a_forked_worker_gets()
    print(f"a forked worker would get: {refusal}")
    if not all(answer.startswith(b"%d " % WEIGHTS) for answer in answers) or "ForkedProcessError" not in refusal:
        sys.exit(f"wrong answers: {answers}")
