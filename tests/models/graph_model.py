"""Brackets around the launch of graphs, in every interleaving: explicit states, breadth first.

Streams L (launches), F (feeds), D (drains) of one process run their operations in order, all at once; hosts queue
theirs in order. The graph holds only `wait gate >= 1`, work, `tap = 1`. Around launch r, in the host's order:

    prepare   L   wait drained >= r-1 · taps = 0 · armed = r; on another L than r-1 first: wait over >= r-1
    feed      F   wait over >= r-1 · (wait for the point · gate = 1) for each · fed = r
    launch    L   none, one, several, any graph
    end       L   taps = 1 · wait fed >= r · gates = 0 · over = r
    drain     D   wait armed >= r · (wait tap >= 1 · record) for each · drained = r
                  without records: wait over >= r · drained = r

Another process makes its generations when it likes, or dies: then its words are released. It is found when work runs
before its point (a silent pass), when a record is made before its work, and when anything stands still for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Op = tuple[Any, ...]
"""(ge or set, word, value); (own, event, r): wait for our record; (work, layer, r, need): it needs that generation of
the other process's word `layer`; (record, event, r, behind): behind that work."""
Call = tuple[str, list[Op]]
"""What one call of the host puts on a stream."""
Host = list[Call]

_RELEASED = 99


class Model:
    """Some hosts, and what may happen. `queues`: which hardware queue each stream has, by default each its own."""

    def __init__(
        self,
        hosts: Sequence[Host],
        *,
        queues: Mapping[str, int] | None = None,
        most: tuple[int, int] = (4, 4),
        death: bool = True,
    ) -> None:
        streams = sorted({stream for host in hosts for stream, _ in host})
        self._hosts = hosts
        self._queue_of = queues or {stream: number for number, stream in enumerate(streams)}
        self._most = most
        self._death = death
        self.faults: set[str] = set()
        self.states = 0

    def explore(self) -> list[str]:
        """The kinds of faults found."""
        queues: tuple[tuple[Op, ...], ...] = ((),) * (1 + max(self._queue_of.values()))
        first: tuple[Any, ...] = ((0,) * len(self._hosts), (0, 0), False, (), queues, frozenset(), frozenset())
        seen, todo = {first}, deque([first])
        while todo:
            for each in self._after(todo.popleft()):
                if each not in seen:
                    seen.add(each)
                    todo.append(each)
        self.states = len(seen)
        return sorted(self.faults)

    def _after(self, state: Any) -> Iterable[Any]:
        at, words, died, memory, queued, worked, recorded = state
        after, deaths = [], []
        for number, host in enumerate(self._hosts):
            if at[number] < len(host):
                stream, ops = host[at[number]]
                mine = self._queue_of[stream]
                more = tuple(queue + tuple(ops) if n == mine else queue for n, queue in enumerate(queued))
                further = (*at[:number], at[number] + 1, *at[number + 1 :])
                after.append((further, words, died, memory, more, worked, recorded))
        if not died:
            for i in (0, 1):
                if words[i] < self._most[i]:
                    made = (*words[:i], words[i] + 1, *words[i + 1 :])
                    after.append((at, made, died, memory, queued, worked, recorded))
            if self._death:
                deaths.append((at, (_RELEASED, _RELEASED), True, memory, queued, worked, recorded))
        for number, queue in enumerate(queued):
            if queue and self._may_run(queue[0], words, memory, recorded):
                op, rest = queue[0], tuple(q[1:] if n == number else q for n, q in enumerate(queued))
                if fault := self._fault(op, words, died, worked):
                    self.faults.add(fault)
                    continue
                now = dict(memory) | ({op[1]: op[2]} if op[0] == "set" else {})
                kept = tuple(sorted((word, value) for word, value in now.items() if value))
                does = worked | ({op[1:3]} if op[0] == "work" else set())
                has = recorded | ({op[1:3]} if op[0] == "record" else set())
                after.append((at, words, died, kept, rest, does, has))
        if not after and any(queued):
            self.faults.add(f"stands still: {[queue[0][:3] for queue in queued if queue]}")
        return [*after, *deaths]

    def _may_run(self, op: Op, words: Any, memory: Any, recorded: Any) -> bool:
        if op[0] == "ge":
            value = words[op[1][1]] if op[1][0] == "word" else dict(memory).get(op[1], 0)
            return bool(value >= op[2])
        return op[0] != "own" or op[1:3] in recorded

    def _fault(self, op: Op, words: Any, died: bool, worked: Any) -> str:
        if op[0] == "work" and not died and words[op[1]] < op[3]:
            return f"silent pass: layer {op[1]} of replay {op[2]} works, and only {words[op[1]]} is complete"
        if op[0] == "record" and op[3] not in worked:
            return f"early: generation {op[2]} of event {op[1]} is recorded before its work"
        return ""


