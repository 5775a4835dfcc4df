"""A ring of buffers with back-pressure, whose producer and consumer may be killed at any moment, and are restarted.

Without ipcsync: a producer that is killed leaves the consumer at an event that will never be recorded, or, where the
driver calls a dead process's event complete, with a buffer half written. A consumer that is killed leaves the producer
full for ever. And a buffer that is given to the next one may still be written by the work of the last. Here the other
one gets RecorderLost within milliseconds, waits until the dead one is over, memory and all, and the ring goes on with
the first item that was not confirmed: under names of a new round, so that nothing of the old one is taken for it.

    python services/recipes/served_ring.py
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from processes import DEADLINE_S, SPAWN, coordinator

import ipcsync
from ipcsync.testing import Memory

ITEMS = 12
SLOTS = 3
SIZE = 1 << 14
KILLS = {4: "producer", 8: "consumer"}  # after so many items


def produce(client: ipcsync.Client, slots: list[Memory], _mine: Memory, first: int, _: Connection) -> None:
    """Write each item into its slot, once what was there is read: at most SLOTS items are on their way."""
    stream, read = ipcsync.Stream(), client.event("read")
    with client.event("written", recorder=True) as written:
        for number, item in enumerate(range(first, ITEMS + 1), 1):
            if number > SLOTS:
                read.at(number - SLOTS).wait(stream, timeout=DEADLINE_S)  # the back-pressure, on stream and host
            slots[item % SLOTS].fill(item, stream)
            written.record(stream)
        read.at(ITEMS + 1 - first).synchronize(DEADLINE_S)


def consume(client: ipcsync.Client, slots: list[Memory], mine: Memory, first: int, boss: Connection) -> None:
    """Read each item, check it, and confirm it."""
    stream, written = ipcsync.Stream(), client.event("written")
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


def worker(role: str, endpoint: str, boss: Connection) -> None:
    """Take part in one round after the other. A death of the other one ends a round; one's own ends nothing else."""
    slots = [Memory(SIZE, handle=handle) for handle in boss.recv()]
    mine = Memory(SIZE)  # for all rounds: freeing waits for every stream, and one may stand behind the dead for ever
    work, theirs = WORK[role]
    while (begin := boss.recv()) is not None:
        number, first = begin
        with ipcsync.connect(endpoint, name=role, prefix=f"ring/{number}/") as client, client.event(theirs) as event:
            try:
                work(client, slots, mine, first, boss)
            except ipcsync.RecorderLost as lost:
                if not client.wait_over(event.at(lost.generation), DEADLINE_S):
                    raise SystemExit(f"the other one may still touch the ring: {lost}") from lost
            boss.send(None)


class Ring:
    """The buffers, and who works on them: what outlives both."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._slots = [Memory(SIZE) for _ in range(SLOTS)]
        self._workers: dict[str, tuple[Any, Connection]] = {}
        self.confirmed = 0
        self.rounds = 0

    def start_missing(self) -> None:
        """Start who was killed."""
        for role in WORK.keys() - self._workers.keys():
            ours, theirs = SPAWN.Pipe()
            process = SPAWN.Process(target=worker, args=(role, self._endpoint, theirs), name=role)
            process.start()
            theirs.close()
            ours.send([slot.handle() for slot in self._slots])
            self._workers[role] = process, ours

    def run_round(self) -> None:
        """Go on with the first item that was not confirmed, until all are, or one of the two is killed."""
        self.rounds += 1
        running = [pipe for _, pipe in self._workers.values()]
        for pipe in running:
            pipe.send((self.rounds, self.confirmed + 1))
        while running:
            ready = wait(running, DEADLINE_S)
            if not ready:
                raise SystemExit(f"nothing came for {DEADLINE_S:g} s after item {self.confirmed}")
            for pipe in [pipe for pipe in running if pipe in ready]:
                item = pipe.recv()
                if item is None:
                    running.remove(pipe)  # its round is over: all is done, or the other one was lost
                    continue
                if item != self.confirmed + 1:
                    raise SystemExit(f"item {item} came after item {self.confirmed}")
                self.confirmed = item
                if item in KILLS:
                    running.remove(self._kill(KILLS[item]))
                if pipe in running:
                    pipe.send(None)

    def _kill(self, role: str) -> Connection:
        """SIGKILL; the pipe of who was killed."""
        process, pipe = self._workers.pop(role)
        process.kill()
        process.join()
        print(f"killed the {role} after item {self.confirmed}", flush=True)
        return pipe

    def end(self) -> None:
        """Let the workers end."""
        for process, pipe in self._workers.values():
            pipe.send(None)
            process.join(DEADLINE_S)
            process.kill()


def main() -> None:
    """Run rounds until every item was confirmed; two of them end by a SIGKILL."""
    with coordinator() as endpoint:
        ring = Ring(endpoint)
        try:
            while ring.confirmed < ITEMS:
                ring.start_missing()
                ring.run_round()
        finally:
            ring.end()
    print(f"{ring.confirmed} items in {ring.rounds} rounds, each read once and in order")
    if ring.rounds != 3:
        raise SystemExit("nobody was killed")


if __name__ == "__main__":
    main()
