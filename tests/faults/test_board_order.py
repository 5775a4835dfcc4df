"""The compiled core's and the coordinator's steps are the board model's, in its order; planted mistakes are found.

Whoever moves a step in the code moves it in the model too (`board_waiter`, `board_recorder`), and sees there whether
every promise still holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ipcsync._board import BROKEN, CLOSED, INT64_MAX, LIVE, OPEN, Board, layout
from ipcsync.typing import EngineName
from ipcsync_coordinator.effects import Effects
from ipcsync_coordinator.state import UNREAD, Recorder, Slot, Tombstones, Touched
from tests.faults.compiled_rig import DIED, Case, Changes, Rig, built, core, end
from tests.kit import boards
from tests.models import board_world
from tests.models.board_recorder import Model
from tests.models.board_world import MAX, RECORDER, Process, Scenario, World
from tests.models.explorer import run_alone

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("nothing_queued")]

Factory = pytest.TempPathFactory

# What the model does within a process that the core does too, but that nobody outside can see.
_WITHIN = {"", "slept", "tell", "pause", "markers?"}
_ERRORS = {"lost": "RecorderLost", "closed": "EventClosed", "orphaned": "CoordinatorLost"}

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
    "wait: recorded, as others do": Case("wait", recorded=1, is_announced=True),
    "wait: complete once it is on its hazard": Case("wait", recorded=1, at_announce={"completed": 1}),
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
    "record: room after a look, nobody has a hazard": Case(
        "record", recorded=1, made=1, says_complete=True, is_announced=True
    ),
    "record: room after a look, an announcer leaves": Case(
        "record", recorded=1, made=1, says_complete=True, is_announced=True, announcer="leaves"
    ),
    "record: room after a look, an announcer is dead": Case(
        "record", recorded=1, made=1, says_complete=True, is_announced=True, announcer="dead"
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


# --- the core's steps, and the model's -------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., tuple[list[str], str]]]:
    """Makes a case's call, by the shipped core or another build of it."""
    rigs: list[Rig] = []

    def run(case: Case, module: ModuleType = core, **within: Callable[[Rig], object]) -> tuple[list[str], str]:
        folder = tmp_path / str(len(rigs))
        folder.mkdir()
        rigs.append(rig := Rig(case, folder, module))
        rig.within |= {name: lambda act=act: act(rig) for name, act in within.items()}  # type: ignore[misc] # the default
        return rig.call()

    yield run
    end(rigs)


def expected(case: Case) -> tuple[list[str], str]:
    """The model's steps."""
    model = Model(
        Scenario(engine=case.engine, depth=case.depth, dies=True, closes=True, reuse=True, orphans=case.is_orphaned)
    )
    process = Process(is_closed=case.is_closed, made=case.made, room=case.depth)
    announcer = process._replace(hazard=int(bool(case.announcer)), is_alive=case.announcer != "dead")
    world = World(
        state=case.state,
        watermark=case.watermark,
        recorded=case.recorded,
        completed=case.completed,
        awaited=int(case.is_awaited),
        announced=int(case.is_announced),
        ring=tuple(range(1, case.depth + 1)),
        truth=frozenset(range(1, 9) if case.says_complete else ()),
        lies=case.says_complete and not case.is_alive,
        processes=(process._replace(is_alive=case.is_alive), announcer),
    )
    programs = {
        "query": lambda: model.query(1, "w", case.generation),
        "synchronize": lambda: model.synchronize(1, "w", case.generation),
        "wait": lambda: model.wait(1, "w", case.generation, False),
        "ahead": lambda: model.wait(1, "w", case.generation, True),
        "record": lambda: model.record(RECORDER, case.made + 1, case.stream, 1),
        "harvest": lambda: model.under_lock(RECORDER, "h", model.publish_completed, RECORDER),
        "let go": lambda: model.let_go(RECORDER, "r"),
    }

    def after(label: str, world: World) -> World:
        if case.is_orphaned and label == case.orphans_at:
            return world._replace(coordinator="gone")
        if label == "announce":
            return world._replace(**case.at_announce)
        if label == "pause" and case.announcer == "leaves":
            return world.put(1, hazard=2)
        return world._replace(**case.meanwhile) if label == "sleep" else world

    labels, outcome = run_alone(world, programs[case.call](), after)
    within = _WITHIN | ({"announcer alive?"} if case.announcer == "leaves" else set())  # which is asked later than here
    steps = [label for label in labels if label not in within and (label == "own is_closed" or label[:4] != "own ")]
    return steps, _ERRORS.get(outcome, outcome)


