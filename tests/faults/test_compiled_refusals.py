"""What the driver refuses, function by function: a shortcut says nothing that is not so, and leaves the call.

The Python engine then makes the call anew, and says what the driver says: `tests/events/test_driver_calls.py`. But if
the stream may have work, a second attempt would be a second record: the shortcut says itself what the driver says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.faults.compiled_rig import MARKER, STREAM, Rig, end
from tests.faults.test_board_order import CASES, Case
from tests.faults.test_compiled_chains import Chain, _go_to
from tests.faults.test_compiled_order import _CHANGES, core

pytestmark = pytest.mark.core

_UNKNOWN = 999  # CUDA_ERROR_UNKNOWN
_CAPTURING, _ID, _MODE = "cuStreamIsCapturing", "cuStreamGetId", "cuThreadExchangeStreamCaptureMode"
_RECORD, _QUERY, _WAIT = "cuEventRecord", "cuEventQuery", "cuStreamWaitEvent"
_WRITE, _WAIT_VALUE = "cuStreamWriteValue64", "cuStreamWaitValue64"
_LINKS = ("store bits", "store as_of", "store behind")  # what a record stands behind is told before it is made
_BERTHS = {"cuEventSynchronize", "cuCtxGetCurrent", "cuCtxSetCurrent"}  # for parked threads, which nothing depends on
_LEFT = "NotMeError"

# Those of `test_board_order`, and more.
_CASES: dict[str, Case] = {
    **CASES,
    "query: by the recorder": Case("query", recorded=1, made=1, says_complete=True),
    "synchronize: pending": Case("synchronize", recorded=1),
    "record: a full ring": Case("record", depth=3, recorded=3, made=3),
    "chain: record": Case("record", depth=4),
    "chain: record behind nothing": Case("record", depth=4),
    "chain: record, room after a look": Case("record", recorded=1, made=1, says_complete=True),
    "chain: record on another stream": Case("record", depth=4, recorded=1, made=1),
    "chain: record, timeline": Case("record", engine="timeline"),
    "chain: record on another stream, timeline": Case("record", engine="timeline", recorded=1, made=1),
}


class Refusal(NamedTuple):
    """One function that is refused, and what the shortcut may have changed by then.

    `since` is the step before which that begins, "" for at once, and `nth` which of several such. `again` is how the
    same call ends once the driver agrees; a record whose number the driver may have is not made by a shortcut again.
    """

    name: str
    function: str
    changes: tuple[str, ...] = ()
    again: str = ""
    since: str = ""
    nth: int = 1

    def __str__(self) -> str:
        return f"{self.name}, {self.function}{' ' * bool(self.since)}{self.since}"

    @property
    def is_doubtful(self) -> bool:
        """Whether the driver may have the record."""
        return self.is_on_stream and _CASES[self.name].call == "record"

    @property
    def is_on_stream(self) -> bool:
        """Whether the stream may have work of this call."""
        return self.function in (_RECORD, _WRITE)


REFUSALS = [
    Refusal("record: room in the ring", _CAPTURING),
    Refusal("record: room in the ring", _ID),
    Refusal("record: room in the ring", _RECORD, (_RECORD,), _LEFT),
    Refusal("record: awaited", _RECORD, (_RECORD,), _LEFT),
    Refusal("record: another stream", _WAIT, (_WAIT,)),
    Refusal("record: another stream", _RECORD, (_WAIT, _RECORD), _LEFT),
    Refusal("record: room after a look", _MODE),
    Refusal("record: room after a look", _QUERY),
    Refusal("record: a full ring", _QUERY, (), _LEFT),
    Refusal("record: a full ring", _QUERY, (), _LEFT, since=_QUERY, nth=2),
    Refusal("record: timeline", _CAPTURING),
    Refusal("record: timeline", _ID),
    Refusal("record: timeline", _WRITE, (_WRITE,), _LEFT),
    Refusal("record: timeline", _RECORD, (_WRITE, "mark"), _LEFT),
    Refusal("record: timeline, another stream", _WAIT_VALUE, (_WAIT_VALUE,)),
    Refusal("record: timeline, another stream", _WRITE, (_WAIT_VALUE, _WRITE), _LEFT),
    Refusal("chain: record", _CAPTURING),
    Refusal("chain: record", _ID),
    Refusal("chain: record", _RECORD, (*_LINKS, _RECORD), _LEFT),
    Refusal("chain: record behind nothing", _CAPTURING, since=_ID),
    Refusal("chain: record behind nothing", _ID, since=_CAPTURING, nth=2),
    Refusal("chain: record behind nothing", _RECORD, (_RECORD,), _LEFT),
    Refusal("chain: record, room after a look", _MODE),
    Refusal("chain: record, room after a look", _QUERY),
    Refusal("chain: record on another stream", _WAIT, (*_LINKS, _WAIT), _LEFT),
    Refusal("chain: record on another stream", _RECORD, (*_LINKS, _WAIT, _RECORD), _LEFT),
    Refusal("chain: record, timeline", _WRITE, (*_LINKS, _WRITE), _LEFT),
    Refusal("chain: record, timeline", _RECORD, (*_LINKS, _WRITE, "mark"), _LEFT),
    Refusal("chain: record on another stream, timeline", _WAIT_VALUE, (*_LINKS, _WAIT_VALUE), _LEFT),
    Refusal("chain: record on another stream, timeline", _WRITE, (*_LINKS, _WAIT_VALUE, _WRITE), _LEFT),
    Refusal("chain: record on another stream, timeline", _RECORD, (*_LINKS, _WAIT_VALUE, _WRITE, "mark"), _LEFT),
    Refusal("wait: recorded", _CAPTURING, (), "ok"),
    Refusal("wait: recorded", _MODE, (), "ok"),
    Refusal("wait: recorded", _QUERY, (), "ok"),
    Refusal("wait: recorded", _ID, (), "ok"),
    Refusal("wait: recorded", _WAIT, ("store visited", _WAIT), "ok"),
    Refusal("wait: recorded", _RECORD, ("store visited", _WAIT, "mark"), "ok"),
    Refusal("wait: recorded while it sleeps", _CAPTURING, ("store awaited",), "ok", since="sleep"),
    Refusal("wait: timeline", _CAPTURING, (), "ok"),
    Refusal("wait: timeline", _ID, (), "ok"),
    Refusal("wait: timeline", _WAIT_VALUE, (_WAIT_VALUE,), "ok"),
    Refusal("wait: timeline", _RECORD, (_WAIT_VALUE, "mark"), "ok"),
    Refusal("query: pending", _MODE, (), "False"),
    Refusal("query: pending", _QUERY, (), "False"),
    Refusal("query: complete by the driver", _MODE, (), "True"),
    Refusal("query: complete by the driver", _QUERY, (), "True"),
    Refusal("query: by the recorder", _MODE, (), "True"),
    Refusal("query: by the recorder", _QUERY, (), "True"),
    Refusal("synchronize: complete by the driver", _MODE, (), "ok"),
    Refusal("synchronize: complete by the driver", _QUERY, (), "ok"),
    Refusal("synchronize: pending", _MODE, (), _LEFT, since="await work"),
    Refusal("synchronize: pending", _QUERY, (), _LEFT, since="await work"),
]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Callable[[str], Rig]]:
    """Makes what the call of a case is made on."""
    rigs: list[Rig] = []

    def make(name: str) -> Rig:
        folder = tmp_path / str(len(rigs))
        folder.mkdir()
        kind = Chain if name.startswith("chain: ") else Rig
        made = kind(core, folder, _CASES[name])
        rigs.append(made)
        if isinstance(made, Chain) and "another stream" in name:
            made.waits[2] = {id(made.view): made.queued(1, stream=2)}
            made.engine.keep_marker(2, MARKER)
            _go_to(made, 2)
        if name == "chain: record behind nothing":  # another stream of the process waits
            made.waits[3] = made.waits.pop(1)
        if name == "query: by the recorder":
            made.engine.is_recorder = True
        return made

    yield make
    end(core, rigs)


def _refuse(made: Rig, refusal: Refusal) -> None:
    """Have the driver refuse, from the refusal's step on."""

    def step(number: int) -> None:
        made.step(number)
        if made.log[-1] == refusal.since and made.log.count(refusal.since) == refusal.nth:
            begin()

    def begin() -> None:
        made.asked.clear()
        made.results[refusal.function] = _UNKNOWN

    if refusal.since:
        made._hook = type(made._hook)(step)
    else:
        begin()


