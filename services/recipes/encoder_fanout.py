"""A vision encoder feeds two consumers: a language model and a classifier.

Without ipcsync: two importers of one CUDA event must both have opened it before the encoder may drop it, which takes
a message back from each, and the encoder may reuse an output only when the slower of the two is done, which takes
another event from each, exported the other way. A count of one too few overwrites an image under a reader. Here
one point goes to both, each returns a point of its own, and the encoder's stream waits for both before it reuses the
slot. A consumer that dies ends the encoder by an error, rather than blocking it, and so the other way round.

    python services/recipes/encoder_fanout.py
"""

from multiprocessing.connection import Connection

from processes import SPAWN, coordinator, run

import ipcsync
from ipcsync.testing import Memory, StreamGate

IMAGES = 6
SLOTS = 2
SIZE = 1 << 16


def encoder(*consumers: Connection) -> None:
    """Encode image n into slot n % 2, once both consumers are done with image n - 2."""
    with ipcsync.connect(name="encoder") as client:
        stream, slots = ipcsync.Stream(), [Memory(SIZE) for _ in range(SLOTS)]
        for consumer in consumers:
            consumer.send([slot.handle() for slot in slots])
        readers: dict[int, list[ipcsync.Point]] = {slot: [] for slot in range(SLOTS)}
        for image in range(1, IMAGES + 1):
            slot = image % SLOTS
            ipcsync.wait_all(readers[slot], stream, timeout=30)
            with StreamGate(stream):  # stands for an encoder that computes until both have queued their work
                slots[slot].fill(image, stream)
                encoded = bytes(client.record(stream))
                for consumer in consumers:
                    consumer.send((image, encoded))
                readers[slot] = [client.point(consumer.recv()) for consumer in consumers]
        ipcsync.synchronize_all([done for points in readers.values() for done in points], timeout=30)


def consumer(name: str, encoder: Connection) -> None:
    """Read every image's embedding, and check that it is that image's."""
    with ipcsync.connect(name=name) as client:
        stream, mine = ipcsync.Stream(), Memory(SIZE)
        slots = [Memory(SIZE, handle=handle) for handle in encoder.recv()]
        for _ in range(IMAGES):
            image, encoded = encoder.recv()
            client.point(encoded).wait(stream, timeout=30)
            mine.copy_from(slots[image % SLOTS], stream)
            read = client.record(stream)
            encoder.send(bytes(read))
            read.synchronize(30)
            if not mine.holds(image):
                raise SystemExit(f"{name}: image {image} was read before it was encoded")
        print(f"{name}: {IMAGES} images", flush=True)


if __name__ == "__main__":
    (to_first, first), (to_second, second) = SPAWN.Pipe(), SPAWN.Pipe()
    with coordinator():
        run((encoder, to_first, to_second), (consumer, "language model", first), (consumer, "classifier", second))
    print(f"{IMAGES} images encoded once and read twice")
