"""Lanes of three processes in a chain, whose members are killed at random; what each is told is held against the truth.

    python -m tests.soak.chains --seconds 60 --lanes 2 --seed 1

A's stream writes a round's number to a cell and records; B's stream waits for that, copies the cell to one of its own
and records behind that; C waits for B's point in one of the ways there are. Told that it is complete, C must find the
number in B's cell; told that it is lost, who it names must have died. Ends with a table, and with status 1 if any of it
was wrong.
"""

from __future__ import annotations

import collections
import mmap
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import ipcsync
from ipcsync.typing import EngineName
from tests.faults import chain_actions as do
from tests.kit.peer import Peer
from tests.kit.until import until
from tests.soak.lanes import command, run_groups

_TTL_S = 5.0  # deaths are seen by other means; a process that is alive may be that late on a busy machine
_CELLS = 128
_ENGINES: tuple[EngineName, ...] = ("event", "timeline")
# Each A that dies on `event` may leave a stream of B standing for ever, and so a hardware queue.
_MANY_QUEUES = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}


class Lane:
    """One chain, round after round. `wrong` tells what broke a promise, `counts` what happened."""

    def __init__(self, endpoint: str, number: int, seed: int) -> None:
        self.wrong: list[str] = []
        self.counts: collections.Counter[str] = collections.Counter()
        self._endpoint = endpoint
        self._number = number
        self._random = random.Random(f"{seed}:{number}")
        self._peers: dict[str, Peer] = {}
        self._streams: dict[str, str] = {}
        self._uses = 0
        file, self._path = tempfile.mkstemp(prefix="soak-chain-", dir="/dev/shm")
        os.ftruncate(file, mmap.PAGESIZE)
        self._cells = memoryview(mmap.mmap(file, mmap.PAGESIZE)).cast("Q")
        os.close(file)

    def run(self, deadline: float) -> None:
        """Go on until then."""
        number = 0
        try:
            while time.monotonic() < deadline:
                number += 1
                self._round(number)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told
            self.wrong.append(f"lane {self._number}, round {number}: {error!r}")
        finally:
            for peer in self._peers.values():
                peer.close()
            os.unlink(self._path)

    def _peer(self, name: str) -> Peer:
        """The living process of that name, with an event of its own if it records."""
        peer = self._peers.get(name)
        if peer is None:
            peer = self._peers[name] = Peer(_MANY_QUEUES)
            peer.call(do.connect, self._endpoint, f"{name}{self._number}", {"lease_ttl": _TTL_S})
            peer.call(do.map_cells, self._path)
            self._renew(name)
        return peer

    def _renew(self, name: str) -> None:
        """A new event on a new stream, as after a loss."""
        self._uses += 1
        self._streams[name] = f"stream {self._uses}"
        if name != "c":
            engine = self._random.choice(_ENGINES)
            self._peers[name].call(do.open_event_anew, f"{name}{self._number}/{self._uses}", engine)

    def _round(self, number: int) -> None:
        a, b, c = (self._peer(name) for name in "abc")
        cell, value = 2 * (number % (_CELLS // 2)), number
        (victim,) = self._random.choices(("a", "b", ""), (2, 1, 12))
        is_held = bool(victim) or self._random.random() < 0.3
        if is_held:
            a.call(do.hold, self._streams["a"])
        a.call(do.write_cell, cell, value, self._streams["a"])
        first = a.call(do.record_last, self._streams["a"])
        b.call(do.wait, first, self._streams["b"])
        b.call(do.copy_cell, cell, cell + 1, self._streams["b"])
        second = b.call(do.record_last, self._streams["b"])
        c.call(do.keep_only, second)
        c.begin(do.await_end, second, self._random.choice(list(do.WAYS)))
        time.sleep(self._random.uniform(0, 0.02))  # when the death comes is drawn, too: nothing is waited for
        if victim:
            self._peers.pop(victim).kill()
        elif is_held:
            a.call(do.open_gate)
        self._judge(number, c.result(), int(self._cells[cell + 1]), value, victim)
        if victim == "b" and is_held:
            a.call(do.open_gate)
        if victim == "a":
            self._renew("b")

    def _judge(self, number: int, loss: dict[str, Any] | None, found: int, value: int, victim: str) -> None:
        where = f"lane {self._number}, round {number}"
        self.counts["rounds"] += 1
        if loss is None:
            self.counts["complete"] += 1
            if found != value:
                self.wrong.append(
                    f"{where}: a silent pass: {found} is in the cell, not {value} ({victim or 'nobody'} died)"
                )
            return
        self.counts[f"lost, {loss['cause']}"] += 1
        wanted = {"a": ("behind", f"a{self._number}"), "b": ("died", f"b{self._number}")}.get(victim)
        if wanted != (loss["cause"], loss["session"]):
            self.wrong.append(f"{where}: {victim or 'nobody'} died, and it is told: {loss}")


def soak(seconds: float, lanes: int, seed: int) -> tuple[collections.Counter[str], list[str]]:
    """What happened in so many lanes, and what was wrong."""
    with ipcsync.launch(lease_ttl=_TTL_S, log_level="error") as coordinator:
        groups = [Lane(coordinator.endpoint, number, seed) for number in range(lanes)]
        counts, wrong = run_groups(groups, seconds)
        return counts, wrong + _left(coordinator)


def _left(coordinator: ipcsync.Coordinator) -> list[str]:
    """What is not given back once every process is gone."""
    with ipcsync.connect(coordinator.endpoint, name="afterwards") as client:
        try:
            until(lambda: not _in_use(client), "slots and sessions are given back", 10)
        except AssertionError:
            return [f"left: {_in_use(client)}"]
    return []


def _in_use(client: ipcsync.Client) -> dict[str, int]:
    stats = client.stats()
    in_use = {"slots": stats["pool_in_use"], "sessions": stats["sessions"] - 1}
    return {what: count for what, count in in_use.items() if count}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run lanes; 0 if every promise held."""
    return command("chains", __doc__.splitlines()[0] if __doc__ else None, soak, arguments)


if __name__ == "__main__":
    sys.exit(main())
