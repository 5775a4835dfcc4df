"""Waits of the host for work: how they end."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

import ipcsync
from ipcsync._linux.futex import Futex
from ipcsync.testing import StreamGate
from ipcsync.typing import EngineName
from tests.faults import actions, forking
from tests.faults.fixtures import Blocked, finish, sleeps_in_core, until_lost
from tests.kit import remote
from tests.kit.peer import Peer
from tests.kit.until import DEADLINE_S, until

pytestmark = [pytest.mark.core, pytest.mark.driver]

_SET_TIMERSLACK, _GET_TIMERSLACK = 29, 30  # of prctl
_BOUND_S = DEADLINE_S / 2  # generous: a wait that the driver keeps would last for as long as its gate is closed


class Held:
    """A point of another process's, of work behind a closed gate."""

    def __init__(
        self, endpoint: str, client: ipcsync.Client, peer: Peer, engine: EngineName = "event", name: str = "e"
    ) -> None:
        self.peer = peer
        peer.call(actions.open_recorder, endpoint, name, engine)
        self.event = client.event(name)
        peer.call(remote.hold)
        self.point = client.point(peer.call(actions.record, name))

    def waiting(self) -> Blocked:
        """A thread that waits for the point."""
        return Blocked(self.point.synchronize)

    def open(self) -> None:
        """Let the work end."""
        self.peer.call(remote.let_go)


@pytest.fixture
def held(coordinator: ipcsync.Coordinator, client: ipcsync.Client, peer: Peer, engine: EngineName) -> Held:
    """One of them."""
    return Held(coordinator.endpoint, client, peer, engine)


@pytest.fixture
def slack() -> Iterator[None]:
    """The thread's timer slack is behind the test what it was before."""
    libc = ctypes.CDLL(None)
    libc.prctl(_SET_TIMERSLACK, 12345)
    yield
    assert libc.prctl(_GET_TIMERSLACK) == 12345
    libc.prctl(_SET_TIMERSLACK, 0)  # the default


@pytest.mark.usefixtures("slack")
def test_a_wait_ends_at_its_deadline(held: Held) -> None:
    for timeout in (0.0, 0.01, 0.2):
        began = time.monotonic()
        with pytest.raises(ipcsync.WaitTimeout):
            held.point.synchronize(timeout)
        assert timeout <= time.monotonic() - began < timeout + _BOUND_S
    held.open()
    finish(held.point)


def test_a_wait_ends_when_its_recorder_is_killed_and_keeps_nothing(held: Held, client: ipcsync.Client) -> None:
    call = held.waiting()
    held.peer.kill()
    assert isinstance(call.outcome(), ipcsync.RecorderLost)
    until_lost(client, "pidfd")
    held.event.close()
    until(lambda: client.stats()["quarantined"] == 0, "the end of the quarantine")


def test_whoever_sleeps_on_the_slots_word_is_woken_by_a_break_and_not_only_let_sleep(held: Held) -> None:
    """As the waits do for some milliseconds at most, which hides whether the wake comes."""
    line = held.point._attached.engine.line  # type: ignore[union-attr]
    word, seen = Futex(line.completed_address), line.completed & 0xFFFFFFFF
    sleeper = Blocked(lambda: word.wait(seen, int(DEADLINE_S * 1e9)))  # asleep: one that is about to be misses the wake
    held.peer.kill()
    assert sleeper.outcome(DEADLINE_S / 2) is True


def test_a_wait_ends_when_its_event_is_closed(held: Held) -> None:
    call = held.waiting()
    engine = held.event._engine
    assert engine is not None
    held.event.close()
    assert isinstance(call.outcome(), ipcsync.EventClosed)
    until(engine.try_release, "the use released")
    held.open()


@pytest.mark.usefixtures("slack")
def test_a_signal_ends_a_wait_at_once(held: Held) -> None:
    def interrupt() -> None:
        until(lambda: sleeps_in_core(threading.main_thread().native_id), "the wait sleeps")
        os.kill(os.getpid(), signal.SIGINT)

    sender = threading.Thread(target=interrupt)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - the signal may come as soon as the thread runs
        sender.start()
        held.point.synchronize(DEADLINE_S)
    assert time.monotonic() - began < _BOUND_S
    sender.join()
    held.open()
    finish(held.point)


def test_a_ring_that_goes_on_meanwhile_keeps_no_wait(client: ipcsync.Client) -> None:
    event = client.event("e", recorder=True, engine="event", depth=1)
    stream = ipcsync.Stream()
    with StreamGate(stream) as gate:
        first = event.record(stream)
        call = Blocked(first.synchronize)
        gate.open()
    with StreamGate(stream) as gate:
        second = event.record(stream, timeout=DEADLINE_S)  # on the same CUDA event
        assert call.outcome() is None
        gate.open()
    finish(second)


@pytest.mark.parametrize("kind", ["os.fork", "PyDLL"])
def test_a_forked_child_waits_for_nothing_and_its_parent_goes_on(
    client: ipcsync.Client, engine: EngineName, kind: str
) -> None:
    event = client.event("e", recorder=True, engine=engine)
    stream = ipcsync.Stream()
    with StreamGate(stream) as gate:
        point = event.record(stream)
        call = Blocked(point.synchronize)
        child = forking.Child(kind, lambda: forking.not_refused({"synchronize": lambda: point.synchronize(5)}))
        assert child.result() == {}
        gate.open()
    assert call.outcome() is None