OVER, DRAINED, ARMED, FED = (("over", 0),), (("drained", 0),), (("armed", 0),), (("fed", 0),)
_Words = tuple[int, ...]


def prepare(r: int, taps: _Words = (0,), s: str = "L", *, other: bool = False) -> Call:
    """`other`: the bracket before was on another launch stream."""
    return s, [
        *[("ge", *OVER, r - 1)] * other,
        ("ge", *DRAINED, r - 1),
        *(("set", ("tap", tap), 0) for tap in taps),
        ("set", *ARMED, r),
    ]


def feed(r: int, gates: _Words = (0,), s: str = "F") -> Call:
    opened = [op for gate in gates for op in (("ge", ("word", gate), r), ("set", ("gate", gate), 1))]
    return s, [("ge", *OVER, r - 1), *opened, ("set", *FED, r)]


def launch(r: int, gates: _Words = (0,), taps: _Words = (0,), s: str = "L") -> Call:
    ops: list[Op] = []
    for i in sorted({*gates, *taps}):
        ops += [("ge", ("gate", i), 1)] * (i in gates)
        ops += [("work", i, r, r if i in gates else 0)]
        ops += [("set", ("tap", i), 1)] * (i in taps)
    return s, ops


def end(r: int, gates: _Words = (0,), taps: _Words = (0,), s: str = "L", fed: int = 0) -> Call:
    reset = (("set", ("gate", gate), 0) for gate in gates)
    return s, [*(("set", ("tap", tap), 1) for tap in taps), ("ge", *FED, fed or r), *reset, ("set", *OVER, r)]


def drain(r: int, taps: _Words = (0,), s: str = "D", records: bool = True) -> Call:
    if not records:
        return s, [("ge", *OVER, r), ("set", *DRAINED, r)]
    drained = (op for tap in taps for op in (("ge", ("tap", tap), 1), ("record", tap, r, (tap, r))))
    return s, [("ge", *ARMED, r), *drained, ("set", *DRAINED, r)]


def bracket(
    r: int,
    gates: _Words = (0,),
    taps: _Words = (0,),
    graph: tuple[_Words, _Words] | None = None,
    s: str = "",
    *,
    other: bool = False,
) -> Host:
    """All of one; `s` is put to the names of its streams."""
    return [
        prepare(r, taps, "L" + s, other=other),
        feed(r, gates, "F" + s),
        launch(r, *(graph or (gates, taps)), "L" + s),
        end(r, gates, taps, "L" + s),
        drain(r, taps, "D" + s),
    ]


def without(call: Call, operation: Op) -> Call:
    """The call without that operation."""
    return call[0], [op for op in call[1] if op[:2] != operation]


def unfed(gated: bool) -> Call:
    """A launch outside of any bracket, a warm-up for example."""
    return "L", [("ge", ("gate", 0), 1)] * gated + [("work", 0, 0, 0), ("set", ("tap", 0), 1)]


BOTH = (0, 1)
CLOSE_F: Call = ("F", [("set", *FED, 1)])
ONE = {"F": 0, "L": 0, "D": 0}


def to_and_fro(r: int) -> Host:
    """Gate 1 is for what is made behind our record of event 0."""
    there, fed = feed(r)[1][:-1], feed(r)[1][-1]
    back: list[Op] = [("own", 0, r), ("set", ("gate", 1), 1)]
    second: list[Op] = [("ge", ("gate", 1), 1), ("work", 1, r, 0), ("set", ("tap", 1), 1)]
    steps: Host = [("F", [*there, *back, fed]), ("L", [*launch(r)[1], *second])]
    return [prepare(r, BOTH), *steps, end(r, BOTH, BOTH), drain(r, BOTH)]


