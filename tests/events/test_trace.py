"""Traces of real processes: what they did, arrows between them, also of one that was killed; none unless asked for."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from cuda.bindings.driver import CUstreamCaptureMode

import ipcsync
from ipcsync import _drivers, _threads
from ipcsync._drivers import unwrap
from ipcsync._trace.file import FILE_BYTES, Kind, Outcome, ProcessTrace, files_in, read
from ipcsync.cli import main
from ipcsync.client import point as points
from ipcsync.testing import StreamGate
from ipcsync.typing import EngineName
from tests import trace_rules
from tests.kit import remote
from tests.kit.peer import Peer
from tests.kit.until import until
from tests.kit.zygote import EXEC, IPCSYNC

pytestmark = pytest.mark.process


def _read_one(directory: Path) -> ProcessTrace:
    (path,) = files_in(directory)
    return read(path)


def _kinds(trace: ProcessTrace) -> list[tuple[Kind, int, Outcome]]:
    return [(entry.kind, entry.generation, entry.outcome) for entry in trace.entries]


def _merge(directory: Path) -> list[trace_rules.Event]:
    out = directory / "out.json"
    done = CliRunner().invoke(main, ["trace", "merge", str(directory), "-o", str(out)])
    assert done.exit_code == 0, done.output
    return trace_rules.load(out)


def _hand_over(new_peer: Callable[..., Peer], endpoint: str, directory: Path, engine: EngineName) -> tuple[Peer, Peer]:
    """Three records of one process, each waited for by the other's stream while it is held back, and by its host."""
    recorder, waiter = (new_peer(IPCSYNC_TRACE=str(directory)) for _ in range(2))
    recorder.call(remote.connect, endpoint, "recorder")
    waiter.call(remote.connect, endpoint, "waiter")
    recorder.call(remote.open_event, "kv/ready", {"recorder": True, "engine": engine})
    for _ in range(3):
        recorder.call(remote.hold)
        (point,) = recorder.call(remote.record, "kv/ready")
        waiter.call(remote.wait, point)
        recorder.call(remote.let_go)
        waiter.call(remote.synchronize, point)
    return recorder, waiter


def test_an_arrow_leads_from_each_record_to_the_waits_of_the_other_process(
    coordinator: ipcsync.Coordinator, new_peer: Callable[..., Peer], tmp_path: Path, engine: EngineName
) -> None:
    recorder, waiter = _hand_over(new_peer, coordinator.endpoint, tmp_path, engine)
    for one in (waiter, recorder):
        one.call(remote.close)
    events = _merge(tmp_path)
    names = {row["pid"]: row["args"]["name"] for row in events if row["name"] == "process_name"}
    assert names == {recorder.pid: "recorder", waiter.pid: "waiter"}
    expected = [
        ((recorder.pid, f"record kv/ready #{generation}"), (waiter.pid, f"released by kv/ready #{generation}"))
        for generation in (1, 2, 3)
        for _ in ("the stream", "the host")
    ]
    assert sorted(trace_rules.arrows(events)) == expected
    tracks = trace_rules.tracks(events)
    where = {(tracks[row["pid"], row["tid"]].split()[0], row["name"].split()[0]) for row in events if row["ph"] == "X"}
    assert where == {
        ("stream", "record"),
        ("stream", "wait"),
        ("stream", "released"),
        ("thread", "synchronize"),
        ("thread", "released"),
    }
    pending = [row["name"] for row in events if row["ph"] == "b"]
    assert pending == [f"pending on kv/ready #{generation}" for generation in (1, 2, 3)]


def test_a_killed_processs_trace_is_there_up_to_its_last_entry(
    coordinator: ipcsync.Coordinator, new_peer: Callable[..., Peer], tmp_path: Path
) -> None:
    recorder, waiter = _hand_over(new_peer, coordinator.endpoint, tmp_path, "event")
    recorder.kill()
    waiter.call(remote.close)
    (trace,) = (read(path) for path in files_in(tmp_path) if path.name.startswith(f"{recorder.pid}-"))
    assert _kinds(trace) == [(Kind.RECORD, generation, Outcome.OK) for generation in (1, 2, 3)]
    assert len(trace_rules.arrows(_merge(tmp_path))) == 6


