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
    """A thread of a process, or a stream with the `place` of a thread among those that call on it.

    So the slices of a track lie in each other or apart, as those of one tid must.
    """

    kind: str
    number: int
    place: int = 0

    def __str__(self) -> str:
        return f"{self.kind} {self.number}" + (f" ({self.place + 1})" if self.place else "")


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
    """One process, with its tracks, streams first; `pid` is its number in the document."""

    trace: ProcessTrace
    pid: int
    slices: dict[Track, list[Slice]] = field(default_factory=lambda: defaultdict(list))
    records: list[tuple[Key, Track, int]] = field(default_factory=list)
    releases: list[tuple[Key, Track, int, str]] = field(default_factory=list)
    pending: list[Slice] = field(default_factory=list)
    tids: dict[Track, int] = field(default_factory=dict)


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
            drawn.append((process, _release_slices(process)))
            process.tids = {track: tid for tid, track in enumerate(sorted(process.slices), 1)}
            for key, track, began in process.records:
                sources[key] = Source(process.pid, process.tids[track], began)
        for process, _ in drawn:
            yield from self._of_process(process)
        for process, release_slices in drawn:  # behind all slices: an arrow's end takes the one that lies there
            yield from self._arrows(process, release_slices, sources)

    def _of_process(self, process: _Process) -> Iterator[Event]:
        pid = process.pid
        yield _metadata(pid, 0, "process_name", name=_title(process.trace))
        yield _metadata(pid, 0, "process_labels", labels=process.trace.command)
        for track, tid in process.tids.items():
            yield _metadata(pid, tid, "thread_name", name=str(track))
            yield _metadata(pid, tid, "thread_sort_index", sort_index=tid)
            for one in process.slices[track]:
                yield {
                    "ph": "X",
                    "cat": _CATEGORY,
                    "name": one.name,
                    "pid": pid,
                    "tid": tid,
                    "ts": self._us(one.began),
                    "dur": (one.ended - one.began) / 1000,
                    "args": one.args,
                }
        for number, one in enumerate(process.pending):
            about = {"cat": _CATEGORY, "name": one.name, "pid": pid, "tid": 0, "id": f"{pid}.{number}"}
            yield {"ph": "b", **about, "ts": self._us(one.began), "args": one.args}
            yield {"ph": "e", **about, "ts": self._us(one.ended)}
        self._count(process.trace.entries)

    def _arrows(self, process: _Process, slices: Sequence[Slice], sources: dict[Key, Source]) -> Iterator[Event]:
        for (key, track, _, name), drawn in zip(process.releases, slices, strict=True):
            source = sources.get(key)
            if source is None:
                self.summary.unmatched += 1
                continue
            self._flow += 1
            self.summary.arrows += 1
            about = {"cat": _CATEGORY, "name": name, "id": self._flow}
            yield {"ph": "s", **about, "pid": source.pid, "tid": source.tid, "ts": self._us(source.began)}
            # Inside of the release's slice: at its edge lies the end of the call that it follows.
            middle = (self._us(drawn.began) + self._us(drawn.ended)) / 2
            yield {"ph": "f", "bp": "e", **about, "pid": process.pid, "tid": process.tids[track], "ts": middle}

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
    callers: dict[int, list[int]] = defaultdict(list)  # the threads that call on each stream
    for entry in trace.entries:
        use = trace.uses[entry.use]
        key = (use.epoch, use.slot, use.incarnation, entry.generation)
        point = f"{use.event or f'(unnamed, slot {use.slot})'} #{entry.generation}"
        args = _args(use, entry)
        thread = Track("thread", threads.setdefault(entry.thread, len(threads) + 1))
        is_good = entry.outcome is Outcome.OK
        on_stream = entry.kind in (Kind.RECORD, Kind.RELEASED) or (entry.kind is Kind.WAIT and is_good)
        track = Track("stream", entry.stream) if on_stream else thread
        if entry.kind is not Kind.RELEASED and on_stream:
            if entry.thread not in callers[entry.stream]:
                callers[entry.stream].append(entry.thread)
            track = track._replace(place=callers[entry.stream].index(entry.thread))
        if entry.kind is Kind.RELEASED:
            process.pending.append(Slice(entry.began, entry.ended, f"pending on {point}", args))
        else:
            name = f"{_CALLS[entry.kind]} {point}{'' if is_good else ' (failed)'}"
            call = Slice(entry.began, entry.ended, name, args)
            process.slices[track].append(call)
            if entry.kind is Kind.RECORD:
                process.records.append((key, track, call.began))
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
