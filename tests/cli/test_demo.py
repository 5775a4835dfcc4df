"""`ipcsync demo`, run as a user runs it: right with its waits, corrupt without, and nothing left behind."""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
import os
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ipcsync.typing import EngineName
from ipcsync_demo.memory import SharedMemory
from ipcsync_demo.plan import Plan, chunk_size, stamp, work
from tests.kit.until import until
from tests.kit.zygote import IPCSYNC, children_of, command_of

pytestmark = pytest.mark.process

_DEADLINE_S = 60.0
_SHARED = Path("/dev/shm")


class Demo:
    """Runs of the demo in a segment and a temporary directory of their own, so that what they leave can be seen."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.segment = uuid.uuid4().hex
        self.processes: list[subprocess.Popen[str]] = []
        self.before = set(_SHARED.iterdir())

    def start(self, *arguments: str, **env: str) -> subprocess.Popen[str]:
        """Start it."""
        settings = {
            **os.environ,
            "TMPDIR": str(self.directory),
            "IPCSYNC_HOST_SEGMENT": self.segment,
            **env,
        }
        self.processes.append(
            subprocess.Popen(
                [*IPCSYNC, "demo", *arguments],
                env=settings,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return self.processes[-1]

    def run(self, *arguments: str, **env: str) -> tuple[int, str, str]:
        """Run it to its end: status, stdout, stderr."""
        return finish(self.start(*arguments, **env))

    def run_json(self, *arguments: str, status: int = 0, **env: str) -> dict[str, Any]:
        """Run it with --json to its end, which must have that status: what it printed."""
        ended, out, err = self.run(*arguments, "--json", **env)
        assert ended == status, err
        return dict(json.loads(out))

    def left(self) -> list[str]:
        """What lies about in shared memory and in the directory for temporary files."""
        ours = [path.name for path in set(_SHARED.iterdir()) - self.before if self.segment in path.name]
        return ours + [path.name for path in self.directory.iterdir()]

    def close(self) -> None:
        """Kill what still runs."""
        for process in self.processes:
            process.kill()
            process.communicate()


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Its status, stdout and stderr, once it has ended."""
    out, err = process.communicate(timeout=_DEADLINE_S)
    return process.returncode, out, err


@pytest.fixture
def demo() -> Iterator[Demo]:
    """The demo; nothing may be left of it after the test."""
    # pytest's own is too long for a socket's path; on a tmpfs the coordinator's board is in it too.
    with tempfile.TemporaryDirectory(dir=_SHARED) as directory:
        demo = Demo(Path(directory))
        yield demo
        demo.close()
        assert demo.left() == []


