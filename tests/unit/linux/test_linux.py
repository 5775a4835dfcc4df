"""Futexes, fork marks, processes and file locks: what the rest takes from Linux."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ipcsync._linux import files
from ipcsync._linux.futex import Futex
from ipcsync._linux.process import ForkMark, PidFd, Process, is_running, pid_namespace, start_time
from tests.kit.descriptors import descriptors
from tests.kit.peer import Peer
from tests.kit.until import until
from tests.unit.linux.shared_word import Word

_kept: dict[str, Any] = {}


# --- futex ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def word(tmp_path: Path) -> Word:
    """A word of the test's own, which is 0."""
    return Word(tmp_path / "word")


def test_a_wait_ends_at_once_if_the_word_is_another(word: Word) -> None:
    assert word.futex.wait(1, 10**12) is True


def test_a_wait_ends_by_its_timeout(word: Word) -> None:
    before = time.monotonic_ns()
    assert word.futex.wait(0, 20_000_000) is False
    assert time.monotonic_ns() - before >= 20_000_000


@pytest.mark.parametrize("timeout_ns", [0, -1, -(10**18)])
def test_no_time_is_no_wait(word: Word, timeout_ns: int) -> None:
    assert word.futex.wait(0, timeout_ns) is False


def test_only_the_low_32_bits_are_compared(word: Word) -> None:
    word.value.value = 0xFFFFFFFF
    assert word.futex.wait(0x5_FFFFFFFF, 1_000_000) is False
    assert word.futex.wait(-1, 1_000_000) is False
    assert word.futex.wait(0x5_00000000, 10**12) is True


def test_every_waiter_is_woken_and_the_gil_is_free_meanwhile(word: Word) -> None:
    def wait() -> None:
        while word.value.value == 0:
            word.futex.wait(0, 10**12)

    threads = [threading.Thread(target=wait) for _ in range(8)]
    for thread in threads:
        thread.start()
    word.value.value = 1
    word.futex.wake()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def test_a_wake_wakes_those_that_sleep(word: Word) -> None:
    """The value stays as it is: that they end is the wake's doing alone."""
    ended: list[bool] = []
    threads = [threading.Thread(target=lambda: ended.append(word.futex.wait(0, 60 * 10**9))) for _ in range(4)]
    for thread in threads:
        thread.start()

    def woken() -> bool:
        word.futex.wake()
        return len(ended) == 4

    until(woken, "the waiter was woken")
    assert ended == [True] * 4


def _wait_for_one(path: Path) -> int:
    word = Word(path)
    while (seen := word.value.value) == 0:
        word.futex.wait(seen, 10**12)
    return seen


def test_a_wake_reaches_another_process(word: Word, tmp_path: Path, peer: Peer) -> None:
    peer.begin(_wait_for_one, tmp_path / "word")
    word.value.value = 7
    word.futex.wake()
    assert peer.result() == 7


def test_a_signal_ends_a_wait_with_a_reason_to_look_again(word: Word) -> None:
    caught: list[int] = []
    main = threading.main_thread().ident
    assert main is not None
    before = signal.signal(signal.SIGUSR1, lambda number, _: caught.append(number))
    ending = threading.Event()

    def send() -> None:
        while not ending.wait(0.001):
            signal.pthread_kill(main, signal.SIGUSR1)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        assert word.futex.wait(0, 60 * 10**9) is True
    finally:
        ending.set()
        sender.join(20)
        signal.signal(signal.SIGUSR1, before)
    assert caught


def test_an_invalid_address_is_an_error() -> None:
    with pytest.raises(OSError, match="futex wait") as caught:
        Futex(8).wait(0, 1_000_000)
    assert caught.value.errno == errno.EFAULT


# --- the fork mark ----------------------------------------------------------------------------------------------------


def _marks_in_children() -> dict[str, list[bool]]:
    """In a process of one thread: what the marks of each of three generations say, after each kind of fork."""
    mark = ForkMark()
    found = {}
    for name, fork in (("os.fork", os.fork), ("C's", ctypes.PyDLL(None).fork)):
        read, write = os.pipe()
        if (child := fork()) == 0:
            own = ForkMark()
            if (grandchild := fork()) == 0:
                os.write(write, bytes([not mark.byte[0], not own.byte[0]]))
                os._exit(0)
            os.waitpid(grandchild, 0)
            os.write(write, bytes([not mark.byte[0], not own.byte[0]]))
            os._exit(0)
        os.waitpid(child, 0)
        found[name] = [bool(each) for each in os.read(read, 16)]
        os.close(read)
        os.close(write)
    found["here"] = [not mark.byte[0]]
    return found


