"""What is left of a recorder: nothing, once its process and all that was forked from it are over."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ipcsync
from ipcsync import _drivers
from ipcsync._linux import files
from ipcsync._linux.files import LastLock
from ipcsync.typing import EngineName
from tests.faults import actions, fixtures, over_actions
from tests.faults.fixtures import ForeignPeer, until_lost
from tests.faults.forking import FORKS
from tests.kit import remote
from tests.kit.descriptors import descriptors, none_left
from tests.kit.peer import Peer
from tests.kit.until import DEADLINE_S, until

pytestmark = pytest.mark.driver

NewPeer = Callable[..., Peer]


def _recorder_of(peer: Peer, endpoint: str, engine: EngineName, lease_ttl: float | None = None) -> bytes:
    """A peer that records, and whose work is held; the point."""
    peer.call(actions.open_recorder, endpoint, "e", engine, lease_ttl)
    peer.call(remote.hold)
    return peer.call(actions.record, "e")


@pytest.fixture
def point(coordinator: ipcsync.Coordinator, client: ipcsync.Client, peer: Peer, engine: EngineName) -> ipcsync.Point:
    """A point of the peer's, unfinished."""
    return client.point(_recorder_of(peer, coordinator.endpoint, engine))


@pytest.fixture
def sleepers() -> Iterator[list[int]]:
    """Processes to be ended after the test."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        over_actions.end(pid)


def _lost(point: ipcsync.Point) -> ipcsync.RecorderLost:
    """What a wait for the point raises."""
    with pytest.raises(ipcsync.RecorderLost) as caught:
        point.synchronize(DEADLINE_S)
    return caught.value


# --- a process that dies ----------------------------------------------------------------------------------------------


def test_a_dead_recorder_is_over_and_later_errors_say_so(
    client: ipcsync.Client, point: ipcsync.Point, peer: Peer
) -> None:
    assert not client.wait_over(point, 0)
    peer.kill()
    assert _lost(point).cause == "died"
    assert client.wait_over(point, DEADLINE_S)
    assert _lost(point).over is True
    assert client.wait_over(point, 0)


def test_a_wait_ends_when_the_recorder_does(client: ipcsync.Client, point: ipcsync.Point, peer: Peer) -> None:
    outcome: list[bool] = []
    waiting = threading.Thread(target=lambda: outcome.append(client.wait_over(point)))
    waiting.start()
    peer.kill()
    waiting.join(DEADLINE_S)
    assert outcome == [True]


def test_a_recorder_that_lives_is_not_over(client: ipcsync.Client, point: ipcsync.Point) -> None:
    before = time.monotonic()
    assert not client.wait_over(point, 0.1)
    assert time.monotonic() - before >= 0.1


def test_an_expired_recorder_is_not_over_before_it_ends(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, peer: Peer, engine: EngineName
) -> None:
    point = client.point(_recorder_of(peer, coordinator.endpoint, engine, 2.0))  # it must not expire as it opens
    fixtures.stop(peer.pid)
    error = _lost(point)
    assert (error.cause, error.over) == ("expired", None)
    assert not client.wait_over(point, 0.1)
    fixtures.resume(peer.pid)
    assert peer.call(actions.error_of, actions.stats) == "SessionExpired"
    peer.call(remote.close_client)  # its session is gone, and the process goes on
    assert not client.wait_over(point, 0.1)
    peer.kill()
    assert client.wait_over(point, DEADLINE_S)


def test_a_recorder_that_closed_is_over_once_its_process_is(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, peer: Peer, engine: EngineName
) -> None:
    peer.call(actions.open_recorder, coordinator.endpoint, "e", engine)
    point = client.event("e").at(1)
    peer.call(remote.close_client)
    error = _lost(point)
    assert (error.cause, error.over) == ("closed", None)
    assert not client.wait_over(point, 0.1)
    peer.kill()
    assert client.wait_over(point, DEADLINE_S)


def test_an_event_without_a_recorder_has_none_that_is_over(client: ipcsync.Client, engine: EngineName) -> None:
    assert not client.wait_over(client.event("e", engine=engine).at(1), 0.05)


def test_of_this_very_process_it_is_never_known_and_nobody_waits(client: ipcsync.Client, engine: EngineName) -> None:
    event = client.event("e", recorder=True, engine=engine)
    assert not client.wait_over(event.at(1))


def test_a_process_of_another_pid_namespace(
    client: ipcsync.Client, coordinator: ipcsync.Coordinator, foreign: ForeignPeer
) -> None:
    point = client.point(_recorder_of(foreign, coordinator.endpoint, "timeline"))
    assert not client.wait_over(point, 0.05)
    foreign.kill()
    assert client.wait_over(point, DEADLINE_S)


def test_who_gets_its_line_changes_nothing(
    new_coordinator: Callable[..., ipcsync.Coordinator], new_peer: NewPeer, engine: EngineName
) -> None:
    coordinator = new_coordinator(max_sessions=2)
    with ipcsync.connect(coordinator.endpoint) as client:
        first, second = new_peer(), new_peer()
        point = client.point(_recorder_of(first, coordinator.endpoint, engine))
        assert not client.wait_over(point, 0)
        first.kill()
        until_lost(client, "pidfd")
        connect = (remote.error_of, actions.connect, coordinator.endpoint, "second")
        until(lambda: second.call(*connect) is None, "the line to be given again, once the kernel has let go of it")
        assert client.wait_over(point, DEADLINE_S)


# --- what a process leaves behind -------------------------------------------------------------------------------------


@pytest.mark.parametrize("generations", [1, 2])
@pytest.mark.parametrize("kind", ["os.fork", "PyDLL"])
def test_a_forked_child_keeps_the_drivers_files_and_so_the_recorder_is_not_over(
    client: ipcsync.Client, point: ipcsync.Point, peer: Peer, sleepers: list[int], kind: str, generations: int
) -> None:
    sleepers.append(peer.call(over_actions.fork_sleeper, kind, os.getpid(), generations))
    peer.kill()
    assert _lost(point).over is None
    until_lost(client, "pidfd")
    assert not client.wait_over(point, 0.2)
    assert _lost(point).over is None
    os.kill(sleepers[0], signal.SIGKILL)
    assert client.wait_over(point, DEADLINE_S)


def test_row_62_what_a_dead_recorders_work_may_touch_is_not_used_again_before_that_is_over(
    peer: Peer, sleepers: list[int], engine: EngineName, capfd: pytest.CaptureFixture[str]
) -> None:
    """Neither its slot nor its CUDA events, though the pool is used up otherwise; the log says who keeps them."""
    with ipcsync.launch(pool=4) as coordinator, ipcsync.connect(coordinator.endpoint) as client:
        _recorder_of(peer, coordinator.endpoint, engine)
        with client.event("e") as old:
            slot, handles = old._engine.slot, set(old._engine.handles)
        sleepers.append(peer.call(over_actions.fork_sleeper, "os.fork", os.getpid()))
        peer.kill()
        until(lambda: client.stats()["kept"][engine] == max(len(handles), 1), "it is kept")
        for number in range(4):
            anew = client.event(str(number), recorder=True, engine=engine)
            assert anew._engine.slot != slot
            assert not handles & set(anew._engine.handles)
        assert (client.stats()["pool_in_use"], client.stats()["quarantined"]) == (4, 0)
        until(lambda: f"held_by={sleepers[0]}" in capfd.readouterr().err, "the log names it")
        os.kill(sleepers[0], signal.SIGKILL)
        left = 1 if engine == "event" else 0  # a CUDA event that is destroyed while a record is pending counts for ever
        until(lambda: client.stats()["kept"][engine] <= left, "it is given up")


def test_row_68_crashes_again_and_again_are_bounded_told_and_refused_by_engine(
    new_peer: NewPeer, engine: EngineName, tmp_path: Path
) -> None:
    """Under MPS, where what the dead submitted is never known to be over."""
    other: EngineName = "event" if engine == "timeline" else "timeline"
    with (
        ipcsync.launch(pool=12, max_cuda_events=160) as coordinator,
        ipcsync.connect(coordinator.endpoint) as client,
    ):
        limit = client.stats()["kept_limit"]
        assert limit == {"timeline": 6, "event": 80}
        mine = client.event("mine", recorder=True, engine=engine, depth=1)
        refused = f"new events of the engine '{engine}' are refused.*MPS"
        for number in range(limit["timeline"]):
            client.event(str(number), recorder=True, engine=engine).close()
            peer = new_peer(**_mps(tmp_path, "the driver says so" if ipcsync.driver_name() == "host" else _DAEMON))
            _recorder_of(peer, coordinator.endpoint, engine)
            peer.kill()
            until(lambda: client.stats()["pool_in_use"] == 1, "it is kept")
        with pytest.raises(ipcsync.QuotaExceeded, match=refused) as full:
            client.event("e", recorder=True, engine=engine)
        assert full.value.limit == limit["timeline"]
        assert client.stats()["kept"][other] == 0
        fixtures.finish(mine.record(ipcsync.Stream()))
        with client.event("rest", recorder=True, engine=other) as rest:
            fixtures.finish(rest.record(ipcsync.Stream()))


@pytest.mark.parametrize("kind", ["os.fork", "PyDLL"])
def test_the_line_of_the_dead_is_nobodys_while_a_child_holds_its_lock(
    peer: Peer, sleepers: list[int], kind: str
) -> None:
    with ipcsync.launch(max_sessions=3) as coordinator, ipcsync.connect(coordinator.endpoint) as client:
        peer.call(actions.connect, coordinator.endpoint, "parent")
        sleepers.append(peer.call(over_actions.fork_sleeper, kind, os.getpid()))
        peer.kill()
        until_lost(client, "pidfd")
        for _ in range(4):
            ipcsync.connect(coordinator.endpoint, timeout=DEADLINE_S).close()


def test_a_program_that_was_started_keeps_nothing(
    client: ipcsync.Client, point: ipcsync.Point, peer: Peer, sleepers: list[int]
) -> None:
    sleepers.append(peer.call(over_actions.spawn_sleeper))
    peer.kill()
    assert client.wait_over(point, DEADLINE_S)
    os.kill(sleepers[0], 0)  # it lives


def test_a_process_that_calls_exec_is_over_and_lives(client: ipcsync.Client, point: ipcsync.Point, peer: Peer) -> None:
    peer.begin(over_actions.call_exec)
    assert client.wait_over(point, DEADLINE_S)
    os.kill(peer.pid, 0)
    peer.kill()


def test_a_session_more_costs_no_descriptor_and_a_coordinator_less_gives_one_back(
    new_coordinator: Callable[..., ipcsync.Coordinator], peer: Peer
) -> None:
    first, second = new_coordinator(), new_coordinator()
    assert peer.call(over_actions.connect_often, first.endpoint, 4) == 1
    assert peer.call(over_actions.connect_often, second.endpoint, 4) == 2
    first.stop()
    assert peer.call(over_actions.connect_often, new_coordinator().endpoint, 1) == 2


# --- what ends the question -------------------------------------------------------------------------------------------


def test_nothing_is_believed_of_a_dead_coordinators_sessions(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, point: ipcsync.Point, new_peer: NewPeer
) -> None:
    """A process gives up its lock with its coordinator, so that lock says nothing then."""
    outcome: list[BaseException] = []

    def ask() -> None:
        with pytest.raises(ipcsync.CoordinatorLost) as caught:
            client.wait_over(point)
        outcome.append(caught.value)

    waiting = threading.Thread(target=ask)
    waiting.start()
    fixtures.kill(coordinator, client)
    waiting.join(DEADLINE_S)
    assert len(outcome) == 1


def test_behind_a_lost_wait_nothing_is_over_while_the_recorder_lives(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, new_peer: NewPeer, engine: EngineName
) -> None:
    first, second = new_peer(), new_peer()
    data = _recorder_of(first, coordinator.endpoint, engine)
    second.call(actions.open_recorder, coordinator.endpoint, "second", engine)
    second.call(actions.open_event, "behind", engine)
    second.call(actions.take, data, "p")
    second.call(actions.wait_on_stream, "p")
    point = client.point(second.call(actions.record, "behind"))
    first.kill()
    error = _lost(point)
    assert (error.cause, error.over) == ("behind", None)
    assert not client.wait_over(point, 0.1)


def test_wrong_arguments_are_refused(client: ipcsync.Client, engine: EngineName) -> None:
    point: Any = client.event("e", recorder=True, engine=engine).at(1)
    for seconds in (-1, float("nan")):
        with pytest.raises(ValueError, match="timeout"):
            client.wait_over(point, seconds)
    wrongs: list[Any] = [bytes(point), 1, None]
    for wrong in wrongs:
        with pytest.raises(TypeError, match="takes a point"):
            client.wait_over(wrong)


def test_it_is_the_same_for_asyncio(coordinator: ipcsync.Coordinator, peer: Peer, engine: EngineName) -> None:
    data = _recorder_of(peer, coordinator.endpoint, engine)

    async def scenario() -> None:
        async with ipcsync.aconnect(coordinator.endpoint) as client:
            point = await client.point(data)
            assert not await client.wait_over(point, 0.02)
            peer.kill()
            assert await client.wait_over(point, DEADLINE_S)
            with pytest.raises(TypeError):
                await client.wait_over(data)  # type: ignore[arg-type]

    asyncio.run(scenario())


# --- MPS --------------------------------------------------------------------------------------------------------------


_DAEMON = "there is a control daemon"


def _mps(tmp_path: Path, how: str) -> dict[str, str]:
    if ipcsync.driver_name() == "host":
        if how == _DAEMON:
            pytest.skip("a daemon of CUDA's does nothing for the software driver")
        return {"IPCSYNC_HOST_MPS": "1"}
    if how == "the driver says so":
        pytest.skip("only the software driver can be told to say so")
    (tmp_path / "control").touch()
    return {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}


@pytest.mark.parametrize("how", ["the driver says so", _DAEMON])
def test_under_mps_it_is_never_known(
    coordinator: ipcsync.Coordinator,
    client: ipcsync.Client,
    new_peer: NewPeer,
    engine: EngineName,
    tmp_path: Path,
    how: str,
) -> None:
    peer = new_peer(**_mps(tmp_path, how))
    point = client.point(_recorder_of(peer, coordinator.endpoint, engine))
    assert not client.wait_over(point)  # at once
    peer.kill()
    assert _lost(point).over is None
    until_lost(client, "pidfd")
    assert not client.wait_over(point)
    assert _lost(point).over is None


def test_under_mps_what_a_dead_recorders_work_may_write_is_never_used_again(new_peer: NewPeer, tmp_path: Path) -> None:
    with ipcsync.launch(exit_when_idle=2.0) as coordinator:
        with ipcsync.connect(coordinator.endpoint) as client:
            peer = new_peer(**_mps(tmp_path, "the driver says so" if ipcsync.driver_name() == "host" else _DAEMON))
            _recorder_of(peer, coordinator.endpoint, "timeline")
            (info,) = client.list_events("e")
            peer.kill()
            until(lambda: client.stats()["kept"]["timeline"] == 1, "the word is kept")
            with client.event("e", recorder=True, engine="timeline") as anew:
                assert anew._engine.slot != info.slot
            assert client.stats()["kept"]["timeline"] == 1
        until(lambda: not coordinator.is_running, "it has no use for a coordinator either")


def test_a_file_of_the_drivers_that_survives_exec_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_drivers, "_NVIDIA", "/dev/null")
    fd = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    try:
        os.set_inheritable(fd, True)
        assert _drivers.files_survive_exec()
    finally:
        os.close(fd)


# --- the lock ---------------------------------------------------------------------------------------------------------

_FILES = 50


def _hold_and_sleep(path: str, write: int) -> None:
    kept = []
    for first in (100, 1000):  # files older than the lock, and younger
        kept += [os.open(path, os.O_RDWR) for _ in range(_FILES)]
        for number, fd in enumerate(kept[-_FILES:]):
            files.try_lock(fd, first + number)
        if first == 100:
            last = LastLock(path)
            last.hold(5000)
    os.write(write, b"r")
    signal.pause()


def test_the_kernel_gives_it_up_after_every_other_file_of_the_process(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(64))
    look = os.open(path, os.O_RDWR)
    for _ in range(20):
        read, write = os.pipe()
        pid = FORKS["os.fork"]()
        if pid == 0:
            _hold_and_sleep(str(path), write)
        os.close(write)
        assert os.read(read, 1) == b"r"
        os.close(read)
        assert files.is_locked(look, 5000)
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + DEADLINE_S
        while files.is_locked(look, 5000):  # as fast as can be: what is looked for lasts some microseconds
            assert time.monotonic() < deadline
        left = [byte for first in (100, 1000) for byte in range(first, first + _FILES) if files.is_locked(look, byte)]
        os.waitpid(pid, 0)
        assert not left
    os.close(look)


def _hold_with_no_descriptor_left(path: str) -> int | None:
    last = LastLock(path)
    try:
        with none_left():
            last.hold(1)
    except OSError as error:
        return error.errno
    return None


def test_a_lock_for_which_no_descriptor_is_left_says_so(tmp_path: Path, peer: Peer) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(64))
    assert peer.call(_hold_with_no_descriptor_left, str(path)) == errno.EMFILE


def test_many_locks_of_one_process_are_one_descriptor(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(64))
    before = descriptors().items()
    last = LastLock(str(path))
    for byte in range(100):
        last.hold(byte)
    assert len(descriptors().items() - before) == 1  # an earlier test's may go meanwhile
    look = os.open(path, os.O_RDWR)
    assert all(files.is_locked(look, byte) for byte in range(100))
    last.drop()
    until(lambda: not any(files.is_locked(look, byte) for byte in range(100)), "the locks given up")
    os.close(look)
