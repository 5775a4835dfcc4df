"""Waits of the host: on the timeline engine a recorder has a thread in the driver's wait, which wakes who waits.

Nothing else depends on it, and on the event engine there is none.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ipcsync
from ipcsync._drivers.constants import EVENT_BLOCKING_SYNC, EVENT_DISABLE_TIMING
from ipcsync._engines import core
from ipcsync._linux.futex import Futex
from ipcsync.testing import StreamGate
from ipcsync.typing import EngineName
from tests.faults import actions, forking
from tests.faults.fixtures import Blocked, finish, sleeps_in_core, until_lost
from tests.kit import remote
from tests.kit.peer import Peer
from tests.kit.until import DEADLINE_S, until

pytestmark = [pytest.mark.core, pytest.mark.driver]

_WAITER_THREADS = 4
_SET_TIMERSLACK, _GET_TIMERSLACK = 29, 30  # of prctl
_ON_TIMELINE = pytest.mark.parametrize("engine", ["timeline"])
_BOUND_S = 5.0  # generous: a wait that the driver keeps would last for as long as its gate is closed


def _blocked_signals(task: Path) -> int:
    lines = (task / "status").read_text().splitlines()
    return next(int(line.split()[1], 16) for line in lines if line.startswith("SigBlk:"))


def _parked_tasks(pid: int) -> list[Path]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [task for task in tasks if (task / "comm").read_text().strip() == "ipcsync-waiter"]


def _await_waiter_threads(pid: int, count: int) -> list[Path]:
    """That many of its threads: one that is counted may not have its name yet."""
    until(lambda: len(_parked_tasks(pid)) >= count, f"{count} threads with the name")
    return _parked_tasks(pid)


class Held:
    """A point of another process's, of work behind a closed gate."""

    def __init__(
        self, endpoint: str, client: ipcsync.Client, peer: Peer, engine: EngineName = "event", name: str = "e"
    ) -> None:
        self.peer = peer
        self.engine = engine
        peer.call(actions.open_recorder, endpoint, name, engine)
        self.event = client.event(name)
        peer.call(remote.hold)
        self.point = client.point(peer.call(actions.record, name))

    def parked(self) -> int:
        """How many threads the recorder has in the driver's wait."""
        return self.peer.call(actions.waiter_threads)[0]

    def waiting(self, timeout: float | None = None) -> Blocked:
        """A thread that waits for the point, for which the recorder has one too, if the engine does."""
        blocked = Blocked(lambda: self.point.synchronize(timeout))
        if self.engine == "timeline":
            until(lambda: self.parked() == 1, "a thread of the recorder's in the driver's wait")
        return blocked

    def open(self) -> None:
        """Let the work end."""
        self.peer.call(remote.let_go)


@pytest.fixture
def held(coordinator: ipcsync.Coordinator, client: ipcsync.Client, peer: Peer, engine: EngineName) -> Held:
    """One of them."""
    return Held(coordinator.endpoint, client, peer, engine)


@_ON_TIMELINE
def test_who_waits_is_woken_by_a_thread_that_the_recorder_has_in_the_driver(held: Held) -> None:
    before = core.waiter_threads()  # of earlier tests in this process
    call = held.waiting()
    assert held.peer.call(actions.waiter_threads)[1] == 0
    held.open()
    assert call.outcome() is None
    until(lambda: held.peer.call(actions.waiter_threads) == (0, 1), "the thread out of the driver's wait, and a ring")
    assert core.waiter_threads() == before  # nobody waits in the driver for another process's work


@_ON_TIMELINE
def test_whoever_sleeps_on_the_slots_word_is_woken_and_not_only_let_sleep(held: Held) -> None:
    """As the waits do for a millisecond at most, which hides whether the wake comes."""
    line = held.point._attached.engine.line  # type: ignore[union-attr]
    word, seen = Futex(line.completed_address), line.completed & 0xFFFFFFFF
    sleeper = Blocked(lambda: word.wait(seen, int(DEADLINE_S * 1e9)), "wait")
    call = held.waiting()
    held.open()
    assert sleeper.outcome(DEADLINE_S / 2) is True
    assert call.outcome() is None


@_ON_TIMELINE
def test_many_that_wait_for_one_event_need_one_thread(held: Held) -> None:
    calls = [held.waiting() for _ in range(6)]
    assert len(_await_waiter_threads(held.peer.pid, 1)) == 1
    held.open()
    assert [call.outcome() for call in calls] == [None] * 6


@pytest.mark.parametrize("engine", ["event"])
def test_nobody_waits_in_the_driver_for_an_interprocess_event(client: ipcsync.Client, held: Held) -> None:
    """NVIDIA's driver burns a core there, whatever the event's flags."""
    call = held.waiting()
    held.peer.call(actions.watch_pending, "e")
    assert held.parked() == 0
    held.open()
    assert call.outcome() is None


