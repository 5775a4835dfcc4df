"""A process with few descriptors, threads or memory left, or a full disk: typed errors, and no abort. Row 61."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

import ipcsync
from ipcsync import _room as room
from ipcsync import _threads
from ipcsync._session import connection
from ipcsync._session import waits as waits_module
from ipcsync._session.waits import Pending
from ipcsync._wire import endpoints
from ipcsync.client.aio import _runner
from ipcsync.testing import StreamGate
from tests.kit import scripts
from tests.kit.examples import LONG
from tests.kit.until import DEADLINE_S, until

pytestmark = [pytest.mark.own_coordinator, pytest.mark.process, pytest.mark.program]

_USE = """
import os, resource, sys, threading
import ipcsync
endpoint, kind, left, late = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == "late"

def limit():
    if kind == "descriptors":
        used = len(os.listdir("/proc/self/fd")) - 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + left, 4096))
        return
    size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    more = left << 20 if kind == "memory" else (left << 30) + (512 << 20)  # each thread's stack has 1 GiB
    resource.setrlimit(resource.RLIMIT_AS, (size + more, resource.RLIM_INFINITY))

ipcsync.Stream()
ipcsync.connect  # imports
if not late:
    limit()
try:
    client = ipcsync.connect(endpoint, timeout=30)
    if late:
        limit()
    event = client.event(f"e{os.getpid()}", recorder=True)
    point = event.record(ipcsync.Stream())
    point.synchronize(30)
    done = threading.Event()
    point.add_done_callback(lambda _: done.set())
    assert done.wait(30)
    for _ in client.watch(timeout=0):
        pass
    client.close()
    said = "good"
except ipcsync.QuotaExceeded as error:
    said = f"short of: {error}"
