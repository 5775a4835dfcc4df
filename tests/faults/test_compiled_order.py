"""The compiled core's steps are the model's: `test_board_order`, on the binary that runs; and its planted mistakes.

A shortcut takes all steps of the model in its order, or it changes nothing and leaves the call to the Python engine.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ipcsync._board import BROKEN, LIVE, OPEN, layout
from ipcsync._engines import core as _core
from tests.faults.board_recorder import Model
from tests.faults.board_world import Process, Scenario, World
from tests.faults.compiled_rig import SOURCE, Rig, built, end
from tests.faults.explorer import Program, run_alone
from tests.faults.test_board_order import _WITHIN, CASES, Case, _run_model

pytestmark = pytest.mark.core

core: Any = _core  # or another build of it

_SHORT = {name: case for name, case in CASES.items() if case.call in ("query", "synchronize", "wait", "record")}
# What the shortcut does to the end. It must: a call that silently left the shortcuts would still be right, and slow.
MINE = [
    "query: complete on the board",
    "query: not recorded",
    "query: pending",
    "query: complete by the driver",
    "synchronize: complete on the board",
    "synchronize: complete by the driver",
    "synchronize: recorded while it sleeps",
    "synchronize: recorded while it sleeps, as others do",
    "wait: complete on the board",
    "wait: recorded",
    "wait: recorded while it sleeps",
    "wait: recorded, as others do",
    "wait: complete once it is on its visit",
    "wait: complete by the driver",
    "wait: complete by the driver once it is recorded",
    "wait: timeline",
    "record: room in the ring",
    "record: room after a look",
    "record: room after a look, nobody visits",
    "record: awaited",
    "record: another stream",
    "record: the first",
    "record: timeline",
    "record: timeline, another stream",
]
_CHANGES = ("store ", "wake", "cuEventRecord", "cuStreamWait", "cuStreamWrite", "mark")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., tuple[list[str], str]]]:
    """Makes a case's call, by the shipped core or another build of it."""
    rigs: list[Rig] = []

    def run(case: Case, module: ModuleType = core) -> tuple[list[str], str]:
        rigs.append(Rig(module, tmp_path, case))
        try:
            return rigs[-1].call()
        finally:
            rigs[-1].close()

    yield run
    end(core, [])


def expected(case: Case) -> tuple[list[str], str]:
    """The model's steps. A synchronize by shortcut waits for the record, then asks as `query` does."""
    if case.call != "synchronize":
        steps, outcome = _run_model(case, asks=True)
        # Asked once for each stream, by the Python engine: where it was not, the wait is none for a shortcut.
        return [step for step in steps if step != "cuStreamGetFlags"], outcome
    model = Model(Scenario(engine=case.engine, depth=case.depth, dies=True, closes=True, reuse=True, locks=True))
    world = World(
        state=case.state,
        recorded=case.recorded,
        completed=case.completed,
        awaited=int(case.is_awaited),
        ring=tuple(range(1, case.depth + 1)),
        truth=frozenset(range(1, 9) if case.says_complete else ()),
        lies=not case.is_alive,
        processes=(Process(is_alive=case.is_alive), Process()),
    )

    def program() -> Program:
        yield from model.check(1)
        if (yield from model.is_complete(1, case.generation)):
            return "ok"
        yield from model.await_recorded(1, case.generation)
        result = yield from model.query(1, "w", case.generation)
        return "ok" if result == "True" else result

    labels, outcome = run_alone(
        world, program(), lambda label, world: world._replace(**case.meanwhile) if label == "sleep" else world
    )
    return [label for label in labels if label not in _WITHIN], outcome


@pytest.mark.parametrize("name", MINE)
def test_a_shortcut_takes_the_steps_of_the_model_in_its_order(name: str, run: Any) -> None:
    steps, outcome = run(CASES[name])
    assert ([step for step in steps if step != "fence"], outcome) == expected(CASES[name])


@pytest.mark.parametrize("name", sorted(set(_SHORT) - set(MINE)))
def test_any_other_call_changes_nothing_and_is_left_to_the_python_engine(name: str, run: Any) -> None:
    steps, outcome = run(CASES[name])
    steps = [step for step in steps if step != "fence"]
    if outcome == "QueuedError":  # the wait was queued: what was taken is the model's, up to the look that failed
        assert steps == expected(CASES[name])[0][: len(steps)]
    else:
        assert outcome == "NotMeError"
        changes = [step for step in steps if step.startswith(_CHANGES)]
        slept = ["store awaited"] if "sleep" in steps else []  # who has slept has said so before
        complete = ["store completed"] if CASES[name].visitor else []  # which is so, whoever goes on
        assert changes == slept + complete
    assert steps.count("lock") == steps.count("unlock")


def test_a_fence_stands_between_the_record_and_the_look_at_the_state(run: Any) -> None:
    steps, _ = run(CASES["record: room in the ring"])
    assert steps[steps.index("store recorded") + 1] == "fence"


def test_a_fence_stands_between_what_each_side_of_a_visit_stores_and_its_look(run: Any) -> None:
    """With one on both sides, the waiter sees that it is complete, or the recorder sees the visit."""
    waiter, _ = run(CASES["wait: recorded"])
    assert waiter[waiter.index("enter") + 1 : waiter.index("enter") + 3] == ["fence", "load completed"]
    recorder, _ = run(CASES["record: room after a look, nobody visits"])
    stored = recorder.index("store completed")
    assert recorder[stored + 1 : stored + 4] == ["fence", "load visited", "load visits"]


