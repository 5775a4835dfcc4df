"""A signal's handler may use ipcsync in the middle of any call, of its own event too: no promise of either call breaks.

The handler is called by a trace function, at the step that a test names. It finds the Python engine there; the compiled
core runs no handler within its steps.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
from ipcsync._engines.event import EventEngine

import ipcsync
from ipcsync._engines import queued
from ipcsync.testing import StreamGate
from tests.kit.peer import Peer
from tests.kit.shortcuts import IN_PYTHON, has_shortcuts
from tests.kit.until import until

NewClient = Callable[..., ipcsync.Client]


@pytest.fixture(autouse=True)
def _in_python() -> None:
    if has_shortcuts():
        pytest.skip(IN_PYTHON)


@contextmanager
def handler_at(
    step: str, handler: Callable[[], object], *, at_end: bool = False, file: str = "", caller: str = ""
) -> Iterator[None]:
    """Have `handler` called once at the begin (or the end) of the next call of a function named `step`."""
    is_called, before = False, sys.gettrace()

    def call() -> None:
        nonlocal is_called
        is_called = True
        sys.settrace(before)
        handler()

    def trace(frame: FrameType, _event: str, _arg: Any) -> Any:
        if is_called or frame.f_code.co_name != step or not frame.f_code.co_filename.endswith(file):
            return None
        if caller and (frame.f_back is None or frame.f_back.f_code.co_name != caller):
            return None
        if at_end:
            return at_return
        call()
        return None

    def at_return(_frame: FrameType, event: str, _arg: Any) -> Any:
        if event == "return" and not is_called:
            call()
        return at_return

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
    assert is_called, f"{step} was called"


class _Ring:
    """A ring of two whose second record is pending, and a waiter's point for it."""

    def __init__(self, new_client: NewClient) -> None:
        recorder, waiter = new_client("recorder"), new_client("waiter")
        self.work, self.held, self.stream = (ipcsync.Stream() for _ in range(3))
        self.event = recorder.event("e", recorder=True, engine="event", depth=2)
        self.event.record(self.work)
        self.work.synchronize()
        self.gate, self.hold = StreamGate(self.work), StreamGate(self.held)
        self.last = self.event.record(self.work)
        self.point = waiter.point(bytes(self.last))
        self.engine: Any = self.point._bound().engine
        assert isinstance(self.engine, EventEngine)
        for generation in (1, 2):
            self.engine._event(generation)

    def finish(self) -> None:
        self.gate.open()
        self.work.synchronize()

    def completed(self) -> int:
        engine = self.event._engine
        return engine.line.completed - engine.base

    def go_round(self) -> int:
        """Record until there is no room; how often."""
        made = 0
        try:
            while made < 2:
                self.event.record(self.held, timeout=2)
                made += 1
        except ipcsync.WaitTimeout as error:
            assert "about to queue" in str(error)  # noqa: PT017 - what is looked at is which timeout it was
        return made

    def end(self) -> None:
        self.gate.open()
        self.hold.open()
        self.held.synchronize()


@pytest.fixture
def ring(new_client: NewClient, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Ring]:
    monkeypatch.setattr("ipcsync._engines.event._PATIENCE_NS", 60_000_000_000)  # longer than any record waits here
    ring = _Ring(new_client)
    yield ring
    ring.end()


