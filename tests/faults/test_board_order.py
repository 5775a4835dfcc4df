"""The model's steps are the code's: the engines and the coordinator's effects run over a board that writes them down.

Whoever moves a step in the code moves it in the model too (`board_waiter`, `board_recorder`), and sees there whether
every promise still holds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest

from ipcsync._board import BROKEN, CLOSED, INT64_MAX, OPEN, Board, slot_line
from ipcsync._drivers import SUCCESS
from ipcsync._engines import EventEngine, TimelineEngine, base, imports, markers, queued, slot_use, slot_view, timeline
from ipcsync._native import capture, pinned
from ipcsync._wire.messages import Attachment
from ipcsync.errors import CoordinatorLost, EventClosed, RecorderLost
from ipcsync.typing import EngineName
from ipcsync_coordinator.effects import Effects
from ipcsync_coordinator.state import Change, ChangeKind, Recorder, Slot
from ipcsync_coordinator.tombstones import Tombstones
from tests.faults import board_world
from tests.faults.board_recorder import Model
from tests.faults.board_world import MAX, RECORDER, Process, Scenario, World
from tests.faults.explorer import run_alone
from tests.kit import boards

# What the model does within a process that the code does too, but that nobody outside can see.
_WITHIN = {"", "slept", "tell", "own seen", "own made", "own done", "own has_import", "own room"}
_STREAM = 4096


@dataclass(frozen=True)
class Case:
    """One call, and what it finds."""

    call: str
    engine: EngineName = "event"
    generation: int = 1
    depth: int = 1
    recorded: int = 0
    completed: int = 0
    state: int = OPEN
    watermark: int = 0
    says_complete: bool = False  # the driver, of what was recorded
    is_alive: bool = True  # the recorder
    is_orphaned: bool = False  # the coordinator died
    is_closed: bool = False  # here, by another thread
    is_awaited: bool = False  # somebody has slept until a record
    is_visited: bool = False  # somebody has queued a wait on a stream
    visitor: str = ""  # who is about to: one that "leaves" during the pause, or is "dead"
    at_enter: dict[str, Any] = field(default_factory=dict)  # stored on the board when a visit has begun
    made: int = 0  # by the recorder, of which `done` are known complete
    done: int = 0
    stream: int = 1  # the one before was 1
    meanwhile: dict[str, Any] = field(default_factory=dict)  # stored on the board while it sleeps

    @property
    def is_queued(self) -> bool:
        """Whether a wait is to be queued: the driver calls its event pending."""
        return self.call == "wait" and not self.says_complete


CASES: dict[str, Case] = {
    "query: complete on the board": Case("query", recorded=1, completed=1),
    "query: complete by the driver, the coordinator dead": Case(
        "query", recorded=1, says_complete=True, is_orphaned=True
    ),
    "query: not recorded": Case("query"),
    "query: pending": Case("query", recorded=1),
    "query: complete by the driver": Case("query", recorded=1, says_complete=True),
    "query: complete by the driver, the recorder dead": Case("query", recorded=1, says_complete=True, is_alive=False),
    "query: complete by the driver, broken": Case("query", recorded=1, says_complete=True, state=BROKEN),
    "query: broken, kept": Case("query", recorded=2, completed=2, state=BROKEN, watermark=1),
    "query: broken, not recorded": Case("query", state=BROKEN),
    "query: closed, not recorded": Case("query", state=CLOSED),
    "query: closed here": Case("query", recorded=1, is_closed=True),
    "query: timeline, released": Case("query", engine="timeline", recorded=1, completed=MAX, state=CLOSED, watermark=1),
    "query: timeline, pending": Case("query", engine="timeline", recorded=1),
    "synchronize: complete on the board": Case("synchronize", recorded=1, completed=1),
    "synchronize: complete by the driver": Case("synchronize", recorded=1, says_complete=True),
    "synchronize: the recorder dead": Case("synchronize", recorded=1, says_complete=True, is_alive=False),
    "synchronize: recorded while it sleeps": Case("synchronize", says_complete=True, meanwhile={"recorded": 1}),
    "synchronize: recorded while it sleeps, as others do": Case(
        "synchronize", says_complete=True, is_awaited=True, meanwhile={"recorded": 1}
    ),
    "synchronize: nothing recorded, the recorder dead": Case("synchronize", is_alive=False),
    "synchronize: broken while it sleeps": Case("synchronize", meanwhile={"state": BROKEN}),
    "synchronize: pending, broken": Case("synchronize", recorded=1, state=BROKEN),
    "wait: complete on the board": Case("wait", recorded=1, completed=1),
    "wait: recorded": Case("wait", recorded=1),
    "wait: recorded, as others do": Case("wait", recorded=1, is_visited=True),
    "wait: complete once it is on its visit": Case("wait", recorded=1, at_enter={"completed": 1}),
    "wait: recorded while it sleeps": Case("wait", meanwhile={"recorded": 1}),
    "wait: the recorder dead": Case("wait", recorded=1, is_alive=False),
    "wait: the coordinator dead": Case("wait", recorded=1, is_orphaned=True),
    "wait: complete by the driver": Case("wait", recorded=1, says_complete=True),
    "wait: complete by the driver, the recorder dead": Case("wait", recorded=1, says_complete=True, is_alive=False),
    "wait: complete by the driver, the coordinator dead": Case(
        "wait", recorded=1, says_complete=True, is_orphaned=True
    ),
    "wait: complete by the driver once it is recorded": Case("wait", says_complete=True, meanwhile={"recorded": 1}),
    "wait: closed here": Case("wait", recorded=1, is_closed=True),
    "wait: broken": Case("wait", recorded=1, state=BROKEN),
    "wait: timeline": Case("wait", engine="timeline", recorded=1),
    "wait: timeline, ahead": Case("ahead", engine="timeline"),
    "record: the first": Case("record"),
    "record: room in the ring": Case("record", depth=4, recorded=1, made=1),
    "record: room after a look": Case("record", recorded=1, made=1, says_complete=True),
    "record: room after a look, nobody visits": Case("record", recorded=1, made=1, says_complete=True, is_visited=True),
    "record: room after a look, a visitor leaves": Case(
        "record", recorded=1, made=1, says_complete=True, is_visited=True, visitor="leaves"
    ),
    "record: room after a look, a visitor is dead": Case(
        "record", recorded=1, made=1, says_complete=True, is_visited=True, visitor="dead"
    ),
    "record: awaited": Case("record", depth=4, recorded=1, made=1, is_awaited=True),
    "record: another stream": Case("record", depth=4, recorded=1, made=1, stream=2),
    "record: finished": Case("record", state=BROKEN),
    "record: closed here": Case("record", is_closed=True),
    "record: timeline": Case("record", engine="timeline"),
    "record: timeline, another stream": Case("record", engine="timeline", recorded=1, made=1, stream=2),
    "harvest: complete": Case("harvest", depth=4, recorded=2, made=2, says_complete=True),
    "harvest: complete, the coordinator dead": Case(
        "harvest", depth=4, recorded=2, made=2, says_complete=True, is_orphaned=True
    ),
    "harvest: pending": Case("harvest", depth=4, recorded=2, made=2),
    "harvest: broken": Case("harvest", recorded=1, made=1, says_complete=True, state=BROKEN),
    "let go: nothing recorded": Case("let go"),
    "let go: complete": Case("let go", recorded=1, made=1, says_complete=True),
    "let go: pending": Case("let go", recorded=1, made=1),
    "let go: broken": Case("let go", recorded=1, made=1, says_complete=True, state=BROKEN),
}


# --- the code ---------------------------------------------------------------------------------------------------------


class Words:
    """The board's words; every access to the slot's is written down."""

    def __init__(self, words: Any, first: int, log: list[str]) -> None:
        self._words = words
        self._log = log
        names = {0: "incarnation", 1: "state", 2: "recorder", 3: "watermark", 8: "recorded", 9: "completed"}
        names |= {6: "awaited", 7: "followed", 10: "behind", 11: "as_of", 12: "lost", 13: "culprit", 14: "visited"}
        self._names = {first + offset: name for offset, name in names.items()}
        self.places = {name: first + offset for offset, name in names.items()}

    def __getitem__(self, index: int) -> Any:
        if index in self._names:
            self._log.append(f"load {self._names[index]}")
        return self._words[index]

    def __setitem__(self, index: int, value: int) -> None:
        if index in self._names:
            self._log.append(f"store {self._names[index]}")
        self._words[index] = value

    def put(self, name: str, value: int) -> None:
        """Somebody else stores a word."""
        self._words[self.places[name]] = INT64_MAX if value == MAX else value


class Visits:
    """The slot's visits; a store begins or ends one."""

    def __init__(self, visits: Any, rig: Rig) -> None:
        self._visits = visits
        self._rig = rig

    def __getitem__(self, session: int) -> Any:
        return self._visits[session]

    def __setitem__(self, session: Any, visit: Any) -> None:
        self._visits[session] = visit
        if isinstance(session, slice):  # a new use begins
            return
        self._rig.log.append("enter" if visit & 1 else "leave")
        for name, value in self._rig.case.at_enter.items():
            self._rig.words.put(name, value)

    def __len__(self) -> int:
        return len(self._visits)

    def tobytes(self) -> bytes:
        """As `memoryview.tobytes`."""
        self._rig.log.append("load visits")
        return bytes(self._visits)

    def put(self, visit: int) -> None:
        """The other session's."""
        self._visits[1] = visit


