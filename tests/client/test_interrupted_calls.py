"""What an exception within a call leaves behind, and when it is given back."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

import pytest

import ipcsync
from ipcsync._threads import Job
from tests.kit import driver_functions
from tests.kit.machine import FEW_WAKE_UPS, Machine
from tests.kit.until import until

pytestmark = pytest.mark.driver

NewClient = Callable[..., ipcsync.Client]


class Interruption(BaseException):
    """What a handler raises."""


def _interrupt(*_: object) -> NoReturn:
    raise Interruption


@pytest.fixture
def client(new_client: NewClient) -> ipcsync.Client:
    """A client whose heartbeat's thread beats as rarely as it may."""
    return new_client("main", lease_ttl=600.0)


def _is_gone(observer: ipcsync.Client, name: str) -> Callable[[], bool]:
    return lambda: not observer.list_events(name)


def _amid_a_wait(call: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this thread make a call in its next wait for the session's thread, as a signal's handler does."""
    wait, me = Job.wait, threading.get_ident()

    def call_first(job: Job[object], seconds: float) -> bool:
        if threading.get_ident() == me:
            monkeypatch.setattr(Job, "wait", wait)
            call()
        return wait(job, seconds)

    monkeypatch.setattr(Job, "wait", call_first)


@pytest.mark.parametrize("error", [ipcsync.DriverError("a context"), ipcsync.WaitTimeout("slow"), ipcsync.Reentered()])
def test_what_fails_at_a_beat_and_says_nothing_of_the_session_does_not_end_it(
    client: ipcsync.Client, error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    beats = [error]
    beat = client._session.attachments.beat

    def fail_once() -> None:
        if beats:
            raise beats.pop()
        beat()

    monkeypatch.setattr(client._session.attachments, "beat", fail_once)
    client._session.owner.wake()
    until(lambda: not beats, "a beat")
    until(lambda: "the heartbeat of" in caplog.text, "its error in the log")
    assert client.event("e", recorder=True).record(ipcsync.Stream()).generation == 1


@pytest.mark.parametrize("is_there", [False, True])
def test_what_an_interrupted_call_opened_is_given_back(
    client: ipcsync.Client, new_client: NewClient, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    observer = new_client()

    def interrupt() -> None:
        until(lambda: bool(observer.list_events("lost")) or not is_there, "the coordinator has opened it")
        raise Interruption

    _amid_a_wait(interrupt, monkeypatch)
    with pytest.raises(Interruption):
        client.event("lost", recorder=True)
    client.stats()
    until(_is_gone(observer, "lost"), "it is given back")
    assert not client._session.attachments.uses


def test_an_interrupted_look_at_a_point_leaves_nothing_attached(
    client: ipcsync.Client, new_client: NewClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bytes(new_client("other").event("e", recorder=True).record())
    _amid_a_wait(_interrupt, monkeypatch)
    with pytest.raises(Interruption):
        client.point(data)
    client.stats()
    client._session.owner.wake()
    until(lambda: [row.session for row in client.list_attachments("e")] == ["other"], "it is given back")


def test_an_interrupted_look_at_a_point_of_an_event_that_is_over_ends_no_session(
    client: ipcsync.Client, new_client: NewClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    with new_client("other") as other, other.event("e", recorder=True) as event:
        data = bytes(event.record(ipcsync.Stream()))
    until(_is_gone(client, "e"), "nobody uses it")
    finished = client._session.attachments._finished

    def interrupt() -> None:
        until(lambda: bool(finished), "the coordinator has said how it ended")
        raise Interruption

    _amid_a_wait(interrupt, monkeypatch)
    with pytest.raises(Interruption) as kept:  # with the frames that have what was found
        client.point(data)
    client.stats()
    assert client.point(data).query()
    del kept


def test_a_point_that_is_attached_as_its_caller_goes_is_given_back(
    client: ipcsync.Client, new_client: NewClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bytes(new_client("other").event("e", recorder=True).record())
    session, is_added = client._session, threading.Event()
    add = session.attachments.add

    def add_and_wait(*arguments: Any) -> object:
        found = add(*arguments)
        is_added.set()
        until(lambda: session.owner.job is not None and not session.owner.job.is_wanted, "the caller is gone")
        return found

    def interrupt() -> None:
        assert is_added.wait(30)
        raise Interruption

    monkeypatch.setattr(session.attachments, "add", add_and_wait)
    _amid_a_wait(interrupt, monkeypatch)
    with pytest.raises(Interruption):
        client.point(data)
    client.stats()
    session.owner.wake()
    until(lambda: [row.session for row in client.list_attachments("e")] == ["other"], "it is given back")


def test_what_fails_for_want_of_stack_says_so_and_leaves_nothing(
    client: ipcsync.Client, new_client: NewClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    observer, data = new_client(), bytes(new_client("other").event("seen", recorder=True).record())

    def within(frames: int, call: Callable[[], object]) -> object:
        return call() if frames == 0 else within(frames - 1, call)

    calls: list[Callable[[], object]] = [
        client.stats,
        lambda: client.point(data).query(),
        lambda: client.event("opened", recorder=True).close(),
        lambda: client.reserve().close(),
    ]
    limit, unraisable = sys.getrecursionlimit(), list[Any]()
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    for call in calls:
        refused = []
        for frames in range(limit - 150, limit):
            try:
                within(frames, call)
            except RecursionError as error:  # noqa: PERF203 - each by itself
                refused.append(error)
        assert refused
    unraisable.clear()  # what is collected meanwhile, of any test, has no stack either
    until(lambda: gc.collect() >= 0 and observer.stats()["pool_in_use"] == 1, "all but the other's event is given back")


def test_a_handler_may_call_anything_amid_a_call_that_waits(
    client: ipcsync.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, made = client.event("first", recorder=True), list[object]()

    def call() -> None:
        made.append(client.event("second", recorder=True))
        made.append(client.record(ipcsync.Stream()))
        client.stats()
        first.close()

    for amid in (lambda: client.event("third"), client.stats, first.close):
        _amid_a_wait(call, monkeypatch)
        amid()
    assert len(made) == 6
    with pytest.raises(ipcsync.EventClosed):
        first.record()


def test_a_finalizer_on_the_sessions_own_thread_is_told_that_it_may_not_wait(client: ipcsync.Client) -> None:
    event, raised, over = client.event("e", recorder=True), [], threading.Event()

    def finalize() -> None:
        try:
            client.stats()
        except ipcsync.Reentered as error:
            raised.append(error)
        event.close()
        client.close()
        over.set()

    client._session.owner.post(finalize)
    assert over.wait(30)
    assert len(raised) == 1
    client.close()
    assert event.state == "closed"


def test_a_session_whose_own_thread_fails_ends_loudly(new_client: NewClient, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    observer, client = new_client("observer"), new_client("failing", lease_ttl=2.0)
    event = client.event("e", recorder=True)
    client._session.owner.post(fail)
    with pytest.raises(ipcsync.IpcSyncError):
        client.stats()
    until(lambda: not client.is_connected, "its loss is known")
    with pytest.raises(ipcsync.IpcSyncError, match=r"own thread failed.*ZeroDivisionError"):
        event.record()
    assert "ends: its own thread failed" in caplog.text
    client.close()
    until(lambda: [row.name for row in observer.list_sessions()] == ["observer"], "for others it expires")


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


def test_a_close_that_was_interrupted_while_it_waited_for_a_call_is_done(
    client: ipcsync.Client, new_client: NewClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    observer, event = new_client(), client.event("e", recorder=True)
    await_calls, me = event._engine.await_calls, threading.get_ident()

    def interrupt(seconds: float) -> bool:
        return _interrupt() if threading.get_ident() == me else await_calls(seconds)

    monkeypatch.setattr(event._engine, "await_calls", interrupt)
    with pytest.raises(Interruption), event:
        pass
    monkeypatch.undo()
    client._session.owner.wake()
    until(_is_gone(observer, "e"), "it is closed")


def test_a_close_waits_for_another_threads_call_with_the_heartbeat_going_on(
    new_client: NewClient, monkeypatch: pytest.MonkeyPatch, machine: Machine
) -> None:
    client, began = new_client("slow", lease_ttl=3.0), time.monotonic()
    events = [client.event(f"e{number}", recorder=True, engine="event") for number in range(4)]

    def record(event: ipcsync.SharedEvent) -> None:
        with suppress(ipcsync.EventClosed):  # by the time it goes on
            event.record(ipcsync.Stream())

    threads = [threading.Thread(target=record, args=(event,)) for event in events]
    lease = client._session.lease
    lease.period_s = 0.3  # as of a lease of a second
    client._session.owner.wake()
    last, longest_ns = [time.monotonic_ns()], [0]
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
        assert longest_ns[0] < 1e9 * machine.limit(1.0, began, FEW_WAKE_UPS)
    for thread in threads:
        thread.join()
