"""A trainer refreshes the weights while an inference process reads them, in two buffers that take turns.

Without ipcsync: a host lock or a message around each refresh keeps the two apart only on the host, while both GPUs'
queues run behind it. The reader takes weights of which half is new, or the trainer overwrites a buffer that a kernel
still reads, and nothing says so: the output is a little wrong. With one CUDA event recorded again for each version, the
reader waits for whichever was recorded last. Here version n is generation n, each side waits for exactly the generation
that it needs, and no message is sent: "weights/ready" says that one is written, "weights/read" that it was used.

    python services/recipes/weight_refresh.py
"""

from multiprocessing.connection import Connection
from threading import Barrier

from processes import DEADLINE_S, SPAWN, coordinator, run

import ipcsync
from ipcsync.testing import Memory, StreamGate

VERSIONS = 6
SIZE = 1 << 16


def trainer(inference: Connection, turn: Barrier) -> None:
    """Write version n into buffer n % 2, once version n - 2 has been used."""
    with (
        ipcsync.connect(name="trainer") as client,
        client.event("weights/ready", recorder=True) as ready,
        client.event("weights/read") as read,
    ):
        stream, buffers = ipcsync.Stream(), [Memory(SIZE), Memory(SIZE)]
        inference.send([buffer.handle() for buffer in buffers])
        for version in range(1, VERSIONS + 1):
            if version > 2:
                read.at(version - 2).wait(stream, timeout=30)
            with StreamGate(stream):  # stands for a refresh that takes until the inference has queued its work
                buffers[version % 2].fill(version, stream)
                ready.record(stream)
                turn.wait(DEADLINE_S)
        read.at(VERSIONS).synchronize(30)


def inference(trainer: Connection, turn: Barrier) -> None:
    """Use every version once, and check that it is whole and the one that it should be."""
    with (
        ipcsync.connect(name="inference") as client,
        client.event("weights/ready") as ready,
        client.event("weights/read", recorder=True) as read,
    ):
        stream, used = ipcsync.Stream(), Memory(SIZE)
        buffers = [Memory(SIZE, handle=handle) for handle in trainer.recv()]
        for version in range(1, VERSIONS + 1):
            ready.at(version).wait(stream, timeout=30)
            used.copy_from(buffers[version % 2], stream)  # stands for a forward pass
            done = read.record(stream)
            turn.wait(DEADLINE_S)
            done.synchronize(30)  # RecorderLost if the trainer died; stream.synchronize() might not return then
            if not used.holds(version):
                raise SystemExit(f"inference: version {version} was used before it was written")
            print(f"inference: used version {version}", flush=True)


if __name__ == "__main__":
    to_inference, to_trainer = SPAWN.Pipe()
    turn = SPAWN.Barrier(2)
    with coordinator():
        run((trainer, to_inference, turn), (inference, to_trainer, turn))
    print(f"{VERSIONS} versions written and used in turn")