def _rounds(steps: list[str]) -> list[str]:
    """The steps without those of a pause that the next one repeats: only then it is asked who of them lives."""
    rounds: list[list[str]] = [[]]
    for step in steps:
        if step == "guard.check":
            rounds.append([])
        rounds[-1].append(step)
    following = [*rounds[1:], []]
    return [step for one, two in zip(rounds, following, strict=True) if two[: len(one)] != one for step in one]


@pytest.mark.parametrize("name", CASES)
def test_the_core_takes_the_steps_of_the_model_in_its_order(name: str, run: Any) -> None:
    steps, outcome = run(CASES[name])
    assert (_rounds(steps), outcome) == expected(CASES[name])


def test_a_record_wakes_the_bridge_too(run: Any) -> None:
    steps, _ = run(CASES["record: room in the ring"], cuEventRecord=lambda rig: rig.put("followed", 1))
    assert steps[steps.index("load followed") + 1] == "wake"


def test_an_event_that_breaks_during_a_record_is_said(run: Any) -> None:
    breaks = {"cuEventRecord": lambda rig: rig.put("state", BROKEN)}
    assert run(CASES["record: room in the ring"], **breaks)[1] == "EventClosed"


@pytest.mark.parametrize("call", ["synchronize", "wait"])
@pytest.mark.parametrize("who", ["recorder", "coordinator", "session"])
def test_each_slice_of_a_sleep_ends_with_the_looks_of_who_lives(
    run: Any, monkeypatch: pytest.MonkeyPatch, call: str, who: str
) -> None:
    def step(rig: Rig, name: bytes) -> None:
        take(rig, name)
        if rig.log.count("sleep") == 2 and rig.log[-1] == "sleep":
            if who == "recorder":
                rig.hold(rig.board.session(1), DIED)
            elif who == "coordinator":
                rig.orphan()
            else:
                rig.session_check.good_until = 0

    take = Rig.step
    monkeypatch.setattr(Rig, "step", step)
    steps, outcome = run(Case(call))
    errors = {"recorder": "RecorderLost", "coordinator": "CoordinatorLost", "session": "SessionExpired"}
    assert outcome == errors[who]
    assert steps.count("sleep") == 2, "all was well after the first one"
    first = steps.index("sleep")
    looks = ["load recorded", "guard.check", "coordinator?", "own is_closed", "load incarnation", "load recorder"]
    assert steps[first + 1 : first + 8] == [*looks, "recorder alive?"]


