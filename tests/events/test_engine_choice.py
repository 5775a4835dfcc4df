"""Which engine an event gets, and why another one cannot be had."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ipcsync
from ipcsync.typing import EngineChecks, EngineName
from tests.kit import remote
from tests.kit.peer import Peer
from tests.kit.until import until

pytestmark = pytest.mark.driver

ENGINES: tuple[EngineName, ...] = ("event", "timeline")


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_asked_for_is_the_events_for_everybody(
    new_client: Callable[..., ipcsync.Client], engine: EngineName
) -> None:
    first, second = new_client(), new_client()
    with first.event("e", engine=engine), second.event("e") as joined, second.event("e", engine=engine) as asked:
        assert joined.engine == asked.engine == engine
        (row,) = first.list_events("e")
        assert row.engine == engine


def test_auto_takes_words_where_they_work(client: ipcsync.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("IPCSYNC_ENGINE", raising=False)
    with client.event("e") as event, client.reserve() as reservation:
        points = [client.record(ipcsync.Stream()), reservation.point, event.at(1)]
        assert {point._bound().engine.kind for point in points} == {"timeline"}


@pytest.mark.parametrize("engine", ENGINES)
def test_another_engine_than_the_events_is_refused_with_both_named(client: ipcsync.Client, engine: EngineName) -> None:
    (other,) = set(ENGINES) - {engine}
    with client.event("e", engine=engine) as event:
        with pytest.raises(ipcsync.EngineMismatch, match=f"'{engine}', not '{other}'"):
            client.event("e", engine=other)
        assert event.state == "open"


def test_an_unknown_engine_is_a_value_error(client: ipcsync.Client) -> None:
    with pytest.raises(ValueError, match="'auto', 'event' or 'timeline'"):
        client.event("e", engine="fence")  # type: ignore[arg-type]


# --- a process that does not share /dev/shm, as in another container --------------------------------------------------


@pytest.fixture
def apart(
    shared_directory: str, new_coordinator: Callable[..., ipcsync.Coordinator], new_peer: Callable[..., Peer]
) -> tuple[ipcsync.Coordinator, Peer]:
    """A coordinator whose board everybody sees, and a client of it that sees another /dev/shm."""
    coordinator = new_coordinator(runtime_dir=shared_directory)
    peer = new_peer()
    peer.call(remote.see_another_shm)
    peer.call(remote.connect, coordinator.endpoint, "apart")
    return coordinator, peer


def _check_there() -> EngineChecks:
    return remote.client().check()


def test_without_a_common_dev_shm_auto_becomes_timeline_and_holds_across(
    apart: tuple[ipcsync.Coordinator, Peer],
) -> None:
    coordinator, peer = apart
    assert peer.call(remote.open_event, "theirs", {"recorder": True})[0] == "timeline"
    peer.call(remote.hold)
    (data,) = peer.call(remote.record, "theirs")
    with ipcsync.connect(coordinator.endpoint) as client:
        point, stream = client.point(data), ipcsync.Stream()
        point.wait(stream)
        assert not point.query()
        assert not stream.query()
        peer.call(remote.let_go)
        point.synchronize(10)
        stream.synchronize()
        # And the other way round.
        mine = client.event("mine", recorder=True, engine="timeline")
        with remote.held(stream):
            data = bytes(mine.record(stream))
            peer.call(remote.wait, data, "waiting")
            assert not peer.call(remote.stream_is_idle, "waiting")
        peer.call(remote.synchronize, data)
    peer.call(remote.close)


def test_without_a_common_dev_shm_the_event_engine_is_refused_and_said_why(
    apart: tuple[ipcsync.Coordinator, Peer],
) -> None:
    coordinator, peer = apart
    with ipcsync.connect(coordinator.endpoint) as client:
        event = client.event("e", engine="event", recorder=True)
        data = bytes(event.record(ipcsync.Stream()))
        tries: list[tuple[Any, ...]] = [
            (remote.open_event, "e"),
            (remote.open_event, "new", {"engine": "event"}),
            (remote.open_event, "e", {"recorder": True}),
            (remote.synchronize, data),
        ]
        for fn, *args in tries:
            error = peer.call(remote.error_of, fn, *args)
            assert error is not None
            assert error[0] == "EngineMismatch"
            assert "/dev/shm" in error[1]
        # None of this did any harm to the event.
        assert event.state == "open"
        event.record(ipcsync.Stream()).synchronize(10)
        assert [row.name for row in client.list_events()] == ["e"]
        event.close()
        until(lambda: client.stats()["pool_in_use"] == 0, "the slot is free")
        peer.call(remote.synchronize, data)  # what is told of an event that is over needs no engine
    report = peer.call(_check_there)
    assert not report["event"]["ok"]
    assert "/dev/shm" in report["event"]["why"]
    assert report["timeline"] == {"ok": True, "why": ""}


# --- two pid namespaces -----------------------------------------------------------------------------------------------


@pytest.fixture
def same_pid(coordinator: ipcsync.Coordinator, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A client in another pid namespace, whose pid value is the coordinator's."""
    enter = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if shutil.which("unshare") is None or subprocess.run([*enter, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no process may enter a pid namespace of its own here")
    command = [*enter, sys.executable, "-m", "tests.events.same_pid", str(coordinator.pid), coordinator.endpoint]
    # A driver in software tells dead processes by their pids: each pid namespace must have one of its own.
    segment = f"{os.environ['IPCSYNC_HOST_SEGMENT']}-inside"
    env = {**os.environ, "IPCSYNC_HOST_SEGMENT": segment, "IPCSYNC_HOST_DIR": str(tmp_path)}
    process = subprocess.Popen(
        command, cwd=Path(__file__).parents[2], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    yield process
    process.kill()
    process.communicate()


def _line_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "the client in the other pid namespace ended"
    answer: dict[str, Any] = json.loads(line)
    return answer


def _tell(process: subprocess.Popen[str], point: ipcsync.Point) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{bytes(point).hex()}\n")
    process.stdin.flush()


def test_a_client_with_the_coordinators_pid_value_gets_a_timeline_that_works_both_ways(
    client: ipcsync.Client, same_pid: subprocess.Popen[str]
) -> None:
    found = _line_of(same_pid)
    assert found["engine"] == "timeline"
    assert not found["check"]["event"]["ok"]
    assert "same pid value" in found["check"]["event"]["why"]
    client.point(bytes.fromhex(found["point"])).synchronize(10)
    event = client.event("from-outside", recorder=True, engine="timeline")
    _tell(same_pid, event.record(ipcsync.Stream()))
    assert _line_of(same_pid) == {"recorded": True}
    assert _line_of(same_pid) == {"done": True}


def test_a_recorders_death_is_seen_from_another_pid_namespace(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, same_pid: subprocess.Popen[str], peer: Peer
) -> None:
    _line_of(same_pid)
    peer.call(remote.connect, coordinator.endpoint, "recorder")
    peer.call(remote.open_event, "e", {"recorder": True, "engine": "timeline"})
    peer.call(remote.hold)
    (data,) = peer.call(remote.record, "e")
    _tell(same_pid, client.point(data))
    assert _line_of(same_pid) == {"recorded": True}
    peer.kill()
    assert _line_of(same_pid) == {"lost": 1}
