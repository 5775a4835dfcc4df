"""A trace file and its merge: what is written is read again, the ring is bounded, damage is told, arrows are right."""

from __future__ import annotations

import io
import json
import os
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

import ipcsync
from ipcsync._trace.file import (
    ENTRIES,
    ENTRIES_AT,
    ENTRY,
    FILE_BYTES,
    MAGIC,
    NAMES,
    SUFFIX,
    Entry,
    Kind,
    Outcome,
    ProcessTrace,
    TraceError,
    Use,
    Writer,
    files_in,
    prepare,
    read,
    writer_in,
)
from ipcsync._trace.merge import Merge
from tests import trace_rules

_USE = Use(b"e" * 16, 3, 7, "kv/ready", "event", "decode")
_THREAD = 1 << 40


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    use = writer.name(_USE)
    writer.put(Kind.RECORD, use, 1, 99, 1000, 1500)
    writer.put(Kind.WAIT, use, 2, 98, 2000, 2500, Outcome.FAILED)
    trace = read(writer.path)
    assert (trace.pid, trace.uses, trace.lost) == (os.getpid(), {use: _USE}, 0)
    assert trace.entries == [
        Entry(Kind.RECORD, use, 1, 99, threading.get_ident(), 1000, 1500, Outcome.OK),
        Entry(Kind.WAIT, use, 2, 98, threading.get_ident(), 2000, 2500, Outcome.FAILED),
    ]