def test_a_record_wakes_the_bridge_too(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def followed(rig: Rig, *_: int) -> int:
        rig.put("followed", 1)
        return 0

    monkeypatch.setattr(Rig, "cuEventRecord", followed)
    steps, _ = run(CASES["record: room in the ring"])
    assert steps[steps.index("load followed") + 1] == "wake"


def test_an_event_that_breaks_during_a_record_is_said(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaking(rig: Rig, *_: int) -> int:
        rig.put("state", BROKEN)
        return 0

    monkeypatch.setattr(Rig, "cuEventRecord", breaking)
    assert run(CASES["record: room in the ring"])[1] == "NotOpenError"


@pytest.mark.parametrize("call", ["synchronize", "wait"])
@pytest.mark.parametrize("who", ["recorder", "coordinator", "session"])
def test_each_slice_of_a_sleep_ends_with_the_looks_of_who_lives(
    run: Any, monkeypatch: pytest.MonkeyPatch, call: str, who: str
) -> None:
    def step(rig: Rig, number: int) -> None:
        take(rig, number)
        if rig.log.count("sleep") == 2 and rig.log[-1] == "sleep":
            if who == "recorder":
                rig.board.words[rig.board.session(1).indices[1]] = 0x4000_0001
            elif who == "coordinator":
                rig.board.words[layout.H_OWNER] = 0x4000_0001
            else:
                rig.session_check.good_until = 0

    take = Rig.step
    monkeypatch.setattr(Rig, "step", step)
    steps, outcome = run(Case(call))
    assert outcome == "NotMeError"
    assert steps.count("sleep") == 2, "all was well after the first one"
    first = steps.index("sleep")
    assert steps.index("store awaited") < first, "who sleeps says so before"
    looks = ["load recorded", "guard.check", "own is_closed", "load incarnation", "load recorder", "recorder alive?"]
    assert steps[first + 1 : first + 8] == [*looks, "coordinator?"]


def test_the_core_and_the_board_agree_on_where_each_word_lies() -> None:
    board = layout
    assert core.LAYOUT == (
        board.H_STATE + 1,
        board.H_NEWEST,
        board.L_INCARNATION,
        board.L_STATE,
        board.L_RECORDER,
        board.L_AWAITED,
        board.L_FOLLOWED,
        board.L_RECORDED,
        board.L_COMPLETED,
        board.L_BEHIND,
        board.L_AS_OF,
        board.L_LOST,
        board.L_VISITED,
        board.S_STATE,
        board.S_SERIAL,
        board.S_OWNER,
        board.S_NUDGE,
        board.HEADER // 8,
        board.WORDS,
        LIVE,
        OPEN,
        BROKEN,
        0x4000_0000,
        16,
    )


# --- mistakes ---------------------------------------------------------------------------------------------------------

MISTAKES = {
    1: ("publish before the driver's call", "record: room in the ring"),
    2: ("wake before publish", "record: room in the ring"),
    3: ("no look after the record", "record: room in the ring"),
    4: ("marker before the wait", "wait: recorded"),
    5: ("the lock left out", "record: room in the ring"),
    6: ("the fence left out", "record: room in the ring"),
    7: ("the recorder asked before the driver", "query: complete by the driver"),
    8: ("no look after the wait", "wait: recorded"),
    11: ("who waits looked at before the record", "record: awaited"),
    12: ("asleep without a word", "synchronize: recorded while it sleeps"),
    13: ("no look right before the wait", "wait: recorded"),
    14: ("a look before the visit", "wait: recorded"),
    15: ("the visit over before the wait", "wait: recorded"),
    16: ("room without a look at the visits", "record: room after a look, nobody visits"),
}
_NO_FENCE = 6


@pytest.fixture(scope="module")
def translated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The core in C."""
    pytest.importorskip("Cython", reason="Cython is not here")
    compiler = shutil.which("cc")
    if compiler is None or not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        pytest.skip("there is no C compiler, or no headers of Python's")
    target = tmp_path_factory.mktemp("core") / "core.c"
    subprocess.run(
        [sys.executable, "-m", "cython", "-3", "--module-name", "core", str(SOURCE), "-o", str(target)], check=True
    )
    return target


@pytest.mark.thorough
@pytest.mark.process
@pytest.mark.parametrize("mistake", MISTAKES, ids=[name.replace(" ", "-") for name, _ in MISTAKES.values()])
def test_a_mistake_planted_in_the_compiled_core_is_found(mistake: int, translated: Path, run: Any) -> None:
    case = CASES[MISTAKES[mistake][1]]
    steps, outcome = run(case, built(translated, mistake))
    assert outcome != "NotMeError", "another order of steps, not a call that was left"
    if mistake == _NO_FENCE:
        assert "fence" not in steps
    else:
        assert ([step for step in steps if step != "fence"], outcome) != expected(case)


@pytest.mark.thorough
@pytest.mark.process
def test_without_a_mistake_the_core_that_is_built_here_takes_the_models_steps(translated: Path, run: Any) -> None:
    module = built(translated, 0)
    for name in sorted({name for _, name in MISTAKES.values()}):
        steps, outcome = run(CASES[name], module)
        assert ([step for step in steps if step != "fence"], outcome) == expected(CASES[name]), name
        if name.startswith("record"):
            assert steps[steps.index("store recorded") + 1] == "fence", name
