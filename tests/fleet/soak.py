"""Random kills, stops and cuts between hosts of their own, and a checker of what was seen there.

    python -m tests.fleet.soak --minutes 10 --seed 1

Each host records on an event and follows those of the others. When one is lost, its follower goes on with the next
event of that host. What must hold: nothing was seen complete that was not recorded; nothing that was seen complete is
lost later, nor the other way round; every wait ends. At the end no slot is left in use.
"""

from __future__ import annotations

import argparse
import collections
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ipcsync
from tests.fleet import hosts
from tests.fleet.hosts import HUB, Host, Hub
from tests.fleet.nodes import Server
from tests.kit.until import until

TTL_S = 2.0
FIRST_WAIT_S = 5.0
_AGAIN_S = 0.05  # until another host is asked again that had nothing, or was away
LONGEST_WAIT_S = 60.0  # none takes that long: they end by a record, or a loss

# --- what runs on a host ----------------------------------------------------------------------------------------------

_stop = threading.Event()
_threads: list[threading.Thread] = []
_recorded: dict[str, int] = {}  # by event: generations that were recorded, and so complete at some time
_seen: list[tuple[str, str, int, str]] = []  # node, event, generation, "complete" or the error's class
_problems: list[str] = []


def begin(node: str, others: list[str]) -> None:
    """Start to record, and to follow the others."""
    client = hosts._here["client"]
    _threads.append(threading.Thread(target=_record, args=(client, node)))
    _threads.extend(threading.Thread(target=_follow, args=(client, other)) for other in others)
    for thread in _threads:
        thread.start()


def _record(client: ipcsync.Client, node: str) -> None:
    stream, number = ipcsync.Stream(), 0
    while not _stop.is_set():
        number += 1
        name = f"{node}/{number}"
        with client.event(name, recorder=True, engine="timeline") as event:
            for _ in range(200):
                if _stop.is_set():
                    break
                _recorded[_use_of(event)] = event.generation + 1  # before: it may be seen before this thread goes on
                event.record(stream)
                _stop.wait(0.01)  # the pace
            event.at(max(event.generation, 1)).synchronize(LONGEST_WAIT_S)


def _follow(client: ipcsync.Client, other: str) -> None:
    while not _stop.is_set():
        number = _newest(client, other)
        name = f"{other}/{number}"
        if not number:
            _stop.wait(_AGAIN_S)
            continue
        try:
            event = client.event(name, node=other, timeout=5.0)
        except ipcsync.IpcSyncError:
            _stop.wait(_AGAIN_S)
            continue
        with event:
            _follow_one(event, other, name)


def _use_of(event: ipcsync.SharedEvent) -> str:
    """The same on every host, and another one for each use of a name."""
    return bytes(event.at(1))[:32].hex()


def _newest(client: ipcsync.Client, other: str) -> int:
    try:
        rows = client.list_events(f"{other}/", node=other, timeout=5.0)
    except ipcsync.IpcSyncError:
        return 0
    return max((int(row.name.partition("/")[2]) for row in rows if row.state == "open" and row.recorder), default=0)


def _follow_one(event: ipcsync.SharedEvent, other: str, name: str) -> None:
    generation, use = 0, _use_of(event)
    while not _stop.is_set():
        generation = max(generation + 1, event.generation)
        try:
            event.at(generation).synchronize(LONGEST_WAIT_S if generation > 1 else FIRST_WAIT_S)
        except ipcsync.RecorderLost as error:
            _seen.append((other, use, generation, type(error).__name__))
            return
        except ipcsync.WaitTimeout:
            if generation > 1:
                _problems.append(f"{name} #{generation}: no end within {LONGEST_WAIT_S} s")
            return  # its recorder had closed before it was opened here, which opened it anew
        except ipcsync.IpcSyncError as error:
            _problems.append(f"{name} #{generation}: {error!r}")
            return
        _seen.append((other, use, generation, "complete"))


def end() -> tuple[dict[str, int], list[tuple[str, str, int, str]], list[str], int]:
    """Stop; what was recorded, seen, wrong, and how many slots are still in use."""
    _stop.set()
    for thread in _threads:
        thread.join(2 * LONGEST_WAIT_S)
        if thread.is_alive():
            _problems.append(f"{thread.name} did not end")
    client = hosts._here["client"]
    try:
        until(lambda: client.stats()["pool_in_use"] == 0, "all slots to be free")
    except AssertionError:
        _problems.append("slots are left in use")
    return _recorded, _seen, _problems, client.stats()["pool_in_use"]


