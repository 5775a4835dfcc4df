"""A call in the middle of another one, as another thread is in the middle of its own: nobody waits for both. Row 42."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import ipcsync
from ipcsync.testing import StreamGate
from ipcsync.typing import EngineName
from tests.faults import fixtures
from tests.kit import driver_functions
from tests.kit.until import DEADLINE_S, until

pytestmark = pytest.mark.process

_TTL_S = 3.0
NewClient = Callable[..., ipcsync.Client]


def _amid(owner: Any, method: str, call: Callable[[], object]) -> None:
    """Have `owner.method`, the next time that it is called, make `call` first."""
    original = getattr(owner, method)

    def once(*args: Any, **kwargs: Any) -> Any:
        setattr(owner, method, original)
        call()
        return original(*args, **kwargs)

    setattr(owner, method, once)


def _streams(count: int) -> list[ipcsync.Stream]:
    return [ipcsync.Stream() for _ in range(count)]


class _Both:
    """Two threads that each make a call, and another one in the middle of it; the second ones begin together."""

    def __init__(self) -> None:
        self._meet = threading.Barrier(2)
        self.raised: list[BaseException] = []
        self._threads: list[threading.Thread] = []

    def add(self, call: Callable[[], object], owner: object, method: str, within: Callable[[], object]) -> None:
        """A thread for `call`, which makes `within` when it comes to that method."""

        def second() -> None:
            self._meet.wait(DEADLINE_S)
            try:
                within()
            except ipcsync.IpcSyncError as error:
                self.raised.append(error)

        _amid(owner, method, second)
        self._threads.append(threading.Thread(target=call, daemon=True))

    def run(self) -> None:
        """Run both to their end."""
        for thread in self._threads:
            thread.start()
        for thread in self._threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive(), "it waits for what the other one has"


def test_row_42_records_within_each_others_calls_end(
    client: ipcsync.Client, new_client: NewClient, engine: EngineName
) -> None:
    """Each call makes a marker, which is asked of Python: there a handler or a finalizer may call."""
    above, held = new_client().event("above", recorder=True, engine=engine), ipcsync.Stream()
    events, streams, both = [], _streams(4), _Both()
    with StreamGate(held) as gate:
        point = client.point(bytes(above.record(held)))
        points = []
        for name, stream in zip(("first", "second"), streams, strict=False):
            events.append(client.event(name, recorder=True, engine=engine))
            point.wait(stream)
            points.append(events[-1].record(stream))
            assert events[-1]._engine.chain.entries
        for mine, other in ((0, 1), (1, 0)):
            wait = partial(points[mine].wait, streams[2 + mine])
            both.add(wait, events[mine]._engine, "create_event", partial(events[other].record, streams[mine]))
        both.run()
        gate.open()
    assert both.raised
    assert {type(error) for error in both.raised} == {ipcsync.Reentered}
    for event in events:
        event.record(streams[0]).synchronize(timeout=DEADLINE_S)


def test_row_42_a_request_within_a_wait_and_a_record_within_a_request_end(
    client: ipcsync.Client, engine: EngineName
) -> None:
    event, streams = client.event("e", recorder=True, engine=engine), _streams(3)
    both = _Both()
    with StreamGate(streams[0]) as gate:
        point = event.record(streams[0])
        stats = partial(client.stats, timeout=2.0)
        both.add(partial(point.wait, streams[1]), event._engine, "create_event", stats)
        both.add(client.stats, client._session.connection, "_try_send", lambda: event.record(streams[0]))
        both.run()
        gate.open()
    assert {type(error) for error in both.raised} <= {ipcsync.Reentered, ipcsync.WaitTimeout}
    client.stats()
    event.record(streams[0]).synchronize(timeout=DEADLINE_S)


@pytest.mark.parametrize("engine", ["event"])
def test_row_42_a_call_within_a_judgement_of_its_event_waits_for_nothing(
    client: ipcsync.Client, new_client: NewClient, engine: EngineName
) -> None:
    """The judgement has the slot's state, without which neither a wait on the host nor a full ring comes to an end."""
    above, event = (
        new_client().event("above", recorder=True, engine=engine),
        client.event("e", recorder=True, engine=engine, depth=1),
    )
    held, stream = _streams(2)
    raised: list[str] = []
    with StreamGate(held):
        theirs: Any = client.point(bytes(above.record(held)))
        seen = theirs._attached.engine
        seen.node = "elsewhere"  # so that only this session can judge what stands behind it
        theirs.wait(stream)
        point = event.record(stream)

        def within() -> None:
            for call in (point.synchronize, partial(event.record, stream)):
                with pytest.raises(ipcsync.Reentered):
                    call()
                raised.append("Reentered")

        _amid(seen, "loss_of", within)
        seen._lost_from = 1
        event._engine.publish_completed()
    assert len(raised) == 2


