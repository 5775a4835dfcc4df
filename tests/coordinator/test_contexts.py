"""When a coordinator makes a CUDA context: for the engine `event` only, and so not by default."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import pytest

import ipcsync
from ipcsync import _drivers
from ipcsync._launch import Coordinator
from tests.kit import remote
from tests.kit.peer import Peer
from tests.kit.until import DEADLINE_S

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(ipcsync.driver_name() != "host", reason="only the software driver counts contexts"),
]

_SEGMENT = "IPCSYNC_HOST_SEGMENT"


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[Coordinator]:
    """A coordinator with a keeper, in a segment of the software driver where its contexts are the only ones."""
    with monkeypatch.context() as patch:
        patch.setenv(_SEGMENT, f"{os.environ[_SEGMENT]}-apart")
        launched = ipcsync.launch(keeper=True, log_level="error")
    with launched:
        yield launched


@pytest.fixture
def contexts(apart: Coordinator, new_peer: Callable[..., Peer]) -> Callable[[], int]:
    """How many contexts there are in that segment."""
    looks = new_peer(**{_SEGMENT: f"{os.environ[_SEGMENT]}-apart"})
    return lambda: int(looks.call(_count))


def _count() -> int:
    from tests.softcuda.kit import stat

    _drivers.load()
    assert stat("processes") == 2, "the keeper and this one"
    return stat("contexts")


@pytest.mark.usefixtures("nothing_queued")
def test_none_is_made_for_the_whole_life_of_timeline_events(
    apart: Coordinator, contexts: Callable[[], int], peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("IPCSYNC_ENGINE", raising=False)
    with ipcsync.connect(apart.endpoint, timeout=DEADLINE_S) as client:
        peer.call(remote.connect, apart.endpoint, "recorder")
        assert peer.call(remote.open_event, "e", {"recorder": True})[0] == "timeline"
        complete = client.point(*peer.call(remote.record, "e"))
        stream = ipcsync.Stream()
        complete.wait(stream)
        stream.synchronize(DEADLINE_S)
        peer.call(remote.hold)
        lost = client.point(*peer.call(remote.record, "e"))
        lost.wait(stream)
        assert contexts() == 0
        os.kill(int(client.stats()["pid"]), signal.SIGKILL)
        assert client.stats(timeout=DEADLINE_S)["starts"] == 2
        peer.kill()
        with pytest.raises(ipcsync.RecorderLost):
            lost.synchronize(DEADLINE_S)
        client.resume(stream, DEADLINE_S)
        with client.event("e", recorder=True) as again, client.reserve() as reservation:
            points = [again.record(stream), client.record(stream), client.record_all(), reservation.record(stream)]
            assert {point._bound().engine.kind for point in points} == {"timeline"}
            ipcsync.synchronize_all(points, timeout=DEADLINE_S)
    assert contexts() == 0


def test_what_asks_for_the_engine_event_makes_the_only_one(apart: Coordinator, contexts: Callable[[], int]) -> None:
    with ipcsync.connect(apart.endpoint, timeout=DEADLINE_S) as client:
        assert client.event("words", engine="timeline").state == "open"
        assert contexts() == 0
        with pytest.raises(ipcsync.EngineMismatch, match="cuIpcOpenEventHandle"):  # of another segment
            client.event("events", engine="event")
        assert contexts() == 1
        assert client.check()["timeline"]["ok"]
        assert contexts() == 1