def test_a_mark_tells_every_child_from_the_process_that_made_it(peer: Peer) -> None:
    #              the grandchild: of its grandparent's mark, of its parent's; the child: of its parent's, of its own
    everywhere = [True, True, True, False]
    assert peer.call(_marks_in_children) == {"os.fork": everywhere, "C's": everywhere, "here": [False]}


# --- processes --------------------------------------------------------------------------------------------------------


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that does nothing."""
    process = subprocess.Popen(["sleep", "100"])
    yield process
    process.kill()
    process.wait(20)


def test_this_process_lives() -> None:
    started = start_time(os.getpid())
    assert started is not None
    assert is_running(os.getpid(), started)
    assert not is_running(os.getpid(), started - 1)


@pytest.mark.process
def test_a_pid_that_nobody_has_is_no_process(sleeper: subprocess.Popen[bytes]) -> None:
    started = start_time(sleeper.pid)
    assert started is not None
    sleeper.kill()
    sleeper.wait(20)
    assert start_time(sleeper.pid) is None
    assert not Process(sleeper.pid, started).is_alive()
    assert not is_running(sleeper.pid, started)
    with pytest.raises(ProcessLookupError):
        PidFd(sleeper.pid)


@pytest.mark.process
def test_a_killed_process_is_dead_though_nobody_reaped_it(sleeper: subprocess.Popen[bytes]) -> None:
    started = start_time(sleeper.pid)
    assert started is not None
    process, pidfd = Process(sleeper.pid, started), PidFd(sleeper.pid)
    assert process.is_alive()
    assert not pidfd.has_ended()
    sleeper.kill()
    until(pidfd.has_ended, "the process is dead")
    assert os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT), "it is a zombie"
    assert not process.is_alive(), "told no later than by the pidfd"
    assert not is_running(sleeper.pid, started)
    assert PidFd(sleeper.pid).has_ended(), "also opened on the zombie"
    sleeper.wait(20)
    assert pidfd.has_ended()
    assert not process.is_alive()
    pidfd.close()


@pytest.mark.process
def test_a_stopped_process_lives(sleeper: subprocess.Popen[bytes]) -> None:
    started = start_time(sleeper.pid)
    assert started is not None
    process, pidfd = Process(sleeper.pid, started), PidFd(sleeper.pid)
    sleeper.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED | os.WNOWAIT)
    assert process.is_alive()
    assert not pidfd.has_ended()
    pidfd.close()


@pytest.mark.process
def test_another_process_of_the_same_pid_is_not_it(sleeper: subprocess.Popen[bytes]) -> None:
    started = start_time(sleeper.pid)
    assert started is not None
    assert not Process(sleeper.pid, started + 1).is_alive()
    assert Process(sleeper.pid, started).is_alive()


_HIDDEN = """
import os, subprocess, sys
from ipcsync._linux.process import is_running, start_time
if subprocess.run(["mount", "-t", "proc", "-o", "hidepid=1", "proc", "/proc"]).returncode:
    sys.exit(77)
theirs = subprocess.Popen(["sleep", "100"]).pid
started = start_time(theirs)
os.setresuid(65534, 65534, 65534)
try:
    open(f"/proc/{theirs}/statm").close()
    sys.exit(77)
except PermissionError:
    pass
