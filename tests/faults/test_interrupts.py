"""An exception, or a call, in the middle of any call: rows 41, 42 and 43.

`python -m tests.faults.interrupts` does the first at every point of every call; here it is some of them.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ipcsync
from ipcsync._session.session import Session
from ipcsync.testing import StreamGate
from ipcsync.typing import EngineName
from tests.faults.interrupt_scenes import SCENES
from tests.faults.interrupt_stage import Stage
from tests.faults.interrupting import HAS_INSTRUCTIONS, Interruption, called_within, interrupted, is_refusal
from tests.faults.interrupts import interrupt
from tests.faults.taken_back import MENDINGS, Mending, find
from tests.kit.shortcuts import has_shortcuts
from tests.kit.until import until

pytestmark = [
    pytest.mark.process,
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]
_ROOT = Path(__file__).parents[2]
_KIND = "instruction" if HAS_INSTRUCTIONS else "line"
_SOME = 12 if _KIND == "line" else 60  # points of each call
_LEAST = {  # lines of a call, 20 of any other; of instructions three times as many
    "StreamGate.open": 8,
    **dict.fromkeys(["event", "events", "point", "record, unnamed", "record_all", "record_all of named streams"], 100),
    **dict.fromkeys(["reserve", "record of a reservation", "close of an event", "close of what drains"], 100),
    **dict.fromkeys(["stats", "watch", "default_client", "ipc_collect", "wait_all", "Event", "StreamGate"], 100),
}
# The compiled core takes these, which has no lines of Python: there may be no points at all.
_TAKEN = ["record", "record at the ring's end", "record on another stream", "record behind a wait"]
_TAKEN += ["wait", "query", "synchronize"]
assert {*_LEAST, *_TAKEN} <= set(SCENES)


@pytest.fixture(params=["event", "timeline"])
def engine(request: pytest.FixtureRequest) -> EngineName:
    """Each engine."""
    name: EngineName = request.param
    return name


@pytest.fixture
def coordinator(any_coordinator: ipcsync.Coordinator) -> ipcsync.Coordinator:
    """These tests are of what happens between its clients: any will do."""
    return any_coordinator


@pytest.fixture
def stage(coordinator: ipcsync.Coordinator, engine: EngineName) -> Iterator[Stage]:
    """A recorder and a peer."""
    made = Stage(coordinator, engine)
    yield made
    made.close()


# --- an exception -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(call, marks=pytest.mark.alone if call == "record_all" else ())
        for call in SCENES
        if call != "launch"
    ],
)
def test_row_41_an_exception_at_any_point_of_a_call_breaks_no_promise(stage: Stage, call: str) -> None:
    # The first one of a process takes more steps, and so does one that has to wait longer than the others.
    points = min(_count(stage, call) for _ in range(3))
    is_taken = has_shortcuts() and call in _TAKEN
    least = _LEAST.get(call, 20) * (1 if _KIND == "line" else 3)
    assert is_taken or points >= least, f"{points} points: most of the call is passed by"
    every, first = max(1, points // _SOME), 1 + zlib.crc32(call.encode()) % 5
    while True:
        result = interrupt(stage, call, _KIND, every=every, first=first)
        assert not result.failures, "\n".join(result.failures)
        if is_taken or result.points >= min(points, _SOME) // 2:
            return
        assert every > 1, f"{result.points} points of {points}"
        every //= 2  # on a busy machine, all that were counted had to wait longer


def _count(stage: Stage, call: str, kind: str = _KIND) -> int:
    fn, after = SCENES[call](stage)
    outcome = interrupted(fn, 0, kind)
    after(outcome)
    return outcome.points


@pytest.mark.parametrize("step", [Session.begin, ipcsync.Client.__init__], ids=["begin", "init"])
def test_row_41_an_exception_once_the_session_has_begun_leaves_none(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, step: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def do_and_raise(self: Any, *args: Any, **options: Any) -> None:
        step(self, *args, **options)
        raise Interruption

    before = set(threading.enumerate())
    with monkeypatch.context() as patch:
        patch.setattr(Session if step is Session.begin else ipcsync.Client, step.__name__, do_and_raise)
        with pytest.raises(Interruption):
            ipcsync.connect(coordinator.endpoint, name="dropped")
    until(lambda: "dropped" not in [row.name for row in client.list_sessions()], "the session has ended")
    until(lambda: not set(threading.enumerate()) - before, "its threads have ended")


_COUNTS = {"records": 800, "requests": 400, "connects": 80, "closes": 60, "handlers": 150, "finalizers": 500}


@pytest.mark.parametrize("program", ["records", "closes"])
def test_row_41_a_signals_handler_that_raises_anywhere_breaks_no_promise(program: str, engine: EngineName) -> None:
    _run(program, engine)


@pytest.mark.parametrize("program", ["requests", "connects"])
def test_row_41_nor_does_it_where_no_event_takes_part(program: str) -> None:
    _run(program, "event")


def _run(program: str, engine: str) -> str:
    """The program's output; it ends by itself, with 0."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.signalled", program, str(_COUNTS[program]), engine],
        cwd=_ROOT,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@pytest.mark.planted
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # what was mended may break more
@pytest.mark.parametrize("kind", dict.fromkeys(["line", _KIND]))
@pytest.mark.parametrize("mending", MENDINGS, ids=lambda mending: f"{mending}, {mending.call}")
def test_row_41_a_mending_that_is_taken_back_is_found(mending: Mending, kind: str) -> None:
    for _ in range(3):  # where a wait takes a line more than the time before, the last line of a call is not reached
        result = find(mending, kind)
        if result.failures:
            return
    pytest.fail(f"{result.points} points of {mending.call}, and nothing was found")


