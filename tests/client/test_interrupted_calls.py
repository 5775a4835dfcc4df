"""What an exception within a call leaves behind, and when it is given back."""

from __future__ import annotations

import gc
import pickle
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

import ipcsync
from ipcsync import _shared
from ipcsync._session import connection
from ipcsync._session.attachments import AttachmentTable
from ipcsync._session.connection import Connection
from ipcsync._session.draining import Draining
from ipcsync._session.lease import LONGEST_BEAT_S
from ipcsync._session.session import Session
from ipcsync._wire import codec
from tests.kit import driver_functions
from tests.kit.until import until

pytestmark = pytest.mark.driver

NewClient = Callable[..., ipcsync.Client]


class Interruption(BaseException):
    """What a handler raises."""


def _interrupt(*_: object) -> None:
    raise Interruption


@pytest.fixture
def client(new_client: NewClient) -> ipcsync.Client:
    """A client whose heartbeat's thread beats as rarely as it may."""
    return new_client("main", lease_ttl=600.0)


def _lose_a_reply(client: ipcsync.Client, name: str, monkeypatch: pytest.MonkeyPatch, timeout: float = 5.0) -> None:
    """Open an event, and be interrupted when the reply was read and not kept."""
    decode, me = codec.decode_reply, threading.current_thread()
    with monkeypatch.context() as patch:
        patch.setattr(
            codec,
            "decode_reply",
            lambda frame: _interrupt() if threading.current_thread() is me else decode(frame),
        )
        with pytest.raises(Interruption):
            client.event(name, recorder=True, timeout=timeout)


def _await_deadline(client: ipcsync.Client) -> None:
    (request,) = client._session.connection._late.values()
    until(lambda: time.monotonic_ns() >= request.deadline, "its time is over")


def _is_gone(observer: ipcsync.Client, name: str) -> Callable[[], bool]:
    return lambda: not observer.list_events(name)


