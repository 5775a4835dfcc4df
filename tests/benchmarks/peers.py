"""The peers: servers of the alternatives, and of the limit, with which a benchmark compares ipcsync."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.managers import SyncManager
from threading import Barrier
from typing import Any

import zmq

from ipcsync._launch import directory_prefix
from ipcsync._linux.child import die_with
from ipcsync._linux.process import start_time
from tests.benchmarks.workers import Worker

_START_S = 10.0
_CONNECT_S = 60.0


def own_directory() -> str:
    """A new directory, which the next `launch` removes if this process is killed."""
    pid = os.getpid()
    return tempfile.mkdtemp(prefix=f"{directory_prefix()}{pid}-{start_time(pid)}-")


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


class Table:
    """A Manager's object: the cheapest request there is."""

    def renew(self, number: int) -> int:
        """The number."""
        return number


class _Manager(SyncManager):
    pass


_Manager.register("Table", Table)


class Manager:
    """`multiprocessing.Manager`, with its server's process. `token` is what another process reaches its table by."""

    def __init__(self) -> None:
        self._manager = _Manager(authkey=b"ipcsync-bench")
        self._manager.start(die_with, (os.getpid(),))  # by itself it would outlive a parent that is killed
        self._table = self._manager.Table()  # type: ignore[attr-defined] # registered above
        self.token = self._table._token

    def event(self) -> Any:
        """A `Manager().Event()`."""
        return self._manager.Event()

    def close(self) -> None:
        """End it."""
        self._manager.shutdown()


def manager_table(token: Any) -> Any:
    """The manager's table, in another process."""
    from multiprocessing.managers import AutoProxy  # type: ignore[attr-defined] # public in CPython, not in typeshed

    return AutoProxy(token, "pickle", authkey=b"ipcsync-bench", exposed=("renew",))


class ManagerCallers:
    """Threads that each have a connection to a manager. A proxy's call blocks, so many in flight take as many."""

    def __init__(self, table: Any, count: int) -> None:
        self._table = table
        self._threads = ThreadPoolExecutor(count)
        self._together = Barrier(count)
        self._count = count
        self.call(1)  # connects each

    def call(self, times: int) -> float:
        """Seconds for so many calls by each thread."""
        start = time.perf_counter()
        for done in [self._threads.submit(self._call, times) for _ in range(self._count)]:
            done.result()
        return time.perf_counter() - start

    def _call(self, times: int) -> None:
        self._together.wait(_CONNECT_S)  # so that each thread gets one task
        for _ in range(times):
            self._table.renew(1)

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()


class Redis:
    """Debian's redis-server, on a Unix socket of its own, nothing written to disk."""

    def __init__(self) -> None:
        self._directory = own_directory()
        self.path = os.path.join(self._directory, "redis.sock")
        command = ["redis-server", "--port", "0", "--unixsocket", self.path, "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen(
            command,
            cwd=self._directory,
            stdout=subprocess.DEVNULL,
            preexec_fn=partial(die_with, os.getpid()),  # noqa: PLW1509 - one call, which takes no lock
        )
        deadline = time.monotonic() + _START_S
        while not os.path.exists(self.path):
            if time.monotonic() > deadline or self._process.poll() is not None:
                self.close()
                raise RuntimeError("redis-server did not start")
            time.sleep(0.01)

    @staticmethod
    def is_installed() -> bool:
        """Whether there is a redis-server."""
        return shutil.which("redis-server") is not None

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait(5)
        shutil.rmtree(self._directory, ignore_errors=True)


class RedisConnection:
    """A Redis client of the few commands needed, as bare as can be: the peer is the server, not a client library."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._file = self._socket.makefile("rb")

    def send(self, *words: bytes) -> None:
        """Send a command."""
        body = b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)
        self._socket.sendall(b"*%d\r\n%s" % (len(words), body))

    def receive(self) -> Any:
        """The next reply."""
        line = self._file.readline()
        kind, rest = line[:1], line[1:-2]
        if kind == b"$":
            return None if rest == b"-1" else self._file.read(int(rest) + 2)[:-2]
        if kind == b"*":
            return [self.receive() for _ in range(int(rest))]
        return rest

    def close(self) -> None:
        """Close the connection."""
        self._file.close()
        self._socket.close()
