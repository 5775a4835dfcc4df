"""A prefill process hands a KV cache over layer by layer, to a decode process that replays a CUDA graph of all layers.

Without ipcsync: nothing can wait between the nodes of a graph for another process's record. An engine skips its waits
in a replay, and attention reads the layer of the request before, or it waits for all layers before the launch, or
breaks the graph at each layer and pays for that in every step. Here the graph has a wait and a record for each layer. A
replay is given eight points, goes on with a layer as soon as it is there, and the prefill overwrites a layer once the
replay is done with it. If either process is killed, the other's graph runs through, and all that it records is lost.

    python services/recipes/graph_layers.py            # 200 requests of 8 layers
    python services/recipes/graph_layers.py --break    # the graph has no waits: it must fail
"""

import sys
from multiprocessing.connection import Connection

from cuda.bindings import driver
from processes import SPAWN, coordinator, run

import ipcsync
from ipcsync.testing import Memory, StreamGate

REQUESTS = 200
LAYERS = 8
SIZE = 4096


def prefill(decode: Connection) -> None:
    """Fill the layers for each request, each once the decode is done with that layer of the request before."""
    with (
        ipcsync.connect(name="prefill") as client,
        client.event("kv/layers", recorder=True, engine="timeline") as written,
        client.event("kv/read", engine="timeline") as read,
    ):
        stream, cache = ipcsync.Stream(), [Memory(SIZE) for _ in range(LAYERS)]
        decode.send([layer.handle() for layer in cache])
        for request in range(1, REQUESTS + 1):
            with StreamGate(stream):  # stands for a model that computes until the decode has launched its graph
                for layer, memory in enumerate(cache):
                    if request > 1:
                        read.at((request - 2) * LAYERS + layer + 1).wait(stream, timeout=30)
                    memory.fill(request, stream)
                    point = written.record(stream)
                decode.send(point.generation - LAYERS + 1)  # the first layer's; the others follow
                decode.recv()
        read.at(REQUESTS * LAYERS).synchronize(30)  # memory must outlive those who read it


def decode(prefill: Connection, has_waits: bool) -> None:
    """Replay one graph for each request, and check that it read that request's layers."""
    with (
        ipcsync.connect(name="decode") as client,
        client.event("kv/layers", engine="timeline") as written,
        client.event("kv/read", recorder=True, engine="timeline") as read,
    ):
        stream, mine = ipcsync.Stream(), [Memory(SIZE) for _ in range(LAYERS)]
        cache = [Memory(SIZE, handle=handle) for handle in prefill.recv()]
        waits = [ipcsync.GraphWait() for _ in range(LAYERS)]
        records = [ipcsync.GraphRecord() for _ in range(LAYERS)]

        driver.cuStreamBeginCapture(stream.cuda_stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
        for wait, source, target, record in zip(waits, cache, mine, records, strict=True):
            if has_waits:
                wait.capture(stream)
            target.copy_from(source, stream)  # stands for the layer's attention
            record.capture(stream)
        _, graph = driver.cuStreamEndCapture(stream.cuda_stream)
        _, executable = driver.cuGraphInstantiate(graph, 0)

        for request in range(1, REQUESTS + 1):
            first = prefill.recv()
            points = {wait: written.at(first + layer) for layer, wait in enumerate(waits)} if has_waits else {}
            with client.replay(points, dict.fromkeys(records, read), stream=stream, timeout=30) as replay:
                driver.cuGraphLaunch(executable, stream.cuda_stream)
            if not has_waits:
                stream.synchronize()  # so that it shows what it has read, every time
            prefill.send("launched")
            replay[records[-1]].synchronize(30)
            if not all(layer.holds(request) for layer in mine):
                raise SystemExit(f"decode: request {request} was read before it was written")
        print(f"decode: {REQUESTS} requests, each with its own {LAYERS} layers", flush=True)


if __name__ == "__main__":
    to_decode, to_prefill = SPAWN.Pipe()
    with coordinator():
        run((prefill, to_decode), (decode, to_prefill, "--break" not in sys.argv))
    print(f"{REQUESTS} replays of one graph, {REQUESTS * LAYERS} layers handed over")
