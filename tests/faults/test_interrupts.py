"""Exceptions and calls of signals' handlers and finalizers in the middle of any call: rows 41, 42 and 43.

No Python code runs between the steps of a call that must not be torn, so what really comes is tried here: alarms
whose handlers raise or call, exceptions for want of stack, finalizers, and functions that the driver calls.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

import ipcsync
from ipcsync._engines import Engine
from ipcsync._session.session import Session
from ipcsync.testing import StreamGate
from ipcsync.typing import EngineName
from tests.graphs import ahead_actions as ahead
from tests.kit import driver_functions
from tests.kit.examples import LONG
from tests.kit.peer import Peer
from tests.kit.until import DEADLINE_S, until

_MOST_S = 400 if LONG else 120  # all that is tried on a machine that does much else

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(_MOST_S),
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]
_ROOT = Path(__file__).parents[2]


class Interruption(BaseException):
    """What a handler raises."""


# --- an exception -----------------------------------------------------------------------------------------------------


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
_SHARE = 1 if LONG else 3  # what comes at random is tried less in everyday tests


@pytest.mark.parametrize("program", ["records", "closes"])
def test_row_41_a_signals_handler_that_raises_anywhere_breaks_no_promise(program: str, engine: EngineName) -> None:
    _run(program, engine)


@pytest.mark.parametrize("program", ["requests", "connects"])
def test_row_41_nor_does_it_where_no_event_takes_part(program: str) -> None:
    _run(program, "event")


def _run(program: str, engine: str) -> str:
    """The program's output; it ends by itself, with 0."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.signalled", program, str(_COUNTS[program] // _SHARE), engine],
        cwd=_ROOT,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_MOST_S - 10,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


# --- a call -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", ["handlers", "finalizers"])
def test_row_42_handlers_and_finalizers_may_call_anything_in_the_middle_of_anything(
    program: str, engine: EngineName
) -> None:
    _run(program, engine)


# --- a record that fails ----------------------------------------------------------------------------------------------


def _at_depth(frames: int, fn: Callable[[], Any]) -> Any:
    return fn() if frames <= 0 else _at_depth(frames - 1, fn)


def _depth() -> int:
    frame, count = sys._getframe(), 0
    while frame is not None:
        frame, count = frame.f_back, count + 1  # type: ignore[assignment]
    return count


def test_row_43_records_without_room_on_the_stack_take_no_number_that_another_one_has(
    client: ipcsync.Client, new_client: Callable[..., ipcsync.Client], engine: EngineName
) -> None:
    event, stream = client.event("e", recorder=True, engine=engine), ipcsync.Stream()
    seen = new_client("peer").event("e")
    failed, last = 0, 0
    for room in range(2, 40):
        depth = sys.getrecursionlimit() - room - _depth()
        try:
            _at_depth(depth, lambda: event.record(stream))
        except Exception:  # noqa: BLE001 - a RecursionError, or what the driver makes of one
            failed += 1
        with StreamGate(stream):
            point = event.record(stream, timeout=10)
            assert last < point.generation == event.generation
            assert not point.query()
            assert not seen.at(point.generation).query()
        seen.at(point.generation).synchronize(10)
        last = point.generation
    assert failed > 5


def test_row_43_what_is_said_of_a_record_that_failed_is_true(
    client: ipcsync.Client, new_client: Callable[..., ipcsync.Client], engine: EngineName
) -> None:
    event = client.event("e", recorder=True, engine=engine)
    seen, stream, held = new_client("peer").event("e"), ipcsync.Stream(), ipcsync.Stream()
    first = event.record(stream).generation
    with StreamGate(held):
        refused = driver_functions.refused_once(driver_functions.RECORD[engine], is_made=True)
        with driver_functions.replaced(refused), pytest.raises(ipcsync.DriverError):
            event.record(held)  # behind a closed gate, where the driver has it
        lost = seen.at(first + 1)
        assert not lost.query()
        later = event.record(stream)
        assert later.generation == first + 2, "its number went to another record"
        assert not lost.query(), "the work before it waits for the gate"
        assert not seen.at(later.generation).query(), "a later record is complete before an earlier one"
    seen.at(later.generation).synchronize(10)
    assert lost.query()


def test_row_43_a_record_that_failed_on_the_default_stream_is_complete_only_behind_its_work(
    client: ipcsync.Client, new_client: Callable[..., ipcsync.Client]
) -> None:
    """That stream has no handle by which any thread could find where the record is: who records elsewhere is told."""
    event, default, other = (
        client.event("e", recorder=True, engine="timeline"),
        ipcsync.default_stream(),
        ipcsync.Stream(),
    )
    seen = new_client("peer").event("e")
    event.record(default).synchronize(10)
    with StreamGate(default):
        refused = driver_functions.refused_once("cuEventRecord")  # of its place; the record is made
        with driver_functions.replaced(refused), pytest.raises(ipcsync.DriverError):
            event.record(default)
        for _ in range(2):
            with pytest.raises(ipcsync.IpcSyncError, match="record on that stream once more, or close the event"):
                event.record(other)
        assert event.generation == 1
        assert event.record(default).generation == 3
        later = event.record(other)
        assert not seen.at(2).query()
    seen.at(later.generation).synchronize(10)
    assert other.query()


def test_row_41_an_exception_within_a_look_at_other_waits_leaves_a_stream_behind_nothing(
    coordinator: ipcsync.Coordinator,
    client: ipcsync.Client,
    new_peer: Callable[[], Peer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: object) -> NoReturn:
        raise Interruption

    def wait() -> None:
        while len(streams) < 1000:  # the looks are the rarer, the more waits there are
            streams.append(ipcsync.Stream())
            awaited.at(1).wait(streams[-1], ahead=True)

    closing, later = new_peer(), new_peer()
    closing.call(ahead.open_recorders, coordinator.endpoint, "lost")
    later.call(ahead.open_recorders, coordinator.endpoint, "later")
    streams, awaited = [ipcsync.Stream()], client.event("later")
    client.event("lost").at(1).wait(streams[0], ahead=True)
    closing.call(ahead.close_recorders)
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "loss_of", interrupted)
        with pytest.raises(Interruption):
            wait()
    later.call(ahead.close_recorders)
    client.record(streams[-1]).synchronize(DEADLINE_S)
    for stream in streams:
        client.resume(stream, DEADLINE_S)