class Inside(dict[object, None]):
    """Who is in the driver for a use; each store and look is written down."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self._log = log

    def __setitem__(self, key: object, value: None) -> None:
        self._log.append("own inside")
        super().__setitem__(key, value)

    def __delitem__(self, key: object) -> None:
        self._log.append("own inside")
        super().__delitem__(key)

    def pop(self, key: object, default: Any = None) -> Any:
        """As of any; an exception ends the question."""
        self._log.append("own inside")
        return super().pop(key, default)

    def __len__(self) -> int:
        self._log.append("own inside")
        return super().__len__()


class Rig:
    """What an engine is given: board, driver, futex, lock, guard and peer, all of which write down what is done."""

    stands_behind_all = False
    line_index = 0

    def __init__(self, case: Case, directory: Path) -> None:
        self.case = case
        self.log: list[str] = []
        self.board = Board.create(str(directory / f"board-{case.call}"), b"e" * 16, 2, 1)
        self.words = Words(self.board.words, (self.board.page_of_slots - self.board.address) // 8, self.log)
        self.board.words = self.words  # type: ignore[assignment] # what the lines index
        self.line = self.board.slot(0)
        self.line.futex = self  # type: ignore[assignment] # wake and wait, below
        for name in ("recorded", "completed", "state", "watermark"):
            self.words.put(name, getattr(case, name))
        self.visits = Visits(self.line._visits, self)
        self.line._visits = self.visits  # type: ignore[assignment] # as much of one as is used
        self.visits.put(int(bool(case.visitor)))
        self.words.put("awaited", int(case.is_awaited))
        self.words.put("visited", int(case.is_visited))
        self.words.put("incarnation", 1)
        self.words.put("recorder", 1)
        self.serial = 1
        self.depth = 0  # of the lock

    def close(self) -> None:
        """Remove the board."""
        boards.end(self.board)

    # A futex, a lock, a guard, a peer.

    def wake(self) -> None:
        self.log.append("wake")

    def wait(self, _seen: int, _timeout_ns: int) -> None:
        self.log.append("sleep")
        for name, value in self.case.meanwhile.items():
            self.words.put(name, value)

    def __enter__(self) -> None:
        self.depth += 1
        if self.depth == 1:
            self.log.append("lock")

    def __exit__(self, *_: object) -> None:
        self.depth -= 1
        if self.depth == 0:
            self.log.append("unlock")

    def is_mine(self) -> bool:
        return self.depth > 0

    def is_held_below(self) -> bool:
        return False

    def acquire(self, *_: object, **__: object) -> bool:
        self.__enter__()
        return True

    def release(self) -> None:
        self.__exit__()

    def unwind(self) -> None:
        """Released by whoever left."""
        while self.depth:
            self.__exit__()

    def check(self) -> None:
        self.log.append("guard.check")

    def check_liveness(self) -> None:
        self.log.append("guard.check_liveness")
        if self.case.is_orphaned:
            raise CoordinatorLost("it died")

    def sleep(self, _seconds: float) -> None:
        """The pause of a record that waits for a visitor."""
        self.log.append("pause")
        if self.case.visitor == "leaves":
            self.visits.put(2)

    def ask_visitor(self, _session: int) -> bool:
        self.log.append("visitor alive?")
        return self.case.visitor != "dead"

    def coordinator_is_alive(self) -> bool:
        return not self.case.is_orphaned

    def count_full_ring(self) -> None:
        """Not a step of the protocol."""

    def is_alive(self) -> bool:
        self.log.append("recorder alive?")
        return self.case.is_alive

    # The driver.

    def wait_event(self, _event: str, _deadline_ns: int) -> bool:
        self.log.append("wait_event")
        return self.case.says_complete

    def cuStreamIsCapturing(self, _stream: int) -> Any:  # noqa: N802 - the driver's name
        self.log.append("cuStreamIsCapturing")
        return SUCCESS, capture._NONE

    def cuStreamGetFlags(self, _stream: int) -> Any:  # noqa: N802 - the driver's name
        self.log.append("cuStreamGetFlags")
        return SUCCESS, 1

    def cuStreamGetId(self, _stream: int) -> Any:  # noqa: N802 - the driver's name
        self.log.append("cuStreamGetId")
        return SUCCESS, self.case.stream

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> Any:  # noqa: N802 - the driver's name
        return SUCCESS, mode

    def cuEventCreate(self, _flags: int) -> Any:  # noqa: N802 - the driver's name
        return SUCCESS, "marker"

    def cuEventDestroy(self, _event: str) -> Any:  # noqa: N802 - the driver's name
        return (SUCCESS,)

    def cuEventRecord(self, event: str, _stream: int) -> Any:  # noqa: N802 - the driver's name
        self.log.append("mark" if event == "marker" else "cuEventRecord")
        return (SUCCESS,)

    def cuEventQuery(self, _event: str) -> Any:  # noqa: N802 - the driver's name
        if self.case.call == "synchronize" and not self.depth:
            return (slot_use._NOT_READY,)  # the first look of a bounded wait, which as a whole is one step
        self.log.append("cuEventQuery")
        return (SUCCESS if self.case.says_complete else slot_use._NOT_READY,)

    def cuStreamWaitEvent(self, *_: Any) -> Any:  # noqa: N802 - the driver's name
        self.log.append("cuStreamWaitEvent")
        return (SUCCESS,)

    def cuStreamWriteValue64(self, *_: Any) -> Any:  # noqa: N802 - the driver's name
        self.log.append("cuStreamWriteValue64")
        return (SUCCESS,)

    def cuStreamWaitValue64(self, *_: Any) -> Any:  # noqa: N802 - the driver's name
        self.log.append("cuStreamWaitValue64")
        return (SUCCESS,)


def _engine(rig: Rig) -> Any:
    kind: Any = EventEngine if rig.case.engine == "event" else TimelineEngine

    class Watched(kind):  # type: ignore[misc] # one of two classes
        """The engine, whose `is_closed` is written down too."""

        @property
        def is_closed(self) -> bool:
            rig.log.append("own is_closed")
            return self._is_closed

        @is_closed.setter
        def is_closed(self, value: bool) -> None:
            self._is_closed = value

        def _raise_lost(self, generation: int) -> NoReturn:
            raise RecorderLost("whose loads are for the text alone", generation=generation)

        @property
        def _is_orphaned(self) -> bool:
            rig.log.append("coordinator?")
            return bool(super()._is_orphaned)

        def _is_alive(self, session: int) -> bool:
            return rig.ask_visitor(session)

    attachment = Attachment(
        name="e",
        slot=0,
        incarnation=1,
        base=0,
        device="",
        engine=rig.case.engine,
        depth=rig.case.depth,
        recorder=rig.case.call in ("record", "harvest", "let go"),
        handles=[b""] * rig.case.depth,
        serials=list(range(rig.case.depth)),
    )
    engine = Watched(rig.board, rig, attachment, 0)
    engine.line = rig.line
    engine._lock = rig
    engine._inside = Inside(rig.log)
    engine._recorded = engine._begun = rig.case.made
    engine._completed = rig.case.done
    if rig.case.engine == "event":
        engine._ring = ["ring"] * rig.case.depth  # as after their first use
        engine._room, engine._watched = rig.case.done + rig.case.depth, {}
    engine._last_stream = 1
    engine._is_closed = rig.case.is_closed
    return engine


@pytest.fixture
def new_rig(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[Case], Rig]]:
    """Makes rigs, and puts them where the engines look for their driver."""
    rigs: list[Rig] = []

    def make(case: Case) -> Rig:
        rig = Rig(case, tmp_path)
        rigs.append(rig)
        monkeypatch.setattr("ipcsync._native.context.driver", lambda: rig)
        monkeypatch.setattr(base, "stream_handle", lambda *_: (_STREAM, 0))
        monkeypatch.setattr(capture, "_status", rig.cuStreamIsCapturing)
        for module in (markers, timeline):
            monkeypatch.setattr(module, "OnDevice", lambda _: contextlib.nullcontext(contextlib.nullcontext()))
        monkeypatch.setattr(slot_view, "peer_of", lambda *_: rig)
        monkeypatch.setattr(queued, "lists", {})
        monkeypatch.setattr(imports, "acquire", lambda *_: "ring")
        monkeypatch.setattr(imports, "release", lambda *_: True)
        monkeypatch.setattr(pinned, "word", lambda address: address)
        monkeypatch.setattr("ipcsync._drivers.wait_event", rig.wait_event)
        monkeypatch.setattr("ipcsync._engines.event.time.sleep", rig.sleep)
        monkeypatch.setattr("ipcsync._engines.event._LONGEST_PAUSE_S", 0.0)  # at each look, who visits is asked for
        # As without the compiled core: test_compiled_order holds its own wait to the order.
        monkeypatch.setattr(EventEngine, "_await_work", lambda *_: None, raising=False)
        monkeypatch.setattr(EventEngine, "_nudge_address", lambda _: 0)
        monkeypatch.setattr(capture, "relaxed_call", lambda function, *args: function(*args))
        return rig

    yield make
    for rig in rigs:
        rig.close()


def _run_code(rig: Rig) -> tuple[list[str], str]:
    case, engine = rig.case, _engine(rig)
    calls: dict[str, Callable[[], Any]] = {
        "query": lambda: engine.query(case.generation),
        "synchronize": lambda: engine.synchronize(case.generation, None) or "ok",
        "wait": lambda: engine.wait(case.generation, _STREAM, None, ahead=False) or "ok",
        "ahead": lambda: engine.wait(case.generation, _STREAM, None, ahead=True) or "ok",
        "record": lambda: engine.record(_STREAM, 0, None) and "",
        "harvest": lambda: engine.publish_completed() or "",
        "let go": engine.try_release,
    }
    rig.log.clear()
    try:
        outcome = str(calls[case.call]())
    except RecorderLost:
        outcome = "lost"
    except EventClosed:
        outcome = "closed"
    except CoordinatorLost:
        outcome = "orphaned"
    return rig.log, outcome


# --- the model --------------------------------------------------------------------------------------------------------


def _run_model(case: Case, *, asks: bool = False) -> tuple[list[str], str]:
    orphans = case.is_orphaned
    scenario = Scenario(
        engine=case.engine, depth=case.depth, dies=True, closes=True, reuse=True, orphans=orphans, asks=asks, locks=asks
    )
    model = Model(scenario)
    process = Process(is_closed=case.is_closed, made=case.made, done=case.done, room=case.done + case.depth)
    visitor = process._replace(visit=int(bool(case.visitor)), is_alive=case.visitor != "dead")
    world = World(
        state=case.state,
        watermark=case.watermark,
        recorded=case.recorded,
        completed=case.completed,
        awaited=int(case.is_awaited),
        visited=int(case.is_visited),
        ring=tuple(range(1, case.depth + 1)),
        truth=frozenset(range(1, 9) if case.says_complete else ()),
        lies=case.says_complete and not case.is_alive,
        processes=(process._replace(is_alive=case.is_alive), visitor),
    )
    programs = {
        "query": lambda: model.query(1, "w", case.generation),
        "synchronize": lambda: model.synchronize(1, "w", case.generation),
        "wait": lambda: model.wait(1, "w", case.generation, False),
        "ahead": lambda: model.wait(1, "w", case.generation, True),
        "record": lambda: model.record(RECORDER, case.made + 1, case.stream, 1),
        "harvest": lambda: model.under_lock(RECORDER, "h", model.publish_completed, RECORDER),
        "let go": lambda: model.under_lock(RECORDER, "r", model.let_go, RECORDER),
    }

    def after(label: str, world: World) -> World:
        # After the looks before, or once the driver has said that it is pending.
        if case.is_orphaned and label in (("cuStreamGetId",) if case.is_queued else ("cuEventQuery", "lock")):
            return world._replace(coordinator="gone")
        if label in ("enter", "leave"):
            return world._replace(**case.at_enter)
        if label == "pause" and case.visitor == "leaves":
            return world.put(1, visit=2)
        return world._replace(**case.meanwhile) if label == "sleep" else world

    labels, outcome = run_alone(world, programs[case.call](), after)
    return [label for label in labels if label not in _WITHIN and label != "markers?"], outcome


@pytest.mark.parametrize("name", CASES)
def test_the_engines_take_the_steps_of_the_model_in_its_order(name: str, new_rig: Callable[[Case], Rig]) -> None:
    case = CASES[name]
    assert _run_code(new_rig(case)) == _run_model(case)


def test_a_fence_stands_between_what_each_side_of_a_visit_stores_and_its_look(
    new_rig: Callable[[Case], Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one on both sides, the waiter sees that it is complete, or the recorder sees the visit."""
    logs = []
    for name in ("wait: recorded", "record: room after a look, nobody visits"):
        rig = new_rig(CASES[name])
        monkeypatch.setattr(slot_line, "full_fence", partial(rig.log.append, "fence"))
        logs.append(_run_code(rig)[0])
    waiter, recorder = logs
    entered = waiter.index("enter")
    assert waiter[entered + 1 : entered + 3] == ["fence", "load completed"]
    stored = recorder.index("store completed")
    assert recorder[stored + 1 : stored + 4] == ["fence", "load visited", "load visits"]