def test_who_waits_in_the_driver_for_a_marker_sleeps(client: ipcsync.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the flag NVIDIA's driver burns a core."""
    event = client.event("e", recorder=True, engine="timeline")
    engine: Any = event._engine
    create, asked = engine._driver.cuEventCreate, []

    def note(flags: int) -> Any:
        asked.append(flags)
        return create(flags)

    monkeypatch.setattr(engine._driver, "cuEventCreate", note)
    finish(event.record(ipcsync.Stream()))
    assert asked == [EVENT_BLOCKING_SYNC | EVENT_DISABLE_TIMING]


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


def test_a_wait_ends_when_its_event_is_closed(held: Held) -> None:
    call = held.waiting()
    engine = held.event._engine
    assert engine is not None
    held.event.close()
    assert isinstance(call.outcome(), ipcsync.EventClosed)
    until(engine.try_release, "the use released")
    held.open()


@_ON_TIMELINE
def test_a_recorder_that_closes_lets_go_once_its_thread_is_out_of_the_driver(held: Held) -> None:
    call = held.waiting()
    held.peer.call(remote.close_event, "e")
    assert not held.peer.call(actions.is_released, "e")
    assert held.parked() == 1
    held.open()
    assert call.outcome() is None
    until(lambda: held.peer.call(actions.is_released, "e"), "the use released")


@pytest.mark.usefixtures("slack")
def test_a_signal_ends_a_wait_at_once(held: Held) -> None:
    def interrupt() -> None:
        until(lambda: sleeps_in_core(threading.main_thread()), "the wait sleeps")
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


@_ON_TIMELINE
def test_signals_of_the_process_are_not_for_the_thread_in_the_driver(held: Held) -> None:
    call = held.waiting()
    (task,) = _await_waiter_threads(held.peer.pid, 1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM):
        assert _blocked_signals(task) & 1 << (number - 1)
    held.open()
    assert call.outcome() is None


@_ON_TIMELINE
def test_more_events_than_threads_end_in_any_order(client: ipcsync.Client, engine: EngineName) -> None:
    count = _WAITER_THREADS + 3
    streams = [ipcsync.Stream() for _ in range(count)]
    events = [client.event(f"e{number}", recorder=True, engine=engine, depth=1) for number in range(count)]
    gates = [StreamGate(stream) for stream in streams]
    points = [event.record(stream) for event, stream in zip(events, streams, strict=True)]
    calls = [Blocked(point.synchronize) for point in points]
    until(lambda: core.waiter_threads()[0] == _WAITER_THREADS, "as many in the driver's wait as there may be")
    assert len(_await_waiter_threads(os.getpid(), _WAITER_THREADS)) == _WAITER_THREADS
    for number in [6, 0, 5, 1, 4, 2, 3]:
        gates[number].open()
        assert calls[number].outcome() is None


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


def test_a_recorder_that_parks_nobody_keeps_no_wait(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, peer: Peer, engine: EngineName
) -> None:
    """As one whose threads are all taken: who waits looks from time to time."""
    peer.call(actions.park_nobody)
    held = Held(coordinator.endpoint, client, peer, engine)
    call = Blocked(held.point.synchronize)
    held.open()
    assert call.outcome() is None
    assert peer.call(actions.waiter_threads) == (0, 0)


_ENDS = """
import sys, time, ipcsync
from ipcsync.testing import StreamGate
from ipcsync._engines import core
client = ipcsync.connect(sys.argv[1])
event = client.event("mine", recorder=True, engine=sys.argv[2])
stream = ipcsync.Stream()
gate = StreamGate(stream)
point = event.record(stream)
while not core.waiter_threads()[0]:
    try:
        point.synchronize(0.1)
    except ipcsync.WaitTimeout:
        continue
print("parked")
if len(sys.argv) > 3:
    client.close()
"""


@pytest.mark.process
@_ON_TIMELINE
@pytest.mark.parametrize("how", [(), ("close",)], ids=["as it is", "closed"])
def test_a_process_ends_though_a_thread_of_it_is_in_the_driver(
    coordinator: ipcsync.Coordinator, engine: EngineName, how: tuple[str, ...]
) -> None:
    command = [sys.executable, "-W", "error", "-c", _ENDS, coordinator.endpoint, engine, *how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "parked\n", "")


@_ON_TIMELINE
@pytest.mark.parametrize("kind", ["os.fork", "PyDLL"])
def test_a_forked_child_waits_for_nothing_and_its_parent_goes_on(
    client: ipcsync.Client, engine: EngineName, kind: str
) -> None:
    event = client.event("e", recorder=True, engine=engine)
    stream = ipcsync.Stream()
    others, _ = core.waiter_threads()
    with StreamGate(stream) as gate:
        point = event.record(stream)
        call = Blocked(point.synchronize)
        until(lambda: core.waiter_threads()[0] == others + 1, "a thread in the driver's wait")
        child = forking.Child(kind, lambda: forking.not_refused({"synchronize": lambda: point.synchronize(5)}))
        assert child.result() == {}
        gate.open()
    assert call.outcome() is None
