"""The mark of a living process: held by a thread until it is let go of, given up, or the process ends."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path

import pytest

from ipcsync._linux import futex
from ipcsync._linux.futex import DeathMark
from tests.kit.until import until
from tests.unit.linux.shared_word import Word


@pytest.fixture
def word(tmp_path: Path) -> Word:
    """A word of the test's own, which is 0."""
    return Word(tmp_path / "word")


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