@pytest.fixture
def running(demo: Demo, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts the demo on a pipe that does not end, and returns once chunks are on their way."""
    ends: list[int] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        path = tmp_path / "pipe"
        os.mkfifo(path)
        process = demo.start(str(path), *arguments)
        ends.append(os.open(path, os.O_WRONLY))
        # More than the pipe holds, so the demo has begun to read, which it does once every stage is ready.
        written = 0
        while written < 1 << 20:
            written += os.write(ends[0], bytes(1 << 16))
        return process

    yield start
    for end in ends:
        os.close(end)


def children(process: subprocess.Popen[str], what: str) -> list[int]:
    """The processes that it has started whose command line has `what` in it, in the order of their start."""
    return [pid for pid in children_of(process.pid) if what in command_of(pid)]


# --- what it proves ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["event", "timeline"])
@pytest.mark.parametrize("asynchronous", ["0", "1"])
def test_the_result_is_that_of_one_process_and_no_message_was_sent(
    demo: Demo, engine: EngineName, asynchronous: str
) -> None:
    found = demo.run_json("--engine", engine, IPCSYNC_HOST_ASYNC=asynchronous)
    assert found["ok"]
    assert found["engine"] == engine
    assert found["sha256"] == found["expected_sha256"]
    assert [row["stage"] for row in found["stages"]] == [1, 2, 3, 4]
    assert len({row["pid"] for row in found["stages"]}) == 4
    assert [row["messages"] for row in found["stages"]] == [0, 0, 0, 0]
    assert [row["chunks"] for row in found["stages"]] == [found["chunks"]] * 4
    assert all(0 < row["hand_over_p50_us"] <= row["hand_over_p99_us"] for row in found["stages"])


def test_a_coordinator_killed_on_the_way_ends_no_session_and_changes_no_result(demo: Demo) -> None:
    result = demo.run_json("--kill-coordinator", "--workers", "3", IPCSYNC_TEST_ZYGOTE="0")
    assert result["ok"]
    assert result["restart"] == {"starts": 2, "sessions": 4, "expected_sessions": 4}
    assert result["sha256"] == result["expected_sha256"]
    assert demo.left() == []


@pytest.mark.parametrize("workers", [pytest.param("1", marks=pytest.mark.thorough), "4"])
@pytest.mark.parametrize("engine", ["event", "timeline"])
@pytest.mark.parametrize("asynchronous", ["0", "1"])
def test_without_the_waits_the_result_is_corrupt(
    demo: Demo, engine: EngineName, asynchronous: str, workers: str
) -> None:
    settings = {"IPCSYNC_HOST_ASYNC": asynchronous}
    found = demo.run_json("--break", "--engine", engine, "--workers", workers, status=1, **settings)
    assert not found["ok"]
    assert found["sha256"] != found["expected_sha256"]
    assert found["first_corrupt"] == 0
    assert "corrupt without the waits" in found["reason"]


def test_corruption_is_one_line_on_stderr(demo: Demo) -> None:
    status, out, err = demo.run("--break")
    assert status == 1
    assert err.startswith("ipcsync: the result is corrupt without the waits: ")
    assert len(err.splitlines()) == 1
    assert "\x1b" not in out + err


@pytest.mark.driver
@pytest.mark.parametrize("workers", [1, 3])
def test_any_number_of_workers_does_what_the_plan_says(demo: Demo, tmp_path: Path, workers: int) -> None:
    data = bytes(range(256)) * 40 + b"and a short last chunk"
    (tmp_path / "file").write_bytes(data)
    found = demo.run_json(str(tmp_path / "file"), "--workers", str(workers))
    size = chunk_size(len(data))
    expected = hashlib.sha256()
    for number, start in enumerate(range(0, len(data), size)):
        chunk = data[start : start + size]
        for stage in range(1, workers + 1):
            chunk = work(chunk, stage, number)
        expected.update(chunk)
    assert found["sha256"] == expected.hexdigest()
    assert len(found["stages"]) == workers
    assert found["bytes"] == len(data)


def test_an_empty_file_works(demo: Demo, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = demo.run_json(str(tmp_path / "file"))
    assert found["ok"]
    assert found["chunks"] == 0
    assert found["sha256"] == hashlib.sha256().hexdigest()
    assert found["stages"][0]["hand_over_p50_us"] is None


def test_without_the_waits_an_empty_file_proves_nothing(demo: Demo, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = demo.run_json(str(tmp_path / "file"), "--break", status=1)
    assert "nothing to hand on" in found["reason"]


def test_a_file_of_one_byte_without_the_waits_is_corrupt(demo: Demo, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"\0")
    assert demo.run_json(str(tmp_path / "file"), "--break", "--workers", "2", status=1)["corrupt_chunks"] == 1


def test_the_table_is_plain_where_no_terminal_reads_it(demo: Demo) -> None:
    status, out, err = demo.run("--workers", "2")
    assert (status, err) == (0, "")
    assert out.isascii()
    assert "\x1b" not in out
    assert len([line for line in out.splitlines() if line.split()[:1] in (["1"], ["2"])]) == 2


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["missing", ""])
def test_a_file_that_cannot_be_read_is_a_wrong_call_in_one_line(demo: Demo, tmp_path: Path, file: str) -> None:
    status, out, err = demo.run(str(tmp_path / file))
    assert (status, out) == (2, "")
    assert err.startswith(f"ipcsync: cannot read {tmp_path / file}: ")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_everything_in_order(
    demo: Demo, running: Callable[..., subprocess.Popen[str]], number: signal.Signals
) -> None:
    process = running()
    everyone = children(process, "ipcsync")
    assert len(everyone) == 5
    process.send_signal(number)
    assert finish(process) == (1, "", "ipcsync: interrupted\n")
    assert [pid for pid in everyone if Path(f"/proc/{pid}").exists()] == []
    assert demo.left() == []


@pytest.mark.parametrize("victim", [1, 2, 4])
def test_a_killed_worker_is_named(demo: Demo, running: Callable[..., subprocess.Popen[str]], victim: int) -> None:
    process = running()
    pid = children(process, "ipcsync_demo.stage")[victim - 1]
    os.kill(pid, signal.SIGKILL)
    assert finish(process) == (1, "", f"ipcsync: stage {victim} (pid {pid}) died: killed by SIGKILL\n")
    assert demo.left() == []


def test_a_killed_coordinator_is_an_error_and_no_hang(
    demo: Demo, running: Callable[..., subprocess.Popen[str]]
) -> None:
    process = running()
    (pid,) = children(process, "ipcsync_coordinator")
    os.kill(pid, signal.SIGKILL)
    assert finish(process) == (1, "", f"ipcsync: the coordinator (pid {pid}) has died\n")


def test_workers_do_not_outlive_a_demo_that_is_killed(
    demo: Demo, running: Callable[..., subprocess.Popen[str]]
) -> None:
    process = running()
    everyone = children(process, "ipcsync")
    process.kill()
    finish(process)
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in everyone), "all have ended", _DEADLINE_S)
    assert demo.run("--workers", "1")[0] == 0  # which tidies up behind the dead one


def test_memory_stays_mapped_for_work_that_is_still_queued_when_a_stage_ends() -> None:
    memory = SharedMemory.create(Plan(1, 64, "auto", without_waits=False))
    address, fd = memory.address, memory.fd
    del memory
    gc.collect()
    os.close(fd)
    assert f"{address:x}-" in Path("/proc/self/maps").read_text()


# --- the plan ---------------------------------------------------------------------------------------------------------


def test_no_stamp_is_what_fresh_memory_or_the_buffers_last_chunk_holds() -> None:
    plan = Plan(4, 64, "auto", without_waits=False)
    for stage in range(1, 17):
        for chunk in range(1000):
            assert 0 < stamp(stage, chunk) < 256
            assert stamp(stage, chunk) != stamp(stage, chunk + plan.buffers)


def test_the_order_of_the_stages_matters() -> None:
    data = bytes(range(100))
    assert work(work(data, 1, 0), 2, 0) != work(work(data, 2, 0), 1, 0)


def test_buffers_and_gates_do_not_overlap() -> None:
    plan = Plan(16, 1000, "auto", without_waits=False)
    gates = [(plan.gate_of(stage), 4) for stage in range(1, 17)]
    buffers = [(plan.buffer(link, index), plan.capacity) for link in range(17) for index in range(plan.buffers)]
    areas = sorted(gates + buffers)
    assert all(start + size <= following for (start, size), (following, _) in itertools.pairwise(areas))
    assert sum(areas[-1]) <= plan.size
    assert plan.depth >= plan.buffers