except ipcsync.IpcSyncError as error:
    said = f"typed: {type(error).__name__}: {error}"
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
os.write(1, said.encode())
os._exit(0)
"""


def _stack_of_a_gibibyte() -> None:
    resource.setrlimit(resource.RLIMIT_STACK, (1 << 30, resource.getrlimit(resource.RLIMIT_STACK)[1]))


def _said(endpoint: str, kind: str, left: int, when: str = "early") -> str:
    """What a process says that has so few left when it connects, or (late) right after it connected."""
    done = subprocess.run(
        [sys.executable, "-c", _USE, endpoint, kind, str(left), when],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "IPCSYNC_TEST_ZYGOTE": "0"},
        preexec_fn=_stack_of_a_gibibyte if kind == "threads" else None,
    )
    assert done.returncode == 0, (kind, left, when, done.returncode, done.stderr)
    assert done.stdout.startswith(("good", "short of", "typed")), (kind, left, when, done.stdout)
    return done.stdout


@pytest.mark.parametrize("when", ["early", "late"])
def test_row_71_few_descriptors_are_an_error_and_no_abort(coordinator: ipcsync.Coordinator, when: str) -> None:
    few = (*range(20), 30) if LONG else (0, 3, 9, 14, 30)
    said = {left: _said(coordinator.endpoint, "descriptors", left, when) for left in few}
    assert said[30] == "good"
    # Late, what is short may be the driver's.
    assert when == "late" or all(one == "good" or "file descriptors left for" in one for one in said.values()), said


def test_row_71_threads_that_connect_at_once_do_not_count_on_the_same_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    made: list[object] = []

    take = _threads._take

    def taken(lock: _threads.CallLock, seconds: float) -> bool:
        asked.append(1)
        return take(lock, 100 * seconds)

    def make() -> object:
        until(lambda: len(asked) == 2, "the other one waits")
        made.append(object())
        return made[-1]

    monkeypatch.setattr(connection, "_contexts", {})
    monkeypatch.setattr(_threads, "_take", taken)
    monkeypatch.setattr(connection, "new_context", make)
    threads = [threading.Thread(target=connection.zmq_context) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1


def test_row_71_few_threads_are_an_error_and_no_abort(coordinator: ipcsync.Coordinator) -> None:
    said = {left: _said(coordinator.endpoint, "threads", left) for left in ((0, 1, 2, 3, 4, 9) if LONG else (0, 2, 9))}
    assert said[9] == "good"
    assert all(one.startswith("short of: no further thread") for left, one in said.items() if left < 3), said


def test_row_71_callbacks_are_called_though_no_thread_for_them_can_start(
    client: ipcsync.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def start(target: Callable[[], object], name: str, on_failure: Callable[[BaseException], object]) -> object:
        if name == "ipcsync-callbacks":
            raise ipcsync.QuotaExceeded(f"no further thread for {name}")
        return real(target, name, on_failure)

    real, called = _threads.start, []
    monkeypatch.setattr(_threads, "start", start)
    event = client.event("e", recorder=True)
    with StreamGate(stream := ipcsync.Stream()):
        points = [event.record(stream) for _ in range(3)]
        for point in points:
            point.add_done_callback(lambda point: called.append(point.generation))
    until(lambda: called == [1, 2, 3], "all were called")
    assert not [each for each in caplog.records if each.threadName in ("ipcsync-waits", "ipcsync-watch")]


def _no_thread(*_: object) -> NoReturn:
    raise ipcsync.QuotaExceeded("no further thread")


def test_row_71_a_callback_for_which_no_thread_starts_is_not_called_later(
    client: ipcsync.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[int] = []
    event = client.event("e", recorder=True)
    with StreamGate(stream := ipcsync.Stream()):
        point = event.record(stream)
        with monkeypatch.context() as patch:
            patch.setattr(_threads, "start", _no_thread)
            with pytest.raises(ipcsync.QuotaExceeded):
                point.add_done_callback(lambda _: called.append(1))
        point.add_done_callback(lambda _: called.append(2))
    until(lambda: called, "the second is called")
    assert called == [2]


def test_row_71_a_wait_goes_on_though_no_thread_could_start_in_place_of_one_that_the_driver_kept(
    client: ipcsync.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(target: Callable[[], object], name: str, on_failure: Callable[[BaseException], object]) -> object:
        if name == "ipcsync-waits":
            refused.append(name)
            raise ipcsync.QuotaExceeded(f"no further thread for {name}")
        return real(target, name, on_failure)

    real, refused, called = _threads.start, list[str](), list[str]()
    waits, keeps, goes_on = client._session.waits, threading.Event(), threading.Event()
    kept, other = client.event("kept", recorder=True), client.event("other", recorder=True)
    with StreamGate(stream := ipcsync.Stream()):
        point, last = kept.record(stream), other.record(stream)
        pending = Pending(kept._engine, point.generation)

        def ask(_may_ask: bool) -> bool:  # a driver's call that blocks
            keeps.set()
            goes_on.wait(DEADLINE_S)
            return False

        monkeypatch.setattr(pending, "has_ended", ask)
        waits.add(pending, lambda _: None)
        assert keeps.wait(DEADLINE_S)
        with monkeypatch.context() as patch:
            patch.setattr(_threads, "start", start)
            last.add_done_callback(lambda _: called.append("other"))
            until(lambda: len(refused) > 1, "it was to be replaced, more than once")
            waits.remove(pending)
            goes_on.set()
    until(lambda: called, "the other wait ends")


def test_a_wait_that_comes_while_the_driver_keeps_a_look_for_one_that_is_cancelled_ends(
    client: ipcsync.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the only one then, and the look is not late yet."""
    waits, keeps, goes_on, called = client._session.waits, threading.Event(), threading.Event(), list[str]()
    kept, other = client.event("kept", recorder=True), client.event("other", recorder=True)
    watch, me = waits.watch, threading.get_ident()
    monkeypatch.setattr(waits, "watch", lambda: watch() if threading.get_ident() == me else None)  # at no beat
    with StreamGate(stream := ipcsync.Stream()):
        pending = Pending(kept._engine, kept.record(stream).generation)

        def ask(_may_ask: bool) -> bool:  # a driver's call that blocks
            keeps.set()
            goes_on.wait(2 * DEADLINE_S)
            return False

        monkeypatch.setattr(pending, "has_ended", ask)
        with monkeypatch.context() as patch:
            patch.setattr(waits_module, "_LOOK_S", 1.0)
            waits.add(pending, lambda _: None)
            assert keeps.wait(DEADLINE_S)
        waits.remove(pending)
        with StreamGate(second := ipcsync.Stream()):
            other.record(second).add_done_callback(lambda _: called.append("other"))
        try:
            until(lambda: called, "the other wait ends")
        finally:
            goes_on.set()