def test_what_an_interrupted_call_opened_is_asked_about_again_soon(
    client: ipcsync.Client, new_client: NewClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    observer, beats = new_client(), list[float]()
    at_beat = client._session._at_beat

    def count() -> float:
        beats.append(at_beat())
        return beats[-1]

    client._session.lease._at_beat = count
    _lose_a_reply(client, "lost", monkeypatch)
    until(_is_gone(observer, "lost"), "it is given back")
    until(lambda: beats[-1] == LONGEST_BEAT_S, "nothing is left to be done soon")
    assert beats[0], "the next beat comes soon"


@pytest.mark.parametrize("error", [ipcsync.DriverError("a context"), ipcsync.WaitTimeout("slow"), ipcsync.Reentered()])
def test_what_fails_at_a_beat_and_says_nothing_of_the_session_does_not_end_it(
    client: ipcsync.Client, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    beats = [error]
    at_beat = client._session._at_beat

    def fail_once() -> float:
        if beats:
            raise beats.pop()
        return at_beat()

    client._session.lease._at_beat = fail_once
    client._session.lease.wake()
    until(lambda: not beats, "a beat")
    until(lambda: "the heartbeat of" in caplog.text, "its error in the log")
    assert client.event("e", recorder=True).record(ipcsync.Stream()).generation == 1


def test_a_reply_that_is_asked_for_only_behind_the_deadline_is_given_back_too(
    client: ipcsync.Client, new_client: NewClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    observer = new_client()
    with monkeypatch.context() as patch:
        patch.setattr(Connection, "drain_late", lambda _: None)  # as while other threads have the lock at each beat
        _lose_a_reply(client, "lost", monkeypatch, timeout=0.2)
        _await_deadline(client)
        assert observer.list_events("lost")
    client._session.lease.wake()
    until(_is_gone(observer, "lost"), "it is given back")


def test_a_request_that_no_coordinator_knows_is_forgotten(
    client: ipcsync.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_FORGOTTEN_NS", 0)
    with monkeypatch.context() as patch:
        patch.setattr(Connection, "drain_late", lambda _: None)
        _lose_a_reply(client, "lost", monkeypatch, timeout=0.2)
        _await_deadline(client)
    client._session.lease.wake()
    until(lambda: not client._session.connection._late, "nothing is asked for any more")


def test_a_lost_event_of_a_stream_is_closed_though_the_close_was_interrupted(
    client: ipcsync.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = ipcsync.Stream()
    client.record(stream)
    with monkeypatch.context() as patch:
        patch.setattr(ipcsync.SharedEvent, "is_lost", property(lambda _: True))
        patch.setattr(ipcsync.SharedEvent, "close", _interrupt)
        with pytest.raises(Interruption):
            client.record(stream)
    with monkeypatch.context() as patch:
        patch.setattr(ipcsync.SharedEvent, "is_lost", property(lambda _: True))
        client.record(stream)
    stream.synchronize()
    until(lambda: client.stats()["pool_in_use"] == 1, "the first one is closed")


def test_a_reservation_whose_close_was_interrupted_is_closed_once_it_is_dropped(
    client: ipcsync.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    reservation = client.reserve()
    with monkeypatch.context() as patch:
        patch.setattr(ipcsync.SharedEvent, "close", _interrupt)
        with pytest.raises(Interruption):
            reservation.close()
    dropped = weakref.ref(reservation)
    with pytest.warns(ResourceWarning):  # noqa: PT031 - from whatever drops it
        del reservation
        until(lambda: gc.collect() >= 0 and dropped() is None, "it is dropped")
    until(lambda: client.stats()["pool_in_use"] == 0, "it is closed")


def test_a_handlers_call_does_not_wait_for_a_thread_that_waits_for_what_it_interrupts(
    client: ipcsync.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    event = client.event("e", recorder=True)
    recorded: list[ipcsync.Point] = []
    waits_to_put = threading.Event()
    thread = threading.Thread(target=lambda: recorded.append(client.record(ipcsync.Stream())))
    put, add = AttachmentTable._put, Draining.add

    def put_late(table: AttachmentTable, *args: Any) -> Any:
        if threading.current_thread() is thread:
            waits_to_put.set()
        return put(table, *args)

    def add_and_be_interrupted(draining: Draining, engine: Any) -> None:
        """In the middle of a close, with its lock held: the handler runs, while the thread has come to that lock."""
        if not waits_to_put.is_set():
            thread.start()
            assert waits_to_put.wait(30)
            with pytest.raises(ipcsync.Reentered):
                client.record(ipcsync.Stream())
            with pytest.raises(ipcsync.Reentered):
                client.event("f")
        add(draining, engine)

    monkeypatch.setattr(AttachmentTable, "_put", put_late)
    monkeypatch.setattr(Draining, "add", add_and_be_interrupted)
    event.close()
    thread.join(30)
    assert len(recorded) == 1


def test_a_session_that_begins_while_another_one_ends_is_known(
    new_client: NewClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = new_client("first")

    def refer(thing: object) -> weakref.ref[object]:
        if isinstance(thing, Session) and thing.name == "second":
            first.close()  # on a thread of its own, at this very moment
        return weakref.ref(thing)

    monkeypatch.setattr(_shared, "weakref", SimpleNamespace(ref=refer))
    second = new_client("second")
    point = second.event("e", recorder=True).record(ipcsync.Stream())
    pickle.loads(pickle.dumps(point)).synchronize(10)


def test_a_close_that_was_interrupted_while_it_waited_for_a_call_is_done(
    client: ipcsync.Client, new_client: NewClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    observer, event = new_client(), client.event("e", recorder=True)
    monkeypatch.setattr(event._engine, "await_calls", _interrupt)
    with pytest.raises(Interruption), event:
        pass
    monkeypatch.undo()
    client._session.lease.wake()
    until(_is_gone(observer, "e"), "it is closed")


def test_a_close_waits_for_another_threads_call_with_the_heartbeat_going_on(
    new_client: NewClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = new_client("slow", lease_ttl=1.0)
    events = [client.event(f"e{number}", recorder=True, engine="event") for number in range(4)]

    def record(event: ipcsync.SharedEvent) -> None:
        with suppress(ipcsync.EventClosed):  # by the time it goes on
            event.record(ipcsync.Stream())

    threads = [threading.Thread(target=record, args=(event,)) for event in events]
    lease = client._session.lease
    last, longest_ns = [lease._last_ns], [0]
    beat = lease.beat

    def beat_and_measure() -> None:
        beat()
        longest_ns[0] = max(longest_ns[0], lease._last_ns - last[0])
        last[0] = lease._last_ns

    monkeypatch.setattr(lease, "beat", beat_and_measure)
    with driver_functions.held_up("cuEventRecord", threads=len(threads)) as held:
        for thread in threads:
            thread.start()
            held.wait()
        events.pop().close()
        assert client.is_connected
        client.close()
        assert lease._problem is None, "it was not silent for its TTL"
        assert longest_ns[0] < 1e9
    for thread in threads:
        thread.join()
