"""Python children: they do what they are told, say why they cannot, and nothing of them stays."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from ipcsync._linux import child
from ipcsync._linux.child import Child, Worker, WorkerError, environment, in_words, read_line
from ipcsync._room import raise_descriptors
from tests.kit.descriptors import descriptors
from tests.kit.until import until

pytestmark = pytest.mark.process

_ROOT = Path(__file__).parents[3]
_DEADLINE_S = 30.0


def _children_of(pid: int) -> set[int]:
    """The children that live; a zombie does not."""
    found = set()
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):
            stat = Path(f"/proc/{int(entry)}/stat").read_text().rpartition(")")[2].split()
            if int(stat[1]) == pid and stat[0] != "Z":
                found.add(int(entry))
    return found


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture(autouse=True)
def _by_exec(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tested is the start of a fresh interpreter."""
    monkeypatch.setenv("IPCSYNC_TEST_ZYGOTE", "0")


@pytest.fixture
def worker() -> Iterator[Worker]:
    with Worker(env={"PYTHONWARNINGS": "error"}) as one:
        yield one


# --- what children do -------------------------------------------------------------------------------------------------


def echo(connection: Connection, *arguments: Any) -> None:
    connection.send((arguments, connection.recv()))


def add(a: int, b: int) -> int:
    return a + b


def fail() -> None:
    raise LookupError("not here")


def hang() -> None:
    time.sleep(600)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def about_me() -> dict[str, Any]:
    return {
        "session": os.getsid(0),
        "stdin": os.readlink("/proc/self/fd/0"),
        "path": sys.path,
        "environment": dict(os.environ),
    }


def my_descriptors() -> list[str]:
    return [os.readlink(f"/proc/self/fd/{fd}") for fd in range(3, 256) if _is_open(fd)]


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def inherits(_: Connection, fd: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import os; os.fstat({fd})"], capture_output=True, check=False, close_fds=False
    )
    os.write(fd, b"kept\n" if done.returncode == 0 else b"not kept\n")


def fork_a_child_that_exits() -> int:
    child_pid = os.fork()
    if child_pid == 0:
        sys.exit(3)
    return os.waitstatus_to_exitcode(os.waitpid(child_pid, 0)[1])


def start_a_sleeper() -> int:
    return subprocess.Popen(["sleep", "600"]).pid


def leave_a_mark(path: str) -> None:
    child.at_end.append(lambda: Path(path).write_text("ended"))


def await_file(path: str) -> None:
    until(Path(path).exists, "it is there")


def start_a_child_and_wait(connection: Connection) -> None:
    """Be the parent of a child that would sleep for ever."""
    grandchild = Worker()
    grandchild.call(add, 1, 1)
    grandchild.begin(hang)
    connection.send(grandchild.pid)
    time.sleep(600)


def start_many_children(connection: Connection) -> None:
    connection.send(None)
    for _ in range(8):  # not for ever: each has a session, and so a share of the processor like all of the tests' one
        Worker().begin(hang)
    hang()


# --- calls ------------------------------------------------------------------------------------------------------------


def test_a_child_runs_its_program_with_its_arguments() -> None:
    with Child(echo, 1, "two", {"three": 3}) as one:
        one.connection.send("four")
        assert one.has_spoken(_DEADLINE_S)
        assert one.connection.recv() == ((1, "two", {"three": 3}), "four")
        assert one.wait(_DEADLINE_S)
        assert one.status == 0


def test_a_worker_answers_in_the_order_of_the_questions(worker: Worker) -> None:
    assert worker.call(add, 1, b=2) == 3
    worker.begin(add, 3, 4)
    worker.begin(add, 5, 6)
    assert [worker.result(_DEADLINE_S), worker.result(_DEADLINE_S)] == [7, 11]


def test_what_a_function_raises_comes_back_with_its_traceback_and_the_worker_goes_on(worker: Worker) -> None:
    with pytest.raises(WorkerError, match=r"^LookupError: not here$") as caught:
        worker.call(fail)
    assert "in fail" in caught.value.trace
    assert worker.call(add, 1, 1) == 2


