"""Trace files of several processes as one document in the Trace Event format, for Perfetto and chrome://tracing.

Each stream of a process is a track, with the calls that recorded on it or queued a wait, and a short slice where a wait
was released; each thread that waited on the host is a track too. An arrow leads from each record to every release that
it caused. An asynchronous slice shows how long a queued wait was pending.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from ipcsync._trace.file import Entry, Kind, Outcome, ProcessTrace, TraceError

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
    """A thread or a stream of a process, and the `place` of a call among those that overlap there.

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


class Merge:
    """The document of one or more processes. TraceError if their clocks cannot be compared."""

    def __init__(self, traces: Sequence[ProcessTrace]) -> None:
        boots = {trace.boot for trace in traces}
        if len(boots) > 1:
            files = ", ".join(sorted(trace.path.name for trace in traces))
            raise TraceError(f"these files are of {len(boots)} boots or machines, whose clocks differ: {files}")
        kinds = Counter(entry.kind for trace in traces for entry in trace.entries)
        self._counts = Counter(
            processes=len(traces),
            records=kinds[Kind.RECORD],
            waits=kinds[Kind.WAIT] + kinds[Kind.PASSED],
            synchronizations=kinds[Kind.SYNCHRONIZE],
            lost=sum(trace.lost for trace in traces),  # written over by later entries
        )
        self._start = min((entry.began for trace in traces for entry in trace.entries), default=0)
        self._traces = traces

    def write(self, file: IO[str]) -> Counter[str]:
        """Write the document, an event a line; the counts of what is in it."""
        file.write('{"displayTimeUnit": "ns",\n"traceEvents": [')
        separator = "\n"
        for event in self._events():
            file.write(separator + json.dumps(event, ensure_ascii=False))
            separator = ",\n"
        first = self._traces[0]
        start = first.realtime_ns - first.monotonic_ns + self._start
        other = {"made by": "ipcsync trace merge", "lost entries": self._counts["lost"], "start, ns since 1970": start}
        file.write(f'\n],\n"otherData": {json.dumps(other)}}}\n')
        return self._counts

    def _events(self) -> Iterator[Event]:
        # The number of each is its pid, or one above all pids if another has that already (in another pid namespace).
        pids = [trace.pid for trace in self._traces]
        for place, pid in enumerate(pids):
            if pid in pids[:place]:
                pids[place] = max(pids) + 1
        processes = [_Process(trace, pid) for trace, pid in zip(self._traces, pids, strict=True)]
        for process in processes:
            yield from self._of_process(process)
        sources = {key: (process, *where) for process in processes for key, where in process.records.items()}
        for process in processes:  # behind all slices: an arrow's end takes the one that lies there
            yield from self._arrows(process, sources)

    def _of_process(self, process: _Process) -> Iterator[Event]:
        pid = process.pid
        clients = dict.fromkeys(use.client for use in process.trace.uses.values() if use.client)
        title = ", ".join(clients) or Path(process.trace.command.partition(" ")[0]).name or "process"
        yield _metadata(pid, 0, "process_name", name=title)
        yield _metadata(pid, 0, "process_labels", labels=process.trace.command)
        for track, tid in process.tids.items():
            yield _metadata(pid, tid, "thread_name", name=str(track))
            yield _metadata(pid, tid, "thread_sort_index", sort_index=tid)
            for one in process.slices[track]:
                yield self._event("X", one.name, pid, tid, one.began, dur=(one.ended - one.began) / 1000, args=one.args)
        for number, one in enumerate(process.pending):
            yield self._event("b", one.name, pid, 0, one.began, id=f"{pid}.{number}", args=one.args)
            yield self._event("e", one.name, pid, 0, one.ended, id=f"{pid}.{number}")

    def _arrows(self, process: _Process, sources: dict[Key, tuple[_Process, Track, int]]) -> Iterator[Event]:
        for key, track, drawn, point in process.releases:
            if key not in sources:
                self._counts["unmatched"] += 1  # the record is in none of the files
                continue
            source, theirs, began = sources[key]
            self._counts["arrows"] += 1
            number = self._counts["arrows"]
            yield self._event("s", point, source.pid, source.tids[theirs], began, id=number)
            end = self._event("f", point, process.pid, process.tids[track], drawn.began, id=number, bp="e")
            # Inside of the release's slice: at its edge lies the end of the call that it follows.
            end["ts"] += (drawn.ended - drawn.began) / 2000
            yield end

    def _event(self, phase: str, name: str, pid: int, tid: int, ns: int, **more: Any) -> Event:
        ts = (ns - self._start) / 1000
        return {"ph": phase, "cat": "ipcsync", "name": name, "pid": pid, "tid": tid, "ts": ts, **more}


