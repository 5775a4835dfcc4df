"""Two streams of one session: the code forgets the waits that the chain model forgets, after each short program."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ipcsync
from ipcsync._board import Board
from ipcsync._engines import queued
from tests.kit import boards
from tests.kit.examples import LONG
from tests.models.chain_model import Model
from tests.models.chain_world import Op, Scenario, World
from tests.unit.engines.chain_row import Row

_LENGTH = 4  # of a program, behind a wait on the first stream that is queued, or that an exception ends
_WAITS: tuple[Op, ...] = (("wait", 0, 1), ("interrupt", 0, 1))
_OPS: tuple[Op, ...] = (*_WAITS, ("rec",), ("fail",), ("other",), ("beats",))
_PROGRAMS = [
    (first, *rest)
    for first in _WAITS
    for rest in itertools.product(_OPS, repeat=_LENGTH)
    if not any(each == after == ("other",) for each, after in itertools.pairwise(rest))
]

Outcome = tuple[tuple[bool, bool], int]
"""Whether the wait on each of the two streams is still open, and the first generation that stands behind something."""


@pytest.fixture
def streams() -> tuple[ipcsync.Stream, ipcsync.Stream]:
    return ipcsync.Stream(), ipcsync.Stream()


@pytest.fixture
def new_board(tmp_path: Path) -> Iterator[Any]:
    made: list[Board] = []

    def new() -> Board:
        made.append(Board.create(str(tmp_path / f"board-{len(made)}"), b"e" * 16, 5, 5))
        return made[-1]

    yield new
    for board in made:
        boards.end(board)
    queued.drop(queued.of(None))


def _by_code(program: tuple[Op, ...], board: Board, streams: tuple[ipcsync.Stream, ...], behind_all: bool) -> Outcome:
    """Another session's record is made and not complete on the board; all that is recorded here completes at once."""
    queued.drop(queued.of(None))
    row = Row(board, behind_all=behind_all)
    row.record(0, 1)
    keys = [queued.list_of(stream._handle, 0) for stream in streams]
    now = 0
    for what, *_ in program:
        if what in ("wait", "interrupt"):
            wait = queued.add(keys[now], row.theirs[0], 1, keys[now])
            wait.is_queued = wait.is_queued or what == "wait"
        elif what == "rec":
            row.mine.record(streams[now]._handle, 0, 1)
        elif what == "fail":
            number = row.mine._recorded + 1
            row.chain.extend(row.mine, number, number, keys[now], queued.latest(None if behind_all else keys[now]))
        elif what == "other":
            now = 1 - now
        else:
            streams[0].synchronize()
            streams[1].synchronize()
            row.mine.publish_completed()
    left = [any(wait.outcome is None for wait in queued.of(key) if wait.view is row.theirs[0]) for key in keys]
    first = row.mine.first_unsettled()
    for stream in streams:  # the next program sets the words back, for which what is still queued would wait for ever
        stream.synchronize()
    return (left[0], left[1]), first


def _by_model(program: tuple[Op, ...], *, behind_all: bool) -> Outcome:
    scenario = Scenario(((("rec",),), program), ("event", "timeline"), 1, behind_all=behind_all)
    model = Model(scenario)
    model._accepts = lambda *_: False  # type: ignore[method-assign] # what is waited for is not complete on the board
    world = model.start().slot(0, recorded=1, sent=2, physical=2, truth=2)
    while (op := world.stages[1].op) < len(program):
        is_beat = program[op] == ("beats",) and world.stages[1].step == "next"
        if is_beat:
            world = _beat(model, _all_done(model, world)).stage(1, op=op + 1)
        else:
            (_, world), *_ = list(model.session(world, 1))
    stage = world.stages[1]
    left = [bool(stage.waits), bool(stage.other.waits)]
    return (left[stage.is_other], left[not stage.is_other]), world.slots[1].behind


def _all_done(model: Model, world: World) -> World:
    while following := [following for _, following in model._stream(world, 1)]:
        world = following[0]
    return world


def _beat(model: Model, world: World) -> World:
    """One judgement from its begin to its end."""
    _, world = next(model._beat(world, 1))
    while world.stages[1].step != "next":
        _, world = next(model.session(world, 1))
    return world


@pytest.mark.alone  # it waits on the host for blocking streams
@pytest.mark.parametrize("behind_all", [False, True], ids=["its stream's waits", "all waits"])
def test_what_a_record_proves_is_what_it_proves_in_the_model(
    new_board: Any, streams: tuple[ipcsync.Stream, ipcsync.Stream], behind_all: bool
) -> None:
    board = new_board()
    for program in _PROGRAMS if LONG else random.sample(_PROGRAMS, len(_PROGRAMS) // 3):
        by_code = _by_code(program, board, streams, behind_all)
        assert by_code == _by_model(program, behind_all=behind_all), program
