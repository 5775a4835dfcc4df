"""Whether words of the board work in a process: it tries before its first event, and is told where they do not."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import pytest
from cuda.bindings.driver import CUresult

import ipcsync
from ipcsync import _drivers
from ipcsync._native import pinned
from ipcsync._session import connection
from ipcsync.typing import EngineChoice
from tests.kit import remote
from tests.kit.peer import Peer
from tests.kit.until import until

pytestmark = pytest.mark.driver


@pytest.fixture(
    params=[
        ("cuMemHostRegister", CUresult.CUDA_ERROR_NOT_PERMITTED, "the board's page cannot be registered here"),
        ("cuStreamWriteValue64", CUresult.CUDA_ERROR_NOT_SUPPORTED, "a stream cannot write a word of the board"),
        ("cuStreamWaitValue64", CUresult.CUDA_ERROR_NOT_SUPPORTED, "a stream cannot write a word of the board"),
    ],
    ids=lambda param: str(param[0]),
)
def without_words(
    request: pytest.FixtureRequest, new_client: Callable[..., ipcsync.Client], monkeypatch: pytest.MonkeyPatch
) -> tuple[ipcsync.Client, str]:
    """A client for which the driver refuses what words need, as for a file on a disk; and what it says of that."""
    name, code, reason = request.param
    client = new_client()
    ipcsync.Stream()  # it has a context: a reader without one tries nothing
    monkeypatch.setattr(_drivers.load(), name, lambda *_: (code,))
    return client, reason


def test_a_client_without_words_gets_the_event_engine_and_says_why_once(
    without_words: tuple[ipcsync.Client, str], caplog: pytest.LogCaptureFixture
) -> None:
    client, reason = without_words
    with client.event("e", recorder=True) as event, client.reserve() as reservation:
        stream = ipcsync.Stream()
        points = [event.record(stream), client.record(stream), reservation.record(stream)]
        assert {point._bound().engine.kind for point in points} == {"event"}
        ipcsync.synchronize_all(points, timeout=10)
    assert sum(reason in record.getMessage() for record in caplog.records) == 1


def test_a_client_without_words_is_refused_the_engine_before_there_is_an_event(
    without_words: tuple[ipcsync.Client, str],
) -> None:
    client, reason = without_words
    for _ in range(2):
        with pytest.raises(ipcsync.EngineMismatch, match=reason):
            client.event("e", engine="timeline", recorder=True)
    assert client.list_events() == []
    assert reason in client.check()["timeline"]["why"]


def test_a_later_joiner_without_words_is_told_of_both_sides_and_what_to_do(
    coordinator: ipcsync.Coordinator, peer: Peer, without_words: tuple[ipcsync.Client, str]
) -> None:
    client, reason = without_words
    peer.call(remote.connect, coordinator.endpoint, "first")
    peer.call(remote.open_event, "e", {"engine": "timeline", "recorder": True})
    wanted: list[EngineChoice] = ["auto", "timeline"]
    for engine in wanted:
        with pytest.raises(ipcsync.EngineMismatch) as caught:
            client.event("e", engine=engine)
        told = str(caught.value)
        assert f"'first' (pid {peer.pid})" in told
        assert f"(pid {os.getpid()})" in told
        assert reason in told
        assert "engine='event'" in told
    (row,) = client.list_events()
    assert (row.state, row.attached) == ("open", 1)


def test_a_recorder_without_words_is_told_what_to_do_about_a_reader_that_had_nothing_to_try(
    coordinator: ipcsync.Coordinator, peer: Peer, without_words: tuple[ipcsync.Client, str]
) -> None:
    client, reason = without_words
    peer.call(remote.connect, coordinator.endpoint, "reader")
    assert peer.call(remote.open_event, "e")[0] == "timeline"
    told = rf"^the event 'e' uses the engine 'timeline', which the session .* cannot use: {reason}.*engine='event'$"
    with pytest.raises(ipcsync.EngineMismatch, match=told):
        client.event("e", recorder=True)


def _refuse_pages() -> None:
    _drivers.load().cuMemHostRegister = lambda *_: (CUresult.CUDA_ERROR_NOT_PERMITTED,)  # type: ignore[attr-defined]


def test_a_reader_without_words_that_had_nothing_to_try_is_told_what_to_do_and_leaves_no_event(
    coordinator: ipcsync.Coordinator, peer: Peer, client: ipcsync.Client
) -> None:
    peer.call(remote.connect, coordinator.endpoint, "reader")
    peer.call(_refuse_pages)
    error = peer.call(remote.error_of, remote.open_event, "e")
    assert error is not None
    assert error[0] == "EngineMismatch"
    assert re.search(r"'timeline', which does not work in this process .*NOT_PERMITTED.*engine='event'$", error[1])
    until(lambda: not client.list_events(), "the event is gone")
    assert peer.call(remote.open_event, "e", {"engine": "event"})[0] == "event"


def test_a_point_of_words_names_both_sides_where_their_page_cannot_be_registered(
    coordinator: ipcsync.Coordinator,
    peer: Peer,
    new_client: Callable[..., ipcsync.Client],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peer.call(remote.connect, coordinator.endpoint, "first")
    peer.call(remote.open_event, "e", {"engine": "timeline", "recorder": True})
    (data,) = peer.call(remote.record, "e")
    client = new_client(engine="event")
    monkeypatch.setattr(_drivers.load(), "cuMemHostRegister", lambda *_: (CUresult.CUDA_ERROR_NOT_PERMITTED,))
    pattern = rf"by the session 'first' \(pid {peer.pid}\), .* \(pid {os.getpid()}\): .*NOT_PERMITTED.*engine='event'$"
    with pytest.raises(ipcsync.EngineMismatch, match=pattern):
        client.point(data).synchronize(10)
    with pytest.raises(ipcsync.EngineMismatch, match=pattern):
        client.event("e")


def test_words_are_tried_once_for_a_session_and_a_device(
    new_client: Callable[..., ipcsync.Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, tried = _drivers.load(), []
    write = driver.cuStreamWriteValue64

    def note(*arguments: Any) -> Any:
        tried.append(arguments)
        return write(*arguments)

    monkeypatch.setattr(driver, "cuStreamWriteValue64", note)
    monkeypatch.setattr(connection, "_RETRY_NS", 60_000_000_000)  # a busy machine may owe a reply for a second
    client = new_client()
    ipcsync.Stream()
    for number in range(3):
        client.event(f"event/{number}", engine="event")
    assert len(tried) == 0, "an event of the other engine needs none"
    sent = client.messages_sent
    for number in range(3):
        client.event(f"auto/{number}")
        client.event(f"timeline/{number}", engine="timeline")
    assert len(tried) == 1
    assert client.messages_sent - sent == 6, "no message more than without"
    new_client(engine="event").event("auto/0")
    assert len(tried) == 1


def _pinned_pages() -> int:
    return len(pinned._registered)


def test_a_trial_behind_earlier_work_ends_with_the_opens_own_timeout(
    coordinator: ipcsync.Coordinator, new_peer: Callable[..., Peer]
) -> None:
    peer = new_peer(IPCSYNC_HOST_QUEUES="1", CUDA_DEVICE_MAX_CONNECTIONS="1")
    peer.call(remote.connect, coordinator.endpoint, "peer")
    peer.call(remote.hold)
    error = peer.call(remote.error_of, remote.open_event, "e", {"timeout": 0.1})
    assert error is not None
    assert error[0] == "WaitTimeout"
    peer.call(remote.close_client)
    assert peer.call(_pinned_pages) == 1, "the trial's write is still to come"
    peer.call(remote.let_go)
    peer.call(remote.connect, coordinator.endpoint, "peer")
    assert peer.call(remote.open_event, "e")[0] == "timeline", "it is tried again"


@pytest.mark.process
def test_the_coordinator_makes_no_cuda_events_for_words() -> None:
    with ipcsync.launch() as launched, ipcsync.connect(launched.endpoint) as client:
        assert client.event("e", recorder=True).engine == "timeline"
        assert client.stats()["cuda_events"] == 0