# --- the soak ---------------------------------------------------------------------------------------------------------


def check(recorded: dict[str, int], seen: list[tuple[str, str, int, str]]) -> list[str]:
    """What is wrong in what one host saw, given what all have recorded."""
    wrong: list[str] = []
    good: dict[str, int] = {}
    lost: dict[str, int] = {}
    for _, name, generation, what in seen:
        if what == "complete":
            if generation > recorded.get(name, 0):
                wrong.append(f"{name} #{generation} was seen complete, and {recorded.get(name, 0)} were recorded")
            if generation >= lost.get(name, 1 << 62):
                wrong.append(f"{name} #{generation} was seen complete after #{lost[name]} was lost")
            good[name] = max(good.get(name, 0), generation)
        else:
            if generation <= good.get(name, 0):
                wrong.append(f"{name} #{generation} was lost after #{good[name]} was seen complete")
            lost[name] = min(lost.get(name, 1 << 62), generation)
    return wrong


def _disturb(chance: random.Random, made: list[Host], server: Server) -> str:
    host = chance.choice(made)
    how = chance.choice(["kill", "stop", "cut", "input", "output", "server"])
    seconds = chance.choice([0.2, 1.0, 3.0])  # the lengths are tested: below the TTL and above it
    if how == "kill":
        host.call(hosts.signal_bridge, signal.SIGKILL)
        host.call(hosts.bridge_status, 30)
        host.call(hosts.start_bridge)
    elif how == "stop":
        host.call(hosts.signal_bridge, signal.SIGSTOP)
        time.sleep(seconds)
        host.call(hosts.signal_bridge, signal.SIGCONT)
    elif how == "cut":
        host.cut()
        time.sleep(seconds)
        host.heal()
    elif how == "server":
        server.kill()
        time.sleep(seconds)
        server.start()
    else:
        host.drop(how)
        time.sleep(seconds)
        host.undrop()
    return how


def run(seconds: float, count: int, seed: int, say: Callable[[str], object]) -> list[str]:
    """What was wrong in so many seconds with `count` hosts."""
    chance = random.Random(seed)
    hub = Hub()
    made: list[Host] = []
    with tempfile.TemporaryDirectory() as path:
        server = Server(Path(path), prefix=hub.prefix, host=HUB)
        try:
            names = [f"n{number}" for number in range(count)]
            for number, name in enumerate(names):
                made.append(Host(hub, number))
                made[-1].call(hosts.serve, made[-1].directory, name, server.url, "--link-ttl", str(TTL_S), timeout=120)
            for host, name in zip(made, names, strict=True):
                host.call(begin, name, [other for other in names if other != name])
            until_s = time.monotonic() + seconds
            done: collections.Counter[str] = collections.Counter()
            while time.monotonic() < until_s:
                time.sleep(chance.uniform(0.5, 2.0))  # so too: another one comes before all have got over the last
                how = _disturb(chance, made, server)
                done[how] += 1
            say(f"disturbed: {dict(done)}")
            return _judge(made, say)
        finally:
            for host in made:
                host.close()
            server.kill()
            hub.close()


def _judge(made: list[Host], say: Callable[[str], object]) -> list[str]:
    ends: list[Any] = [host.call(end, timeout=600) for host in made]
    for host in made:
        host.call(hosts.end)
    recorded = {name: generation for each, *_ in ends for name, generation in each.items()}
    wrong = [problem for _, _, problems, _ in ends for problem in problems]
    for _, seen, _, _ in ends:
        wrong += check(recorded, seen)
    total = [what for _, seen, _, _ in ends for *_, what in seen]
    complete = total.count("complete")
    say(f"recorded {sum(recorded.values())}; seen complete {complete}, lost {len(total) - complete}")
    return wrong


def main() -> int:
    """Run it by its command."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    reason = hosts.why_not()
    if reason:
        sys.stderr.write(f"no soak: {reason}\n")
        return 1
    wrong = run(60 * arguments.minutes, arguments.hosts, arguments.seed, lambda text: sys.stdout.write(f"{text}\n"))
    for each in wrong:
        sys.stdout.write(f"VIOLATION: {each}\n")
    sys.stdout.write(f"{len(wrong)} violations\n")
    return bool(wrong)


if __name__ == "__main__":
    from tests.fleet.soak import main as run_by_its_name  # under which the hosts find it

    sys.exit(run_by_its_name())
