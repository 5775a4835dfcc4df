"""What is left of a process that ended or was killed, at whatever instruction, and who cleans up after it."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator

import pytest

from tests.unit.drivers.host_process import PREFIX, HostProcess, own_segment, segment_files

pytestmark = pytest.mark.process

NOT_READY = 600
INVALID_HANDLE = 400
INVALID_VALUE = 1


@pytest.fixture
def segment() -> Iterator[str]:
    with own_segment() as name:
        yield name


def used(process: HostProcess) -> dict[str, int]:
    """How many lines of the segment's tables are taken, and how many stream slots are retired."""
    result: dict[str, int] = process.run(
        "data = bytes(process.segment._map)\n"
        "lines = range(layout.PROCESSES, layout.STREAMS, layout.PROCESS_WORDS)\n"
        "streams = data[layout.STREAM_MAP:layout.EVENT_MAP]\n"
        "{'processes': sum(process.words[line] != 0 for line in lines),\n"
        " 'streams': streams.count(layout.USED), 'retired': streams.count(layout.RETIRED),\n"
        " 'events': data[layout.EVENT_MAP:].count(layout.USED)}"
    )
    return result


def test_a_record_pending_when_its_process_is_killed_stays_pending_for_ever(segment: str) -> None:
    with HostProcess(segment) as watcher, HostProcess(segment) as victim:
        # The watcher's own event, recorded by the victim: the event lives, its record's process does not.
        data = watcher.run("event, data = exported(); stream = d.cuStreamCreate(1)[1]; data")
        victim.run(f"stream = d.cuStreamCreate(1)[1]; gate = hold(stream); d.cuEventRecord(opened({data!r}), stream)")
        victim.kill()
        assert watcher.run("code(d.cuEventQuery(event))") == NOT_READY
        with HostProcess(segment) as third:  # reaps
            assert used(third)["retired"] == 1
            assert third.run(f"code(d.cuEventQuery(opened({data!r})))") == NOT_READY
        assert watcher.run("d.wait_event(event, time.monotonic_ns() + 20_000_000)") is False
        assert watcher.run("[code(d.cuStreamWaitEvent(stream, event, 0)), code(d.cuStreamQuery(stream))]") == [0, 600]


def test_a_record_done_before_the_kill_stays_done(segment: str) -> None:
    with HostProcess(segment) as watcher, HostProcess(segment) as victim:
        data = watcher.run("event, data = exported(); data")
        victim.run(f"stream = d.cuStreamCreate(1)[1]; d.cuEventRecord(opened({data!r}), stream)")
        victim.kill()
        assert watcher.run("code(d.cuEventQuery(event))") == 0


@pytest.mark.parametrize("end", ["kill", "finish"])
def test_an_import_whose_exporter_ended_is_an_invalid_handle(segment: str, end: str) -> None:
    with HostProcess(segment) as importer, HostProcess(segment) as exporter:
        data = exporter.run(
            "event, data = exported(); stream = d.cuStreamCreate(1)[1]; d.cuEventRecord(event, stream); data"
        )
        importer.run(f"event = opened({data!r}); stream = d.cuStreamCreate(1)[1]")
        assert importer.run("code(d.cuEventQuery(event))") == 0
        getattr(exporter, end)()
        uses = "d.cuEventQuery(event), d.cuEventRecord(event, stream), d.cuEventSynchronize(event)"
        uses += ", d.cuStreamWaitEvent(stream, event, 0)"
        assert importer.run(f"[code(result) for result in ({uses})]") == [INVALID_HANDLE] * 4
        assert importer.run(f"code(d.cuIpcOpenEventHandle(handle_from_bytes(d.CUipcEventHandle, {data!r})))") == 1
        assert importer.run("code(d.cuEventDestroy(event))") == 0


def test_the_next_process_frees_what_a_killed_one_had(segment: str) -> None:
    with HostProcess(segment) as survivor, HostProcess(segment) as victim:
        before = used(survivor)
        victim.run("streams = [d.cuStreamCreate(1) for _ in range(5)]; events = [d.cuEventCreate(6) for _ in range(7)]")
        victim.run("d.cuEventRecord(events[0][1], streams[0][1]); memory = d.cuMemAlloc(1 << 20)")
        assert used(survivor)["events"] == before["events"] + 7
        assert len(segment_files(segment)) == 2
        victim.kill()
        with HostProcess(segment) as third:
            assert used(third) == {**before, "processes": 2}
            assert third.run("d.cuMemGetInfo()[1] == d.cuMemGetInfo()[2]")
        assert segment_files(segment) == [""]


def test_a_slot_used_again_goes_on_with_its_positions(segment: str) -> None:
    with HostProcess(segment) as process:
        first, last, again = process.run(
            "from ipcsync._drivers.host.stream import find_stream\n"
            "handle = d.cuStreamCreate(1)[1]; stream = find_stream(handle); first = stream.slot, stream.tail\n"
            "event = d.cuEventCreate(2)[1]\n"
            "for _ in range(3): d.cuEventRecord(event, handle)\n"
            "last = stream.tail; d.cuStreamDestroy(handle); process.words[layout.H_STREAM_CURSOR] = stream.slot\n"
            "stream = find_stream(d.cuStreamCreate(1)[1])\n"
            "first, last, (stream.slot, stream.tail)"
        )
        assert last == first[1] + 3
        assert again == (first[0], last)