def test_a_stream_is_asked_for_its_id_once_and_a_default_stream_each_time(
    new_rig: Callable[[Case], Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "OnDevice", lambda _: contextlib.nullcontext(contextlib.nullcontext()))
    rig = new_rig(Case("record", depth=8))
    engine, default = _engine(rig), 1
    handles: list[Any] = [_STREAM, _STREAM, _Handle(), _STREAM, default, default]
    asked = []
    for handle in handles:
        rig.log.clear()
        engine.record(handle, 0, None)
        asked.append(rig.log.count("cuStreamGetId"))
    assert asked == [1, 0, 1, 1, 1, 1]


class _Handle:
    """Another handle of the same stream, as a library gives a new one for each call."""

    def __int__(self) -> int:
        return _STREAM


# --- the coordinator --------------------------------------------------------------------------------------------------

_EFFECTS = [
    ("broken", "event", OPEN, 1),
    ("broken", "timeline", OPEN, 1),
    ("drained", "timeline", CLOSED, 2),
    ("drained", "event", CLOSED, 2),
    ("freed", "event", BROKEN, 1),
    ("freed", "event", CLOSED, 2),
    ("freed", "timeline", BROKEN, MAX),
    ("freed", "timeline", CLOSED, MAX),
]


class _Feed:
    def announce(self, *_: Any, **__: Any) -> None:
        """Nobody listens."""


class _Pool:
    def give_back(self, *_: Any) -> None:
        """Nothing was made."""

    destroy = give_back

    def handles(self, _: list[int]) -> list[bytes]:
        return []


def _effects(rig: Rig) -> Effects:
    pool, feed = _Pool(), _Feed()  # as much of them as is used
    return Effects(rig.board, pool, feed, lambda _: None, Tombstones())  # type: ignore[arg-type]


def _run_effect(rig: Rig, kind: ChangeKind) -> list[str]:
    effects = _effects(rig)
    slot = Slot(0, incarnation=1, ring=[], engine=rig.case.engine, recorder=Recorder(1, "s", "recorder"))
    effects._lines[0] = rig.line
    rig.log.clear()
    if kind == "opened":
        slot.base = effects.line(0).recorded
    effects.carry_out(effects.plan([Change(kind, slot, was_broken=rig.case.state == board_world.BROKEN)]))
    return rig.log


@pytest.mark.parametrize(("kind", "engine", "state", "completed"), _EFFECTS)
def test_the_coordinator_takes_the_steps_of_the_model_in_its_order(
    kind: ChangeKind, engine: EngineName, state: int, completed: int, new_rig: Callable[[Case], Rig]
) -> None:
    case = Case(kind, engine=engine, state=state, recorded=2, completed=completed)
    model = Model(Scenario(engine=engine, dies=True, closes=True, reuse=True))
    world = World(state=state, recorded=2, completed=completed, processes=(Process(),))
    labels, _ = run_alone(world, getattr(model, kind)(), lambda _, world: world)
    steps = [label for label in labels if label not in _WITHIN]
    taken = _run_effect(new_rig(case), kind)
    assert taken[: len(steps)] == steps
    assert all(label.startswith("load ") for label in taken[len(steps) :]), "what follows is for the log"


def test_a_slot_is_opened_and_finished_in_the_models_order(new_rig: Callable[[Case], Rig]) -> None:
    model = Model(Scenario(dies=True, reuse=True))
    world = World(state=board_world.FREE, recorded=2, completed=2, processes=(Process(),))
    programs: list[tuple[ChangeKind, Any]] = [
        ("opened", model.opened()),
        ("closed", model.finish(board_world.CLOSED)),
    ]
    for kind, program in programs:
        labels, _ = run_alone(world, program, lambda _, world: world)
        steps = [label for label in labels if label not in _WITHIN and label != "a new recorder's work"]
        assert _run_effect(new_rig(Case(kind, recorded=2, completed=2)), kind) == steps


def test_a_released_word_is_released_again_once_it_was_pulled_down(new_rig: Callable[[Case], Rig]) -> None:
    rig = new_rig(Case("again", engine="timeline", recorded=2, completed=1))
    effects = _effects(rig)
    effects.releaser.hold(0, rig.line)
    rig.words.put("completed", 2)
    rig.log.clear()
    effects.releaser.reassert()
    effects.releaser.reassert()
    assert rig.log == ["load completed", "store completed", "load completed"]
    assert rig.line.completed == INT64_MAX
