"""Whatever ends a use, the coordinator learns of it: nobody waits for it any more, and its slot is free again."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from cuda.bindings.driver import CUresult

import ipcsync
from ipcsync._threads import Job
from ipcsync.testing import StreamGate
from ipcsync.typing import EngineName
from tests.faults import fixtures
from tests.kit import driver_functions
from tests.kit.until import until

pytestmark = [pytest.mark.core, pytest.mark.driver]

NewClient = Callable[..., ipcsync.Client]


@pytest.fixture
def observer(new_client: NewClient) -> ipcsync.Client:
    """Somebody else, who sees what is left."""
    return new_client("observer")


def _assert_all_free(observer: ipcsync.Client) -> None:
    until(lambda: observer.stats()["pool_in_use"] == 0, "every slot is free")
    until(lambda: len(observer.list_sessions()) == 1, "the other session is gone")


@contextmanager
def _stopped(coordinator: ipcsync.Coordinator) -> Iterator[None]:
    fixtures.stop(coordinator.pid)
    try:
        yield
    finally:
        fixtures.resume(coordinator.pid)


# --- who waits ahead --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["event", "client"])
def test_who_waits_ahead_is_released_when_nobody_is_left_who_could_record(
    new_client: NewClient, observer: ipcsync.Client, by: str
) -> None:
    first, second = new_client("first"), new_client("second")
    streams = [ipcsync.Stream(), ipcsync.Stream()]
    events = [client.event("e", engine="timeline") for client in (first, second)]
    for event, stream in zip(events, streams, strict=True):
        event.at(1).wait(stream, ahead=True)
    for closing in events if by == "event" else (first, second):
        assert not any(stream.query() for stream in streams)
        closing.close()
    until(lambda: all(stream.query() for stream in streams), "both are released")
    first.close()
    second.close()
    _assert_all_free(observer)


@pytest.mark.parametrize("by", ["event", "client"])
def test_a_recorder_that_waits_ahead_for_itself_releases_everybody_by_its_close(
    new_client: NewClient, observer: ipcsync.Client, by: str
) -> None:
    client, other = new_client("client", lease_ttl=3.0), new_client("other")
    event = client.event("e", recorder=True, engine="timeline")
    seen = other.event("e")
    streams = [ipcsync.Stream(), ipcsync.Stream()]
    recording = ipcsync.Stream()
    with StreamGate(recording) as gate:
        event.record(recording)
        for each, stream in zip((event, seen), streams, strict=True):
            each._engine.wait(2, stream, None, True)  # as one that waited ahead before it was its recorder
        (event if by == "event" else client).close()
        assert not any(stream.query() for stream in streams), "the first generation is not complete"
        gate.open()
        until(lambda: all(stream.query() for stream in streams), "both are released")
    seen.at(1).synchronize(10)
    with pytest.raises(ipcsync.RecorderLost):
        seen.at(2).query()
    client.close()
    other.close()
    _assert_all_free(observer)


def test_a_recorder_that_waited_ahead_before_it_was_one_releases_that_wait_by_its_close(
    new_client: NewClient, observer: ipcsync.Client
) -> None:
    """The use that waits drains, and never can before the one that records is over."""
    client, stream = new_client("client"), ipcsync.Stream()
    with observer.event("e", engine="timeline"):  # so that the first close does not end it
        with client.event("e") as seen:
            seen.at(2).wait(stream, ahead=True)
        with client.event("e", recorder=True) as event:
            event.record(ipcsync.Stream()).synchronize(10)
        until(stream.query, "it is released")
    client.close()
    _assert_all_free(observer)


# --- what the coordinator did not hear --------------------------------------------------------------------------------


def test_a_goodbye_that_a_silent_coordinator_did_not_take_is_said_again(
    coordinator: ipcsync.Coordinator, new_client: NewClient, observer: ipcsync.Client, engine: EngineName
) -> None:
    client = new_client("client", lease_ttl=6.0)  # a beat every 2 s; without the goodbye it would be broken after 6
    client.event("e", recorder=True, engine=engine).record(ipcsync.Stream()).synchronize(10)
    seen = observer.event("e")
    with _stopped(coordinator):
        client.close()
    until(lambda: seen.state != "open", "a beat said goodbye")
    assert seen.state == "closed"
    assert seen.at(1).query()
    seen.close()
    _assert_all_free(observer)


@contextmanager
def _lost_program(code: str, observer: ipcsync.Client, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], Any]]:
    """A program that recorded on "e" what stays in flight, and then went on as `code` says: its generation is lost.

    Gives its process, which is killed at the end, and the observer's event.
    """
    command = [sys.executable, "-c", code, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdin is not None
            assert process.stdout.readline() == "recorded\n"
            event = observer.event("e")
            assert not event.at(1).query()
            process.stdin.write("\n")
            process.stdin.flush()
            with pytest.raises(ipcsync.RecorderLost):
                event.at(1).synchronize(20)
            yield process, event
        finally:
            process.kill()


_EXECUTES = """
import os, sys, ipcsync
from ipcsync.testing import StreamGate
client = ipcsync.connect(sys.argv[1], lease_ttl=60)
event, stream = client.event("e", recorder=True, engine=sys.argv[2]), ipcsync.Stream()
with StreamGate(stream):
    event.record(stream)
    print("recorded", flush=True)
    input()
    os.execv(sys.executable, [sys.executable, "-c", "print('here', flush=True); input()"])
