"""A death between any two stores to the board."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from ipcsync._board import (
    BROKEN,
    CLOSED,
    FREE,
    LIVE,
    OPEN,
    Board,
    SessionLine,
    SlotLine,
)
from tests.kit.peer import Peer as PeerProcess


class DeadlyWords:
    """The board's words; the process is killed in place of its store number `last`."""

    def __init__(self, words: memoryview, last: int) -> None:
        self._words = words
        self._left = last

    def __getitem__(self, index: int) -> int:
        return self._words[index]

    def __setitem__(self, index: int, value: int) -> None:
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1
        self._words[index] = value


def _publish(line: SlotLine, _: SessionLine) -> None:
    line.publish(9)


def _complete(line: SlotLine, _: SessionLine) -> None:
    line.store_completed(8)


def _open(line: SlotLine, _: SessionLine) -> None:
    line.open(7)


def _break(line: SlotLine, _: SessionLine) -> None:
    line.break_at(6)


def _close(line: SlotLine, _: SessionLine) -> None:
    line.finish(CLOSED)


def _assign_anew(_: SlotLine, line: SessionLine) -> None:
    line.assign(0x8_0000, 100, 101, 102, 103)


STEPS = {function.__name__: function for function in (_publish, _complete, _open, _break, _close, _assign_anew)}


def _words_of(slot: SlotLine, session: SessionLine) -> dict[str, Any]:
    names = ("incarnation", "state", "recorder", "watermark", "recorded", "completed")
    words: dict[str, Any] = {name: getattr(slot, name) for name in names}
    return words | {"session": (session.state, session.serial, session.process, session.heartbeat)}


def _die_at_each_store(path: str, name: str, state: int) -> list[dict[str, Any]]:
    """What is on the board after a child of this process was killed at each store in turn; at last, after none."""
    board = Board.open(path)
    slot, session = board.slot(0), board.session(0)
    words = board.words
    found: list[dict[str, Any]] = []
    survived = False
    while not survived:
        slot.open(6)
        slot.break_at(2)
        slot.recorder = 3
        slot.publish(5)
        slot.store_completed(4)
        slot.finish(state)
        session.assign(0x7_0000, 10, 11, 12, 13)
        session.state = FREE
        if (child := os.fork()) == 0:
            board.words = DeadlyWords(words, len(found))  # type: ignore[assignment] # what the lines below index
            STEPS[name](board.slot(0), board.session(0))
            os._exit(0)
        survived = os.waitpid(child, 0)[1] == 0
        found.append(_words_of(slot, session))
    return found


def _deaths(board: Board, peer: PeerProcess, step: Callable[..., None], state: int) -> list[dict[str, Any]]:
    found = peer.call(_die_at_each_store, board.path, step.__name__, state)
    assert len(found) >= 2
    return found


@pytest.mark.parametrize(("step", "word", "values"), [(_publish, "recorded", [5, 9]), (_complete, "completed", [4, 8])])
def test_a_count_is_the_old_or_the_new_one_whenever_its_writer_dies(
    board: Board, peer: PeerProcess, step: Callable[..., None], word: str, values: list[int]
) -> None:
    found = _deaths(board, peer, step, OPEN)
    assert [each[word] for each in found] == values
    assert all({**each, word: 0} == {**found[0], word: 0} for each in found), "and nothing else was touched"


def test_a_slot_is_open_only_once_all_of_its_new_use_is_there(board: Board, peer: PeerProcess) -> None:
    *dead, last = _deaths(board, peer, _open, FREE)
    assert {each["state"] for each in dead} == {FREE}
    assert (last["state"], last["incarnation"], last["recorder"], last["watermark"]) == (OPEN, 7, 0, 0)
    assert {(each["recorded"], each["completed"]) for each in (*dead, last)} == {(5, 4)}, "counts never go back"


def test_a_broken_slot_always_says_what_stays_good(board: Board, peer: PeerProcess) -> None:
    *dead, last = _deaths(board, peer, _break, OPEN)
    assert {each["state"] for each in dead} == {OPEN}
    assert (last["state"], last["watermark"]) == (BROKEN, 6)


def test_a_slot_is_finished_in_one_store(board: Board, peer: PeerProcess) -> None:
    assert [each["state"] for each in _deaths(board, peer, _close, OPEN)] == [OPEN, CLOSED]


def test_a_session_lives_only_once_all_of_it_is_there(board: Board, peer: PeerProcess) -> None:
    *dead, last = _deaths(board, peer, _assign_anew, OPEN)
    assert {each["session"][0] for each in dead} == {FREE}
    assert last["session"] == (LIVE, 0x8_0000, (100, 101, 102), 103)