def _changes(steps: list[str]) -> tuple[str, ...]:
    return tuple(step for step in steps if step.startswith(_CHANGES))


@pytest.mark.parametrize("refusal", REFUSALS, ids=str)
def test_what_the_driver_refuses_is_not_said_to_be_done_and_left_to_the_python_engine(
    refusal: Refusal, rig: Callable[[str], Rig]
) -> None:
    made = rig(refusal.name)
    _refuse(made, refusal)
    _expect_refused(made, refusal)
    _expect_again(made, refusal)


def _expect_refused(made: Rig, refusal: Refusal) -> None:
    """The call is left with nothing said and nothing kept; of what a stream may have, so much is kept."""
    case, engine = made.case, made.engine
    steps, outcome = made.call()
    assert refusal.function in made.asked, "the driver was asked"
    unmarked = (0, 0) if (case.call, case.engine) == ("record", "event") else (STREAM, case.stream)
    assert outcome == (str((_UNKNOWN, refusal.function, *unmarked)) if refusal.is_on_stream else _LEFT)
    assert _changes(steps) == refusal.changes
    assert (made.word("recorded"), made.word("completed")) == (case.meanwhile.get("recorded", case.recorded), 0)
    assert (engine._recorded, engine._begun) == (case.made, case.made + refusal.is_doubtful)
    assert (engine._is_interrupted, engine._completed, engine.known_complete) == (refusal.is_doubtful, 0, 0)
    queued = [wait.is_queued for held in made.waits.values() for wait in held.values() if wait.view is engine]
    is_noted = case.call == "wait" or (isinstance(made, Chain) and bool({_WAIT, _WAIT_VALUE} & {*refusal.changes}))
    assert any(queued) == (is_noted and refusal.is_on_stream)
    assert (made.session_check.shortcuts, made.session_check.slow_calls) == (0, int(outcome == _LEFT))
    _expect_free(made)
    if refusal.function != _MODE:
        assert made.mode == 0, "the thread's capture mode was restored"


