"""A prefill process hands a KV cache to a decode process, and gets it back.

Without ipcsync: the prefill exports a CUDA event's handle with each request. If it drops the event before the decode
has opened it, the open fails, or worse, opens another event whose handle has the same bytes. If the message overtakes
the record, the decode's wait passes at once, since CUDA takes an event that was never recorded for complete, and it
reads the cache of the request before. If the prefill records the event again for the next request, the decode waits
for the wrong one. And if either process is killed, the other's wait may never end. Here a point names one record, and
each of these is an error that is raised: on the host, wait for points, since a stream may stay behind a lost wait.

    python services/recipes/kv_handover.py
"""

from multiprocessing.connection import Connection

from processes import SPAWN, coordinator, run

import ipcsync
from ipcsync.testing import Memory, StreamGate

REQUESTS = 3
SIZE = 1 << 16


def prefill(decode: Connection) -> None:
    """Fill the cache for each request, once the decode has read the one before."""
    with ipcsync.connect(name="prefill") as client:
        stream, cache = ipcsync.Stream(), Memory(SIZE)
        decode.send(cache.handle())
        for request in range(1, REQUESTS + 1):
            with StreamGate(stream):  # stands for a model that computes until the decode has queued all it has to do
                cache.fill(request, stream)
                decode.send((request, bytes(client.record(stream))))  # recorded, and far from complete
                read = client.point(decode.recv())
            read.wait(stream, timeout=30)  # the next request's work overwrites the cache, so it waits on the GPU
        read.synchronize(30)  # memory must outlive those who read it


def decode(prefill: Connection) -> None:
    """Take each request's cache as soon as it is computed, and check that it is that request's."""
    with ipcsync.connect(name="decode") as client:
        stream, mine = ipcsync.Stream(), Memory(SIZE)
        cache = Memory(SIZE, handle=prefill.recv())
        for _ in range(REQUESTS):
            request, data = prefill.recv()
            client.point(data).wait(stream, timeout=30)
            mine.copy_from(cache, stream)
            read = client.record(stream)
            prefill.send(bytes(read))
            read.synchronize(30)  # torch.cuda.synchronize() may never return if the prefill is killed
            if not mine.holds(request):
                raise SystemExit(f"decode: the cache of request {request} was read before it was computed")
            print(f"decode: request {request} has its own cache", flush=True)


if __name__ == "__main__":
    to_decode, to_prefill = SPAWN.Pipe()
    with coordinator():
        run((prefill, to_decode), (decode, to_prefill))
    print(f"{REQUESTS} caches handed over")
