"""The driver as a coordinator asks it over the link: what happens while it does not answer, and if nobody hears it."""

from __future__ import annotations

import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from ipcsync.errors import WaitTimeout
from ipcsync_keeper import link
from ipcsync_keeper.link import DriverClient, DriverThread, Link, Peer
from ipcsync_keeper.resources import SharedCudaEvent

_PATIENCE_S = 0.2


def test_behind_a_question_that_is_not_answered_the_next_ones_are_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link, "_PATIENCE_S", _PATIENCE_S)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        driver, keeper = DriverClient(Link(ours)), Link(theirs)
        with pytest.raises(WaitTimeout, match="did not answer within"):
            driver.make("gpu", 1, lambda _: None)
        monkeypatch.setattr(link, "_PATIENCE_S", 1000.0)  # who waits once more does so for ever
        for _ in range(3):
            with pytest.raises(WaitTimeout, match="has not answered an earlier request yet"):
                driver.make("gpu", 1, lambda _: None)
        assert keeper.receive(5.0) is not None
        assert keeper.receive(0.0) is None, "those that were refused were not sent"
        keeper.send(False, [])
        made = SharedCudaEvent(1, "gpu", b"handle")
        answering = threading.Thread(target=_answer_one, args=(keeper, made))
        answering.start()
        heard: list[SharedCudaEvent] = []
        driver.make("gpu", 1, heard.extend)
        assert heard == [made]
        answering.join()


def _answer_one(keeper: Link, made: SharedCudaEvent) -> None:
    assert keeper.receive(30.0) is not None
    keeper.send(False, [made])


def test_a_coordinator_that_hung_up_before_the_answer_does_not_wait_for_the_driver_any_more() -> None:
    """Else its end, if that hangs, would count as a driver's call for ever."""
    ours, theirs = socket.socketpair()
    has_ended = threading.Event()

    def make(_device: str, _count: int) -> list[SharedCudaEvent]:
        ours.close()
        return []

    resources: Any = SimpleNamespace(next_config=lambda _: {}, events=SimpleNamespace(make=make))
    with theirs:
        peer = Peer(Link(theirs), 1)
        DriverThread(resources, has_ended.set).serve(peer)
        coordinator = Link(ours)
        assert coordinator.receive(30.0) == [False, {}]
        coordinator.send("make", ["gpu", 1])
        assert has_ended.wait(30.0)
        assert not peer.is_asking