def test_a_wait_whose_recorder_dies_is_not_told_as_released(
    coordinator: ipcsync.Coordinator, new_peer: Callable[..., Peer], tmp_path: Path
) -> None:
    recorder = new_peer()
    recorder.call(remote.connect, coordinator.endpoint, "recorder")
    recorder.call(remote.open_event, "e", {"recorder": True, "engine": "timeline"})
    with ipcsync.connect(coordinator.endpoint, name="waiter", trace=tmp_path) as client:
        point = client.event("e").at(1)
        stream = ipcsync.Stream()
        point.wait(stream, ahead=True)
        recorder.kill()
        with pytest.raises(ipcsync.RecorderLost):
            point.synchronize(20)
        stream.synchronize()  # the coordinator has let it go
    kinds = _kinds(_read_one(tmp_path))
    assert kinds[0] == (Kind.WAIT, 1, Outcome.OK)
    assert (Kind.SYNCHRONIZE, 1, Outcome.FAILED) in kinds
    (release,) = (outcome for kind, _, outcome in kinds if kind is Kind.RELEASED)
    assert release in (Outcome.FAILED, Outcome.UNSEEN)


def test_a_wait_on_a_complete_point_queues_nothing_and_is_told_so(
    coordinator: ipcsync.Coordinator, tmp_path: Path, engine: EngineName
) -> None:
    with ipcsync.connect(coordinator.endpoint, name="both", trace=tmp_path) as client:
        point = client.event("e", recorder=True, engine=engine).record(ipcsync.Stream())
        point.synchronize(20)
        point.wait(ipcsync.Stream())
    assert _kinds(_read_one(tmp_path)) == [
        (Kind.RECORD, 1, Outcome.OK),
        (Kind.SYNCHRONIZE, 1, Outcome.OK),
        (Kind.PASSED, 1, Outcome.OK),
    ]


def test_a_wait_that_a_capture_forbids_is_told_as_failed(
    coordinator: ipcsync.Coordinator, tmp_path: Path, engine: EngineName
) -> None:
    with ipcsync.connect(coordinator.endpoint, name="both", trace=tmp_path) as client:
        point = client.event("e", recorder=True, engine=engine).record(ipcsync.Stream())
        point.synchronize(20)
        stream, driver = ipcsync.Stream(), _drivers.load()
        unwrap(driver.cuStreamBeginCapture(stream.cuda_stream, CUstreamCaptureMode(0)), "cuStreamBeginCapture")
        with pytest.raises(ipcsync.StreamCapturing):
            point.wait(stream)
        unwrap(driver.cuGraphDestroy(unwrap(driver.cuStreamEndCapture(stream.cuda_stream), "end")), "cuGraphDestroy")
    assert _kinds(_read_one(tmp_path))[2:] == [(Kind.WAIT, 1, Outcome.FAILED)]


def test_a_release_is_learned_while_the_process_does_something_else(
    coordinator: ipcsync.Coordinator, tmp_path: Path, engine: EngineName
) -> None:
    with ipcsync.connect(coordinator.endpoint, name="both", trace=tmp_path) as client:
        first, second = ipcsync.Stream(), ipcsync.Stream()
        event = client.event("e", recorder=True, engine=engine)
        with StreamGate(first) as gate:
            point = event.record(first)
            point.wait(second)
            gate.open()
        second.synchronize()
        until(lambda: (Kind.RELEASED, 1, Outcome.OK) in _kinds(_read_one(tmp_path)), "the release is written")
    trace = _read_one(tmp_path)
    assert _kinds(trace) == [
        (Kind.RECORD, 1, Outcome.OK),
        (Kind.WAIT, 1, Outcome.OK),
        (Kind.RELEASED, 1, Outcome.OK),
    ]
    record, wait, release = trace.entries
    assert record.stream != wait.stream == release.stream
    assert record.began <= record.ended <= wait.began <= wait.ended == release.began <= release.ended


def test_a_wait_is_queued_though_no_thread_can_start_to_learn_its_release_which_is_told_at_the_close(
    coordinator: ipcsync.Coordinator, tmp_path: Path, engine: EngineName, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: object) -> object:
        raise ipcsync.QuotaExceeded("no further thread")

    with ipcsync.connect(coordinator.endpoint, name="both", trace=tmp_path) as client:
        first, second = ipcsync.Stream(), ipcsync.Stream()
        event = client.event("e", recorder=True, engine=engine)
        with StreamGate(first):
            point = event.record(first)
            with monkeypatch.context() as patch:
                patch.setattr(_threads, "start", start)
                point.wait(second)
            assert not second.query()
        second.synchronize()
    assert _kinds(_read_one(tmp_path)) == [
        (Kind.RECORD, 1, Outcome.OK),
        (Kind.WAIT, 1, Outcome.OK),
        (Kind.RELEASED, 1, Outcome.OK),
    ]


