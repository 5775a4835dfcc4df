"""An asyncio decode server takes requests from a prefill process, and goes on when that is killed and restarted.

Without ipcsync: a server either blocks its loop in a CUDA wait, and answers nobody meanwhile, or asks each event again
and again; and a wait for a prefill that was killed may never end, so that the request and its buffers are lost with it.
Here a task awaits the point of each layer, other tasks run meanwhile, and a death raises RecorderLost in the task whose
request it concerns. The request is then given to the next prefill, once nothing of the dead one can write any more.

    python services/recipes/async_server.py
"""

from __future__ import annotations

import asyncio
import os
import signal
from multiprocessing.connection import Connection
from typing import Any

from processes import DEADLINE_S, SPAWN, coordinator

import ipcsync
from ipcsync.testing import Memory, StreamGate

REQUESTS = 6
LAYERS = 4
SIZE = 1 << 12
KILLED_AT = 3  # the first prefill dies in the middle of this request


def prefill(endpoint: str, server: Connection, killed_at: int) -> None:
    """Write each layer of a request, and send the generation of its first layer: the others follow it."""
    with (
        ipcsync.connect(endpoint, name="prefill", prefix=f"{server.recv()}/", engine="timeline") as client,
        client.event("layers", recorder=True) as layers,
    ):
        stream, memory = ipcsync.Stream(), [Memory(SIZE, handle=handle) for handle in server.recv()]
        while (request := server.recv()) is not None:
            server.send(layers.generation + 1)
            if request == killed_at:
                with StreamGate(stream):  # it computes, and is killed amid that
                    layers.record(stream)
                    os.kill(os.getpid(), signal.SIGKILL)
            for layer in memory:
                layer.fill(request, stream)
                layers.record(stream)


class Server:
    """Answers requests, one after the other, while a second task shows that the loop is free."""

    def __init__(self, endpoint: str, client: ipcsync.AsyncClient) -> None:
        self._endpoint = endpoint
        self._client = client
        self._cache = [Memory(SIZE) for _ in range(LAYERS)]
        self._mine = [Memory(SIZE) for _ in range(LAYERS)]
        self._starts = 0
        self.beats = 0

    def start_prefill(self) -> tuple[Any, Connection, str]:
        """A new prefill: the process, the pipe to it, and the prefix of its names."""
        self._starts += 1
        ours, theirs = SPAWN.Pipe()
        killed_at = KILLED_AT if self._starts == 1 else 0
        process = SPAWN.Process(target=prefill, args=(self._endpoint, theirs, killed_at), daemon=True)
        process.start()
        theirs.close()
        ours.send(name := f"prefill-{self._starts}")
        ours.send([memory.handle() for memory in self._cache])
        return process, ours, name

    async def serve(self) -> None:
        """Answer all requests; one that its prefill did not finish is done again by the next one."""
        request = 1
        while request <= REQUESTS:
            process, pipe, name = self.start_prefill()
            async with await self._client.event(f"{name}/layers") as layers:
                try:
                    while request <= REQUESTS:
                        await self._answer(request, pipe, layers)
                        request += 1
                except ipcsync.RecorderLost as lost:
                    print(f"request {request} again: its {lost.session!r} {lost.cause}", flush=True)
                    if not await self._client.wait_over(layers.at(lost.generation), DEADLINE_S):
                        raise SystemExit("the dead prefill may still write to the cache") from lost
                finally:
                    process.kill()

    async def _answer(self, request: int, pipe: Connection, layers: ipcsync.AsyncSharedEvent) -> None:
        pipe.send(request)
        first = await asyncio.to_thread(pipe.recv)
        stream = ipcsync.Stream()
        for number, (theirs, mine) in enumerate(zip(self._cache, self._mine, strict=True)):
            point = layers.at(first + number)
            await point.synchronize(DEADLINE_S)  # no copy is ever queued behind a prefill that may be dead
            await point.wait(stream)
            mine.copy_from(theirs, stream)
        read = await self._client.record(stream)
        await read.synchronize(DEADLINE_S)
        if not all(memory.holds(request) for memory in self._mine):
            raise SystemExit(f"request {request} was read before it was written")
        print(f"request {request} answered", flush=True)

    async def beat(self) -> None:
        """Something else that this loop does."""
        while True:
            self.beats += 1
            await asyncio.sleep(0.001)


async def main(endpoint: str) -> None:
    """Serve, with another task beside it."""
    async with ipcsync.aconnect(endpoint, name="decode") as client:
        server = Server(endpoint, client)
        beating = asyncio.create_task(server.beat())
        await asyncio.wait_for(server.serve(), DEADLINE_S)
        beating.cancel()
        if not server.beats:
            raise SystemExit("the loop was blocked")


if __name__ == "__main__":
    with coordinator() as endpoint:
        asyncio.run(main(endpoint))
    print(f"{REQUESTS} requests answered over the death of a prefill")
