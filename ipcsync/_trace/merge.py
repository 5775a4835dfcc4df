"""Trace files of several processes as one document in the Trace Event format, for Perfetto and chrome://tracing.

Each stream of a process is a track, with the calls that recorded on it or queued a wait, and a short slice where a wait
was released; each thread that waited on the host is a track too. An arrow leads from each record to every release that
it caused. An asynchronous slice shows how long a queued wait was pending.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from ipcsync._trace.layout import Kind, Outcome
from ipcsync._trace.reader import Entry, ProcessTrace, TraceError
from ipcsync._trace.writer import Use

_CATEGORY = "ipcsync"
_RELEASE_NS = 1000  # how long the slice of a release is drawn, if nothing else is in its way
_CALLS = {
    Kind.RECORD: "record",
    Kind.WAIT: "wait",
    Kind.PASSED: "wait, complete already",
    Kind.SYNCHRONIZE: "synchronize",
}

Event = dict[str, Any]
Key = tuple[bytes, int, int, int]
"""Epoch, slot, incarnation, generation: one point."""


class Track(NamedTuple):
    """A stream or a thread of a process."""

    kind: str
    number: int


class Slice(NamedTuple):
    """A slice of a track, in ns."""

    began: int
    ended: int
    name: str
    args: Event


class Source(NamedTuple):
    """Where a record is drawn."""

    pid: int
    tid: int
    began: int


@dataclass
class Summary:
    """Counts of a merge."""

    processes: int = 0
    records: int = 0
    waits: int = 0
    synchronizations: int = 0
    arrows: int = 0
    lost: int = 0
    """Entries that were written over by later ones."""
    unmatched: int = 0
    """Releases whose record is in none of the files."""


@dataclass
class _Process:
    """One process, with its tracks; `pid` is its number in the document."""

    trace: ProcessTrace
    pid: int
    slices: dict[Track, list[Slice]] = field(default_factory=lambda: defaultdict(list))
    records: list[tuple[Key, Slice]] = field(default_factory=list)
    releases: list[tuple[Key, Track, int, str]] = field(default_factory=list)
    pending: list[Slice] = field(default_factory=list)


class Merge:
    """The document of some processes. TraceError if their clocks cannot be compared."""

    def __init__(self, traces: Sequence[ProcessTrace]) -> None:
        boots = {trace.boot for trace in traces}
        if len(boots) > 1:
            files = ", ".join(sorted(trace.path.name for trace in traces))
            raise TraceError(f"these files are of {len(boots)} boots or machines, whose clocks differ: {files}")
        self.summary = Summary(processes=len(traces), lost=sum(trace.lost for trace in traces))
        self._start = min((entry.began for trace in traces for entry in trace.entries), default=0)
        self._traces = traces
        self._flow = 0

    def write(self, file: TextIO) -> Summary:
        """Write the document, an event a line."""
        file.write('{"displayTimeUnit": "ns",\n"traceEvents": [')
        separator = "\n"
        for event in self._events():
            file.write(separator + json.dumps(event, ensure_ascii=False))
            separator = ",\n"
        other = {"made by": "ipcsync trace merge", "lost entries": self.summary.lost, **self._clock()}
        file.write(f'\n],\n"otherData": {json.dumps(other)}}}\n')
        return self.summary

    def _clock(self) -> Event:
        if not self._traces:
            return {}
        first = self._traces[0]
        return {"start, ns since 1970": first.realtime_ns - first.monotonic_ns + self._start}

    def _events(self) -> Iterator[Event]:
        processes = [_process(trace, pid) for trace, pid in zip(self._traces, _pids(self._traces), strict=True)]
        sources: dict[Key, Source] = {}
        drawn = []
        for process in processes:
            release_slices = _release_slices(process)
            lanes = _Lanes(process)
            drawn.append((process, release_slices, lanes))
            for key, record in process.records:
                sources[key] = Source(process.pid, lanes.tid(record), record.began)
        for process, _, lanes in drawn:
            yield from self._of_process(process, lanes)
        for process, release_slices, lanes in drawn:  # behind all slices: an arrow's end takes the one that lies there
            yield from self._arrows(process, release_slices, lanes, sources)

    def _of_process(self, process: _Process, lanes: _Lanes) -> Iterator[Event]:
        pid = process.pid
        yield _metadata(pid, 0, "process_name", name=_title(process.trace))
        yield _metadata(pid, 0, "process_labels", labels=process.trace.command)
        for order, (tid, name) in enumerate(lanes.names()):
            yield _metadata(pid, tid, "thread_name", name=name)
            yield _metadata(pid, tid, "thread_sort_index", sort_index=order)
        for slices in process.slices.values():
            for one in slices:
                yield {
                    "ph": "X",
                    "cat": _CATEGORY,
                    "name": one.name,
                    "pid": pid,
                    "tid": lanes.tid(one),
                    "ts": self._us(one.began),
                    "dur": (one.ended - one.began) / 1000,
                    "args": one.args,
                }
        for number, one in enumerate(process.pending):
            about = {"cat": _CATEGORY, "name": one.name, "pid": pid, "tid": 0, "id": f"{pid}.{number}"}
            yield {"ph": "b", **about, "ts": self._us(one.began), "args": one.args}
            yield {"ph": "e", **about, "ts": self._us(one.ended)}
        self._count(process.trace.entries)

    def _arrows(
        self, process: _Process, slices: Sequence[Slice], lanes: _Lanes, sources: dict[Key, Source]
    ) -> Iterator[Event]:
        for (key, _, _, name), drawn in zip(process.releases, slices, strict=True):
            source = sources.get(key)
            if source is None:
                self.summary.unmatched += 1
                continue
            self._flow += 1
            self.summary.arrows += 1
            about = {"cat": _CATEGORY, "name": name, "id": self._flow}
            yield {"ph": "s", **about, "pid": source.pid, "tid": source.tid, "ts": self._us(source.began)}
            tid = lanes.tid(drawn)
            # Inside of the release's slice: at its edge lies the end of the call that it follows.
            middle = (self._us(drawn.began) + self._us(drawn.ended)) / 2
            yield {"ph": "f", "bp": "e", **about, "pid": process.pid, "tid": tid, "ts": middle}

    def _us(self, ns: int) -> float:
        return (ns - self._start) / 1000

    def _count(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            self.summary.records += entry.kind is Kind.RECORD
            self.summary.waits += entry.kind in (Kind.WAIT, Kind.PASSED)
            self.summary.synchronizations += entry.kind is Kind.SYNCHRONIZE


def _metadata(pid: int, tid: int, what: str, **args: Any) -> Event:
    return {"ph": "M", "cat": "__metadata", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _title(trace: ProcessTrace) -> str:
    clients = dict.fromkeys(use.client for use in trace.uses.values() if use.client)
    return ", ".join(clients) or Path(trace.command.partition(" ")[0]).name or "process"


def _pids(traces: Sequence[ProcessTrace]) -> list[int]:
    """A number for each: its pid, or one above all pids if another has that already (in another pid namespace)."""
    free = max((trace.pid for trace in traces), default=0) + 1
    taken: set[int] = set()
    numbers = []
    for trace in traces:
        number = trace.pid
        if number in taken:
            number, free = free, free + 1
        taken.add(number)
        numbers.append(number)
    return numbers


def _process(trace: ProcessTrace, pid: int) -> _Process:
    """What the entries of one process draw."""
    process = _Process(trace, pid)
    threads: dict[int, int] = {}
    for entry in trace.entries:
        use = trace.uses[entry.use]
        key = (use.epoch, use.slot, use.incarnation, entry.generation)
        point = f"{use.event or f'(unnamed, slot {use.slot})'} #{entry.generation}"
        args = _args(use, entry)
        thread = Track("thread", threads.setdefault(entry.thread, len(threads) + 1))
        is_good = entry.outcome is Outcome.OK
        on_stream = entry.kind in (Kind.RECORD, Kind.RELEASED) or (entry.kind is Kind.WAIT and is_good)
        track = Track("stream", entry.stream) if on_stream else thread
        if entry.kind is Kind.RELEASED:
            process.pending.append(Slice(entry.began, entry.ended, f"pending on {point}", args))
        else:
            name = f"{_CALLS[entry.kind]} {point}{'' if is_good else ' (failed)'}"
            call = Slice(entry.began, entry.ended, name, args)
            process.slices[track].append(call)
            if entry.kind is Kind.RECORD:
                process.records.append((key, call))
        if is_good and entry.kind in (Kind.RELEASED, Kind.PASSED, Kind.SYNCHRONIZE):
            process.releases.append((key, track, entry.ended, point))
    return process


def _args(use: Use, entry: Entry) -> Event:
    return {
        "event": use.event,
        "generation": entry.generation,
        "engine": use.engine,
        "slot": use.slot,
        "incarnation": use.incarnation,
        "epoch": use.epoch.hex()[:8],
        "client": use.client,
        "outcome": entry.outcome.name.lower(),
    }


def _release_slices(process: _Process) -> list[Slice]:
    """A slice for each release, in the order of `releases`, drawn so short that it is in no other's way."""
    edges: dict[Track, list[int]] = {}
    at: dict[Track, set[int]] = defaultdict(set)
    for _, track, when, _ in process.releases:
        at[track].add(when)
    for track, times in at.items():
        calls = process.slices.get(track, ())
        edges[track] = sorted({*times, *(one.began for one in calls), *(one.ended for one in calls)})
    slices = []
    for _, track, when, point in process.releases:
        after = bisect_right(edges[track], when)
        end = when + _RELEASE_NS
        if after < len(edges[track]):
            end = min(end, edges[track][after])
        one = Slice(when, end, f"released by {point}", {})
        process.slices[track].append(one)
        slices.append(one)
    return slices