TO_AND_FRO: Host = to_and_fro(1)
PIPELINE: Host = [*bracket(1), prepare(2), ("F", [("own", 0, 1), *feed(2)[1]]), launch(2), end(2), drain(2)]
_OPENED: Host = [prepare(1), feed(1), launch(1)]
_BOTH_2 = bracket(2, BOTH, BOTH)

HOLDS: dict[str, Sequence[Host]] = {
    "three replays": [bracket(1) + bracket(2) + bracket(3)],
    "two layers": [bracket(1, BOTH, BOTH) + _BOTH_2],
    "a block that launches nothing, drained without records": [
        [prepare(1), feed(1), end(1), drain(1, records=False), *bracket(2), *bracket(3)]
    ],
    "a block that launches twice": [[*_OPENED, launch(1), end(1), drain(1), *bracket(2)]],
    "records only, behind an unfed launch": [[unfed(False), *bracket(1, ()), *bracket(2, ())]],
    "an unfed launch between replays": [[*bracket(1), unfed(True), *bracket(2)]],
    "launched, then raised: drained without records": [[*_OPENED, end(1), drain(1, records=False), *bracket(2)]],
    "an exception at the prepare, which is repeated": [
        [prepare(1), prepare(1), CLOSE_F, end(1), drain(1, records=False), *bracket(2)]
    ],
    "an exception at the end: ended anew under a fresh number": [
        [*_OPENED, end(1), end(2, fed=1), drain(2, records=False), *bracket(3)]
    ],
    "an exception at the end, which was not queued": [[*_OPENED, end(2, fed=1), drain(2, records=False), *bracket(3)]],
    "an exception at the drain: drained again": [[*_OPENED, end(1), drain(1), drain(1, records=False), *bracket(2)]],
    "the same before one to and fro": [[*bracket(1, BOTH, BOTH), drain(1, records=False), *to_and_fro(2)]],
    "an exception at the feed, which was not queued": [
        [prepare(1), CLOSE_F, end(1), drain(1, records=False), *bracket(2)]
    ],
    "an exception at the feed, which was queued": [
        [prepare(1), feed(1), CLOSE_F, end(1), drain(1, records=False), *bracket(2)]
    ],
    "an exception at the feed, queued in part": [
        [prepare(1), ("F", feed(1, BOTH)[1][:3]), CLOSE_F, end(1, BOTH), drain(1, records=False), *_BOTH_2]
    ],
    "a smaller graph than was fed": [bracket(1, BOTH, (0,), ((0,), (0,))) + _BOTH_2],
    "a second launch stream": [bracket(1, s="a") + bracket(2, s="b", other=True) + bracket(3, s="a", other=True)],
    "to and fro within a replay": [TO_AND_FRO],
    "a pipeline over replays": [PIPELINE],
}
IN_ONE_QUEUE = [
    "three replays",
    "two layers",
    "a block that launches nothing, drained without records",
    "a smaller graph than was fed",
    "a pipeline over replays",
]
FOUND: dict[str, Sequence[Host]] = {
    "the drain without `armed`": [[*bracket(1), *bracket(2)[:4], without(drain(2), ("ge", *ARMED))]],
    "the feed without `over`": [
        [*bracket(1), prepare(2), without(feed(2), ("ge", *OVER)), launch(2), end(2), drain(2)]
    ],
    "the end without `fed`, a smaller graph": [
        [prepare(1), feed(1, BOTH), launch(1), without(end(1, BOTH), ("ge", *FED)), drain(1), *_BOTH_2]
    ],
    "the prepare without `over`, another launch stream": [bracket(1, s="a") + bracket(2, s="b")],
    "the prepare without `drained`, a pipeline": [
        [*PIPELINE[:5], without(prepare(2), ("ge", *DRAINED)), *PIPELINE[6:]]
    ],
    "the feed again under its number": [[prepare(1), feed(1), feed(1), launch(1), end(1), drain(1), *bracket(2)]],
    "the end again under its number": [[*_OPENED, end(1), end(1), drain(1), *bracket(2)]],
    "the drain again by its taps, before one to and fro": [[*bracket(1, BOTH, BOTH), drain(1, BOTH), *to_and_fro(2)]],
    "two brackets open at once on one stream": [
        [prepare(1), feed(1), prepare(2), feed(2), launch(2), end(2), drain(2), launch(1), end(1), drain(1)]
    ],
    "an unfed launch on another stream while a bracket is open": [bracket(1), [("Lz", unfed(False)[1])]],
}