def test_a_handlers_wait_before_the_visit_has_a_visit_of_its_own(ring: _Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = ipcsync.Stream()
    made: list[int] = []
    queue = EventEngine._driver_stream_wait

    def held_up(self: EventEngine, handle: Any, generation: int) -> None:
        if self is ring.engine and handle is inner._handle:
            ring.finish()
            thread = threading.Thread(target=lambda: made.append(ring.go_round()))
            thread.start()
            thread.join()
        queue(self, handle, generation)

    monkeypatch.setattr(EventEngine, "_driver_stream_wait", held_up)
    with handler_at("enter", lambda: ring.point.wait(inner, timeout=5), file="slot_line.py"):
        ring.point.wait(ring.stream, timeout=5)
    assert made[0] < 2, "the record on the event that is about to be waited for is refused"
    until(inner.query, "the handler's stream past generation 2")


def test_room_is_what_was_complete_before_the_look_at_the_visits(ring: _Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    is_within, may_go = threading.Event(), threading.Event()
    queue = EventEngine._driver_stream_wait

    def held_up(self: EventEngine, handle: Any, generation: int) -> None:
        if self is ring.engine:
            is_within.set()
            assert may_go.wait(30)
        queue(self, handle, generation)

    monkeypatch.setattr(EventEngine, "_driver_stream_wait", held_up)
    waiter = threading.Thread(target=lambda: ring.point.wait(ring.stream, timeout=5))

    def handler() -> None:
        waiter.start()
        assert is_within.wait(30)
        ring.finish()
        assert ring.last.query()

    made = []
    with handler_at("_visits", handler, at_end=True, caller="_raise_room"):
        made.append(ring.go_round())
    may_go.set()
    waiter.join()
    assert made[0] < 2, "generation 4 lies on the event of generation 2, which is about to be waited for"
    until(ring.stream.query, "the waiter's stream past generation 2")


def test_what_is_complete_never_goes_back(ring: _Ring) -> None:
    def handler() -> None:
        ring.finish()
        ring.event.record(ring.held)
        assert ring.completed() == 2

    with handler_at("state", handler, file="slot_line.py", caller="_store"):
        assert ring.event.at(1).query()
    assert ring.completed() == 2
    ring.event.record(ring.held)
    assert ring.point.query()
    ring.point.synchronize(5)


def test_a_record_within_the_question_about_the_newest_is_pending(ring: _Ring, new_client: NewClient) -> None:
    ring.finish()
    made: list[ipcsync.Point] = []
    with handler_at("is_done", lambda: made.append(ring.event.record(ring.held)), at_end=True):
        assert ring.event.completed == 2
    assert ring.completed() == 2
    assert not new_client("other").point(bytes(made[0])).query()


# --- chains -----------------------------------------------------------------------------------------------------------

_kept: dict[str, Any] = {}


def _hold_and_record(endpoint: str, count: int) -> list[bytes]:
    """In a peer: records behind a closed gate."""
    client = _kept["client"] = ipcsync.connect(endpoint, name="above")
    stream = _kept["stream"] = ipcsync.Stream()
    event = _kept["event"] = client.event("above", recorder=True, engine="event", depth=4)
    _kept["gate"] = StreamGate(stream)
    return [bytes(event.record(stream)) for _ in range(count)]


def _go_on() -> bytes:
    """In a peer: what it has recorded is complete; a further record behind a closed gate."""
    _kept["gate"].open()
    _kept["stream"].synchronize()
    _kept["gate"] = StreamGate(_kept["stream"])
    return bytes(_kept["event"].record(_kept["stream"]))


def _close_event() -> None:
    _kept["event"].close()


def _is_lost(point: ipcsync.Point) -> bool:
    return isinstance(point.exception(), ipcsync.RecorderLost)


@pytest.mark.usefixtures("nothing_queued")
def test_a_record_within_a_judgement_stays_behind_what_it_waited_for(
    coordinator: ipcsync.Coordinator, new_client: NewClient, peer: Peer
) -> None:
    client, other = new_client("below"), new_client("other")
    event = client.event("below", recorder=True, engine="event", depth=4)
    first, second = ipcsync.Stream(), ipcsync.Stream()
    (data,) = peer.call(_hold_and_record, coordinator.endpoint, 1)
    client.point(data).wait(first, timeout=5)
    settled = event.record(first)
    above = client.point(peer.call(_go_on))
    first.synchronize()
    made: list[ipcsync.Point] = []

    def handler() -> None:
        above.wait(second, timeout=5)
        made.append(event.record(second))

    with handler_at("_behind", handler, file="chains.py"):
        settled.query()
    assert settled.query()
    peer.kill()
    until(lambda: _is_lost(above), "the loss of what it stands behind")
    for point in (made[0], other.point(bytes(made[0]))):
        with pytest.raises(ipcsync.RecorderLost):
            point.synchronize(10)


def _stand_behind_a_loss(client: ipcsync.Client, peer: Peer, data: bytes) -> tuple[ipcsync.Point, ipcsync.Stream]:
    """The peer's generation 1, which is good and pending, and a stream that stands behind its lost generation 2."""
    point, stream = client.point(data), ipcsync.Stream()
    event = client.event("f", recorder=True, engine="event")
    above = client.event("above")._engine
    queued.add(queued.list_of(stream._handle, 0), above, 2, 0)  # which is never recorded
    event.record(stream)
    peer.call(_close_event)

    def is_refused() -> bool:
        try:
            event.record(stream)
        except ipcsync.RecorderLost:
            return True
        return False

    until(is_refused, "the loss of generation 2")
    return point, stream


def _assert_the_next_record_stands_behind(client: ipcsync.Client, stream: ipcsync.Stream, peer: Peer) -> None:
    assert [wait.generation for wait in queued.everything()] == [1]
    behind = client.event("g", recorder=True, engine="event").record(stream)
    os.kill(peer.pid, signal.SIGKILL)
    with pytest.raises(ipcsync.RecorderLost):
        behind.synchronize(10)


@pytest.mark.usefixtures("nothing_queued")
def test_resume_forgets_no_wait_that_is_queued_meanwhile(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    (data,) = peer.call(_hold_and_record, coordinator.endpoint, 1)
    point, stream = _stand_behind_a_loss(client, peer, data)
    passed = queued.await_passed

    def amid(*arguments: Any) -> bool:
        is_past = passed(*arguments)
        thread = threading.Thread(target=lambda: point.wait(stream, timeout=5))
        thread.start()
        thread.join()
        return is_past

    monkeypatch.setattr(queued, "await_passed", amid)
    client.resume(stream, timeout=10)
    _assert_the_next_record_stands_behind(client, stream, peer)


@pytest.mark.usefixtures("nothing_queued")
def test_resume_forgets_no_wait_that_is_listed_and_not_queued_yet(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, peer: Peer
) -> None:
    (data,) = peer.call(_hold_and_record, coordinator.endpoint, 1)
    point, stream = _stand_behind_a_loss(client, peer, data)

    def resume() -> None:
        thread = threading.Thread(target=lambda: client.resume(stream, timeout=10))
        thread.start()
        thread.join()

    with handler_at("_queue_wait", resume):
        point.wait(stream, timeout=5)
    _assert_the_next_record_stands_behind(client, stream, peer)


class _Open:
    """As much of an engine as the list of waits needs."""

    is_released = False

    def fate(self, _generation: int) -> None:
        return None


def test_a_listed_wait_stands_for_a_handlers_wait_on_another_stream_too() -> None:
    view: Any = _Open()
    try:
        with handler_at("__init__", lambda: queued.add(-5, view, 1, 8), file="queued_wait.py"):
            queued.add(-5, view, 2, 9)
        (listed,) = queued.of(-5)
        assert (listed.generation, listed.stream, set(listed.others)) == (2, 9, {8})
    finally:
        queued.drop(queued.of(-5))


def test_an_exception_amid_a_change_loses_no_wait_of_a_handler() -> None:
    view: Any = _Open()
    try:
        with (
            pytest.raises(KeyboardInterrupt),
            handler_at("_stands_for", lambda: signal.raise_signal(signal.SIGINT), file="queued.py"),
            handler_at("__init__", lambda: queued.add(-5, view, 7, 9), file="queued_wait.py"),
        ):
            queued.add(-5, view, 5, 9)
        queued.add(-5, view, 6, 9)
        assert [wait.generation for wait in queued.of(-5)] == [7]
    finally:
        queued.drop(queued.of(-5))