# --- a call -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", ["handlers", "finalizers"])
def test_row_42_handlers_and_finalizers_may_call_anything_in_the_middle_of_anything(
    program: str, engine: EngineName
) -> None:
    _run(program, engine)


@pytest.mark.parametrize("call", ["record", "wait", "query", "event", "close of an event", "record, unnamed"])
def test_row_42_a_call_within_a_call_works_or_raises_at_once(stage: Stage, call: str) -> None:
    wrong: list[str] = []
    nested = ""
    closing: list[ipcsync.SharedEvent] = []

    def within() -> None:
        calls: dict[str, Callable[[], object]] = {
            "record": lambda: stage.event.record(stage.stream, timeout=10),
            "query": lambda: stage.event.at(1).query(),
            "wait": lambda: stage.event.at(1).wait(stage.other, timeout=10),
            "close": lambda: closing.pop().close(),
            "open": lambda: stage.client.event(stage.name(), recorder=True, engine=stage.engine, timeout=10).close(),
            "stats": lambda: stage.client.stats(timeout=10),
            "point": lambda: stage.client.point(data),
        }
        try:
            calls[nested]()
        except BaseException as error:  # noqa: BLE001 - it is told
            if not is_refusal(nested, error):
                wrong.append(f"{nested}: {error!r}")

    points = _count(stage, call, "line")
    stage.event.record(stage.stream).synchronize(10)
    data = bytes(stage.seen.at(1))
    step = max(1, points // 28)
    kinds = itertools.cycle(["record", "query", "wait", "close", "open", "stats", "point"])
    for number, nested in zip(range(1, points + 1, step), kinds, strict=False):
        closing.append(stage.client.event(stage.name(), recorder=True, engine=stage.engine))
        stage.event.record(stage.stream).synchronize(10)
        fn, after = SCENES[call](stage)
        outcome = called_within(fn, number, "line", within)
        after(outcome)
        assert outcome.error is None, f"{outcome.error!r} with {nested} at {outcome.stack}"
        stage.check()
        while closing:
            closing.pop().close()
    assert not wrong, wrong[:3]


# --- a record that fails behind its number ----------------------------------------------------------------------------


def _at_depth(frames: int, fn: Callable[[], Any]) -> Any:
    return fn() if frames <= 0 else _at_depth(frames - 1, fn)


def test_row_43_the_number_of_a_record_without_room_on_the_stack_goes_to_no_other(stage: Stage) -> None:
    failed = 0
    for room in range(2, 40):
        depth = sys.getrecursionlimit() - room - _depth()
        try:
            _at_depth(depth, lambda: stage.event.record(stage.stream))
        except Exception:  # noqa: BLE001 - a RecursionError, or what the driver makes of one
            failed += 1
        stage.stream.synchronize()
        stage.highest = max(stage.highest, stage.event._engine._begun)
        stage.gated(lambda: stage.event.record(stage.stream, timeout=10))
    assert failed > 5


def _depth() -> int:
    frame, count = sys._getframe(), 0
    while frame is not None:
        frame, count = frame.f_back, count + 1  # type: ignore[assignment]
    return count


def test_row_43_what_is_said_of_a_record_that_failed_is_true(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = stage.event._engine
    first = stage.event.record(stage.stream).generation
    name = "cuEventRecord" if stage.engine == "event" else "cuStreamWriteValue64"
    real, failing = getattr(engine._driver, name), [True]

    def fail_behind(*args: Any) -> Any:
        result = real(*args)
        if failing:
            failing.pop()
            raise MemoryError
        return result

    gate = StreamGate(stage.other)
    with monkeypatch.context() as patch:
        patch.setattr(engine._driver, name, fail_behind)
        with pytest.raises(MemoryError):
            stage.event.record(stage.other)  # behind a closed gate, where the driver has it
    lost = stage.seen.at(first + 1)
    assert not lost.query()
    later = stage.event.record(stage.stream)
    assert later.generation == first + 2, "its number went to another record"
    assert not lost.query(), "the work before it waits for the gate"
    assert not stage.seen.at(later.generation).query(), "a later record is complete before an earlier one"
    gate.open()
    stage.seen.at(later.generation).synchronize(10)
    assert lost.query()
