"""`resume` forgets what is lost of a stream, and nothing that other threads wait for meanwhile."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

import ipcsync
from ipcsync._engines import queued
from ipcsync.testing import StreamGate
from tests.faults import actions
from tests.graphs.stage import Standing
from tests.kit import driver_functions
from tests.kit.peer import Peer
from tests.kit.until import DEADLINE_S, until

_kept: dict[str, Any] = {}


def _hold_and_record(endpoint: str, count: int) -> list[bytes]:
    """In a peer: records behind a closed gate."""
    client = _kept["client"] = ipcsync.connect(endpoint, name="above")
    stream = _kept["stream"] = ipcsync.Stream()
    event = _kept["event"] = client.event("above", recorder=True, engine="event", depth=4)
    _kept["gate"] = StreamGate(stream)
    return [bytes(event.record(stream)) for _ in range(count)]


def _close_event() -> None:
    _kept["event"].close()


def _stand_behind(endpoint: str, data: bytes) -> None:
    """In a peer: a stream that stands behind generation 2, which is never recorded. 1 is good and pending."""
    client = _kept["client"] = ipcsync.connect(endpoint, name="behind")
    stream = _kept["stream"] = ipcsync.Stream()
    _kept["point"] = client.point(data)
    event = _kept["event"] = client.event("f", recorder=True, engine="event")
    above = client.event("above")._engine
    queued.add(queued.list_of(stream._handle, 0), above, 2, 0)
    event.record(stream)


def _await_the_loss() -> None:
    def is_refused() -> bool:
        try:
            _kept["event"].record(_kept["stream"])
        except ipcsync.RecorderLost:
            return True
        return False

    until(is_refused, "the loss of generation 2")


def _resume() -> None:
    _kept["client"].resume(_kept["stream"], timeout=10)


def _wait() -> None:
    _kept["point"].wait(_kept["stream"], timeout=5)


def _in_thread(function: Callable[[], None]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def _wait_while_it_resumes() -> None:
    _await_the_loss()
    passed = queued.await_passed

    def amid(*arguments: Any) -> bool:
        is_past = passed(*arguments)
        _in_thread(_wait)
        return is_past

    queued.await_passed = amid  # type: ignore[assignment]
    _resume()


def _resume_while_it_waits() -> None:
    _await_the_loss()
    with driver_functions.replaced(driver_functions.amid("cuStreamWaitEvent", lambda: _in_thread(_resume))):
        _wait()


def _record_behind() -> list[int]:
    """Record behind what the stream waits for: which generations that is."""
    _kept["behind"] = _kept["client"].event("g", recorder=True, engine="event").record(_kept["stream"])
    return [wait.generation for wait in queued.of(None)]


def _is_lost() -> bool:
    try:
        _kept["behind"].synchronize(10)
    except ipcsync.RecorderLost:
        return True
    return False


@pytest.mark.parametrize("both", [_wait_while_it_resumes, _resume_while_it_waits])
def test_resume_forgets_no_wait_that_another_thread_queues_meanwhile(
    coordinator: ipcsync.Coordinator, new_peer: Callable[..., Peer], both: Callable[[], None]
) -> None:
    above, behind = new_peer(), new_peer()  # whose stream never ends
    (data,) = above.call(_hold_and_record, coordinator.endpoint, 1)
    behind.call(_stand_behind, coordinator.endpoint, data)
    above.call(_close_event)
    behind.call(both)
    assert behind.call(_record_behind) == [1]
    os.kill(above.pid, signal.SIGKILL)
    assert behind.call(_is_lost)


_BEHIND_WHAT_STANDS: dict[str, Callable[[ipcsync.Client, ipcsync.Stream], object]] = {
    "resume": lambda client, stream: client.resume(stream, 0.1),
    "synchronize": lambda _, stream: stream.synchronize(0.1),
    "record_all": lambda client, stream: client.record_all(streams=[stream], timeout=0.1),
}


def _outcome_of(name: str) -> str:
    """In a peer: as behind a full queue, the driver does not return from a record before the stream goes on."""
    _await_the_loss()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ipcsync.Stream, "record_event", lambda *_: pytest.fail("the driver stands"))
        return actions.error_of(_BEHIND_WHAT_STANDS[name], _kept["client"], _kept["stream"])


@pytest.mark.parametrize("name", _BEHIND_WHAT_STANDS)
def test_a_stream_that_stands_and_may_be_full_is_given_no_work(
    coordinator: ipcsync.Coordinator, new_peer: Callable[..., Peer], name: str
) -> None:
    above, behind = new_peer(), new_peer(IPCSYNC_HOST_DEATH="pending")
    (data,) = above.call(_hold_and_record, coordinator.endpoint, 1)
    behind.call(_stand_behind, coordinator.endpoint, data)
    behind.call(_wait)
    os.kill(above.pid, signal.SIGKILL)
    assert behind.call(_outcome_of, name) == ("WaitTimeout" if name == "resume" else "RecorderLost")


@pytest.mark.parametrize("closes", [False, True])
def test_a_record_on_a_stream_that_is_resumed_is_good_whether_the_event_that_it_followed_is_closed_or_not(
    new_client: Callable[[], ipcsync.Client], closes: bool
) -> None:
    theirs, client = new_client(), new_client()
    root, seen = theirs.event("root", recorder=True, engine="timeline"), client.event("root")
    event, later = (client.event(name, recorder=True, engine="timeline") for name in ("e", "later"))
    streams = ipcsync.Stream(), ipcsync.Stream()
    seen._engine.wait(1, streams[0], None, True)  # as one that waited ahead before the other was its recorder
    for stream in streams:
        event.record(stream)  # the second one follows the first
    if closes:
        event.close()
    root.close()
    with pytest.raises(ipcsync.RecorderLost):
        seen.at(1).synchronize(30)
    for stream in streams:
        client.resume(stream, 30)
    later.record(streams[1]).synchronize(30)


@pytest.mark.parametrize("handle", [1, pytest.param(2, marks=pytest.mark.thorough)], ids=["legacy", "per-thread"])
def test_a_default_stream_is_resumed_once_it_is_idle_though_the_driver_refused_the_wait_and_its_marker(
    new_client: Callable[[], ipcsync.Client], handle: int
) -> None:
    standing, client, stream = Standing(new_client), new_client(), ipcsync.ExternalStream(handle, device=0)
    point = client.point(standing.data)
    refused = driver_functions.refused_once("cuStreamWaitEvent") | driver_functions.refused_once("cuEventRecord", 1)
    with standing.gate:
        with driver_functions.replaced(refused), pytest.raises(ipcsync.DriverError):
            point.wait(stream)
        standing.lose(point)
        with StreamGate(stream), pytest.raises(ipcsync.WaitTimeout):
            client.resume(stream, 0)
        client.resume(stream, DEADLINE_S)
    client.record(stream).synchronize(DEADLINE_S)