def test_of_the_queued_waits_for_an_event_the_earliest_is_looked_at_and_each_release_is_told(
    coordinator: ipcsync.Coordinator, tmp_path: Path, engine: EngineName
) -> None:
    with ipcsync.connect(coordinator.endpoint, name="both", trace=tmp_path) as client:
        first, second, third = (ipcsync.Stream() for _ in range(3))
        event = client.event("e", recorder=True, engine=engine)
        with StreamGate(first) as gate:
            points = [event.record(first) for _ in range(8)]
            for point in points[2:]:
                point.wait(second)
            assert len(client._session.waits._waiting) == 1
            for point in points:
                point.wait(third)
            assert len(client._session.waits._waiting) == 2  # those for the third, and since then those for the first
            gate.open()
        expected = [1, 2, *(generation for generation in range(3, 9) for _ in (second, third))]
        told: list[tuple[Kind, int, Outcome]] = [(Kind.RELEASED, generation, Outcome.OK) for generation in expected]
        until(
            lambda: sorted(one for one in _kinds(_read_one(tmp_path)) if one[0] is Kind.RELEASED) == told,
            "all releases are written",
        )
        until(lambda: len(client._session.waits._waiting) == 0, "nothing is looked at any more")


def test_a_task_that_waits_is_told_once_and_the_clients_own_looks_are_not(
    coordinator: ipcsync.Coordinator, tmp_path: Path
) -> None:
    async def work() -> None:
        async with await ipcsync.aconnect(coordinator.endpoint, name="both", trace=tmp_path) as client:
            event = await client.event("e", recorder=True)
            stream = ipcsync.Stream()
            with StreamGate(stream) as gate:
                point = await event.record(stream)
                with pytest.raises(ipcsync.WaitTimeout):
                    await point.synchronize(0.05)
                gate.open()
            await point.synchronize(20)

    asyncio.run(work())
    assert _kinds(_read_one(tmp_path)) == [
        (Kind.RECORD, 1, Outcome.OK),
        (Kind.SYNCHRONIZE, 1, Outcome.FAILED),
        (Kind.SYNCHRONIZE, 1, Outcome.OK),
    ]


@pytest.mark.parametrize("wait", [ipcsync.synchronize_all, ipcsync.wait_all])
def test_a_wait_in_steps_is_told_as_one_call_from_its_beginning(
    coordinator: ipcsync.Coordinator,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    wait: Callable[..., list[ipcsync.Point]],
) -> None:
    between: list[int] = []

    def record(*_: object) -> tuple[int, ...]:
        """Comes between two steps."""
        if not between:
            between.append(time.monotonic_ns())
            event.record(ipcsync.Stream())
        return ()

    monkeypatch.setattr(points, "_lost", record)
    with ipcsync.connect(coordinator.endpoint, name="both", trace=tmp_path) as client:
        event = client.event("e", recorder=True)
        wait([event.at(1)], timeout=30)
    calls = (Kind.WAIT, Kind.PASSED, Kind.SYNCHRONIZE)
    (told,) = [entry for entry in _read_one(tmp_path).entries if entry.kind in calls]
    assert told.outcome is Outcome.OK
    assert told.began < between[0] < told.ended


def test_tasks_that_wait_for_records_of_one_event_are_told_as_one_call_each(
    coordinator: ipcsync.Coordinator, tmp_path: Path
) -> None:
    async def work() -> int:
        connect = ipcsync.aconnect
        async with connect(coordinator.endpoint, trace=tmp_path) as client, connect(coordinator.endpoint) as other:
            event, seen = await other.event("e", recorder=True), await client.event("e")
            waits = [asyncio.ensure_future(seen.at(each).wait(ipcsync.Stream())) for each in (1, 2)]
            while len(client._session.waits._waiting) < 2:
                await asyncio.sleep(0.001)
            recorded = time.monotonic_ns()
            for wait in waits:
                await event.record(ipcsync.Stream())
                await wait
        return recorded

    recorded = asyncio.run(work())
    told = [entry for entry in _read_one(tmp_path).entries if entry.kind in (Kind.WAIT, Kind.PASSED)]
    assert [(entry.generation, entry.outcome) for entry in told] == [(1, Outcome.OK), (2, Outcome.OK)]
    assert all(entry.began < recorded < entry.ended for entry in told)
    _merge(tmp_path)