def test_row_71_what_a_task_closes_is_closed_though_no_thread_can_start(
    client: ipcsync.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def left() -> tuple[int, int]:
        return len(client.list_events()), len(client.list_sessions())

    async def scenario() -> None:
        other = await ipcsync.aconnect(client.endpoint)
        event, reservation = await other.event("e", recorder=True), await other.reserve()
        assert left() == (2, 2)
        monkeypatch.setattr(_runner, "start", _no_thread)
        for closing, expected in ((event.close, (1, 2)), (reservation.close, (0, 2)), (other.close, (0, 1))):
            await closing()
            until(lambda expected=expected: left() == expected, "it is closed")  # type: ignore[misc] # bound now

    asyncio.run(scenario())


def test_row_71_a_record_of_everything_that_has_no_thread_does_not_hold_up_the_loop(
    coordinator: ipcsync.Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with ipcsync.aconnect(coordinator.endpoint) as client:
            stream = ipcsync.Stream()
            event = await client.event("e", recorder=True, engine="timeline")
            recording = asyncio.create_task(event.record(stream))  # only the loop can make it
            with monkeypatch.context() as patch:
                patch.setattr(_runner, "start", _no_thread)
                with pytest.raises(ipcsync.QuotaExceeded):
                    await client.record_all(streams=[stream], after=[event.at(1)], timeout=10)
            await recording

    asyncio.run(scenario())


def test_row_71_little_memory_is_an_error_and_no_abort(coordinator: ipcsync.Coordinator) -> None:
    said = {
        left: _said(coordinator.endpoint, "memory", left)
        for left in ((1, 4, 12, 24, 512, 2048) if LONG else (1, 24, 2048))
    }
    assert said[2048] == "good"  # the allocator may keep 64 MiB for each thread, beside its stack
    assert said[1].startswith("short of"), said  # of memory, or of a thread, whose stack takes some


def _limited(limit: str, most: int, *arguments: str) -> list[str]:
    """The command of a coordinator under that limit."""
    code = f"import os, resource, sys; resource.setrlimit(resource.RLIMIT_{limit}, ({most}, {most})); "
    run = "os.execv(sys.executable, [sys.executable, '-m', 'ipcsync_coordinator', *sys.argv[1:]])"
    return [sys.executable, "-c", code + run, *arguments]


@pytest.mark.parametrize("flag", ["--keeper", "--no-keeper"])
@pytest.mark.parametrize("limit", ["NOFILE", "FSIZE"])
def test_row_71_a_coordinator_with_few_descriptors_or_small_files_says_so_and_ends(
    tmp_path: Path, flag: str, limit: str
) -> None:
    ipcsync.Stream()  # the software driver's file, which is there from now on, may be larger
    few = (16, 24, 28, 40) if flag == "--no-keeper" else (12, 16, 40)
    for most in few if limit == "NOFILE" else (1 << 16,):
        done = subprocess.run(
            _limited(limit, most, flag, "--runtime-dir", str(tmp_path / str(most))),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={**os.environ, "IPCSYNC_TEST_ZYGOTE": "0"},
        )
        assert done.returncode == 1, (most, done)
        assert "cannot start" in done.stderr, (most, done.stderr)
        assert most != 40 or re.search("needs [56]. file descriptors for its first session", done.stderr), done.stderr
        assert "Traceback" not in done.stderr or "CUDA" in done.stderr, (most, done.stderr)
        assert limit == "NOFILE" or "`ulimit -f`" in done.stderr, done.stderr


_BURST = """
import os, socket, sys, time
path, crowd, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
for _ in range(rounds):
    held = []
    for _ in range(crowd):
        one, until = socket.socket(socket.AF_UNIX), time.monotonic() + 0.05
        one.setblocking(False)
        while time.monotonic() < until:
            try:
                one.connect(path)
                held.append(one)
                break
            except BlockingIOError:  # its queue is full
                time.sleep(0.0005)
            except OSError:  # it is hidden
                break
    for one in held:
        one.close()
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("flag", ["--keeper", "--no-keeper"])
@pytest.mark.parametrize("most", [64, 100, 300] if LONG else [64])
def test_row_71_a_burst_of_connections_does_not_end_a_coordinator_with_few_descriptors(
    tmp_path: Path, flag: str, most: int
) -> None:
    """Bursts from four processes at once, of more connections than it has descriptors."""
    ready, told = os.pipe()
    command = _limited("NOFILE", most, flag, "--runtime-dir", str(tmp_path / "r"), "--ready-fd", str(told))
    env = {**os.environ, "IPCSYNC_TEST_ZYGOTE": "0"}
    with subprocess.Popen(command, env=env, pass_fds=[told], stderr=subprocess.PIPE, text=True) as process:
        try:
            os.close(told)
            with os.fdopen(ready) as file:
                endpoint = file.readline().strip()
            count = max(240, 2 * most)  # more than it has, also where the four do not run at once
            burst = [sys.executable, "-c", _BURST, endpoints.socket_path(endpoint), str(count), "8"]
            with ipcsync.connect(endpoint, timeout=30) as client:
                before = client.stats()["pid"]

                def has_refused() -> bool:
                    crowds = [subprocess.Popen(burst) for _ in range(4)]
                    assert [crowd.wait(120) for crowd in crowds] == [0] * 4
                    return client.stats()["refusals"].get("descriptors", 0) > 0

                until(has_refused, "a burst that meets the limit", 60)  # one may be gone before it is accepted
                assert client.stats()["pid"] == before
            assert process.poll() is None
        finally:
            process.terminate()
            _, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors
    assert "Too many open files" not in errors


def test_a_look_for_room_leaves_nothing_and_says_what_holds_the_descriptors() -> None:
    scripts.run(
        """
        import os, resource, ipcsync
        from ipcsync import _room as room
        before = os.listdir("/proc/self/fd"), os.listdir("/proc/self/task")
        room.look("a test", descriptors=5, threads=5)
        assert (os.listdir("/proc/self/fd"), os.listdir("/proc/self/task")) == before
        pipes = [os.pipe() for _ in range(20)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 2, 4096))
        try:
            room.look("a test", descriptors=5, threads=1)
        except ipcsync.QuotaExceeded as error:
            assert error.limit == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            assert "for a test" in str(error) and "of kind pipe" in str(error) and "ulimit -n" in str(error), error
        else:
            raise AssertionError
        os.pipe2(0)  # those that were tried are closed
        """
    )


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(errno.EMFILE, "x"), "file descriptors left for a test"),
        (OSError(errno.ENFILE, "x"), "machine has no file descriptor left for a test"),
        (RuntimeError("can't start new thread"), "no further thread or process can be started for a test"),
        (BlockingIOError(errno.EAGAIN, "x"), "no further thread or process can be started for a test"),
        (MemoryError(), "too little memory left for a test"),
        (OSError(errno.ENOSPC, "x", "/f"), "no room on the disk for a test: /f"),
        (OSError(errno.EFBIG, "x"), "a file of a test would be larger than this process may write"),
    ],
)
def test_what_was_short_is_named(error: BaseException, text: str) -> None:
    assert text in str(room.shortage(error, "a test"))


def test_a_shortage_of_threads_is_named_though_no_descriptor_is_left_to_count_them_with() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        short = room.shortage(RuntimeError("can't start new thread"), "a test")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    what = "no further thread or process can be started for a test; this process has many threads: look at"
    assert str(short).startswith(what)


@pytest.mark.parametrize("error", [OSError(errno.EACCES, "x"), ipcsync.WaitTimeout("x"), RuntimeError("x")])
def test_other_errors_stay_what_they_are(error: BaseException) -> None:
    assert room.shortage(error, "a test") is None


def test_row_71_a_trace_whose_disk_is_full_ends_and_the_program_goes_on(coordinator: ipcsync.Coordinator) -> None:
    """RLIMIT_FSIZE stands for the disk; a signal that it sends is ignored, as Python does."""
    scripts.run(
        f"""
        import logging, os, resource, tempfile
        import ipcsync
        said = []
        class Heard(logging.Handler):
            def emit(self, record):
                said.append(record.getMessage())
        logging.getLogger("ipcsync").addHandler(Heard())
        folder = tempfile.mkdtemp()
        ipcsync.Stream()
        with ipcsync.connect({coordinator.endpoint!r}, name="traced", trace=folder, timeout=30) as client:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
            for name in ("full-1", "full-2"):
                with client.event(name, recorder=True) as event:
                    event.record(ipcsync.Stream()).synchronize(30)
        assert len([one for one in said if "no trace of 'traced'" in one]) == 1, said
        assert not os.listdir(folder)
        os.rmdir(folder)
        open(folder, "w").close()
        try:
            ipcsync.connect({coordinator.endpoint!r}, trace=folder)
        except ipcsync.IpcSyncError as error:
            assert isinstance(error, OSError) and folder in str(error), error
        else:
            raise AssertionError
        os.unlink(folder)
        """
    )