class _Lane:
    """One tid, and when the slices end that are open on it, the innermost last."""

    def __init__(self, tid: int) -> None:
        self.tid = tid
        self.ends: list[int] = []

    def has_room(self, one: Slice) -> bool:
        """Whether a slice, which begins behind all before it, lies in or behind those."""
        while self.ends and self.ends[-1] <= one.began:
            self.ends.pop()
        return not self.ends or one.ended <= self.ends[-1]


class _Lanes:
    """The tids of one process: one for each track, and more where calls of several threads overlap on it.

    Slices of one tid must lie in each other or apart.
    """

    def __init__(self, process: _Process) -> None:
        self._names: list[tuple[int, str]] = []
        self._tids: dict[int, int] = {}  # by the slice's identity: two may be equal
        for track in sorted(process.slices):
            lanes: list[_Lane] = []
            for one in sorted(process.slices[track], key=lambda one: (one.began, -one.ended)):
                lane = next((lane for lane in lanes if lane.has_room(one)), None)
                if lane is None:
                    lane = _Lane(len(self._names) + 1)
                    lanes.append(lane)
                    more = f" ({len(lanes)})" if len(lanes) > 1 else ""
                    self._names.append((lane.tid, f"{track.kind} {track.number}{more}"))
                lane.ends.append(one.ended)
                self._tids[id(one)] = lane.tid

    def tid(self, one: Slice) -> int:
        """Where a slice is drawn."""
        return self._tids[id(one)]

    def names(self) -> list[tuple[int, str]]:
        """Each tid, and what it is called; streams first."""
        return self._names
