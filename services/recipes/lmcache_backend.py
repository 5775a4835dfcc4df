# ruff: noqa: T201 - a recipe says what it did
"""What LMCache's multiprocess mode asks of an event backend, on points.

Its interface creates an event, records it, exports it as bytes, and imports, waits for, queries and synchronizes it
in the other process. Without ipcsync, those bytes are a CUDA event's handle, and a backend has to guess how long each
exported event must be kept: one that is let go too soon cannot be imported by a peer that is late, and one that is
used again is waited for in its place. Here nothing is kept: the coordinator owns the events, and the bytes name one
record. An event that was exported before it was recorded is an error, rather than one that every wait passes. The
class follows that interface as it was published in 2026; LMCache itself is not needed to run this.

    python services/recipes/lmcache_backend.py
"""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

from device_memory import Memory
from processes import SPAWN, coordinator, run

import ipcsync
from ipcsync.testing import StreamGate

SIZE = 1 << 16


class PointEvent:
    """An event as LMCache passes it around: made first, recorded later."""

    point: ipcsync.Point | None = None

    def recorded(self) -> ipcsync.Point:
        """Its point; RuntimeError before it is recorded."""
        if self.point is None:
            raise RuntimeError("this event was not recorded yet, so there is nothing to export or to wait for")
        return self.point


class IpcSyncEventBackend:
    """Events between processes for LMCache; one for each process, over its client."""

    device_type = "cuda"

    def __init__(self, client: ipcsync.Client) -> None:
        self._client = client

    def check_event_support(self, device: Any) -> None:
        """Raise RuntimeError if no engine works between this process and the coordinator."""
        engines = self._client.check(device)
        if not any(engine["ok"] for engine in engines.values()):
            raise RuntimeError("; ".join(f"{name}: {engine['why']}" for name, engine in engines.items()))

    def create_event(self, device: Any) -> PointEvent:  # noqa: ARG002 - the event lives where it is recorded
        """An event that is still to be recorded."""
        return PointEvent()

    def record_event(self, event: PointEvent, stream: Any) -> None:
        """Record after all work submitted to `stream` so far."""
        event.point = self._client.record(stream)

    def export_event(self, event: PointEvent, device: Any) -> bytes:  # noqa: ARG002 - the bytes say the device
        """The 48 bytes for LMCache's message."""
        return bytes(event.recorded())

    def import_event(self, handle: bytes, device: Any) -> PointEvent:  # noqa: ARG002 - found by UUID, not by ordinal
        """The event that another process exported."""
        event = PointEvent()
        event.point = self._client.point(handle)
        return event

    def wait_event(self, event: PointEvent, stream: Any) -> None:
        """Have the stream's later work wait for it."""
        event.recorded().wait(stream)

    def query_event(self, event: PointEvent) -> bool:
        """Whether it is complete."""
        return event.recorded().query()

    def synchronize_event(self, event: PointEvent, device: Any) -> None:  # noqa: ARG002 - the point knows its device
        """Block the host until it is complete."""
        event.recorded().synchronize()


def engine(endpoint: str, server: Connection) -> None:
    """Play an inference engine: have a block stored while it is being computed, overwrite it, and retrieve it."""
    with ipcsync.connect(endpoint, name="engine") as client:
        backend, device = IpcSyncEventBackend(client), ipcsync.current_device()
        backend.check_event_support(device)
        stream, block = ipcsync.Stream(), Memory.on_device(SIZE)
        server.send(block.handle())
        for operation, value in (("store", 7), ("retrieve", 0)):
            with StreamGate(stream):  # stands for a model that computes until the server has queued its copy
                block.fill(value, stream)
                mine = backend.create_event(device)
                backend.record_event(mine, stream)
                server.send((operation, backend.export_event(mine, device)))
                theirs = backend.import_event(server.recv(), device)
            backend.wait_event(theirs, stream)
        backend.synchronize_event(theirs, device)
        server.send(None)
        if not (backend.query_event(theirs) and block.holds(7)):
            raise SystemExit("engine: the block was copied before it was computed, or overwritten after it came back")


def server(endpoint: str, engine: Connection) -> None:
    """Play LMCache's server: one block of cache on the host, copied on a stream of its own."""
    with ipcsync.connect(endpoint, name="server") as client:
        backend, device = IpcSyncEventBackend(client), ipcsync.current_device()
        stream, block, cached = ipcsync.Stream(), Memory.opened(engine.recv(), SIZE), Memory.pinned(SIZE)
        while (request := engine.recv()) is not None:
            operation, handle = request
            backend.wait_event(backend.import_event(handle, device), stream)
            if operation == "store":
                cached.copy_from(block, stream)
            else:
                block.copy_from(cached, stream)
            done = backend.create_event(device)
            backend.record_event(done, stream)
            engine.send(backend.export_event(done, device))
            print(f"server: queued a {operation}", flush=True)


if __name__ == "__main__":
    to_server, to_engine = SPAWN.Pipe()
    with coordinator() as endpoint:
        run((engine, (endpoint, to_server)), (server, (endpoint, to_engine)))
    print("a block stored and retrieved")
