"""An asyncio decode server takes requests from a prefill process, and goes on when that is killed and restarted.

Without ipcsync: a server either blocks its loop in a CUDA wait, and answers nobody meanwhile, or asks each event again
and again; and a wait for a prefill that was killed may never end, so that the request and its buffers are lost with it.
Here a task awaits the point of each layer, other tasks run meanwhile, and a death raises RecorderLost in the task whose
request it concerns. The request is then given to the next prefill, once nothing of the dead one can write any more.

    python services/recipes/async_server.py
"""

import asyncio
import os
import signal
from multiprocessing.connection import Connection

from processes import DEADLINE_S, SPAWN, coordinator, start

import ipcsync
from ipcsync.testing import Memory, StreamGate

REQUESTS = 6
LAYERS = 4
SIZE = 1 << 12
KILLED_AT = 3  # the first prefill dies in the middle of this request


def prefill(name: str, cache: list[bytes], server: Connection, killed_at: int) -> None:
    """Write each layer of a request, and send the generation of its first layer: the others follow it."""
    with (
        ipcsync.connect(name=name, engine="timeline") as client,
        client.event(f"{name}/layers", recorder=True) as layers,
    ):
        stream, memory = ipcsync.Stream(), [Memory(SIZE, handle=handle) for handle in cache]
        while (request := server.recv()) is not None:
            server.send(layers.generation + 1)
            if request == killed_at:
                with StreamGate(stream):  # it computes, and is killed amid that
                    layers.record(stream)
                    os.kill(os.getpid(), signal.SIGKILL)
            for layer in memory:
                layer.fill(request, stream)
                layers.record(stream)


async def serve(client: ipcsync.AsyncClient) -> None:
    """Answer all requests, one after the other; one that its prefill did not finish is done again by the next one."""
    cache, mine = ([Memory(SIZE) for _ in range(LAYERS)] for _ in range(2))
    stream, request, starts = ipcsync.Stream(), 1, 1
    while request <= REQUESTS:
        pipe, theirs = SPAWN.Pipe()
        name, killed_at = f"prefill-{starts}", KILLED_AT if starts == 1 else 0
        process = start(prefill, name, [memory.handle() for memory in cache], theirs, killed_at)
        starts += 1
        async with await client.event(f"{name}/layers") as layers:
            try:
                while request <= REQUESTS:
                    pipe.send(request)
                    first = await asyncio.to_thread(pipe.recv)
                    for number in range(LAYERS):
                        point = layers.at(first + number)
                        await point.synchronize(DEADLINE_S)  # no copy is ever queued behind a prefill that may be dead
                        await point.wait(stream)
                        mine[number].copy_from(cache[number], stream)
                    await (await client.record(stream)).synchronize(DEADLINE_S)
                    if not all(memory.holds(request) for memory in mine):
                        raise SystemExit(f"request {request} was read before it was written")
                    print(f"request {request} answered", flush=True)
                    request += 1
            except (ipcsync.RecorderLost, EOFError, ConnectionError) as lost:  # a pipe's end may tell it first
                print(f"request {request} again: {lost!r}", flush=True)
                if not await client.wait_over(layers.at(1), DEADLINE_S):
                    raise SystemExit("the dead prefill may still write to the cache") from lost
            finally:
                process.kill()


async def main() -> None:
    """Serve, and beside it do something else in the same loop."""
    beats = 0
    async with ipcsync.aconnect(name="decode") as client:
        serving = asyncio.create_task(serve(client))
        while not serving.done():
            beats += 1
            await asyncio.sleep(0.001)
        await serving
    if beats < REQUESTS:
        raise SystemExit("the loop was blocked")


if __name__ == "__main__":
    with coordinator():
        asyncio.run(main())
    print(f"{REQUESTS} requests answered over the death of a prefill")
