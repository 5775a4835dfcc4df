"""What the processes of a soak wrote down, and what in it must not be.

A process writes a line before it records, and one after each end of a wait, in a file that outlives it. All hosts read
one clock (CLOCK_MONOTONIC), as they have one kernel.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Seen(NamedTuple):
    """The end of a wait: "complete" or an error's class. `by` is the waiting process, `source` the recorder's node."""

    by: str
    source: str
    use: str
    generation: int
    what: str
    began: float
    ended: float


class Held(NamedTuple):
    """A name of the fleet in one process's hands; it asked for the name at `asked`."""

    node: str
    name: str
    asked: float
    since: float
    until: float


class Away(NamedTuple):
    """A node that could not answer others for a while."""

    node: str
    since: float
    until: float


class Journal:
    """A file of lines, one write each: what was written stays when the process is killed."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, kind: str, *values: object) -> None:
        """Write one line, with the time."""
        os.write(self._fd, json.dumps([kind, time.monotonic(), *values]).encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


Lines = list[list[Any]]


def read(path: Path) -> Lines:
    """The lines of a journal, without one that death cut short."""
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


class History:
    """All that was written down on all nodes."""

    def __init__(self) -> None:
        self.recorded: dict[str, list[float]] = {}
        """By use: when each generation's record was about to begin."""
        self.seen: dict[str, list[Seen]] = defaultdict(list)
        """By node."""
        self.held: list[Held] = []
        self.away: list[Away] = []
        self.problems: list[str] = []

    def add(self, node: str, by: str, lines: Lines) -> None:
        """Add what one process of a node wrote down, and what its host did of it."""
        holds: dict[str, tuple[float, float]] = {}
        has_ended = False
        for kind, now, *values in lines:
            if kind == "recorded":
                times = self.recorded.setdefault(values[0], [])
                assert len(times) + 1 == values[1], "a generation was written twice"
                times.append(now)
            elif kind == "seen":
                source, use, generation, what, began = values
                self.seen[node].append(Seen(by, source, use, generation, what, began, now))
            elif kind == "problem":
                self.problems.append(f"{by}: {values[0]}")
            elif kind == "holds" and not has_ended:
                holds[values[0]] = values[1], now
            elif kind == "frees" and values[0] in holds:
                self.held.append(Held(node, values[0], *holds.pop(values[0]), now))
            elif kind == "ended":  # killed, or stopped for longer than its lease: what it holds from then on is nothing
                has_ended = True
                self._let_go(node, holds, now)
        self._let_go(node, holds, float("inf"))

    def _let_go(self, node: str, holds: dict[str, tuple[float, float]], now: float) -> None:
        for name, (asked, since) in holds.items():
            self.held.append(Held(node, name, asked, since, now))
        holds.clear()

    def wrong(self, ttl_s: float, recovery_s: float) -> list[str]:
        """Everything that must not be."""
        found = list(self.problems)
        for seen in self.seen.values():
            found += check(self.recorded, seen)
        return found + check_names(self.held, self.away, ttl_s, recovery_s)


def check(recorded: dict[str, list[float]], seen: Iterable[Seen]) -> list[str]:
    """What is wrong in what one node's processes saw, given what all have recorded."""
    wrong: list[str] = []
    by_use: dict[str, list[Seen]] = defaultdict(list)
    for each in seen:
        by_use[each.use].append(each)
    for use, ends in by_use.items():
        ends.sort(key=lambda each: each.ended)
        times = recorded.get(use, [])
        good = [each for each in ends if each.what == "complete"]
        lost = [each for each in ends if each.what != "complete"]
        for each in good:
            what = f"{each.by}: {each.source} {use} #{each.generation} was seen complete"
            if each.generation > len(times):
                wrong.append(f"{what}, and {len(times)} were recorded")
            elif each.ended < times[each.generation - 1]:
                wrong.append(f"{what} before it was recorded")
            # A wait that began before another process learned of the loss may still have found what was true then.
            earlier = [one for one in lost if one.ended <= each.began and one.generation <= each.generation]
            if earlier:
                wrong.append(f"{what} after #{earlier[0].generation} was lost")
        for each in lost:
            before = [one for one in good if one.ended <= each.began and one.generation >= each.generation]
            if before:
                wrong.append(
                    f"{each.by}: {each.source} {use} #{each.generation} was lost ({each.what}) after "
                    f"#{before[0].generation} was seen complete"
                )
    return wrong


def check_names(held: Iterable[Held], away: Sequence[Away], ttl_s: float, recovery_s: float) -> list[str]:
    """Which names had two holders at once.

    Only a node that does not answer for a TTL loses a name to another one: the new holder must have asked for that
    long, and the old one's node must have been away then, or at most so many seconds before.
    """
    wrong: list[str] = []
    last: dict[str, Held] = {}
    for now in sorted(held, key=lambda each: each.since):
        then = last.get(now.name)
        last[now.name] = now
        if then is None or then.until <= now.since:
            continue
        is_lost = any(
            each.node == then.node and each.since < now.since and each.until + recovery_s > now.asked for each in away
        )
        if then.node == now.node or not is_lost or now.since - now.asked < ttl_s:
            wrong.append(f"{now.name} is held by {now.node} from {now.since:.3f}, and was by {then.node}: {then} {now}")
    return wrong
