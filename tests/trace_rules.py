"""The rules of the Trace Event format that a merged trace must keep, and what is asked of one in tests."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

Event = dict[str, Any]
_COMMON = {"ph", "name", "pid", "tid", "ts"}
_MORE = {"X": {"dur", "args"}, "M": {"args"}, "b": {"id", "cat"}, "e": {"id", "cat"}, "s": {"id", "cat"}, "f": {"id"}}
_METADATA = {"process_name", "process_labels", "thread_name", "thread_sort_index"}


def load(path: Path) -> list[Event]:
    """The events of a merged file, which must keep the rules."""
    document = json.loads(path.read_text())
    assert set(document) == {"displayTimeUnit", "traceEvents", "otherData"}
    assert document["displayTimeUnit"] in ("ms", "ns")
    events: list[Event] = document["traceEvents"]
    check(events)
    return events


def check(events: list[Event]) -> None:
    """Raise AssertionError for what Perfetto or chrome://tracing would not take as it is meant."""
    for event in events:
        assert event.keys() >= _COMMON | _MORE[event["ph"]], event
        assert type(event["pid"]) is int
        assert type(event["tid"]) is int
        assert isinstance(event["ts"], int | float), event
        assert event["ts"] >= 0, event
        if event["ph"] == "X":
            assert event["dur"] >= 0, event
        if event["ph"] == "M":
            assert event["name"] in _METADATA
    _check_named(events)
    _check_nested(events)
    _check_pairs(events, "b", "e")
    _check_pairs(events, "s", "f")
    for event in events:
        if event["ph"] in ("s", "f"):
            assert _slices_at(events, event), f"no slice lies at {event}"
        if event["ph"] == "f":
            assert event["bp"] == "e"


def _check_named(events: list[Event]) -> None:
    """Every track has a name, and every process."""
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in events if event["ph"] in "Xsf"} <= named
    processes = [event["pid"] for event in events if event["name"] == "process_name"]
    assert sorted(processes) == sorted({event["pid"] for event in events})


def _check_nested(events: list[Event]) -> None:
    """Slices of one track lie in each other or apart."""
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            began = round(event["ts"] * 1000)
            tracks[event["pid"], event["tid"]].append((began, -(began + round(event["dur"] * 1000))))
    for slices in tracks.values():
        ends: list[int] = []
        for began, negative_end in sorted(slices):
            while ends and ends[-1] <= began:
                ends.pop()
            assert not ends or -negative_end <= ends[-1]
            ends.append(-negative_end)


def _check_pairs(events: list[Event], begin: str, end: str) -> None:
    """Each id has one beginning and one end, not before it, of the same name and category."""
    begins = {event["id"]: event for event in events if event["ph"] == begin}
    ends = {event["id"]: event for event in events if event["ph"] == end}
    assert len(begins) + len(ends) == sum(event["ph"] in (begin, end) for event in events)
    assert begins.keys() == ends.keys()
    for number, event in begins.items():
        other = ends[number]
        assert (event["name"], event["cat"]) == (other["name"], other["cat"])
        assert event["ts"] <= other["ts"]


def _slices_at(events: list[Event], at: Event) -> list[Event]:
    """The slices of a track that enclose an end of an arrow, the outer ones first."""
    return [
        event
        for event in events
        if event["ph"] == "X"
        and (event["pid"], event["tid"]) == (at["pid"], at["tid"])
        and event["ts"] <= at["ts"] <= event["ts"] + event["dur"]
    ]


def tracks(events: list[Event]) -> dict[tuple[int, int], str]:
    """The name of each (pid, tid)."""
    return {(row["pid"], row["tid"]): row["args"]["name"] for row in events if row["name"] == "thread_name"}


def arrows(events: list[Event]) -> list[tuple[tuple[int, str], tuple[int, str]]]:
    """Each arrow, from (pid, slice) to (pid, slice)."""
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    return [(_bound_to(events, event), _bound_to(events, ends[event["id"]])) for event in events if event["ph"] == "s"]


def _bound_to(events: list[Event], at: Event) -> tuple[int, str]:
    innermost = max(_slices_at(events, at), key=lambda event: (event["ts"], -event["dur"]))
    return at["pid"], innermost["name"]
