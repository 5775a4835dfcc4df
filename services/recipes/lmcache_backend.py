# ruff: noqa: T201 - a recipe says what it did
"""What LMCache's multiprocess mode does with an event backend: ipcsync's, by itself.

Its interface creates an event, records it, exports it as bytes, and imports, waits for, queries and synchronizes it
in the other process. Without ipcsync, those bytes are a CUDA event's handle, and a backend has to guess how long each
exported event must be kept: one that is released too soon cannot be imported by a peer that is late, and one that is
used again is waited for in its place. Here nothing is kept: the coordinator owns the events, and the bytes name one
record. LMCache itself loads this backend by its name (docs/integrations.md); it is not needed to run this.

    python services/recipes/lmcache_backend.py
"""

from __future__ import annotations

import os
from multiprocessing.connection import Connection

from processes import SPAWN, coordinator, run

import ipcsync
from ipcsync.integrations.lmcache import IpcSyncEventBackend
from ipcsync.testing import Memory, StreamGate

SIZE = 1 << 16


def engine(endpoint: str, server: Connection) -> None:
    """Play an inference engine: have a block stored while it is being computed, overwrite it, and retrieve it."""
    os.environ["IPCSYNC_ENDPOINT"] = endpoint  # the backend's client is the process's own
    with ipcsync.default_client():
        backend, device = IpcSyncEventBackend(), ipcsync.current_device()
        backend.check_event_support(device)
        stream, block = ipcsync.Stream(), Memory(SIZE)
        server.send(block.handle())
        for operation, value in (("store", 7), ("retrieve", 0)):
            with StreamGate(stream):  # stands for a model that computes until the server has queued its copy
                block.fill(value, stream)
                mine = backend.create_event(device)
                backend.record_event(mine, stream)
                server.send((operation, backend.export_event(mine, device)))
                theirs = backend.import_event(server.recv(), device)
            backend.wait_event(theirs, stream)
        backend.record_event(mine, stream)  # behind that wait: an error if the server died, and no stream that hangs
        backend.synchronize_event(mine, device)
        server.send(None)
        if not (backend.query_event(theirs) and block.holds(7)):
            raise SystemExit("engine: the block was copied before it was computed, or overwritten after it came back")


def server(endpoint: str, engine: Connection) -> None:
    """Play LMCache's server: one block of cache on the host, copied on a stream of its own."""
    os.environ["IPCSYNC_ENDPOINT"] = endpoint
    with ipcsync.default_client():
        backend, device = IpcSyncEventBackend(), ipcsync.current_device()
        stream, block, cached = ipcsync.Stream(), Memory(SIZE, handle=engine.recv()), Memory(SIZE, pinned=True)
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