def test_a_call_that_timed_out_soon_is_told_and_no_part_of_the_next(
    coordinator: ipcsync.Coordinator, tmp_path: Path
) -> None:
    with ipcsync.connect(coordinator.endpoint, name="both", trace=tmp_path) as client:
        event = client.event("e", recorder=True)
        with pytest.raises(ipcsync.WaitTimeout):
            event.at(1).synchronize(0.001)
        event.record(ipcsync.Stream()).synchronize(20)
    trace = _read_one(tmp_path)
    assert _kinds(trace) == [
        (Kind.SYNCHRONIZE, 1, Outcome.FAILED),
        (Kind.RECORD, 1, Outcome.OK),
        (Kind.SYNCHRONIZE, 1, Outcome.OK),
    ]
    _, record, call = trace.entries
    assert record.ended <= call.began


def test_clients_of_one_process_share_one_file_of_bounded_size(
    coordinator: ipcsync.Coordinator, tmp_path: Path
) -> None:
    for name in ("one", "two"):
        with ipcsync.connect(coordinator.endpoint, name=name, trace=tmp_path) as client:
            client.event(name, recorder=True).record(ipcsync.Stream())
    trace = _read_one(tmp_path)
    assert {(use.client, use.event) for use in trace.uses.values()} == {("one", "one"), ("two", "two")}
    assert trace.path.stat().st_size == FILE_BYTES
    assert trace.path.stat().st_mode & 0o777 == 0o600


