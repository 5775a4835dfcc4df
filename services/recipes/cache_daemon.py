"""A cache daemon copies KV blocks out of an engine and in again, on its own stream, and replies when done.

This is how LMCache's multiprocess mode works: ZeroMQ messages carry what to copy and an event to wait for, and the
reply carries an event of the daemon's. Without ipcsync each of those is a CUDA event's handle. Both sides must keep
each event they sent until the peer has opened it and is done with it, for which there is no message; an event dropped
with the function that made it makes the peer's open fail, sometimes. A daemon that is restarted leaves handles that
open nothing, and one that is killed amid work an engine whose stream waits for ever. Here the messages carry points.

    python services/recipes/cache_daemon.py
"""

import tempfile
from typing import Any

import zmq
from processes import DEADLINE_S, coordinator, run

import ipcsync
from ipcsync.testing import Memory, StreamGate

BLOCKS = 4
SIZE = 1 << 16


def daemon(address: str) -> None:
    """Serve store and retrieve: "queued" with a point once the copy is on a stream, "done" once it is made."""
    with ipcsync.connect(name="cache daemon") as client, _socket(zmq.PAIR) as socket:
        socket.bind(address)
        stream, opened, stored = ipcsync.Stream(), dict[bytes, Memory](), dict[bytes, Memory]()
        while (request := socket.recv_multipart()) != [b"stop"]:
            operation, key, handle, data = request
            block = opened.get(handle)
            if block is None:
                block = opened[handle] = Memory(SIZE, handle=handle)
            client.point(data).wait(stream, timeout=30)  # the engine's: it has written the block, or no longer needs it
            if operation == b"store":
                stored[key] = Memory(SIZE, pinned=True)
                stored[key].copy_from(block, stream)
            else:
                block.copy_from(stored[key], stream)
            done = client.record(stream)
            socket.send_multipart([b"queued", bytes(done)])
            done.synchronize(30)  # a daemon with more to do uses done.add_done_callback instead
            socket.send_multipart([b"done", bytes(done)])


def engine(address: str) -> None:
    """Compute blocks, have them stored, overwrite them, fetch them again, and check that they are what they were."""
    with ipcsync.connect(name="engine") as client, _socket(zmq.PAIR) as socket:
        socket.connect(address)
        stream, block = ipcsync.Stream(), Memory(SIZE)
        for number in range(1, BLOCKS + 1):
            with StreamGate(stream):  # stands for a prefill that computes until the daemon has queued its copy
                block.fill(number, stream)
                _ask(socket, b"store", number, block, client.record(stream))
                stored = client.point(_expect(socket, b"queued"))
            _expect(socket, b"done")
            stored.wait(stream, timeout=30)  # complete by now; an engine in a hurry goes on after "queued" and this
        for number in range(1, BLOCKS + 1):
            block.fill(0, stream)  # the block is used for something else meanwhile
            _ask(socket, b"retrieve", number, block, client.record(stream))
            client.point(_expect(socket, b"queued")).wait(stream, timeout=30)
            _expect(socket, b"done")
            client.record(stream).synchronize(30)
            if not block.holds(number):
                raise SystemExit(f"engine: block {number} was stored before it was computed")
            print(f"engine: block {number} came back whole", flush=True)
        socket.send_multipart([b"stop"])


def _socket(kind: int) -> Any:
    socket: Any = zmq.Context.instance().socket(kind)
    socket.rcvtimeo = socket.linger = int(DEADLINE_S * 1000)
    return socket


def _ask(socket: Any, operation: bytes, number: int, block: Memory, point: ipcsync.Point) -> None:
    socket.send_multipart([operation, b"block %d" % number, block.handle(), bytes(point)])


def _expect(socket: Any, kind: bytes) -> bytes:
    answer, data = socket.recv_multipart()
    if answer != kind:
        raise SystemExit(f"engine: expected {kind!r}, but got {answer!r}")
    return bytes(data)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, coordinator():
        address = f"ipc://{folder}/cache.sock"
        run((daemon, address), (engine, address))
    print(f"{BLOCKS} blocks stored and retrieved")
