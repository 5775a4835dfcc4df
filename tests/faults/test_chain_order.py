"""The chain model's steps are the code's: engines run over a board that writes them down, as in `test_board_order`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import pytest
from ipcsync._engines.chains import Entry
from ipcsync._engines.queued_wait import Wait

from ipcsync._board import LIVE, layout
from ipcsync._engines import queued
from ipcsync._engines.loss import Loss
from tests.faults import chain_world
from tests.faults.chain_model import Model
from tests.faults.chain_world import Scenario, World
from tests.faults.test_board_order import _STREAM, Case, Rig, _engine, new_rig

__all__ = ["new_rig"]

NewRig = Callable[[Case], Rig]

# What stands in the code for one step of the model.
_RECORD = {
    "loads newest": ["load newest"],
    "checks whom it stands behind": ["load session's state", "load owner", "load serial"],
    "stores bits": ["store bits"],
    "stores as_of": ["store as_of"],
    "stores behind": ["store behind"],
    "the driver's record": ["cuEventRecord"],
    "publishes 1": ["store recorded"],
}
_ACCEPT = {
    "waiter: the driver says complete": ["wait_event"],
    "waiter: loads as_of": ["load behind", "load as_of"],
    "waiter: loads bits": ["load bits"],
    "waiter: 0 lives": ["load owner", "load session's state", "load serial"],
    "waiter: accepts": ["recorder alive?", "load state"],
}
_JUDGE = {
    "stores completed 1": ["store completed"],
    "stores behind 0": ["store behind"],
    "stores bits 0": ["store bits"],
    "stores lost 1": ["store culprit", "store lost", "wake"],
}
_OTHERS = 1 << 16  # the serial of who is waited for, whose line is the first
_PAIR = Scenario(((("rec",),), (("wait", 0, 1), ("rec",))), ("event", "event"), 1)


def _name_more(rig: Rig) -> None:
    """Write down what is done to the header, the bits and the first session's line, too."""
    first = layout.session_offset(0) // 8
    rig.words._names |= {
        layout.H_NEWEST: "newest",
        first + layout.S_OWNER: "owner",
        first + layout.S_STATE: "session's state",
        first + layout.S_SERIAL: "serial",
        **dict.fromkeys(rig.line._bits, "bits"),
    }


def _assign(rig: Rig) -> None:
    """Give the first session's line to a session that lives."""
    first = layout.session_offset(0) // 8
    for word, value in ((layout.S_OWNER, 77), (layout.S_STATE, LIVE), (layout.S_SERIAL, _OTHERS)):
        rig.words._words[first + word] = value


def _other(rig: Rig, fate: Loss | bool | None) -> Any:
    """What the recorder waited for: generation 1 of an event of the first session's, which lives."""
    _assign(rig)
    line = rig.board.session(0)
    return SimpleNamespace(
        name="x", label="'x'", node="", board=rig.board, recorder=_OTHERS, generation=1, is_released=False,
        fate=lambda _: fate, accepts=lambda _: False, recorder_is_alive=lambda: line.owner and line.serial == _OTHERS,
        behind=SimpleNamespace(nudge=lambda _: None, stands=lambda _: False),
    )  # fmt: skip


def _steps_of(labels: list[str], stands_for: dict[str, list[str]]) -> list[str]:
    return [step for label in labels for step in stands_for.get(label, ())]


def _done(log: list[str], stands_for: dict[str, list[str]]) -> list[str]:
    """The code's steps that the model has; of several loads of one word in a row, one."""
    wanted = {step for steps in stands_for.values() for step in steps}
    return [step for step, _ in groupby(step for step in log if step in wanted)]


def _run(
    moves: Callable[[World], Iterator[tuple[str, World]]], world: World, until: Callable[[World], bool]
) -> list[str]:
    labels = []
    while not until(world):
        label, world = next(moves(world))
        labels.append(label)
    return labels


def _started(**second: Any) -> tuple[Model, World]:
    """The first session has recorded, and its driver calls that complete; the second one is about to go on."""
    model = Model(_PAIR)
    world = model.start().slot(0, recorded=1, sent=2, physical=2, truth=2)
    return model, world.stage(1, **second)


def test_a_record_tells_whom_it_stands_behind_before_it_is_made(new_rig: NewRig) -> None:
    model, world = _started(op=1, waits=((0, 1),))
    labels = _run(lambda world: model.session(world, 1), world, lambda world: world.slots[1].recorded == 1)
    rig = new_rig(Case("record"))
    _name_more(rig)
    engine = _engine(rig)
    queued.lists[1] = {1: Wait(_other(rig, None), 1, 1, 1)}
    rig.log.clear()
    engine.record(_STREAM, 0, None)
    assert "checks whom it stands behind" in labels
    assert _done(rig.log, _RECORD) == _steps_of(labels, _RECORD)
    assert (rig.line.behind, rig.line.bits) == (1, 0b1)


def test_a_waiter_looks_whom_it_stands_behind_after_it_is_complete(new_rig: NewRig) -> None:
    model, world = _started()
    world = world.slot(1, recorded=1, sent=2, physical=2, truth=2, behind=1, bits=1, as_of=2)
    labels = _run(model.waiter, world, lambda world: world.waiter.step == "good")
    rig = new_rig(Case("synchronize", recorded=1, says_complete=True))
    rig.line.store_behind(1)
    rig.line.store_as_of(2)
    rig.line.store_bits(1)
    _assign(rig)
    _name_more(rig)
    engine = _engine(rig)
    rig.log.clear()
    engine.synchronize(1, None)
    begin = rig.log.index("wait_event")
    assert _done(rig.log[begin:], _ACCEPT)[: len(_steps_of(labels, _ACCEPT))] == _steps_of(labels, _ACCEPT)


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_recorder_tells_its_judgement_in_the_models_order(new_rig: NewRig, is_lost: bool) -> None:
    entry = chain_world.Entry(1, ((0, 1),), 2)
    model, world = _started(op=2, made=1, entries=(entry,))
    world = world.slot(1, recorded=1, sent=2, physical=2, behind=1, bits=2)
    if is_lost:
        world = world.line(0, mark=True)
    labels = _run(
        lambda world: model.session(world, 1),
        world,
        lambda world: world.slots[1].lost == 1 or (world.stages[1].entries, world.stages[1].step) == ((), "next"),
    )
    rig = new_rig(Case("harvest", recorded=1, made=1, says_complete=True))
    rig.line.store_behind(1)
    rig.line.store_bits(2)
    _name_more(rig)
    engine = _engine(rig)
    loss = Loss("died", _OTHERS, "a", 7)
    engine.chain.entries = [Entry(1, 1, 1, (Wait(_other(rig, loss if is_lost else True), 1, 1, 1),), 2)]
    rig.log.clear()
    engine.publish_completed()
    assert _done(rig.log, _JUDGE) == _steps_of(labels, _JUDGE)
    assert (rig.line.lost, rig.line.behind) == ((1, 1) if is_lost else (0, 0))


@pytest.fixture(autouse=True)
def _nothing_is_queued() -> Iterator[None]:
    yield
    queued.lists.clear()
