"""`ipcsync demo`, run as a user runs it: right with its waits, corrupt without, and nothing left behind.

Its stages are started by multiprocessing, so each takes a while: tests have no more of them than they need.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ipcsync.typing import EngineName
from ipcsync_demo import LARGEST, Report, why_failed
from tests.kit.until import until
from tests.kit.zygote import EXEC, IPCSYNC, children_of, command_of

pytestmark = [pytest.mark.process, pytest.mark.program]

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
        """Start it, in a process group of its own."""
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
                start_new_session=True,
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
    """Its status, stdout and stderr at its end, without what stages log of streams that a death holds up."""
    out, err = process.communicate(timeout=_DEADLINE_S)
    return process.returncode, out, "".join(line for line in err.splitlines(True) if not line.startswith("at exit, "))


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

    def start(*arguments: str, **env: str) -> subprocess.Popen[str]:
        path = tmp_path / "pipe"
        os.mkfifo(path)
        process = demo.start(str(path), *arguments, **env)
        ends.append(os.open(path, os.O_WRONLY))
        # More than the pipe holds, so the demo has begun to read, which it does once every stage is ready.
        written = 0
        while written < 1 << 20:
            written += os.write(ends[0], bytes(1 << 16))
        return process

    yield start
    for end in ends:
        os.close(end)


def stages_of(process: subprocess.Popen[str]) -> list[int]:
    """The pids of its source, its stages, and its sink, in order."""
    return [pid for pid in children_of(process.pid) if "--multiprocessing-fork" in command_of(pid)]


def coordinator_of(process: subprocess.Popen[str]) -> int:
    """The pid of its coordinator."""
    (pid,) = [pid for pid in children_of(process.pid) if "ipcsync_coordinator" in command_of(pid)]
    return pid


def position(pid: int, path: Path) -> int:
    """How far a process has read a file that it has open; 0 if it has not."""
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it has closed it meanwhile
            if os.readlink(fd) == str(path):
                return int(Path(f"/proc/{pid}/fdinfo/{fd.name}").read_text().split()[1])
    return 0


# --- what it proves ---------------------------------------------------------------------------------------------------


def test_the_engine_may_be_in_the_environment(demo: Demo) -> None:
    assert demo.run_json(IPCSYNC_ENGINE="event")["engine"] == "event"


@pytest.mark.driver
@pytest.mark.parametrize("engine", ["event", "timeline"])
@pytest.mark.parametrize("asynchronous", [pytest.param("0", marks=pytest.mark.thorough), "1"])
def test_the_file_comes_out_and_no_message_was_sent(demo: Demo, engine: EngineName, asynchronous: str) -> None:
    found = demo.run_json("--engine", engine, IPCSYNC_HOST_ASYNC=asynchronous)
    assert found["ok"]
    assert found["engine"] == engine
    assert found["sha256"] == found["expected_sha256"]
    assert [row["stage"] for row in found["stages"]] == [1, 2, 3, 4]
    assert len({row["pid"] for row in found["stages"]}) == 4
    assert [row["messages"] for row in found["stages"]] == [0, 0, 0, 0]
    assert [row["chunks"] for row in found["stages"]] == [found["chunks"]] * 4


@pytest.mark.parametrize("workers", [pytest.param("1", marks=pytest.mark.thorough), "4"])
@pytest.mark.parametrize("engine", ["event", "timeline"])
@pytest.mark.parametrize("asynchronous", [pytest.param("0", marks=pytest.mark.thorough), "1"])
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
    status, out, err = demo.run("--break", "--workers", "2")
    assert status == 1
    assert err.startswith("ipcsync: the result is corrupt without the waits: ")
    assert len(err.splitlines()) == 1
    assert "\x1b" not in out + err


@pytest.mark.parametrize(
    ("variable", "value", "text"),
    [
        ("IPCSYNC_DEPTH", "x", "IPCSYNC_DEPTH is from 1 to 1024, but got 'x'"),
        ("IPCSYNC_HOST_DEVICES", "x", "IPCSYNC_HOST_DEVICES must be a number from 0 to 16, but is 'x'"),
        ("IPCSYNC_TRACE", "/proc/foo", "there can be no traces in /proc/foo: "),
    ],
)
def test_an_invalid_variable_is_one_line_on_stderr(demo: Demo, variable: str, value: str, text: str) -> None:
    status, out, err = demo.run(**{variable: value})
    assert (status, out) == (1, "")
    assert err.startswith("ipcsync: ")
    assert text in err
    assert len(err.splitlines()) == 1


@pytest.mark.thorough
@pytest.mark.parametrize("workers", [1, 3])
def test_any_number_of_workers_hands_on_all_of_the_file(demo: Demo, tmp_path: Path, workers: int) -> None:
    data = bytes(range(256)) * 40 + b"and a short last chunk"
    (tmp_path / "file").write_bytes(data)
    found = demo.run_json(str(tmp_path / "file"), "--workers", str(workers))
    assert found["sha256"] == found["expected_sha256"] == hashlib.sha256(data).hexdigest()
    assert len(found["stages"]) == workers
    assert found["bytes"] == len(data)
    assert found["chunks"] > 8


def test_an_empty_file_works(demo: Demo, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = demo.run_json(str(tmp_path / "file"), "--workers", "2")
    assert found["ok"]
    assert found["chunks"] == 0
    assert found["sha256"] == hashlib.sha256().hexdigest()


@pytest.mark.parametrize("words", ["printf hello | {} /dev/stdin", "{} <(printf hello)"])
def test_what_only_the_command_can_open_comes_out(demo: Demo, words: str) -> None:
    command = words.format(f"{shlex.join([*IPCSYNC, 'demo'])} --workers 1 --json")
    settings = {**os.environ, "TMPDIR": str(demo.directory), "IPCSYNC_HOST_SEGMENT": demo.segment}
    done = subprocess.run(
        ["bash", "-c", command], env=settings, capture_output=True, text=True, timeout=_DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["sha256"] == hashlib.sha256(b"hello").hexdigest()


def test_a_file_that_is_written_before_the_source_is_there_comes_out(demo: Demo, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    process = demo.start(str(tmp_path / "pipe"), "--workers", "1", "--json")
    (tmp_path / "pipe").write_bytes(b"hello")
    status, out, err = finish(process)
    assert status == 0, err
    assert json.loads(out)["sha256"] == hashlib.sha256(b"hello").hexdigest()


@pytest.mark.thorough
def test_without_the_waits_an_empty_file_proves_nothing(demo: Demo, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = demo.run_json(str(tmp_path / "file"), "--break", "--workers", "2", status=1)
    assert "nothing to hand on" in found["reason"]


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.thorough), 2000])
def test_a_file_of_zeros_without_the_waits_is_corrupt(demo: Demo, tmp_path: Path, size: int) -> None:
    (tmp_path / "file").write_bytes(bytes(size))  # which is what new memory holds
    found = demo.run_json(str(tmp_path / "file"), "--break", "--workers", "2", status=1)
    assert found["corrupt_chunks"] == found["chunks"]


def test_the_output_for_people_is_plain_and_has_a_line_for_each_stage(demo: Demo) -> None:
    status, out, err = demo.run("--workers", "2")
    assert (status, err) == (0, "")
    assert out.isascii()
    assert "\x1b" not in out
    assert [line.split()[1] for line in out.splitlines() if line.startswith("stage ")] == ["1", "2"]
    assert out.endswith("equal: no stage read data that was not there yet\n")


@pytest.mark.parametrize(
    ("corrupt", "chunks", "messages", "waits", "why"),
    [
        ([], 3, 0, True, None),
        ([1, 2], 3, 0, True, "although every stage waits: 2 of 3 chunks differ from the file's, the first is number 1"),
        ([0], 3, 0, False, "corrupt without the waits: 1 of 3 chunks"),
        ([], 3, 0, False, "not corrupt: so the check proves nothing"),
        ([], 0, 0, False, "there was nothing to hand on"),
        ([], 3, 5, True, "stage 2 sent 5 messages"),
    ],
)
def test_a_run_is_a_success_or_says_why_not(
    corrupt: list[int], chunks: int, messages: int, waits: bool, why: str | None
) -> None:
    found: Report = {"corrupt_chunks": len(corrupt), "first_corrupt": corrupt[0] if corrupt else None, "chunks": chunks}
    found["stages"] = [{"stage": 1, "messages": 0}, {"stage": 2, "messages": messages}]
    reason = why_failed(found, waits=waits)
    assert (reason is None) == (why is None)
    assert why is None or why in str(reason)


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["missing", ""])
def test_a_file_that_cannot_be_read_is_a_wrong_call_in_one_line(demo: Demo, tmp_path: Path, file: str) -> None:
    status, out, err = demo.run(str(tmp_path / file))
    assert (status, out) == (2, "")
    assert err.startswith(f"ipcsync: cannot read {tmp_path / file}: ")
    assert len(err.splitlines()) == 1


_UNSTARTED = """
import multiprocessing.util
from ipcsync_demo import main
def refuse(*_): raise {}
multiprocessing.util.spawnv_passfds = refuse
main(["--workers", "1"])
"""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("OSError(11, 'no process is left')", "ipcsync: cannot start the source: no process is left\n"),
        ("KeyboardInterrupt", "ipcsync: interrupted\n"),
    ],
)
def test_a_start_that_fails_or_is_interrupted_is_one_line(demo: Demo, error: str, said: str) -> None:
    settings = {**os.environ, "TMPDIR": str(demo.directory), "IPCSYNC_HOST_SEGMENT": demo.segment}
    command = [sys.executable, "-c", _UNSTARTED.format(error)]
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", said)


@pytest.mark.parametrize(
    ("number", "send"),
    [
        pytest.param(signal.SIGINT, os.kill, id="SIGINT", marks=pytest.mark.thorough),
        pytest.param(signal.SIGINT, os.killpg, id="Ctrl-C of a terminal"),
        pytest.param(signal.SIGTERM, os.kill, id="SIGTERM"),
    ],
)
def test_an_interrupt_ends_everything_in_order(
    demo: Demo,
    running: Callable[..., subprocess.Popen[str]],
    number: signal.Signals,
    send: Callable[[int, signal.Signals], None],
) -> None:
    process = running("--workers", "2", **EXEC)  # a zygote would be in its group
    everyone = [coordinator_of(process), *stages_of(process)]
    assert len(everyone) == 5
    send(process.pid, number)
    assert finish(process) == (1, "", "ipcsync: interrupted\n")
    assert [pid for pid in everyone if Path(f"/proc/{pid}").exists()] == []
    assert demo.left() == []


@pytest.mark.parametrize(
    "victim", [pytest.param(1, marks=pytest.mark.thorough), 2, pytest.param(3, marks=pytest.mark.thorough)]
)
def test_a_killed_worker_is_named(demo: Demo, running: Callable[..., subprocess.Popen[str]], victim: int) -> None:
    process = running("--workers", "3")
    everyone = stages_of(process)
    pid = everyone[victim]
    os.kill(pid, signal.SIGKILL)
    assert finish(process) == (1, "", f"ipcsync: stage {victim} (pid {pid}) died: killed by SIGKILL\n")
    assert [pid for pid in everyone if Path(f"/proc/{pid}").exists()] == []
    assert demo.left() == []


def test_a_worker_that_is_killed_amid_work_is_named(demo: Demo, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    os.truncate(path, 64 << 30)  # it has no blocks
    process = demo.start(str(path), "--workers", "3")
    until(lambda: len(stages_of(process)) == 5, "all are there", _DEADLINE_S)
    source, _, pid, *_ = stages_of(process)
    until(lambda: position(source, path) > 10 * LARGEST, "chunks are on their way", _DEADLINE_S)
    os.kill(pid, signal.SIGKILL)
    assert finish(process) == (1, "", f"ipcsync: stage 2 (pid {pid}) died: killed by SIGKILL\n")
    assert demo.left() == []


def test_a_killed_coordinator_is_an_error_and_no_hang(
    demo: Demo, running: Callable[..., subprocess.Popen[str]]
) -> None:
    process = running("--workers", "2")
    pid = coordinator_of(process)
    os.kill(pid, signal.SIGKILL)
    assert finish(process) == (1, "", f"ipcsync: the coordinator (pid {pid}) has died\n")


def test_workers_do_not_outlive_a_demo_that_is_killed(
    demo: Demo, running: Callable[..., subprocess.Popen[str]]
) -> None:
    process = running("--workers", "2")
    everyone = [coordinator_of(process), *stages_of(process)]
    process.kill()
    finish(process)
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in everyone), "all have ended", _DEADLINE_S)
    assert demo.run("--workers", "1")[0] == 0  # which tidies up behind the dead one
