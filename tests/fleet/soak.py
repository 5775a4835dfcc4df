"""Random kills, stops and cuts between hosts of their own, and a judge of what was seen there.

    python -m tests.fleet.soak --minutes 10 --hosts 4 --processes 8 --seed 1

Three servers stand in the hub. On each host processes record on events, follow those of the other hosts, and claim
names of the fleet. Processes, bridges and servers are killed and stopped, wires cut, several at once. What must hold:
nothing was seen complete that was not recorded, nothing that was seen complete on a node is lost there later, nor the
other way round; a name has one holder; every wait ends; after the last disturbance all hosts hear each other again; and
at the end no slot, link or descriptor is left in use.
"""

from __future__ import annotations

import argparse
import collections
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.fleet import cluster, hosts, soak_host
from tests.fleet.cluster import Cluster
from tests.fleet.history import Away, History
from tests.fleet.hosts import HUB, Host, Hub
from tests.kit.until import until

TTL_S, LEASE_S = 2.0, 5.0
_RECOVERY_S = 15.0  # after a cut, until a node answers again: TCP repeats what was lost ever more rarely
_RECOVERED_S = 120.0
_RECORDERS = 2  # of each host's processes


class Soak:
    """The hosts and servers, and what is just now being done to them."""

    def __init__(self, path: Path, count: int, processes: int, seed: int) -> None:
        self._chance = random.Random(seed)
        self._processes = processes
        self.names = [f"n{number}" for number in range(count)]
        self.history = History()
        self.done: collections.Counter[str] = collections.Counter()
        self.made: list[Host] = []
        self._undo: dict[str, tuple[float, Callable[[], object]]] = {}  # by what is disturbed: when, and how
        self._hub = Hub()
        self._cluster = Cluster(path, prefix=self._hub.prefix, host=HUB)

    def start(self) -> None:
        """Start all hosts, then their workers."""
        arguments = ("--link-ttl", str(TTL_S), "--replicas", "3")
        for number in range(len(self.names)):
            self.made.append(Host(self._hub, number))
        for host, name in zip(self.made, self.names, strict=True):
            host.call(hosts.serve, host.directory, name, self._cluster.urls, *arguments, timeout=120)
        for host, name in zip(self.made, self.names, strict=True):
            others = [other for other in self.names if other != name]
            host.call(soak_host.begin, name, others, self._processes, min(_RECORDERS, self._processes), timeout=120)

    def disturb(self, seconds: float) -> None:
        """Do so for that long; then all is whole again."""
        until_s, next_s = time.monotonic() + seconds, 0.0
        while (now := time.monotonic()) < until_s:
            if now >= next_s:
                self._disturb_one()
                next_s = now + self._chance.uniform(0.3, 1.5)  # often before all have got over the last
            for what, (due, undo) in list(self._undo.items()):
                if now >= due:
                    undo()
                    del self._undo[what]
            self._tend()
            time.sleep(0.1)
        for _, undo in self._undo.values():
            undo()
        self._undo.clear()

    def _tend(self) -> None:
        for host in self.made:
            host.begin(soak_host.tell, "tend")
        for host in self.made:
            host.result(60)

    def _disturb_one(self) -> None:
        number = self._chance.randrange(len(self.made))
        host, place = self.made[number], self._chance.randrange(self._processes)
        how = self._chance.choice(
            ["worker killed", "worker stopped", "bridge killed", "bridge stopped", "cut", "input", "output", "server",
             "leader"]
        )  # fmt: skip
        seconds = self._chance.choice([0.2, 1.0, 3.0, 8.0])  # below the TTL and the lease, and above them
        what = "server" if how in ("server", "leader") else f"{how[:6]} {number} {place if 'worker' in how else ''}"
        if what in self._undo or (
            how in ("cut", "input", "output") and any(f" {number} " in key for key in self._undo)
        ):
            return
        undo = self._begin(how, host, place, seconds)
        self.done[how] += 1
        if undo is not None:
            self._undo[what] = time.monotonic() + seconds, undo

    def _begin(self, how: str, host: Host, place: int, seconds: float) -> Callable[[], object] | None:
        """Begin a disturbance; what ends it, None if nothing has to."""
        undo: Callable[[], object] | None = None
        began, node = time.monotonic(), self.names[host.number]
        if how == "worker killed":
            host.call(soak_host.tell, "kill", place)
            return None
        if how == "worker stopped":
            host.call(soak_host.tell, "stop", place, is_for_long=seconds > LEASE_S / 2)
            return lambda: host.call(soak_host.tell, "go_on", place)
        if how in ("server", "leader"):
            server = self._cluster.servers[self._leader() if how == "leader" else self._chance.randrange(3)]
            server.kill()
            return server.start
        if how == "bridge killed":
            host.call(hosts.signal_bridge, signal.SIGKILL)
            undo, seconds = None, 0.0  # `tend` starts the next one
        elif how == "bridge stopped":
            host.call(hosts.signal_bridge, signal.SIGSTOP)
            undo = lambda: host.call(hosts.signal_bridge, signal.SIGCONT)  # noqa: E731
        elif how == "cut":
            host.cut()
            undo = host.heal
        else:
            host.drop(how)
            undo = host.undrop
        self.history.away.append(Away(node, began, began + seconds))
        return undo

    def _leader(self) -> int:
        number = self.made[0].call(cluster.leader, self._cluster.urls)
        return number if number >= 0 else self._chance.randrange(3)

    def recover(self) -> float:
        """Wait until each host hears each other one again; how many seconds that took."""
        began = time.monotonic()
        for host, name in zip(self.made, self.names, strict=True):

            def hears_all(host: Host = host, name: str = name) -> bool:
                self._tend()
                heard: object = host.call(soak_host.tell, "heard", began)
                return heard == set(self.names) - {name}

            try:
                until(hears_all, "", _RECOVERED_S)
            except AssertionError:
                self.history.problems.append(f"{name} does not hear all others within {_RECOVERED_S:g} s")
        return time.monotonic() - began

    def end(self, say: Callable[[str], object]) -> list[str]:
        """End the workers; what was wrong in all of it."""
        for host in self.made:
            host.begin(soak_host.tell, "end")
        for host in self.made:
            host.result(600)
        ends: collections.Counter[str] = collections.Counter()
        for host, name in zip(self.made, self.names, strict=True):
            rest: Any = host.call(soak_host.tell, "rest", timeout=600)
            journals, problems, ended = rest
            for by, lines in journals.items():
                self.history.add(name, by, lines)
            self.history.problems += problems
            ends.update(ended)
            host.call(hosts.end)
        seen = [each.what for some in self.history.seen.values() for each in some]
        say(f"disturbed: {dict(sorted(self.done.items()))}; ended: {dict(sorted(ends.items()))}")
        say(
            f"recorded {sum(map(len, self.history.recorded.values()))} on {len(self.history.recorded)} events; "
            f"seen {dict(collections.Counter(seen))}; names were held {len(self.history.held)} times"
        )
        return self.history.wrong(TTL_S, _RECOVERY_S)

    def close(self) -> None:
        """End what is left."""
        for host in self.made:
            host.close()
        self._cluster.close()
        self._hub.close()


def run(seconds: float, count: int, processes: int, seed: int, say: Callable[[str], object]) -> list[str]:
    """What was wrong in so many seconds with `count` hosts of so many processes."""
    with tempfile.TemporaryDirectory() as path:
        soak = Soak(Path(path), count, processes, seed)
        try:
            soak.start()
            soak.disturb(seconds)
            say(f"all hear each other again after {soak.recover():.1f} s")
            return soak.end(say)
        finally:
            soak.close()


def main() -> int:
    """Run it by its command."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--processes", type=int, default=8, help="on each host, two of which record")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    reason = hosts.why_not()
    if reason:
        sys.stderr.write(f"no soak: {reason}\n")
        return 1

    def say(text: str) -> None:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()

    wrong = run(60 * arguments.minutes, arguments.hosts, arguments.processes, arguments.seed, say)
    for each in wrong:
        say(f"VIOLATION: {each}")
    say(f"{len(wrong)} violations")
    return bool(wrong)


if __name__ == "__main__":
    from tests.fleet.soak import main as run_by_its_name  # under which the hosts find it

    sys.exit(run_by_its_name())
