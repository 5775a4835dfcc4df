"""What the driver refuses, function by function: the call raises it, and says and keeps nothing that is not so.

If the stream may have the work all the same, its marker is behind it, and the next record is made behind its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.faults.compiled_rig import Case, Rig, core, end
from tests.faults.test_board_order import CASES
from tests.faults.test_chain_order import Chain

pytestmark = pytest.mark.core

_UNKNOWN = 999  # CUDA_ERROR_UNKNOWN
_CAPTURING, _ID, _MODE = "cuStreamIsCapturing", "cuStreamGetId", "cuThreadExchangeStreamCaptureMode"
_RECORD, _QUERY, _WAIT = "cuEventRecord", "cuEventQuery", "cuStreamWaitEvent"
_WRITE, _WAIT_VALUE = "cuStreamWriteValue64", "cuStreamWaitValue64"
_CHANGES = ("store ", "wake", _RECORD, "cuStreamWait", "cuStreamWrite", "mark")
_LINKS = (
    "store bits",
    "store valid_as_of",
    "store first_dependent",
)  # what a record stands behind is told before it is made
_QUEUED = ("store announced", _WAIT, "mark")
_ELSEWHERE = {"cuEventCreate", "cuEventDestroy"}  # for markers, which Python makes
_ELSEWHERE |= {"cuStreamGetFlags", "cuStreamGetCtx"}  # asked once for each stream
_ELSEWHERE |= {"cuStreamBatchMemOp", "cuCtxGetCurrent", "cuCtxSetCurrent"}  # of replays: in tests/graphs

_CASES: dict[str, Case] = {
    **CASES,
    "query: by the recorder": Case("query", recorded=1, made=1, says_complete=True),
    "synchronize: pending": Case("synchronize", recorded=1),
    "record: a full ring": Case("record", depth=3, recorded=3, made=3),
    "chain: record": Case("record", depth=4),
    "chain: record, room after a look": Case("record", recorded=1, made=1, says_complete=True),
    "chain: record on another stream": Case("record", depth=4, recorded=1, made=1, stream=2),
    "chain: record, timeline": Case("record", engine="timeline"),
    "chain: record on another stream, timeline": Case("record", engine="timeline", recorded=1, made=1, stream=2),
}
_BLOCKED = ("synchronize: pending", "record: a full ring")  # until the driver refuses


class Refusal(NamedTuple):
    """One function that is refused, from the step `since` on ("": at once), and what the call has changed by then."""

    name: str
    function: str
    changes: tuple[str, ...] = ()
    since: str = ""

    def __str__(self) -> str:
        return f"{self.name}, {self.function}{' ' * bool(self.since)}{self.since}"

    @property
    def is_doubtful(self) -> bool:
        """Whether the driver may have the record."""
        return self.function in (_RECORD, _WRITE) and _CASES[self.name].call == "record"


REFUSALS = [
    Refusal("record: room in the ring", _CAPTURING),
    Refusal("record: room in the ring", _ID),
    Refusal("record: room in the ring", _RECORD, (_RECORD,)),
    Refusal("record: awaited", _RECORD, (_RECORD,)),
    Refusal("record: another stream", _WAIT, (_WAIT,)),
    Refusal("record: another stream", _RECORD, (_WAIT, _RECORD)),
    Refusal("record: room after a look", _QUERY),
    Refusal("record: a full ring", _QUERY),
    Refusal("record: timeline", _CAPTURING),
    Refusal("record: timeline", _ID),
    Refusal("record: timeline", _WRITE, (_WRITE, "mark")),
    Refusal("record: timeline", _RECORD, (_WRITE, "mark")),
    Refusal("record: timeline, another stream", _WAIT_VALUE, (_WAIT_VALUE, "mark")),
    Refusal("record: timeline, another stream", _WRITE, (_WAIT_VALUE, _WRITE, "mark")),
    Refusal("chain: record", _CAPTURING),
    Refusal("chain: record", _ID),
    Refusal("chain: record", _RECORD, (*_LINKS, _RECORD)),
    Refusal("chain: record, room after a look", _QUERY),
    Refusal("chain: record on another stream", _WAIT, (*_LINKS, _WAIT)),
    Refusal("chain: record on another stream", _RECORD, (*_LINKS, _WAIT, _RECORD)),
    Refusal("chain: record, timeline", _WRITE, (*_LINKS, _WRITE, "mark")),
    Refusal("chain: record, timeline", _RECORD, (*_LINKS, _WRITE, "mark")),
    Refusal("chain: record on another stream, timeline", _WAIT_VALUE, (*_LINKS, _WAIT_VALUE, "mark")),
    Refusal("chain: record on another stream, timeline", _WRITE, (*_LINKS, _WAIT_VALUE, _WRITE, "mark")),
    Refusal("wait: recorded", _CAPTURING),
    Refusal("wait: recorded", _QUERY),
    Refusal("wait: recorded", _ID),
    Refusal("wait: recorded", _WAIT, _QUEUED),
    Refusal("wait: recorded", _RECORD, _QUEUED),
    Refusal("wait: recorded while it sleeps", _CAPTURING, ("store awaited",), since="sleep"),
    Refusal("wait: timeline", _CAPTURING),
    Refusal("wait: timeline", _ID),
    Refusal("wait: timeline", _WAIT_VALUE, (_WAIT_VALUE, "mark")),
    Refusal("wait: timeline", _RECORD, (_WAIT_VALUE, "mark")),
    Refusal("query: pending", _QUERY),
    Refusal("query: by the recorder", _QUERY),
    Refusal("synchronize: complete by the driver", _QUERY),
    Refusal("synchronize: pending", _QUERY, since="await work"),
]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Callable[[str], Rig]]:
    """Makes what the call of a case is made on."""
    rigs: list[Rig] = []

    def make(name: str) -> Rig:
        folder = tmp_path / str(len(rigs))
        folder.mkdir()
        rigs.append((Chain if name.startswith("chain: ") else Rig)(_CASES[name], folder))
        if isinstance(rigs[-1], Chain) and "another stream" in name:
            rigs[-1].queued(1, stream=2)
        rigs[-1].engine.is_recorder |= name == "query: by the recorder"
        return rigs[-1]

    yield make
    end(rigs)


@pytest.mark.parametrize("refusal", REFUSALS, ids=str)
def test_what_the_driver_refuses_is_raised_and_not_said_to_be_done(
    refusal: Refusal, rig: Callable[[str], Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(made: Rig, name: bytes) -> None:
        take(made, name)
        if made.log[-1] == refusal.since:
            made.results[refusal.function] = _UNKNOWN

    take = Rig.step
    monkeypatch.setattr(Rig, "step", step)
    made = rig(refusal.name)
    if not refusal.since:
        made.results[refusal.function] = _UNKNOWN
    steps, outcome = made.call()
    monkeypatch.undo()
    case, engine = made.case, made.engine
    assert outcome == ("StreamCapturing" if refusal.function == _CAPTURING else f"DriverError {refusal.function}")
    assert tuple(step for step in steps if step.startswith(_CHANGES)) == refusal.changes
    assert (made.word("recorded"), made.word("completed")) == (case.meanwhile.get("recorded", case.recorded), 0)
    assert (engine._recorded, engine._begun) == (
        case.made * case.is_recorder,
        (case.made + refusal.is_doubtful) * case.is_recorder,
    )
    assert (engine._completed, engine.known_complete) == (0, 0)
    _expect_free(made)
    made.results, refusal = {}, refusal._replace(since="")
    made.case = replace(case, says_complete=True, meanwhile={})
    if case.engine == "timeline":
        made.put("completed", case.recorded)
    made.log.clear()
    _, outcome = made.call()  # the driver agrees
    assert outcome == {"record": "", "query": "True"}.get(case.call, "ok")
    if case.call == "record":  # the refused one too, if the driver may have it
        assert made.word("recorded") == engine._recorded == engine._begun == case.recorded + 1 + refusal.is_doubtful
    _expect_free(made)


def _expect_free(made: Rig) -> None:
    """No lock and no announcement is left, and the thread's capture mode was restored."""
    assert made.log.count("lock") == made.log.count("unlock")
    assert made.engine.await_calls(0)
    assert made.engine.has_passed(99), "nobody has `state`"
    assert made.log.count("announce") == made.log.count("retract")
    assert made.line._hazards[0] % 2 == 0
    assert made.mode == 0


@pytest.mark.parametrize(
    "name", ["record: room after a look", "wait: recorded", "query: pending", "query: complete by the driver"]
)
def test_a_thread_whose_capture_mode_stays_is_told_all_the_same(name: str, rig: Callable[[str], Rig]) -> None:
    made = rig(name)
    made.results[_MODE] = _UNKNOWN
    assert made.call()[1] == rig(name).call()[1]
    made.mode = 0
    _expect_free(made)


def test_each_function_of_the_core_is_refused_above(rig: Callable[[str], Rig]) -> None:
    asked: set[tuple[str, str, str]] = set()
    for name, case in _CASES.items():
        if case.call in ("record", "wait", "query", "synchronize") and name not in _BLOCKED:
            made = rig(name)
            made.call()
            asked |= {(case.call, case.engine, function) for function in made.asked if function != _MODE}
    cases = [(_CASES[refusal.name], refusal.function) for refusal in REFUSALS]
    assert asked == {(case.call, case.engine, function) for case, function in cases}
    assert {function for *_, function in asked} == set(core.FUNCTIONS) - _ELSEWHERE - {_MODE}