def _use_in_a_forked_child() -> int:
    """In a peer with an event "e" whose first point is complete: a child uses them in every way; its wait status."""
    event, stream = remote.event("e"), remote.stream()
    point = event.at(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside threads
        child = os.fork()
    if not child:
        for use in (lambda: event.record(stream), lambda: point.wait(stream), lambda: point.synchronize(1)):
            try:
                use()
            except ipcsync.ForkedProcessError:
                continue
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def test_a_forked_child_writes_nothing_to_its_parents_trace(
    coordinator: ipcsync.Coordinator, new_peer: Callable[..., Peer], tmp_path: Path
) -> None:
    parent = new_peer(IPCSYNC_TRACE=str(tmp_path))
    parent.call(remote.connect, coordinator.endpoint)
    parent.call(remote.open_event, "e", {"recorder": True})
    parent.call(remote.record, "e")
    assert parent.call(_use_in_a_forked_child) == 0
    assert _kinds(_read_one(tmp_path)) == [(Kind.RECORD, 1, Outcome.OK)]


def test_no_file_is_made_unless_it_is_asked_for_and_something_is_shared(
    coordinator: ipcsync.Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("IPCSYNC_TRACE", raising=False)
    with ipcsync.connect(coordinator.endpoint) as client:
        client.record(ipcsync.Stream())
        assert "Traced" not in type(client.event("e")._engine).__name__
    monkeypatch.setenv("IPCSYNC_TRACE", str(tmp_path / "traces"))
    with ipcsync.connect(coordinator.endpoint, trace="") as client:
        client.record(ipcsync.Stream())
    assert list(tmp_path.iterdir()) == []
    with ipcsync.connect(coordinator.endpoint) as client:
        assert client.list_events() == []
    assert files_in(tmp_path / "traces") == []


def test_a_directory_that_cannot_be_used_is_refused_at_once(coordinator: ipcsync.Coordinator, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="File exists"):
        ipcsync.connect(coordinator.endpoint, trace=tmp_path / "file")


_NVTX = """
calls = []


class annotate:
    def __init__(self, message, domain):
        assert domain == "ipcsync"
        self.message = message

    def __enter__(self):
        calls.append(self.message)

    def __exit__(self, *_):
        calls.append("end")
"""


def test_ranges_are_shown_to_nvtx_if_it_is_there(
    coordinator: ipcsync.Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvtx.py").write_text(_NVTX)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "nvtx", raising=False)
    with ipcsync.connect(coordinator.endpoint, trace=tmp_path) as client:
        point = client.event("e", recorder=True).record(ipcsync.Stream())
        point.synchronize(20)
        point.wait(ipcsync.Stream())
    calls = sys.modules.pop("nvtx").calls
    assert calls == ["record e", "end", "synchronize e", "end", "wait e", "end"]


@pytest.mark.program
def test_the_demo_is_traced_and_merged(tmp_path: Path) -> None:
    directory = tmp_path / "traces"
    command = [*IPCSYNC, "demo", "--workers", "2"]
    env = {**os.environ, **EXEC, "IPCSYNC_TRACE": str(directory)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    events = _merge(directory)
    titles = {row["args"]["name"] for row in events if row["name"] == "process_name"}
    assert titles == {"demo source", "demo stage 1", "demo stage 2", "demo sink"}
    between = {(source[0], target[0]) for source, target in trace_rules.arrows(events)}
    assert len(between) > 1


def test_a_folder_without_traces_is_told_so(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["trace", "merge", str(tmp_path)])
    assert done.exit_code == 1
    assert "there is no trace in" in done.output
    file = tmp_path / "one.ipctrace"
    file.touch()
    for missing in (tmp_path / "nowhere", file, tmp_path / ("too long" * 50)):
        done = CliRunner().invoke(main, ["trace", "merge", str(missing)])
        assert (done.exit_code, f"there is no directory {missing}" in done.output) == (1, True)


def test_a_merged_trace_goes_to_stdout_and_to_no_file_that_cannot_be_written(
    tmp_path: Path, coordinator: ipcsync.Coordinator
) -> None:
    with ipcsync.connect(coordinator.endpoint, trace=tmp_path) as client:
        client.record(ipcsync.Stream()).synchronize(10)
    done = CliRunner().invoke(main, ["trace", "merge", str(tmp_path), "-o", "-"])
    assert done.exit_code == 0
    assert json.loads(done.stdout)["traceEvents"]
    assert "1 processes, 1 records" in done.stderr
    done = CliRunner().invoke(main, ["trace", "merge", str(tmp_path), "-o", str(tmp_path / "none" / "trace.json")])
    assert (done.exit_code, done.stdout) == (2, "")
    assert "cannot write" in done.stderr


def test_files_that_are_no_traces_are_left_out_and_named(tmp_path: Path, coordinator: ipcsync.Coordinator) -> None:
    """A process that was killed as it made its file, a copy that broke off, and a FIFO, which would block a reader."""
    with ipcsync.connect(coordinator.endpoint, trace=tmp_path) as client:
        client.record(ipcsync.Stream()).synchronize(10)
    (whole,) = tmp_path.glob("*.ipctrace")
    (tmp_path / "a-empty.ipctrace").touch()
    (tmp_path / "b-cut.ipctrace").write_bytes(whole.read_bytes()[:5000])
    damaged = bytearray(whole.read_bytes())
    damaged[:8] = b"\xff" * 8
    (tmp_path / "c-damaged.ipctrace").write_bytes(damaged)
    os.mkfifo(tmp_path / "d-fifo.ipctrace")
    (tmp_path / "e-folder.ipctrace").mkdir()
    (tmp_path / "f-gone.ipctrace").symlink_to(tmp_path / "nothing")
    out = tmp_path / "trace.json"
    done = CliRunner().invoke(main, ["trace", "merge", str(tmp_path), "-o", str(out)])
    assert done.exit_code == 0, done.output
    left_out = [line for line in done.stderr.splitlines() if line.startswith("ipcsync: left out: ")]
    said = [
        "it is empty",
        "is not a trace: it has 5000",
        "not a trace of version",
        "not a regular file",
        "Is a directory",
    ]
    assert len(left_out) == 6
    for line, letter, words in zip(left_out, "abcdef", [*said, "No such file"], strict=True):
        assert f"{tmp_path}/{letter}-" in line
        assert words in line
    assert "1 processes, 1 records" in done.stderr
    assert json.loads(out.read_text())["traceEvents"]


def test_a_folder_with_nothing_but_broken_files_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "x.ipctrace").touch()
    done = CliRunner().invoke(main, ["trace", "merge", str(tmp_path)])
    assert done.exit_code == 1
    assert "none of the 1 files in" in done.output