sys.exit(is_running(theirs, started))
"""


@pytest.mark.process
def test_a_process_that_proc_hides_counts_as_gone() -> None:
    command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", sys.executable, "-c", _HIDDEN]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if "unshare failed" in done.stderr or done.returncode == 77:
        pytest.skip(f"no /proc can be mounted here that hides processes: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr


def test_a_closed_process_counts_as_dead() -> None:
    process = Process(os.getpid(), start_time(os.getpid()) or 0)
    process.close()
    process.close()
    assert not process.is_alive()


class _Interrupted(Process):
    """One whose end an exception keeps from closing anything."""

    def close(self) -> None:
        raise KeyboardInterrupt


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_process_that_is_watched_no_more_has_no_descriptor_whatever_its_finalizer_meets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    gc.collect()  # else what earlier tests left is closed amid this one
    before = descriptors()
    watched = _Interrupted(os.getpid(), start_time(os.getpid()) or 0)
    assert watched.is_alive()
    assert len(descriptors().items() - before.items()) == 1
    del watched
    assert descriptors().items() <= before.items()


@pytest.mark.process
def test_a_closed_pidfd_may_be_closed_again(sleeper: subprocess.Popen[bytes]) -> None:
    pidfd = PidFd(sleeper.pid)
    assert os.fstat(pidfd.fileno())
    pidfd.close()
    pidfd.close()


@pytest.mark.process
def test_a_pidfd_whose_close_an_exception_ends_closes_no_other_descriptor(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    pidfd, close = PidFd(sleeper.pid), os.close

    def close_and_be_interrupted(fd: int) -> None:
        close(fd)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", close_and_be_interrupted)
        with pytest.raises(KeyboardInterrupt):
            pidfd.close()
    other = os.eventfd(0)  # it gets the number that is free now
    del pidfd
    assert os.fstat(other)
    close(other)


_ODDLY_NAMED = """
import ctypes, signal, sys
ctypes.CDLL(None).prctl(15, b") R 1 2 (")  # PR_SET_NAME
print(flush=True)
signal.pause()
"""


@pytest.mark.process
def test_a_process_may_be_called_what_it_likes() -> None:
    with subprocess.Popen([sys.executable, "-c", _ODDLY_NAMED], stdout=subprocess.PIPE) as odd:
        assert odd.stdout is not None
        odd.stdout.read(1)
        started = start_time(odd.pid)
        plain = start_time(os.getpid())
        assert started is not None
        assert plain is not None
        assert started >= plain
        assert is_running(odd.pid, started)
        odd.kill()


def _namespace() -> int:
    return pid_namespace()


def test_processes_of_one_pid_namespace_know_it(peer: Peer) -> None:
    assert peer.call(_namespace) == pid_namespace()


# --- locks ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def open_file(tmp_path: Path) -> Iterator[Callable[[], int]]:
    """Opens the same file anew each time."""
    fds: list[int] = []

    def open_it() -> int:
        fds.append(os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        return fds[-1]

    yield open_it
    for fd in fds:
        if fd >= 0:
            os.close(fd)


def test_a_lock_keeps_out_whoever_opened_the_file_anew_also_in_this_process(open_file: Callable[[], int]) -> None:
    mine, other = open_file(), open_file()
    assert not files.is_locked(other, 5)
    assert files.try_lock(mine, 5)
    assert files.try_lock(mine, 5), "again by the same description"
    assert not files.try_lock(other, 5)
    assert files.is_locked(other, 5)
    assert not files.is_locked(mine, 5), "its own it does not see"


def test_each_byte_has_a_lock_of_its_own_beyond_the_files_end_too(open_file: Callable[[], int]) -> None:
    mine, other = open_file(), open_file()
    assert files.try_lock(mine, 10**9)
    assert files.try_lock(other, 10**9 + 1)
    assert files.try_lock(other, 10**9 - 1)
    assert not files.try_lock(other, 10**9)


def _lock(path: str, offset: int) -> bool:
    _kept["fd"] = os.open(path, os.O_RDWR)
    return files.try_lock(_kept["fd"], offset)


def _give_up() -> None:
    os.close(_kept.pop("fd"))


def test_a_lock_goes_with_its_descriptor_or_its_process(
    open_file: Callable[[], int], tmp_path: Path, peer: Peer
) -> None:
    fd = open_file()
    path = str(tmp_path / "file")
    assert peer.call(_lock, path, 1)
    assert files.is_locked(fd, 1)
    assert not files.try_lock(fd, 1)
    peer.call(_give_up)
    assert not files.is_locked(fd, 1)
    assert peer.call(_lock, path, 1)
    peer.kill()
    assert files.try_lock(fd, 1)


def _fork_with_lock(path: str) -> tuple[list[bool], list[bool]]:
    """What a second opening sees while this process and a forked child have the lock, and then only the child."""
    _lock(path, 1)
    other = os.open(path, os.O_RDWR)
    seen = [files.is_locked(other, 1)]
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    os.close(read)
    _give_up()
    seen.append(files.is_locked(other, 1))
    os.close(write)
    os.waitpid(child, 0)
    return seen, [files.is_locked(other, 1)]


def test_a_forked_child_keeps_its_parents_lock_until_it_closes_the_descriptor(
    open_file: Callable[[], int], tmp_path: Path, peer: Peer
) -> None:
    open_file()
    assert peer.call(_fork_with_lock, str(tmp_path / "file")) == ([True, True], [False])