def test_a_worker_that_ends_in_the_middle_says_how(worker: Worker) -> None:
    with pytest.raises(WorkerError, match=rf"pid {worker.pid}\) ended: killed by SIGKILL"):
        worker.call(die)
    with pytest.raises(WorkerError, match="killed by SIGKILL"):
        worker.call(add, 1, 1)
    assert worker.status == -signal.SIGKILL


def test_so_does_one_that_ends_amid_its_answer(worker: Worker) -> None:
    worker.begin(bytes, 10_000_000)  # more than the pipe holds
    assert worker.has_spoken(_DEADLINE_S)
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match="killed by SIGKILL"):
        worker.result(_DEADLINE_S)


def test_an_answer_that_takes_too_long_is_told_and_closing_kills_at_once(worker: Worker) -> None:
    with pytest.raises(WorkerError, match=r"did not answer within 0\.05 s"):
        worker.call(hang, timeout=0.05)
    began = time.monotonic()
    assert worker.close() == -signal.SIGKILL
    assert time.monotonic() - began < child._REAP_S / 2


def test_a_worker_that_is_closed_does_what_it_has_to_at_its_end(worker: Worker, tmp_path: Path) -> None:
    worker.call(leave_a_mark, str(tmp_path / "mark"))
    assert worker.close(_DEADLINE_S) == 0
    assert (tmp_path / "mark").read_text() == "ended"
    assert worker.close() == 0


def test_a_worker_whose_answer_nobody_takes_ends_in_order(
    worker: Worker, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    worker.call(leave_a_mark, str(tmp_path / "mark"))
    worker.begin(await_file, str(tmp_path / "go"))
    worker.connection.close()
    (tmp_path / "go").touch()
    assert worker.wait(_DEADLINE_S)
    assert (worker.status, (tmp_path / "mark").read_text()) == (0, "ended")
    assert capfd.readouterr().err == ""


def test_a_child_that_a_function_forks_ends_its_own_way(worker: Worker) -> None:
    assert worker.call(fork_a_child_that_exits) == 3
    assert worker.call(add, 1, 1) == 2


def test_a_program_that_cannot_be_pickled_leaves_no_process() -> None:
    before = _children_of(os.getpid())
    with pytest.raises(Exception, match="pickle"):
        Child(lambda _: None)
    assert _children_of(os.getpid()) <= before


def test_an_exception_that_ends_the_constructor_waits_for_no_process_that_was_not_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a signal's handler may raise, at any line, also of what the constructor calls to be undone."""

    class Alarm(Exception):  # noqa: N818 - as a user may name it
        """What the handler raises."""

    asked: list[str] = []
    process = SimpleNamespace(pid=os.getpid(), kill=lambda: asked.append("kill"), wait=lambda: asked.append("wait"))
    monkeypatch.setattr(child, "spawn", lambda *_, **__: process)
    codes = (Child.__init__.__code__, contextlib.ExitStack.callback.__code__)

    def is_interrupted(line: int) -> bool:
        lines = itertools.count()

        def trace(frame: FrameType, event: str, _: object) -> Any:
            if frame.f_code not in codes:
                return None
            if event == "line" and next(lines) == line:
                raise Alarm
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            Child(echo).connection.close()
        except Alarm:
            return True
        finally:
            sys.settrace(before)
        return False

    found = set()
    for line in itertools.count():
        asked.clear()
        with ThreadPoolExecutor(1) as apart:  # CPython may keep an exception that it handled as its thread's, for ever
            if not apart.submit(is_interrupted, line).result():
                break
        found.add(tuple(asked))
    assert found == {(), ("kill", "wait")}, "nothing before there is a process"


# --- what a child has -------------------------------------------------------------------------------------------------


def test_a_child_has_a_session_of_its_own_no_stdin_and_our_import_path(worker: Worker) -> None:
    found = worker.call(about_me)
    assert found["session"] == worker.pid
    assert found["stdin"] == os.devnull
    assert set(filter(None, sys.path)) <= set(found["path"])
    assert found["environment"]["PYTHONWARNINGS"] == "error"
    assert environment({"A": "b"})["A"] == "b"


def test_what_is_no_text_in_the_import_path_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["/here", Path("/there")])  # which the interpreter passes over too
    assert environment()["PYTHONPATH"] == "/here"


