"""Robust futexes: what the kernel does with a word when its thread ends; the mark of a living process."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from ipcsync._linux import futex
from ipcsync._linux.futex import DeathMark
from tests.kit.peer import Peer
from tests.kit.until import until
from tests.unit.linux.shared_word import Word

_kept: dict[str, Any] = {}


@pytest.fixture
def word(tmp_path: Path) -> Word:
    """A word of the test's own, which is 0."""
    return Word(tmp_path / "word")


def _address(word: Word) -> int:
    return ctypes.addressof(word.value)


def test_a_held_word_is_the_threads_id_and_0_once_it_left(word: Word) -> None:
    found = []

    def hold() -> None:
        with futex.held(_address(word)) as is_held:
            found.append((is_held, word.value.value == threading.get_native_id()))

    thread = threading.Thread(target=hold)
    thread.start()
    thread.join(20)
    assert found == [(True, True)]
    assert word.value.value == 0


def test_a_word_that_wakes_has_the_bit_for_it_and_is_released_whoever_set_that(word: Word) -> None:
    with futex.held(_address(word), wakes=True):
        assert word.value.value == threading.get_native_id() | futex.WAITERS
    assert word.value.value == 0
    with futex.held(_address(word)):
        word.value.value |= futex.WAITERS  # as a waiter of the C library's kind does
    assert word.value.value == 0


def test_a_word_that_another_took_meanwhile_is_left_alone(word: Word) -> None:
    with futex.held(_address(word)):
        word.value.value = 12345
    assert word.value.value == 12345


def _list_head() -> int:
    head, length = ctypes.c_void_p(), ctypes.c_size_t()
    assert ctypes.CDLL(None).syscall(futex._SYS_GET, 0, ctypes.byref(head), ctypes.byref(length)) == 0
    return head.value or 0


def test_libcs_own_list_is_put_back(word: Word) -> None:
    before = _list_head()
    with futex.held(_address(word)):
        assert _list_head() != before
    assert _list_head() == before


def test_the_list_lies_where_the_oom_reaper_takes_nothing(word: Word) -> None:
    """It takes the private pages of a process that is being killed, before that process's threads come to their end."""
    with futex.held(_address(word)):
        for address in (_list_head(), _address(word)):
            (mapping,) = [each for each in _mappings() if address in each[0]]
            assert mapping[1].endswith("s"), "shared"


def _mappings() -> list[tuple[range, str]]:
    """Addresses and permissions of this process's mappings (proc(5), maps)."""
    rows = [line.split()[:2] for line in Path("/proc/self/maps").read_text().splitlines()]
    return [(range(*(int(part, 16) for part in where.split("-"))), permissions) for where, permissions in rows]


def test_where_the_kernel_refuses_nothing_is_held(word: Word, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futex, "_SYS_SET", -1)
    with futex.held(_address(word)) as is_held:
        assert not is_held
        assert word.value.value == 0


def _hold(path: Path) -> int:
    """In a peer: a thread that holds the word from now on; its id."""
    word, is_held = Word(path), threading.Event()

    def hold() -> None:
        with futex.held(_address(word)):
            is_held.set()
            threading.Event().wait()

    _kept["word"] = word
    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    assert is_held.wait(20)
    return int(word.value.value)


def _fork_and_end(fork: str) -> None:
    """In a peer: a child that ends, as the kernel sees it with no thread but its main one."""
    child = os.fork() if fork == "os.fork" else ctypes.PyDLL(None).fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


def _execute() -> None:
    """In a peer: be another program."""
    os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(100)"])


@pytest.mark.parametrize("how", ["kill", "exit", "exec"])
def test_the_kernel_marks_what_a_process_held_that_ends_or_is_another_program(
    peer: Peer, word: Word, tmp_path: Path, how: str
) -> None:
    assert peer.call(_hold, tmp_path / "word") == word.value.value != 0
    for fork in ("os.fork", "C's"):
        peer.call(_fork_and_end, fork)
    assert not word.value.value & futex.OWNER_DIED, "a child holds nothing"
    if how == "kill":
        peer.kill()
    elif how == "exec":
        peer.begin(_execute)
    else:
        peer.begin(os._exit, 0)
    until(lambda: word.value.value == futex.OWNER_DIED, "the word is marked")
    peer.kill()


def _words_of_the_dead(path: Path, count: int) -> list[int]:
    """In a peer of one thread: of each killed child what it held, at the moment at which all its files are closed."""
    word, found = Word(path), []
    for _ in range(count):
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:
            os.close(reading)
            for _ in range(3):
                threading.Thread(target=threading.Event().wait, daemon=True).start()
            _hold(path)
            os.write(writing, b"x")
            signal.pause()
        os.close(writing)
        assert os.read(reading, 1) == b"x"
        os.kill(child, signal.SIGKILL)
        assert os.read(reading, 1) == b""
        found.append(int(word.value.value))
        os.close(reading)
        os.waitpid(child, 0)
    return found


def test_the_mark_is_there_before_the_processs_files_are_closed(peer: Peer, tmp_path: Path) -> None:
    assert peer.call(_words_of_the_dead, tmp_path / "word", 30) == [futex.OWNER_DIED] * 30


# --- the mark of a living process -------------------------------------------------------------------------------------


@pytest.fixture
def life(word: Word) -> DeathMark:
    """Over that word."""
    return DeathMark(ctypes.addressof(word.value))


def _is_ended(life: DeathMark) -> bool:
    assert life.thread is not None
    return not life.thread.is_alive()


def test_it_is_held_when_show_returns_and_released_when_end_does(word: Word, life: DeathMark) -> None:
    life.show()
    life.show()
    assert life.thread is not None
    assert word.value.value == life.thread.native_id != threading.get_native_id()
    life.end()
    assert word.value.value == 0
    life.end()


def test_what_was_never_shown_ends_too(word: Word, life: DeathMark) -> None:
    life.end()
    life.give_up()
    assert word.value.value == 0


def test_given_up_it_is_marked_as_by_a_death_and_stays_so(word: Word, life: DeathMark) -> None:
    life.show()
    life.give_up()
    until(lambda: word.value.value == futex.OWNER_DIED, "the word is marked")
    life.give_up()
    life.end()
    assert word.value.value == futex.OWNER_DIED


def test_given_up_after_the_end_it_is_nothing(word: Word, life: DeathMark) -> None:
    life.show()
    life.end()
    life.give_up()
    assert _is_ended(life)
    assert word.value.value == 0


def test_given_up_when_the_word_is_anothers_already_it_is_left_alone(word: Word, life: DeathMark) -> None:
    """A session's line may be given to the next one in this very moment."""
    life.show()
    word.value.value = 12345
    life.give_up()
    until(lambda: _is_ended(life), "the thread has ended")
    assert word.value.value == 12345


@pytest.mark.parametrize("missing", ["robust futexes", "threads"])
def test_where_it_cannot_be_held_the_word_stays_0(
    word: Word, life: DeathMark, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    if missing == "threads":
        monkeypatch.setattr(threading.Thread, "start", refuse)
    else:
        monkeypatch.setattr(futex, "_SYS_SET", -1)
    life.show()
    assert word.value.value == 0
    life.give_up()
    life.end()
    assert word.value.value == 0