def _metadata(pid: int, tid: int, what: str, **args: Any) -> Event:
    return {"ph": "M", "cat": "__metadata", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": args}


class _Process:
    """What the entries of one process draw; `pid` is its number in the document, `tids` those of its tracks."""

    def __init__(self, trace: ProcessTrace, pid: int) -> None:
        self.trace = trace
        self.pid = pid
        self.slices: dict[Track, list[Slice]] = defaultdict(list)
        self.records: dict[Key, tuple[Track, int]] = {}
        self.releases: list[tuple[Key, Track, Slice, str]] = []
        self.pending: list[Slice] = []
        self._threads: dict[int, int] = {}
        self._ends: dict[tuple[str, int], list[int]] = defaultdict(list)  # of the last call on each track
        released = [found for entry in trace.entries if (found := self._draw(entry)) is not None]
        self._draw_releases(released)
        self.tids = {track: tid for tid, track in enumerate(sorted(self.slices), 1)}  # streams first

    def _draw(self, entry: Entry) -> tuple[Key, Track, int, str] | None:
        """Draw a call; what was released by it, where and when."""
        use = self.trace.uses[entry.use]
        key = (use.epoch, use.slot, use.incarnation, entry.generation)
        point = f"{use.event or f'(unnamed, slot {use.slot})'} #{entry.generation}"
        args = {**use._asdict(), "epoch": use.epoch.hex()[:8], "generation": entry.generation}
        args["outcome"] = entry.outcome.name.lower()
        is_good = entry.outcome is Outcome.OK
        if entry.kind is Kind.RELEASED:
            track = Track("stream", entry.stream)
            self.pending.append(Slice(entry.began, entry.ended, f"pending on {point}", args))
        else:
            if entry.kind is Kind.RECORD or (entry.kind is Kind.WAIT and is_good):
                where = "stream", entry.stream
            else:
                where = "thread", self._threads.setdefault(entry.thread, len(self._threads) + 1)
            ends = self._ends[where]  # threads, and tasks of one thread, call at the same time
            place = next((place for place, ended in enumerate(ends) if ended <= entry.began), len(ends))
            ends[place : place + 1] = [entry.ended]
            track = Track(*where, place)
            name = f"{_CALLS[entry.kind]} {point}{'' if is_good else ' (failed)'}"
            self.slices[track].append(Slice(entry.began, entry.ended, name, args))
        if entry.kind is Kind.RECORD:
            self.records[key] = (track, entry.began)
        releases = is_good and entry.kind in (Kind.RELEASED, Kind.PASSED, Kind.SYNCHRONIZE)
        return (key, track, entry.ended, point) if releases else None

    def _draw_releases(self, released: Sequence[tuple[Key, Track, int, str]]) -> None:
        """A slice for each release, drawn so short that it is in no other's way."""
        edges: dict[Track, list[int]] = defaultdict(list)
        for _, track, when, _ in released:
            edges[track].append(when)
        for track, times in edges.items():
            times += [edge for one in self.slices[track] for edge in (one.began, one.ended)]
            times.sort()
        for key, track, when, point in released:
            after = bisect_right(edges[track], when)
            one = Slice(when, min([when + _RELEASE_NS, *edges[track][after : after + 1]]), f"released by {point}", {})
            self.slices[track].append(one)
            self.releases.append((key, track, one, point))