def test_a_child_has_no_descriptors_but_its_own() -> None:
    read, write = os.pipe()
    os.set_inheritable(read, True)
    with Worker() as one:
        found = [
            what for what in one.call(my_descriptors) if "/libffi.so" not in what
        ]  # newer ones open their own file
        assert [what.partition(":")[0] for what in found] == ["socket"]
    os.close(read)
    os.close(write)


def test_descriptors_given_to_a_child_are_not_given_on() -> None:
    read, write = os.pipe()
    with Child(inherits, write, fds=[write]):
        os.close(write)
        assert read_line(read, _DEADLINE_S) == "not kept"
    os.close(read)


def test_a_childs_life_leaves_no_descriptor_here() -> None:
    with Worker() as one:
        one.call(add, 1, 1)
    gc.collect()
    before = descriptors()
    for end in (Worker.close, Worker.kill):
        one = Worker()
        one.call(add, 1, 1)
        end(one)
        one.close()
    assert descriptors().items() <= before.items()


# --- its end ----------------------------------------------------------------------------------------------------------


def test_a_child_is_killed_with_its_parent() -> None:
    with Child(start_a_child_and_wait) as parent:
        grandchild = parent.connection.recv()
        assert _is_alive(grandchild)
        parent.kill()
        until(lambda: not _is_alive(grandchild), "the grandchild is gone")


def test_a_parent_killed_at_any_moment_leaves_no_child() -> None:
    mark = f"{os.getpid()}-{time.monotonic_ns()}"

    def of_this_test() -> set[int]:
        found = set()
        for entry in os.listdir("/proc"):
            with contextlib.suppress(OSError, ValueError):
                if mark.encode() in Path(f"/proc/{int(entry)}/environ").read_bytes() and _is_alive(int(entry)):
                    found.add(int(entry))
        return found

    for number in range(4):
        parent = Child(start_many_children, env={"IPCSYNC_TEST_MARK": mark})
        assert parent.has_spoken(_DEADLINE_S)
        threading.Event().wait(0.008 * number)  # anywhere in the starts that follow
        parent.kill()
        parent.close()
        until(lambda: not of_this_test(), "everything is gone")


def test_killing_with_the_group_ends_what_the_child_started(worker: Worker) -> None:
    sleeper = worker.call(start_a_sleeper)
    assert worker.kill(with_group=True)
    until(lambda: not _is_alive(sleeper), "the sleeper is gone")


def test_killing_alone_leaves_what_the_child_started(worker: Worker) -> None:
    sleeper = worker.call(start_a_sleeper)
    assert worker.kill()
    assert _is_alive(sleeper)
    os.kill(sleeper, signal.SIGKILL)


def test_a_forked_child_of_ours_ends_nobody(worker: Worker) -> None:
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            worker.kill(with_group=True)
        os._exit(0)
    os.waitpid(pid, 0)
    assert worker.call(add, 1, 1) == 2


# --- the rest ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("least", [0, 1024])
def test_a_line_is_read_to_its_end_or_said_to_be_missing(least: int) -> None:
    raise_descriptors(2048)
    pipe, write = os.pipe()
    read = fcntl.fcntl(pipe, fcntl.F_DUPFD_CLOEXEC, least)  # as in a process that has a thousand files open
    os.close(pipe)
    assert read_line(read, 0.01) is None
    os.write(write, b"rea")
    threading.Timer(0.05, os.write, (write, b"dy\n")).start()
    assert read_line(read, _DEADLINE_S) == "ready"
    os.write(write, b"half")
    os.close(write)
    assert read_line(read, _DEADLINE_S) == ""
    os.close(read)


def test_an_end_is_told_in_words() -> None:
    assert in_words(3) == "exit status 3"
    assert in_words(-signal.SIGTERM) == "killed by SIGTERM"
    assert in_words(-signal.SIGRTMIN - 1) == f"killed by signal {signal.SIGRTMIN + 1}"
    assert in_words(None) == "still running"