@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if case.call in ("query", "synchronize", "wait", "record")]
)
def test_what_users_call_takes_the_same_steps(name: str, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = run(CASES[name])
    monkeypatch.setattr(Rig, "is_users", True)
    steps, outcome = run(CASES[name])
    if CASES[name].call == "wait":  # it asks for the stream first: whether the core knows it
        steps, engines = (
            [step for step in steps if step != "cuStreamGetId"],
            (
                [step for step in engines[0] if step != "cuStreamGetId"],
                engines[1],
            ),
        )
    assert (steps, outcome) == engines


def test_the_core_and_the_board_agree_on_where_each_word_lies() -> None:
    slot = "INCARNATION STATE RECORDER WATERMARK AWAITED FOLLOWED RECORDED COMPLETED FIRST_DEPENDENT VALID_AS_OF LOST"
    slot += " ROOT_CAUSE ANNOUNCED"
    names = {name: getattr(layout, f"L_{name}") for name in slot.split()}
    names |= {name: getattr(layout, name) for name in ("S_STATE", "S_SERIAL", "S_OWNER", "S_DOORBELL")}
    names |= {"HEADER": layout.H_STATE + 1, "NEWEST": layout.H_NEWEST}
    names |= {"FIRST_SESSION": layout.HEADER // 8, "LINE": layout.WORDS}
    names |= {"LIVE": LIVE, "OPEN": OPEN, "BROKEN": BROKEN, "CLOSED": CLOSED, "OWNER_DIED": DIED}
    assert {name: getattr(core, name) for name in names} == names


# --- mistakes ---------------------------------------------------------------------------------------------------------

_PUBLISH = "    self._recorded = generation\n    publish_record(self, generation)\n"
_DRIVER = '    if self.has_ring:\n        step(b"cuEventRecord")\n'
_WAKE = "    if is_awaited(self):\n        wake(self)\n"
_MARK = '        tell(refusal, mark(self, handle, stream), b"cuEventRecord")  #'
_QUEUE = "        give_wait(self, handle, generation, refusal)\n"
_ANNOUNCE = "        announce(self)  # from here on its event is recorded again only if it was complete before\n"
_LOOK = (
    "        if <int64_t>(load(self.place, COMPLETED) - self.base) >= generation:\n"
    "            found = look(self, generation)\n"
)
_RETRACT = "    if self.has_ring:\n        retract(self)\n"
_REPEATS = "    cdef bint repeats = generation == self._begun\n"
_ASK = "        with nogil:\n            is_there = is_done("
MISTAKES: dict[str, tuple[str, Changes]] = {
    "publish before the driver's call": (
        "record: room in the ring",
        [
            (_DRIVER, "    publish_record(self, generation)\n" + _DRIVER),
            (_PUBLISH, _PUBLISH.splitlines(keepends=True)[0]),
        ],
    ),
    "wake before publish": ("record: awaited", [(_PUBLISH, "    wake(self)\n" + _PUBLISH), (_WAKE, "")]),
    "no look after the record": (
        "record: room in the ring",
        [("    if not is_open(self):\n        return IS_CLOSED\n", "")],
    ),
    "marker before the wait": (
        "wait: recorded",
        [(_MARK, "        pass  #"), (_QUEUE, "        mark(self, handle, stream)\n" + _QUEUE)],
    ),
    "the lock left out": (
        "record: room in the ring",
        [
            ('    step(b"lock")\n    if not self.calls.take():\n        return BUSY\n', ""),
            ('    step(b"unlock")\n    self.calls.give()\n    return found\n', "    return found\n"),
        ],
    ),
    "the fence left out": ("record: room in the ring", [("fence()  # before the looks at `state`", "pass  #")]),
    "the recorder asked before the driver": (
        "query: complete by the driver",
        [("is_good = recorder_lives(self) and", "is_good ="), (_ASK, "        recorder_lives(self)\n" + _ASK)],
    ),
    "no look after the wait": (
        "wait: recorded",
        [("    check_queued(self, bound)\n    return stream\n", "    return stream\n")],
    ),
    "who waits looked at before the record": (
        "record: awaited",
        [
            (_REPEATS, _REPEATS + "    cdef bint was_awaited = is_awaited(self)\n"),
            (_WAKE, "    if was_awaited:\n        wake(self)\n"),
        ],
    ),
    "asleep without a word": (
        "synchronize: recorded while it sleeps",
        [("    if load(place, AWAITED) == 0:\n        store(", "    if load(place, AWAITED) == 2:\n        store(")],
    ),
    "no look right before the wait": ("wait: recorded", [(_LOOK, "")]),
    "a look before the hazard": ("wait: recorded", [(_ANNOUNCE, ""), (_LOOK, _LOOK + _ANNOUNCE)]),
    "the hazard over before the wait": (
        "wait: recorded",
        [(_RETRACT, ""), (_LOOK, _LOOK + "        retract(self)\n")],
    ),
    "room without a look at the hazards": (
        "record: room after a look, nobody has a hazard",
        [("    if load(self.place, ANNOUNCED) != 0:\n", "    if False:\n")],
    ),
}


@pytest.mark.planted
@pytest.mark.process
@pytest.mark.parametrize("mistake", MISTAKES, ids=[name.replace(" ", "-") for name in MISTAKES])
def test_a_mistake_planted_in_the_compiled_core_is_found(mistake: str, tmp_path_factory: Factory, run: Any) -> None:
    name, changes = MISTAKES[mistake]
    assert run(CASES[name], built(tmp_path_factory.mktemp("core"), changes)) != expected(CASES[name])


@pytest.mark.planted
@pytest.mark.process
def test_without_a_mistake_the_core_that_is_built_here_takes_the_models_steps(
    tmp_path_factory: Factory, run: Any
) -> None:
    module = built(tmp_path_factory.mktemp("core"))
    for name in sorted({name for name, _ in MISTAKES.values()}):
        assert run(CASES[name], module) == expected(CASES[name]), name


# --- the coordinator --------------------------------------------------------------------------------------------------


class Words:
    """The board's words; every access to the slot's is written down."""

    def __init__(self, words: Any, first: int, log: list[str]) -> None:
        self._words = words
        self._log = log
        names = {0: "incarnation", 1: "state", 2: "recorder", 3: "watermark", 8: "recorded", 9: "completed"}
        names |= {
            6: "awaited",
            7: "followed",
            10: "first_dependent",
            11: "valid_as_of",
            12: "lost",
            13: "root_cause",
            14: "announced",
        }
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


class Coordinators:
    """A board whose slot's words and wakes are written down."""

    def __init__(self, case: Case, directory: Path) -> None:
        self.case = case
        self.log: list[str] = []
        self.board = Board.create(str(directory / f"board-{case.call}"), b"e" * 16, 2, 1)
        self.words = Words(self.board.words, self.board.layout.slots // 8, self.log)
        self.board.words = self.words  # type: ignore[assignment] # what the lines index
        self.line = self.board.slot(0)
        self.line.futex = self  # type: ignore[assignment] # wake, below
        for name in ("recorded", "completed", "state", "watermark"):
            self.words.put(name, getattr(case, name))
        self.words.put("incarnation", 1)
        self.words.put("recorder", 1)

    def wake(self) -> None:
        """As of any futex."""
        self.log.append("wake")


@pytest.fixture
def new_rig(tmp_path: Path) -> Iterator[Callable[[Case], Coordinators]]:
    """Makes such boards."""
    rigs: list[Coordinators] = []

    def make(case: Case) -> Coordinators:
        rigs.append(Coordinators(case, tmp_path))
        return rigs[-1]

    yield make
    for rig in rigs:
        boards.end(rig.board)


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


def _effects(rig: Coordinators) -> Effects:
    pool, feed = _Pool(), _Feed()  # as much of them as is used
    return Effects(rig.board, pool, feed, lambda _: None, Tombstones())  # type: ignore[arg-type]


_ROWS: dict[str, dict[str, Any]] = {
    "opened": {"state": "open", "recorder": None},
    "broken": {"state": "broken", "ended": "broken", "good": UNREAD},
    "closed": {"state": "closed", "ended": "closed"},
    "drained": {"state": "closed", "ended": "closed", "is_drained": True, "good": UNREAD},
    "freed": {"state": "free"},
}
_OWN = {"load incarnation", "load recorder", "load state"}  # which no other process writes


def _run_effect(rig: Coordinators, kind: str) -> list[str]:
    effects = _effects(rig)
    slot = Slot(0, incarnation=1, engine=rig.case.engine, recorder=Recorder(1, "s", "recorder"))
    slot.ring = [1] if rig.case.engine == "event" else []
    for name, value in _ROWS[kind].items():
        setattr(slot, name, value)
    if kind == "freed":
        slot.ended = "broken" if rig.case.state == board_world.BROKEN else "closed"
    rig.line.recorder = 1
    rig.line.incarnation = 0 if kind == "opened" else 1
    effects.line = lambda _: rig.line
    rig.log.clear()
    if kind == "opened":
        slot.base = effects.line(0).recorded
    effects.fill_in([slot])
    effects.carry_out(Touched(slots={slot}))
    return [label for label in rig.log if label not in _OWN]


@pytest.mark.parametrize(("kind", "engine", "state", "completed"), _EFFECTS)
def test_the_coordinator_takes_the_steps_of_the_model_in_its_order(
    kind: str, engine: EngineName, state: int, completed: int, new_rig: Callable[[Case], Coordinators]
) -> None:
    case = Case(kind, engine=engine, state=state, recorded=2, completed=completed)
    model = Model(Scenario(engine=engine, dies=True, closes=True, reuse=True))
    world = World(state=state, recorded=2, completed=completed, processes=(Process(),))
    steps = _steps_of(getattr(model, kind)(), world)
    if kind == "drained":  # its row says again that it is closed
        steps[1:1] = _steps_of(model.finish(board_world.CLOSED), world)
    taken = _run_effect(new_rig(case), kind)
    assert taken[: len(steps)] == steps
    assert all(label.startswith("load ") for label in taken[len(steps) :]), "what follows is for the log"


def _steps_of(program: Any, world: World) -> list[str]:
    labels, _ = run_alone(world, program, lambda _, world: world)
    return [label for label in labels if label not in _WITHIN and label != "a new recorder's work"]


def test_a_slot_is_opened_and_finished_in_the_models_order(new_rig: Callable[[Case], Coordinators]) -> None:
    model = Model(Scenario(dies=True, reuse=True))
    world = World(state=board_world.FREE, recorded=2, completed=2, processes=(Process(),))
    programs: list[tuple[str, Any]] = [
        ("opened", model.opened()),
        ("closed", model.finish(board_world.CLOSED)),
    ]
    for kind, program in programs:
        state = board_world.FREE if kind == "opened" else OPEN
        assert _run_effect(new_rig(Case(kind, state=state, recorded=2, completed=2)), kind) == _steps_of(program, world)


def test_a_released_word_is_released_again_once_it_was_pulled_down(new_rig: Callable[[Case], Coordinators]) -> None:
    rig = new_rig(Case("again", engine="timeline", recorded=2, completed=1))
    effects = _effects(rig)
    effects.releaser.hold(0, rig.line)
    rig.words.put("completed", 2)
    rig.log.clear()
    effects.releaser.reassert()
    effects.releaser.reassert()
    assert rig.log == ["load completed", "store completed", "load completed"]
    assert rig.line.completed == INT64_MAX