"""


def test_a_process_that_calls_exec_is_told_at_once_and_keeps_no_slot(
    coordinator: ipcsync.Coordinator, observer: ipcsync.Client, engine: EngineName
) -> None:
    """Long before its lease is over."""
    with _lost_program(_EXECUTES, observer, coordinator.endpoint, engine) as (process, event):
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        event.close()
        _assert_all_free(observer)
        assert process.poll() is None
        process.communicate("\n", timeout=20)


_ENDS_SLOWLY = """
import atexit, ctypes, sys, ipcsync
import ipcsync.testing
from ipcsync.testing import StreamGate
libc = ctypes.CDLL(None)
# An exit handler of C's that takes long, as a driver's may.
libc["__cxa_atexit"](ctypes.cast(libc.pause, ctypes.c_void_p), None, None)
client = ipcsync.connect(sys.argv[1], lease_ttl=60)
event, stream = client.event("e", recorder=True, engine=sys.argv[2]), ipcsync.Stream()
gate = StreamGate(stream)
atexit.unregister(ipcsync.testing._release_all)  # what is in flight stays so to the end
event.record(stream)
print("recorded", flush=True)
if sys.argv[3] == "closed":
    client.close()
input()
"""


@pytest.mark.parametrize("client", ["open", "closed"])
def test_a_program_that_ended_with_work_in_flight_is_dead_while_its_process_still_ends(
    coordinator: ipcsync.Coordinator, observer: ipcsync.Client, engine: EngineName, client: str
) -> None:
    with _lost_program(_ENDS_SLOWLY, observer, coordinator.endpoint, engine, client) as (process, event):
        assert process.poll() is None
    event.close()
    _assert_all_free(observer)


# --- two threads ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lingers", [False, True])
def test_an_event_that_is_opened_while_the_client_closes_is_given_back(
    coordinator: ipcsync.Coordinator, new_client: NewClient, observer: ipcsync.Client, engine: EngineName, lingers: bool
) -> None:
    client = new_client("client", lease_ttl=3.0)
    errors: list[BaseException] = []

    def open_late() -> None:
        try:
            client.event("late", recorder=True, engine=engine, timeout=20)
        except ipcsync.IpcSyncError as error:
            errors.append(error)

    thread = threading.Thread(target=open_late)
    recording = ipcsync.Stream()
    with StreamGate(recording) as gate:
        if lingers:
            client.event("held", recorder=True, engine=engine).record(recording)
        with _stopped(coordinator):
            sent = client.messages_sent
            thread.start()
            until(lambda: client.messages_sent > sent, "the request is under way")
            client.close()
        thread.join(30)
        gate.open()
    assert len(errors) == 1
    assert isinstance(errors[0], ipcsync.ClientClosed | ipcsync.ConnectError | ipcsync.SessionExpired)
    _assert_all_free(observer)


@pytest.mark.parametrize("call", ["event", "point", "list_events"])
def test_a_request_of_another_thread_ends_with_its_client(
    coordinator: ipcsync.Coordinator, new_client: NewClient, call: str
) -> None:
    client, other = new_client("client", lease_ttl=60.0), new_client("other")
    data = bytes(other.event("e", recorder=True, engine="timeline").record(ipcsync.Stream()))
    calls: dict[str, Callable[[], object]] = {
        "event": lambda: client.event("late", recorder=True, timeout=60),
        "point": lambda: client.point(data, timeout=60),
        "list_events": lambda: client.list_events(timeout=60),
    }
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            calls[call]()
        except ipcsync.IpcSyncError as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    with _stopped(coordinator):
        sent = client.messages_sent
        thread.start()
        until(lambda: client.messages_sent > sent, "the request is under way")
        closing = threading.Thread(target=client.close)  # whose own goodbye nobody answers
        closing.start()
        thread.join(20)
        assert not thread.is_alive()
        assert [type(error) for error in errors] == [ipcsync.ClientClosed]
    closing.join(30)
    assert not closing.is_alive()


def test_a_client_that_closes_waits_for_what_another_thread_is_closing(
    new_client: NewClient, observer: ipcsync.Client, engine: EngineName
) -> None:
    client, other = new_client("client", lease_ttl=3.0), new_client("other")
    recording, waiting = ipcsync.Stream(), ipcsync.Stream()
    with StreamGate(recording) as gate:
        other.event("e", recorder=True, engine=engine).record(recording)
        event = client.event("e")
        event.at(1).wait(waiting)
        used = event._attached.engine
        let_go = used.try_release
        tried, go_on = threading.Event(), threading.Event()

        def try_and_dawdle() -> bool:
            has_let_go = let_go()
            if threading.current_thread() is thread:
                tried.set()
                go_on.wait(20)
            return has_let_go

        used.try_release = try_and_dawdle  # type: ignore[method-assign]
        thread = threading.Thread(target=event.close)
        thread.start()
        assert tried.wait(20)
        client.close()
        (row,) = [row for row in observer.list_attachments("e") if row.session == "client"]
        assert row.state == "draining", "its wait is still queued"
        go_on.set()
        thread.join(20)
        gate.open()
    other.close()
    _assert_all_free(observer)


# --- what fails in the middle -----------------------------------------------------------------------------------------


def test_an_interrupted_open_leaves_the_name_to_others(
    client: ipcsync.Client, observer: ipcsync.Client, engine: EngineName, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = Job.wait

    def interrupt(*_: Any) -> bool:
        monkeypatch.setattr(Job, "wait", wait)
        until(lambda: observer.stats()["events"] == 1, "the coordinator has opened it")
        raise KeyboardInterrupt

    monkeypatch.setattr(Job, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        client.event("e", recorder=True, engine=engine)
    until(lambda: observer.stats()["events"] == 0, "what came late was given back")
    observer.event("e", recorder=True, engine=engine)


def test_of_many_events_none_stays_open_when_one_cannot_be_taken_in(
    client: ipcsync.Client, observer: ipcsync.Client, engine: EngineName, monkeypatch: pytest.MonkeyPatch
) -> None:
    attachments = client._session.attachments
    make = attachments._make

    def fail(reply: Any, here: int) -> Any:
        if reply.name == "b":
            raise OSError("no space left on device")
        return make(reply, here)

    monkeypatch.setattr(attachments, "_make", fail)
    with pytest.raises(OSError, match="no space"):
        client.events(["a", "b", "c"], recorder=True, engine=engine)
    until(lambda: observer.stats()["events"] == 0, "all three were given back")


_BROKEN: dict[str, driver_functions.Call] = {"cuEventQuery": lambda *_: int(CUresult.CUDA_ERROR_ILLEGAL_ADDRESS)}
"""The driver of a context in which something faulted."""
_BROKEN_WHERE_PENDING: dict[str, driver_functions.Call] = {
    "cuEventQuery": lambda real, event: int(CUresult.CUDA_ERROR_ILLEGAL_ADDRESS) if real(event) else 0
}
"""The same, for what was not complete by then."""


def test_a_driver_that_fails_keeps_no_client_from_its_goodbye(
    new_client: NewClient, observer: ipcsync.Client, engine: EngineName
) -> None:
    client = new_client("client", lease_ttl=3.0)
    faulted, sound = (client.event(name, recorder=True, engine=engine) for name in ("faulted", "sound"))
    stream = ipcsync.Stream()
    gate = StreamGate(stream)  # so that no beat finds it complete before the driver fails
    faulted.record(stream)
    sound.record(ipcsync.Stream()).synchronize(10)
    with driver_functions.replaced(_BROKEN_WHERE_PENDING):
        client.close()
        until(lambda: observer.stats()["pool_in_use"] == 1, "the sound one is free")
        assert [row.state for row in observer.list_events()] == ["closed"]
    gate.open()
    _assert_all_free(observer)


def test_a_driver_that_fails_costs_no_lease_and_no_other_event_anything(
    new_client: NewClient, caplog: pytest.LogCaptureFixture
) -> None:
    client = new_client("client")
    faulted, sound = (client.event(name, recorder=True, engine="event") for name in ("faulted", "sound"))
    faulted.record(ipcsync.Stream())
    with driver_functions.replaced(_BROKEN):
        client._session.owner.wake()
        until(lambda: "cannot publish what is complete of the event 'faulted'" in caplog.text, "a beat met the failure")
    assert client.is_connected
    sound.record(ipcsync.Stream()).synchronize(10)


def test_nor_does_it_keep_a_client_that_has_expired_from_its_close(
    new_client: NewClient, observer: ipcsync.Client, engine: EngineName
) -> None:
    client = new_client("client", lease_ttl=3.0)
    event = client.event("e", recorder=True, engine=engine)
    event.record(ipcsync.Stream())
    with driver_functions.replaced(_BROKEN):
        client._session.lease.lose(ipcsync.SessionExpired("it was silent for too long"))
        client.close()
    _assert_all_free(observer)