def test_a_stopped_process_is_not_taken_for_dead(segment: str) -> None:
    with HostProcess(segment) as stopped, HostProcess(segment) as other:
        data = stopped.run("event, data = exported(); data")
        stopped.signal(signal.SIGSTOP)
        with HostProcess(segment) as third:
            assert third.run(f"code(d.cuEventQuery(opened({data!r})))") == 0
        assert used(other)["processes"] == 2
        stopped.signal(signal.SIGCONT)
        assert stopped.run("code(d.cuEventQuery(event))") == 0


@pytest.mark.parametrize("fork", ["os.fork()", "ctypes.CDLL(None).fork()"])
def test_a_forked_child_does_not_keep_its_dead_parent_alive(segment: str, fork: str) -> None:
    with HostProcess(segment) as survivor, HostProcess(segment) as parent:
        parent.run("event, data = exported()")
        child = parent.run(f"child = {fork}\nif child == 0: signal_free = time.sleep(60); os._exit(0)\nchild")
        try:
            parent.kill()
            with HostProcess(segment) as third:
                assert used(third) == {**used(survivor), "processes": 2, "events": 0}
        finally:
            os.kill(child, signal.SIGKILL)


def test_the_last_one_out_removes_the_file(segment: str) -> None:
    with HostProcess(segment) as first, HostProcess(segment) as second:
        second.run("memory = d.cuMemAlloc(100); stream = d.cuStreamCreate(1); event = d.cuEventCreate(6)")
        assert second.finish() == 0
        assert segment_files(segment) == [""]
        assert used(first)["processes"] == 1
        assert first.finish() == 0
        assert segment_files(segment) == []


def test_a_segment_without_a_living_process_is_removed_by_whoever_starts_next_in_any_segment(segment: str) -> None:
    with HostProcess(segment) as victim:
        victim.run("memory = d.cuMemAlloc(100)")
        assert len(segment_files(segment)) == 2
        victim.kill()
    with own_segment() as another, HostProcess(another):
        assert segment_files(segment) == []


@pytest.mark.parametrize("size", [0, 100, 4096])
def test_a_control_file_left_half_made_is_made_anew(segment: str, size: int) -> None:
    with open(f"/dev/shm/{PREFIX}{segment}", "wb") as file:
        file.write(b"\1" * size)
    with HostProcess(segment) as process:
        assert used(process) == {"processes": 1, "streams": 0, "retired": 0, "events": 0}


def test_a_new_segment_of_the_old_name_does_not_know_the_old_handles(segment: str) -> None:
    with HostProcess(segment) as first:
        data = first.run("exported()[1]")
        first.kill()
    with HostProcess(segment) as second, HostProcess(segment) as third:
        second.run("exported()")
        opened = f"code(d.cuIpcOpenEventHandle(handle_from_bytes(d.CUipcEventHandle, {data!r})))"
        assert third.run(opened) == INVALID_VALUE


def test_processes_killed_anywhere_leave_nothing_behind(segment: str) -> None:
    # Each victim creates, records and destroys as fast as it can, and dies somewhere in it.
    busy = (
        "def busy():\n"
        "    d.cuCtxSetCurrent(d.cuDevicePrimaryCtxRetain(0)[1])\n"
        "    while True:\n"
        "        stream = d.cuStreamCreate(1)[1]; event = d.cuEventCreate(6)[1]; memory = d.cuMemAlloc(4096)[1]\n"
        "        for _ in range(3): d.cuEventRecord(event, stream)\n"
        "        d.cuMemFree(memory); d.cuEventDestroy(event); d.cuStreamDestroy(stream)\n"
        "threading.Thread(target=busy, daemon=True).start()\n"
    )
    chance = random.Random(7)
    with HostProcess(segment) as survivor:
        for _ in range(4):
            victims = [HostProcess(segment) for _ in range(3)]
            for victim in victims:
                victim.run(busy)
            time.sleep(chance.uniform(0.005, 0.05))  # the moment of death is what is drawn
            for victim in victims:
                victim.kill()
                victim.close()
        with HostProcess(segment) as last:
            state = used(last)
            # A kill between the two stores of a position leaves `done` ahead, which loses nothing.
            assert state == {"processes": 2, "streams": 0, "retired": 0, "events": 0}
            assert segment_files(segment) == [""]
            assert last.run("d.cuMemGetInfo()[1] == d.cuMemGetInfo()[2]")
            last.run("event, data = exported(); stream = d.cuStreamCreate(1)[1]")
            assert last.run("code(d.cuEventRecord(event, stream))") == 0
        assert used(survivor)["processes"] == 1