@pytest.mark.parametrize("engine", ["event"])
def test_row_42_a_record_within_an_import_and_an_import_within_a_wait_end(
    client: ipcsync.Client, new_client: NewClient, engine: EngineName
) -> None:
    event, streams, peer = client.event("e", recorder=True, engine=engine), _streams(3), new_client()
    with StreamGate(streams[0]) as gate:
        point = event.record(streams[0])
        others = [peer.event(name, recorder=True, engine=engine).record(streams[0]) for name in ("first", "second")]
        made: list[Any] = [client.point(bytes(other)) for other in others]
        first, second = made
        both = _Both()
        both.add(partial(point.wait, streams[1]), event._engine, "create_event", first.query)
        both.add(second.query, second._engine, "open_event", partial(event.record, streams[2]))
        both.run()
        gate.open()
    assert both.raised == []


def test_row_42_a_handler_that_records_by_a_second_client_within_a_wait_is_done(
    client: ipcsync.Client, new_client: NewClient, engine: EngineName
) -> None:
    event, held, *streams = client.event("e", recorder=True, engine=engine), *_streams(4)
    theirs, made = new_client().event("theirs", recorder=True, engine=engine), list[ipcsync.Point]()
    with StreamGate(held) as gate:
        point = event.record(held)
        for stream in streams[:2]:  # on a stream of its own, and on the one that waits
            _amid(event._engine, "create_event", lambda: made.append(theirs.record(streams[1])))
            point.wait(stream)
        assert [each.generation for each in made] == [1, 2]
        gate.open()
    made[-1].synchronize(timeout=DEADLINE_S)
    event.record(streams[2]).synchronize(timeout=DEADLINE_S)


class _OnTheHeartbeatsThread:
    """A call that the collector's finalizer makes on the thread that keeps the session alive."""

    def __init__(self, client: ipcsync.Client, call: Callable[[], object]) -> None:
        self._call = call
        self.raised: BaseException | None = None
        self.has_ended = threading.Event()
        _amid(client._session.attachments, "beat", self._run)
        client._session.owner.wake()

    def _run(self) -> None:
        try:
            self._call()
        except ipcsync.IpcSyncError as error:
            self.raised = error
        self.has_ended.set()


@pytest.mark.parametrize("engine", [pytest.param("event", marks=pytest.mark.thorough), "timeline"])
def test_row_42_a_finalizer_on_the_heartbeats_thread_waits_for_no_thread_that_the_driver_holds_up(
    new_client: NewClient, engine: EngineName
) -> None:
    client, stream = new_client(lease_ttl=_TTL_S), ipcsync.Stream()
    event = client.event("e", recorder=True, engine=engine)
    event.record(stream)
    held_up = threading.Event()

    def hold_up(real: driver_functions.Call, *args: Any) -> int:  # as the driver does while a stream's queue is full
        if not held_up.is_set():
            held_up.set()
            finalizer.has_ended.wait(1.5 * _TTL_S)
        return real(*args)

    thread = threading.Thread(target=lambda: event.record(stream), daemon=True)

    def record() -> None:
        held_up.wait(DEADLINE_S)
        event.record(stream)

    with driver_functions.replaced({driver_functions.RECORD[engine]: hold_up}):
        finalizer = _OnTheHeartbeatsThread(client, record)
        thread.start()
        thread.join(DEADLINE_S)
        assert finalizer.has_ended.wait(DEADLINE_S)
    assert finalizer.raised is None, "it had its turn, and beat until then"
    event.record(stream).synchronize(timeout=DEADLINE_S)
    assert client.is_connected


@pytest.mark.parametrize(("engine", "of"), fixtures.each_once("its own client", "another client"))
def test_row_42_a_finalizer_that_waits_on_the_heartbeats_thread_ends_no_session(
    new_client: NewClient, engine: EngineName, of: str
) -> None:
    client, other, stream = new_client(lease_ttl=2.0), new_client(), ipcsync.Stream()
    event = other.event("e", recorder=True, engine=engine)
    waiter = client if of == "its own client" else other
    with StreamGate(stream) as gate:
        point = waiter.point(bytes(event.record(stream)))
        finalizer = _OnTheHeartbeatsThread(client, lambda: point.synchronize(timeout=3.0))  # longer than its lease
        until(finalizer.has_ended.is_set, "the wait's own end")
        assert isinstance(finalizer.raised, ipcsync.WaitTimeout)
        gate.open()
    point.synchronize(timeout=DEADLINE_S)
    assert client.is_connected
    client.stats()