def _expect_free(made: Rig) -> None:
    """No lock, visit or sleeper is left."""
    assert made.log.count("lock") == made.log.count("unlock")
    locks: list[Any] = [made.engine._lock, made.engine._record_lock, made.links.lock]
    for lock in locks:
        assert not lock.is_mine()
        assert lock.acquire(blocking=False)
        lock.release()
    assert made.log.count("enter") == made.log.count("leave")
    assert made.line._visits[0] % 2 == 0
    assert made.engine._sleepers == 0


def _expect_again(made: Rig, refusal: Refusal) -> None:
    """The driver agrees: the call is made, unless it is a record that the driver may have."""
    made.results.clear()
    made._hook = type(made._hook)(made.step)
    made.mode = 0
    made.log.clear()
    before = made.word("recorded")
    steps, outcome = made.call()
    assert outcome == refusal.again
    if made.case.call == "record":
        is_made = refusal.again != _LEFT
        assert made.word("recorded") == made.engine._recorded == before + is_made
        assert is_made or not _changes(steps)
    elif made.case.call == "wait":
        (wait,) = made.waits[made.case.stream].values()
        assert wait.is_queued
    _expect_free(made)


def test_each_function_that_a_shortcut_calls_is_refused_above(rig: Callable[[str], Rig]) -> None:
    asked: set[tuple[str, str, str]] = set()
    for name, case in _CASES.items():
        if case.call in ("record", "wait", "query", "synchronize"):
            made = rig(name)
            made.call()
            asked |= {(case.call, case.engine, function) for function in made.asked}
    cases = [(_CASES[refusal.name], refusal.function) for refusal in REFUSALS]
    assert asked == {(case.call, case.engine, function) for case, function in cases}
    assert {function for *_, function in asked} == set(core.FUNCTIONS) - _BERTHS
