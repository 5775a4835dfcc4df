"""A ring of buffers with back-pressure, whose producer and consumer may be killed at any moment, and are restarted.

Without ipcsync: a producer that is killed leaves the consumer at an event that will never be recorded, or, where the
driver calls a dead process's event complete, with a buffer half written. A consumer that is killed leaves the producer
full for ever. And a buffer that is given to the next one may still be written by the work of the last. Here the other
one gets RecorderLost within milliseconds, waits until the dead one is over, memory and all, and the ring goes on with
the first item that was not confirmed: under names of a new round, so that nothing of the old one is taken for it.

    python services/recipes/served_ring.py
"""

from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

from processes import DEADLINE_S, SPAWN, coordinator, start

import ipcsync
from ipcsync.testing import Memory

ITEMS = 12
SLOTS = 3
SIZE = 1 << 14
KILLS = {4: "producer", 8: "consumer"}  # after so many items


def produce(
    client: ipcsync.Client, stream: ipcsync.Stream, slots: list[Memory], _mine: Memory, first: int, _: Connection
) -> None:
    """Write each item into its slot, once what was there is read: at most SLOTS items are on their way."""
    read = client.event("read")
    with client.event("written", recorder=True) as written:
        for number, item in enumerate(range(first, ITEMS + 1), 1):
            if number > SLOTS:
                read.at(number - SLOTS).wait(stream, timeout=DEADLINE_S)  # the back-pressure, on stream and host
            slots[item % SLOTS].fill(item, stream)
            written.record(stream)
        read.at(ITEMS + 1 - first).synchronize(DEADLINE_S)


def consume(
    client: ipcsync.Client, stream: ipcsync.Stream, slots: list[Memory], mine: Memory, first: int, boss: Connection
) -> None:
    """Read each item, check it, and confirm it."""
    written = client.event("written")
    with client.event("read", recorder=True) as read:
        for number, item in enumerate(range(first, ITEMS + 1), 1):
            written.at(number).wait(stream, timeout=DEADLINE_S)
            mine.copy_from(slots[item % SLOTS], stream)
            read.record(stream).synchronize(DEADLINE_S)
            if not mine.holds(item):
                raise SystemExit(f"item {item} was read before it was written")
            boss.send(item)
            boss.recv()


WORK: dict[str, tuple[Callable[..., None], str]] = {"producer": (produce, "read"), "consumer": (consume, "written")}


def worker(role: str, handles: list[bytes], boss: Connection) -> None:
    """Take part in one round after the other. A death of the other one ends a round; one's own ends nothing else."""
    slots = [Memory(SIZE, handle=handle) for handle in handles]
    mine = Memory(SIZE)  # for all rounds: freeing waits for every stream
    stream = ipcsync.Stream()
    work, theirs = WORK[role]
    while (begin := boss.recv()) is not None:
        number, first = begin
        prefix = f"ring/{number}/"
        with ipcsync.connect(name=role, prefix=prefix, engine="timeline") as client, client.event(theirs) as event:
            try:
                work(client, stream, slots, mine, first, boss)
            except ipcsync.RecorderLost as lost:
                client.resume(stream, DEADLINE_S)  # what waited here for the dead one touches no slot any more
                if not client.wait_over(event.at(lost.generation), DEADLINE_S):
                    raise SystemExit(f"the other one may still touch the ring: {lost}") from lost
            boss.send(None)


Workers = dict[str, tuple[SpawnProcess, Connection]]


def follow_round(workers: Workers, confirmed: int) -> int:
    """Take the consumer's confirmations, and kill who is to die then, until the round is over: the last one."""
    consumer = workers["consumer"][1]
    while "consumer" in workers and (item := consumer.recv()) is not None:
        if item != confirmed + 1:
            raise SystemExit(f"item {item} came after item {confirmed}")
        confirmed = item
        if (victim := KILLS.get(item)) is not None:
            process, _ = workers.pop(victim)
            process.kill()
            process.join()
            print(f"killed the {victim} after item {item}", flush=True)
        if "consumer" in workers:
            consumer.send(None)
    if "producer" in workers:
        workers["producer"][1].recv()  # it has done all, or has lost the consumer
    return confirmed


def main() -> None:
    """Run rounds until every item was confirmed; two of them end by a SIGKILL."""
    slots = [Memory(SIZE) for _ in range(SLOTS)]  # what outlives both
    workers: Workers = {}
    rounds = confirmed = 0
    with coordinator():
        while confirmed < ITEMS:
            for role in WORK.keys() - workers.keys():
                ours, theirs = SPAWN.Pipe()
                workers[role] = start(worker, role, [slot.handle() for slot in slots], theirs), ours
            rounds += 1
            for _, pipe in workers.values():
                pipe.send((rounds, confirmed + 1))
            confirmed = follow_round(workers, confirmed)
        for process, pipe in workers.values():
            pipe.send(None)
            process.join(DEADLINE_S)
    print(f"{confirmed} items in {rounds} rounds, each read once and in order")
    if rounds != len(KILLS) + 1:
        raise SystemExit("nobody was killed")


if __name__ == "__main__":
    main()
