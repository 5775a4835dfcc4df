"""Where a stream may not wait ahead of a record: its own process would have to make it, or no stream passes another."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

import ipcsync
from ipcsync._session.session import living
from tests.kit import remote
from tests.kit.peer import Peer
from tests.kit.until import until

pytestmark = pytest.mark.driver

NewClient = Callable[..., ipcsync.Client]


def _refused(point: ipcsync.Point) -> None:
    stream = ipcsync.Stream()
    with pytest.raises(ipcsync.EngineMismatch, match=r"is recorded in this process.*record first"):
        point.wait(stream, ahead=True)
    assert stream.query(), "nothing was queued"


def test_a_wait_ahead_of_this_processs_own_record_is_refused_whichever_client_records(new_client: NewClient) -> None:
    recorder, other = new_client(), new_client()
    event = recorder.event("e", engine="timeline", recorder=True)
    seen = other.event("e")
    for point in (event.at(1), seen.at(1), other.point(bytes(event.at(1)))):
        _refused(point)
    with recorder.reserve(engine="timeline") as reservation:
        _refused(reservation.point)
    done = event.record(ipcsync.Stream())
    done.synchronize(10)
    _refused(done)  # also where there is nothing to wait for, so that it does not depend on who is faster
    stream = ipcsync.Stream()
    seen.at(1).wait(stream)
    until(stream.query, "a wait that is not ahead")


def test_a_wait_ahead_is_refused_beside_a_client_whose_records_depend_on_all_waits(new_client: NewClient) -> None:
    stream = ipcsync.Stream()
    for client in (new_client(chains="session"), new_client()):
        with pytest.raises(ipcsync.EngineMismatch, match="not for chains='session'"):
            client.event("theirs", engine="timeline").at(1).wait(stream, ahead=True)
    assert stream.query(), "nothing was queued"


def test_it_is_not_once_that_client_is_closed_though_a_stream_still_waits_for_it(
    coordinator: ipcsync.Coordinator, new_client: NewClient, peer: Peer
) -> None:
    pending = peer.call(remote.record_unfinished, coordinator.endpoint, "pending")
    peer.call(remote.open_event, "theirs", {"recorder": True, "engine": "timeline"})
    theirs, behind_all, stream = new_client().event("theirs"), new_client(chains="session"), ipcsync.Stream()
    behind_all.point(pending).wait(ipcsync.Stream())
    closing = threading.Thread(target=behind_all.close)
    closing.start()
    until(lambda: behind_all._session.is_closed, "it is closed")
    theirs.at(1).wait(stream, ahead=True)
    assert behind_all._session in living, "it drains"
    assert not stream.query()
    peer.call(remote.record, "theirs", "other")
    until(stream.query, "the stream goes on")
    peer.call(remote.let_go)
    closing.join()


def _wait_ahead() -> None:
    for _ in range(2):
        remote.event("e").at(1).wait(remote.stream("ahead"), ahead=True)


@pytest.mark.parametrize(("queues", "passes"), [("0", True), ("8", True), ("1", False)])
def test_a_wait_ahead_needs_streams_that_pass_each_other(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, new_peer: Callable[..., Peer], queues: str, passes: bool
) -> None:
    event = client.event("e", engine="timeline", recorder=True)
    peer = new_peer(IPCSYNC_HOST_QUEUES=queues, CUDA_DEVICE_MAX_CONNECTIONS=queues if queues != "0" else "8")
    peer.call(remote.connect, coordinator.endpoint, "peer")
    peer.call(remote.open_event, "e")
    error = peer.call(remote.error_of, _wait_ahead)
    if passes:
        assert error is None
        assert not peer.call(remote.stream_is_idle, "ahead")
    else:
        assert error is not None
        assert error[0] == "EngineMismatch"
        assert "CUDA_DEVICE_MAX_CONNECTIONS" in error[1]
    event.record(ipcsync.Stream())
    until(lambda: peer.call(remote.stream_is_idle, "ahead"), "the stream goes on")