def test_the_longest_name_fits_and_a_clients_name_is_cut(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    writer.name(_USE._replace(event="é" * 127 + "x", client="c" * 1000, engine="timeline"))
    (use,) = read(writer.path).uses.values()
    assert (use.event, use.client, use.engine) == ("é" * 127 + "x", "c" * 160, "timeline")


def test_a_full_ring_keeps_the_newest_and_counts_the_lost(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    use = writer.name(_USE)
    for number in range(1, ENTRIES + 11):
        writer.put(Kind.RECORD, use, number, 1, number, number)
    trace = read(writer.path)
    assert [entry.generation for entry in trace.entries] == list(range(11, ENTRIES + 11))
    assert trace.lost == 10
    assert writer.path.stat().st_size == FILE_BYTES


def test_entries_of_a_use_whose_name_was_written_over_are_lost(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    first = writer.name(_USE)
    writer.put(Kind.RECORD, first, 1, 1, 1, 1)
    for slot in range(NAMES):
        last = writer.name(_USE._replace(slot=slot))
    writer.put(Kind.RECORD, last, 1, 1, 2, 2)
    trace = read(writer.path)
    assert len(trace.uses) == NAMES
    assert [entry.use for entry in trace.entries] == [last]
    assert trace.lost == 1


def test_an_entry_that_was_not_finished_does_not_count(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    use = writer.name(_USE)
    for number in range(1, 4):
        writer.put(Kind.RECORD, use, number, 1, number, number)
    with writer.path.open("r+b") as file:  # as a kill inside of the third leaves it: all but the number
        file.seek(ENTRIES_AT + 3 * ENTRY.size + ENTRY.size - 8)
        file.write(bytes(8))
    trace = read(writer.path)
    assert [entry.generation for entry in trace.entries] == [1, 2]
    assert trace.lost == 0


@pytest.mark.parametrize("content", [b"", b"x" * FILE_BYTES, MAGIC + bytes(FILE_BYTES - 8)])
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / f"1-x{SUFFIX}"
    path.write_bytes(content)
    with pytest.raises(TraceError, match="is not a trace"):
        read(path)


def test_a_damaged_entry_is_refused(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    use = writer.name(_USE)
    writer.put(77, use, 1, 1, 1, 1)
    with pytest.raises(TraceError, match="is damaged"):
        read(writer.path)


@pytest.mark.process
def test_a_forked_child_writes_nothing_to_its_parents_file(tmp_path: Path) -> None:
    writer = writer_in(tmp_path)
    use = writer.name(_USE)
    child = os.fork()
    if not child:
        writer.put(Kind.RECORD, use, 1, 1, 1, 1)
        os._exit(0 if not writer.is_mine[0] and writer_in(tmp_path) is not writer else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert read(writer.path).entries == []
    assert len(files_in(tmp_path)) == 2
    assert writer_in(tmp_path) is writer


def test_a_directory_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    made = prepare(tmp_path / "a" / "b")
    assert made.stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="File exists") as caught:
        prepare(tmp_path / "file")
    assert isinstance(caught.value, ipcsync.IpcSyncError)


def test_a_working_directory_that_was_removed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here").rmdir()
    with pytest.raises(ipcsync.IpcSyncError, match="there can be no traces in here: No such file"):
        prepare("here")


def _trace(pid: int, entries: list[Entry], client: str = "decode") -> ProcessTrace:
    path = Path(f"{pid}-0{SUFFIX}")
    return ProcessTrace(path, pid, "python worker.py", "boot", 0, 5_000, {1: _USE._replace(client=client)}, entries, 0)


def _entry(
    kind: Kind, generation: int, began: int, ended: int, outcome: Outcome = Outcome.OK, thread: int = 1
) -> Entry:
    return Entry(kind, 1, generation, 5, _THREAD + thread, began, ended, outcome)


def _merged(traces: list[ProcessTrace]) -> tuple[list[trace_rules.Event], Counter[str]]:
    text = io.StringIO()
    counts = Merge(traces).write(text)
    events: list[trace_rules.Event] = json.loads(text.getvalue())["traceEvents"]
    trace_rules.check(events)
    return events, counts


def test_an_arrow_leads_from_a_record_to_all_that_it_released() -> None:
    recorder = _trace(10, [_entry(Kind.RECORD, 1, 1_000, 3_000), _entry(Kind.RECORD, 2, 9_000, 9_500)])
    waiter = _trace(
        20,
        [
            _entry(Kind.WAIT, 1, 2_000, 2_100),
            _entry(Kind.RELEASED, 1, 2_100, 7_000),
            _entry(Kind.PASSED, 1, 7_500, 7_600),
            _entry(Kind.SYNCHRONIZE, 2, 8_000, 9_900),
        ],
    )
    events, counts = _merged([waiter, recorder])
    first, second = (10, "record kv/ready #1"), (10, "record kv/ready #2")
    assert sorted(trace_rules.arrows(events)) == [
        (first, (20, "released by kv/ready #1")),
        (first, (20, "released by kv/ready #1")),
        (second, (20, "released by kv/ready #2")),
    ]
    assert counts == {"processes": 2, "records": 2, "waits": 2, "synchronizations": 1, "arrows": 3, "lost": 0}
    assert set(trace_rules.tracks(events).values()) == {"stream 5", "thread 1"}
    assert [(row["ts"], row["name"]) for row in events if row["ph"] == "b"] == [(1.1, "pending on kv/ready #1")]


def test_what_failed_or_has_no_record_here_gets_no_arrow() -> None:
    entries = [
        _entry(Kind.WAIT, 1, 1, 2, Outcome.FAILED),
        _entry(Kind.SYNCHRONIZE, 1, 3, 4, Outcome.FAILED),
        _entry(Kind.RELEASED, 1, 5, 6, Outcome.UNSEEN),
        _entry(Kind.RELEASED, 1, 5, 7),
    ]
    events, counts = _merged([_trace(10, entries)])
    assert trace_rules.arrows(events) == []
    assert (counts["arrows"], counts["unmatched"]) == (0, 1)
    assert "wait kv/ready #1 (failed)" in {row["name"] for row in events}


def test_calls_that_overlap_on_a_stream_get_tracks_of_their_own() -> None:
    entries = [_entry(Kind.WAIT, 1, 10, 30), _entry(Kind.WAIT, 2, 20, 40, thread=2), _entry(Kind.WAIT, 3, 40, 50)]
    events, _ = _merged([_trace(10, entries)])
    assert sorted(trace_rules.tracks(events).values()) == ["stream 5", "stream 5 (2)"]


def test_calls_of_tasks_that_overlap_on_a_thread_get_tracks_of_their_own() -> None:
    calls = [(1, 10, 30), (2, 20, 40), (3, 40, 50)]
    events, _ = _merged([_trace(10, [_entry(Kind.SYNCHRONIZE, *call) for call in calls])])
    assert sorted(trace_rules.tracks(events).values()) == ["thread 1", "thread 1 (2)"]


def test_processes_of_one_pid_are_told_apart() -> None:
    events, _ = _merged([_trace(10, [_entry(Kind.RECORD, 1, 1, 2)], name) for name in ("left", "right")])
    names = {row["pid"]: row["args"]["name"] for row in events if row["name"] == "process_name"}
    assert names == {10: "left", 11: "right"}


def test_traces_of_two_boots_are_refused() -> None:
    with pytest.raises(TraceError, match="2 boots"):
        Merge([_trace(10, []), replace(_trace(11, []), boot="another")])
