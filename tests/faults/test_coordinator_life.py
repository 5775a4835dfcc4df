"""Rows 8 to 11, 20 and 34: a coordinator that dies, restarts, sleeps, is started twice, or ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import ipcsync
from ipcsync._linux.process import start_time
from ipcsync._session.connection import Connection
from ipcsync._wire import messages
from ipcsync.testing import StreamGate
from ipcsync.typing import EngineName
from ipcsync_coordinator.deaths import PauseCredit
from tests.faults import actions, fixtures
from tests.faults.fixtures import Blocked, ForeignPeer, Held
from tests.kit.machine import Machine
from tests.kit.peer import Peer
from tests.kit.until import DEADLINE_S, until

pytestmark = [pytest.mark.driver, pytest.mark.keeper, pytest.mark.own_coordinator]


@pytest.fixture
def runtime_dir() -> Iterator[str]:
    """A runtime directory that is removed after the test."""
    path = fixtures.private_dir()
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def held(client: ipcsync.Client, engine: EngineName) -> Iterator[Held]:
    """A client of this process, blocked in every way."""
    held = Held(client, engine)
    yield held
    held.end()


# --- row 8 ------------------------------------------------------------------------------------------------------------


def test_row_08_every_blocked_and_every_later_call_learns_of_the_coordinators_death(
    coordinator: ipcsync.Coordinator, held: Held
) -> None:
    fixtures.kill(coordinator, held.client)
    held.assert_all_are_lost()


def test_row_08_a_request_in_flight_learns_of_the_coordinators_death(
    coordinator: ipcsync.Coordinator, held: Held
) -> None:
    fixtures.stop(coordinator.pid)
    held.ask()
    fixtures.kill(coordinator, held.client)
    held.assert_all_are_lost()


def test_row_08_a_client_in_another_pid_namespace_learns_of_the_coordinators_death(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, foreign: ForeignPeer
) -> None:
    foreign.call(actions.connect, coordinator.endpoint, "foreign")
    foreign.call(actions.open_event, "e", "auto", False)
    client.event("e", recorder=True)
    foreign.begin(actions.error_of, actions.synchronize_at, "e", 1)
    until(lambda: {info.name for info in client.list_sessions()} == {"main", "foreign"}, "both sessions")
    fixtures.kill(coordinator, client)
    assert foreign.result() == "CoordinatorLost"
    assert foreign.call(actions.error_of, actions.stats) == "CoordinatorLost"


def test_row_01_a_death_in_another_pid_namespace_is_seen_from_here_and_from_there(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, peer: Peer, foreign: ForeignPeer
) -> None:
    foreign.call(actions.open_recorder, coordinator.endpoint, "theirs", "timeline")
    peer.call(actions.open_recorder, coordinator.endpoint, "ours", "timeline")
    # What it records it also waits for: its own lifeline must not look cut to itself.
    fixtures.finish(client.point(foreign.call(actions.record_complete, "theirs")))
    foreign.call(actions.open_event, "ours", "auto", False)
    foreign.begin(actions.error_of, actions.synchronize_at, "ours", 1)
    peer.kill()
    assert foreign.result() == "RecorderLost"
    waiting = Blocked(client.event("theirs").at(2).synchronize)
    foreign.kill()
    assert isinstance(waiting.outcome(), ipcsync.RecorderLost)
    fixtures.until_lost(client, "pidfd", 2)


# --- row 9 ------------------------------------------------------------------------------------------------------------


def test_row_09_a_coordinator_restarted_at_once_has_a_new_epoch_and_does_nothing_for_the_old_one(
    runtime_dir: str, new_coordinator: Callable[..., ipcsync.Coordinator], engine: EngineName
) -> None:
    first = new_coordinator(runtime_dir=runtime_dir)
    client = ipcsync.connect(first.endpoint, name="old")
    held = Held(client, engine)
    fixtures.stop(first.pid)
    held.ask()
    fixtures.kill(first, client)

    second = new_coordinator(runtime_dir=runtime_dir)

    assert second.endpoint == first.endpoint
    held.assert_all_are_lost()
    with ipcsync.connect(second.endpoint, name="new") as fresh:
        assert fresh.epoch != client.epoch
        assert fresh.list_events() == []  # neither the events of the old one, nor the requests that it did not answer
        assert fresh.stats()["requests"].keys() <= {"hello", "ready", "events", "stats"}
        with pytest.raises(ipcsync.StalePoint):
            fresh.point(bytes(held.point))
        with fresh.event("e", recorder=True, engine=engine) as event:
            assert event.generation == 0
            fixtures.finish(event.record())
            with pytest.raises(ipcsync.CoordinatorLost):
                held.point.query()
        _assert_an_old_token_opens_nothing(second.endpoint, client, fresh)
    held.end()
    client.close()


def _assert_an_old_token_opens_nothing(endpoint: str, old: ipcsync.Client, fresh: ipcsync.Client) -> None:
    connection = Connection(endpoint)
    try:
        for body in (messages.Open("stolen", recorder=True), messages.ListSessions(), messages.Bye()):
            with pytest.raises(ipcsync.SessionExpired):
                connection.request(body, old._session.token, 5.0)
    finally:
        connection.close()
    assert "stolen" not in [info.name for info in fresh.list_events()]
    assert "new" in [info.name for info in fresh.list_sessions()]


# --- row 10 -----------------------------------------------------------------------------------------------------------

TTL_S = 3.0  # of who must not expire, on a busy machine too


def test_row_10_a_stopped_coordinator_stops_no_records_and_expires_nobody_when_it_goes_on(
    new_coordinator: Callable[..., ipcsync.Coordinator], peer: Peer, engine: EngineName
) -> None:
    coordinator = new_coordinator(lease_ttl=TTL_S)
    with ipcsync.connect(coordinator.endpoint, name="main", lease_ttl=30) as client:
        peer.call(actions.open_recorder, coordinator.endpoint, "e", engine)
        first = client.point(peer.call(actions.record, "e"))
        fixtures.finish(first)
        stream = ipcsync.Stream()

        fixtures.stop(coordinator.pid)
        end = time.monotonic() + TTL_S / 2  # and two thirds for what is asked then: longer than a lease
        generation = 1
        while time.monotonic() < end:
            point = client.point(peer.call(actions.record, "e"))
            generation += 1
            assert point.generation == generation
            point.wait(stream)
            fixtures.finish(point)
            time.sleep(0.005)  # a hundred records show what a thousand do
        with pytest.raises(ipcsync.WaitTimeout):
            client.event("too-late", timeout=TTL_S / 3)
        with pytest.raises(ipcsync.WaitTimeout):
            client._session.request(messages.Stats(), messages.Counters, TTL_S / 3)
        fixtures.resume(coordinator.pid)

        stats = client.stats()
        assert set(stats["refusals"]) == {"late"}  # both, unless this process stood still before it had sent one
        until(lambda: client.stats()["uptime_s"] > stats["uptime_s"] + 0.6, "several looks at who is silent")
        assert client.stats()["deaths"] == {"pidfd": 0, "ttl": 0}
        assert sorted(info.name for info in client.list_sessions()) == ["main", "recorder"]
        assert [info.name for info in client.list_events()] == ["e"]
        fixtures.finish(client.point(peer.call(actions.record, "e")))


def test_row_10_a_close_that_a_stopped_coordinator_did_not_take_ends_no_later_use(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, engine: EngineName
) -> None:
    stream = ipcsync.Stream()
    event = client.event("e", recorder=True, engine=engine)
    fixtures.finish(event.record(stream))
    first = event.at(1)
    fixtures.stop(coordinator.pid)
    event.close()  # gives up after a while, to tell it later
    fixtures.resume(coordinator.pid)
    again = client.event("e", recorder=True, engine=engine)
    assert again.generation == 0  # a recorder that closed has finished its event: this is another one
    with StreamGate(stream):
        point = again.record(stream)
        assert point != first
        assert not point.query()
    fixtures.finish(point)
    until(lambda: not client._session.attachments.has_closes, "nothing to tell")
    fixtures.finish(again.record(stream))
    assert again.state == "open"
    assert [info.generation for info in client.list_events() if info.state == "open"] == [2]


def test_row_10_silence_counts_only_from_the_moment_at_which_the_coordinator_goes_on() -> None:
    second = 1_000_000_000
    credit = PauseCredit(now_ns=0, tick_ns=second // 4)
    for quarter in range(1, 9):
        credit.tick(quarter * second // 4)
    assert credit.since_ns == 0
    credit.tick(3600 * second)
    assert credit.since_ns == 3600 * second
    credit.tick(3600 * second + second // 4)
    assert credit.since_ns == 3600 * second


# --- row 11 -----------------------------------------------------------------------------------------------------------


def test_row_11_a_second_coordinator_on_the_same_directory_refuses_and_touches_nothing(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client
) -> None:
    event = client.event("e", recorder=True)
    before = _files(coordinator.runtime_dir)

    second = subprocess.run(
        [sys.executable, "-m", "ipcsync_coordinator", "--runtime-dir", coordinator.runtime_dir],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )

    assert second.returncode == 1
    assert f"another coordinator (pid {coordinator.pid}) serves {coordinator.runtime_dir}" in second.stderr
    assert "Traceback" not in second.stderr
    assert _files(coordinator.runtime_dir) == before
    fixtures.finish(event.record())
    with ipcsync.connect(coordinator.endpoint) as other:
        assert other.epoch == client.epoch


def _files(directory: str) -> dict[str, tuple[int, int]]:
    """Name, inode and size of all that lies in a directory."""
    return {path.name: (path.stat().st_ino, path.stat().st_size) for path in Path(directory).iterdir()}


# --- row 20 -----------------------------------------------------------------------------------------------------------


def test_row_20_a_wall_clock_that_jumps_by_years_changes_nothing(peer: Peer, engine: EngineName) -> None:
    with (
        fixtures.launch_patched("jumping-wall-clock", fixtures.private_dir()) as coordinator,
        ipcsync.connect(coordinator.endpoint, name="main") as client,
    ):
        peer.call(actions.jump_the_wall_clock)
        peer.call(actions.open_recorder, coordinator.endpoint, "e", engine)
        event = client.event("e")
        with pytest.raises(ipcsync.WaitTimeout):
            event.at(1).wait(timeout=0.05)
        assert peer.call(actions.error_of, actions.synchronize_at, "e", 1, 0.05) == "WaitTimeout"
        start = client.stats()["uptime_s"]
        while (now := client.stats()["uptime_s"]) < start + 0.6:  # several looks of the coordinator at its sessions
            fixtures.finish(client.point(peer.call(actions.record_complete, "e")))
        assert now < start + DEADLINE_S  # no leap of years
        stats = client.stats()
        assert stats["deaths"] == {"pidfd": 0, "ttl": 0}
        assert stats["refusals"] == {}
        assert all(0 <= info.last_seen_s < DEADLINE_S for info in client.list_sessions())


_WALL_CLOCKS = (
    "time.time(",
    "time.time_ns(",
    "datetime.now(",
    "CLOCK_REALTIME",
    "import time as",
    "from time import time",
)


def test_row_20_no_code_but_what_shows_the_time_to_people_asks_the_wall_clock() -> None:
    root = Path(ipcsync.__file__).parents[1]
    found = [*root.glob("ipcsync/**/*.py"), *root.glob("services/ipcsync_coordinator/**/*.py")]
    sources = [path for path in found if path.parent.name not in ("cli", "_trace")]
    assert len(sources) > 30
    asking = [(path.name, clock) for path in sources for clock in _WALL_CLOCKS if clock in path.read_text()]
    assert asking == []


# --- row 34 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_row_34_a_coordinator_told_to_end_tells_everyone_and_leaves_nothing(
    runtime_dir: str,
    new_coordinator: Callable[..., ipcsync.Coordinator],
    machine: Machine,
    engine: EngineName,
    number: signal.Signals,
) -> None:
    coordinator = new_coordinator(runtime_dir=runtime_dir)
    with ipcsync.connect(coordinator.endpoint) as client:
        held = Held(client, engine)
        board = client._session.lease.board.path
        assert Path(board).exists()
        began = time.monotonic()
        os.kill(coordinator.pid, number)
        with ThreadPoolExecutor(1) as pool:
            ended = pool.submit(coordinator._process.wait, DEADLINE_S)
            held.assert_all_are_lost()
            assert ended.result() == 0
        assert time.monotonic() - began < machine.limit(2.0, began)
        assert not Path(board).exists()
        assert not list(Path(runtime_dir).iterdir())
        held.end()


@pytest.mark.parametrize(("number", "word"), [(signal.SIGTERM, "has stopped"), (signal.SIGKILL, "died")])
def test_row_34_an_idle_client_is_told_whether_it_stopped_or_died(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, number: signal.Signals, word: str
) -> None:
    os.kill(coordinator.pid, number)
    coordinator._process.wait(DEADLINE_S)
    until(lambda: not client.is_connected, "the heartbeat's thread saw it")
    with pytest.raises(ipcsync.CoordinatorLost, match=word):
        client.stats()


def test_row_34_a_stopped_client_does_not_delay_the_end(
    new_coordinator: Callable[..., ipcsync.Coordinator], machine: Machine, peer: Peer
) -> None:
    coordinator = new_coordinator()
    peer.call(actions.open_recorder, coordinator.endpoint, "e", "auto")
    fixtures.stop(peer.pid)
    began = time.monotonic()
    assert coordinator.stop() == 0
    assert time.monotonic() - began < machine.limit(2.0, began)
    fixtures.resume(peer.pid)
    assert set(peer.call(actions.errors_of_every_use, "e").values()) == {"CoordinatorLost"}


def test_row_34_a_coordinator_ends_with_its_parent(peer: Peer) -> None:
    pid, started = peer.call(actions.launch_coordinator)
    assert start_time(pid) == started
    peer.kill()
    until(lambda: start_time(pid) != started or fixtures.state_of(pid) == "Z", "the end of the coordinator")
