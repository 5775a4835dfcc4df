"""The client that all of a process shares: when it is connected, and when another one takes its place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ipcsync
from tests.kit.peer import Peer
from tests.kit.until import until

pytestmark = pytest.mark.driver

NewCoordinator = Callable[..., ipcsync.Coordinator]


class _Seen(list[str]):
    """The sessions of the clients that it is called with. Not hashable."""

    def __call__(self, client: ipcsync.Client) -> None:
        self.append(client.session_id)


_seen = _Seen()


def _session() -> str:
    return ipcsync.default_client().session_id


def _listen() -> list[str]:
    ipcsync.default_client(on_connect=_seen)
    ipcsync.default_client(on_connect=_seen)  # once
    return _seen


def _sessions_of_threads(count: int) -> list[str]:
    barrier, found = threading.Barrier(count), []

    def ask() -> None:
        barrier.wait()
        found.append(_session())

    threads = [threading.Thread(target=ask) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def _close() -> None:
    ipcsync.default_client().close()


def _in_forked_children(count: int) -> list[str]:
    """What forked children get, by a pipe: a session's id, or the name of an error."""
    found = []
    for _ in range(count):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.write(write, _session().encode())
                ipcsync.default_client().close()
            except BaseException as error:  # noqa: BLE001 - told to the parent
                os.write(write, type(error).__name__.encode())
            finally:
                os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            found.append(pipe.read().decode())
        os.waitpid(child, 0)
    return found


@pytest.fixture
def default_peer(coordinator: ipcsync.Coordinator, new_peer: Callable[..., Peer]) -> Peer:
    """A process whose default client is of the test's coordinator."""
    return new_peer(IPCSYNC_ENDPOINT=coordinator.endpoint)


def test_there_is_one_for_all_threads_of_a_process(default_peer: Peer) -> None:
    assert len(set(default_peer.call(_sessions_of_threads, 8))) == 1


@pytest.mark.process
@pytest.mark.parametrize(
    ("arguments", "name"),
    [(["worker.py"], "worker"), (["-m", "job.worker"], "job.worker"), (["-m", "job"], "job"), (["-c", ""], "python")],
    ids=["script", "module", "package", "command"],
)
def test_it_is_named_by_the_program_and_its_pid(
    coordinator: ipcsync.Coordinator, tmp_path: Path, arguments: list[str], name: str
) -> None:
    program = "import ipcsync, os; print(ipcsync.default_client().name, os.getpid())"
    for path in ("worker.py", "job/worker.py", "job/__main__.py"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(program)
    call = [sys.executable, *(argument or program for argument in arguments)]
    environment = {**os.environ, "IPCSYNC_ENDPOINT": coordinator.endpoint}
    told = subprocess.run(call, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    own, pid = told.split()
    assert own == f"{name}-{pid}"


def test_a_child_forked_before_the_first_use_gets_its_own(default_peer: Peer) -> None:
    children = default_peer.call(_in_forked_children, 2)
    own = default_peer.call(_session)
    assert len({*children, own}) == 3
    assert "Error" not in "".join(children)


def test_a_child_forked_after_the_first_use_is_refused(default_peer: Peer) -> None:
    default_peer.call(_session)
    assert default_peer.call(_in_forked_children, 1) == ["ForkedProcessError"]


def test_a_closed_one_is_followed_by_a_new_one(default_peer: Peer) -> None:
    seen = default_peer.call(_listen)
    assert seen == [default_peer.call(_session)]
    default_peer.call(_close)
    second = default_peer.call(_session)
    assert second not in seen
    assert default_peer.call(_listen) == [*seen, second]


def _lose(error: ipcsync.IpcSyncError) -> None:
    ipcsync.default_client()._session.lease.lose(error)


@pytest.mark.parametrize(
    "error",
    [
        ipcsync.IpcSyncError("the session's own thread failed"),
        ipcsync.ProtocolError("the board's header was overwritten", code="board"),
    ],
    ids=["thread", "header"],
)
def test_a_lost_one_is_followed_by_a_new_one_whatever_it_was_lost_by(
    default_peer: Peer, error: ipcsync.IpcSyncError
) -> None:
    first = default_peer.call(_session)
    default_peer.call(_lose, error)
    assert default_peer.call(_session) != first


def _listen_twice_with_the_first_failing() -> tuple[list[str], list[str], list[str]]:
    """The calls of a listener that fails, and one that it adds; and of a third. A client is closed in between."""
    first: list[str] = []
    second: list[str] = []
    third: list[str] = []

    def fail(client: ipcsync.Client) -> None:
        first.append(client.session_id)
        ipcsync.default_client(on_connect=within)
        raise ValueError

    def within(client: ipcsync.Client) -> None:
        second.append(client.session_id)

    def last(client: ipcsync.Client) -> None:
        third.append(client.session_id)

    for expected in (fail, last, None, None):
        try:
            client = ipcsync.default_client(on_connect=expected)
        except ValueError:
            continue
        if expected is last:
            client.close()
    return first, second, third


def test_each_listener_is_told_of_each_client_once_whichever_of_them_fails(default_peer: Peer) -> None:
    first, second, third = default_peer.call(_listen_twice_with_the_first_failing)
    assert len(set(first)) == 2
    assert first == second == third


def _listen_with_a_number() -> str:
    number: Any = 5
    with pytest.raises(TypeError, match=r"^on_connect is a function that takes a client, but got int$"):
        ipcsync.default_client(on_connect=number)
    _close()
    return _session()


def test_a_listener_that_is_no_function_is_refused_and_not_kept(default_peer: Peer) -> None:
    assert default_peer.call(_listen_with_a_number)


def test_one_that_expired_is_followed_by_a_new_one(
    new_coordinator: NewCoordinator, new_peer: Callable[..., Peer]
) -> None:
    coordinator = new_coordinator(lease_ttl=2.0)
    peer = new_peer(IPCSYNC_ENDPOINT=coordinator.endpoint)
    first = peer.call(_session)
    with ipcsync.connect(coordinator.endpoint, lease_ttl=60) as observer:
        peer.signal(signal.SIGSTOP)
        try:
            until(lambda: all(info.id != first for info in observer.list_sessions()), "the lease expired")
        finally:
            peer.signal(signal.SIGCONT)
    assert peer.call(_session) != first


def test_after_its_coordinators_end_the_next_use_connects_to_the_one_in_its_place(
    new_coordinator: NewCoordinator, new_peer: Callable[..., Peer], tmp_path: Path
) -> None:
    first = new_coordinator(runtime_dir=str(tmp_path / "ipcsync"))
    peer = new_peer(IPCSYNC_ENDPOINT=first.endpoint)
    before = peer.call(_listen)
    os.kill(first.pid, signal.SIGKILL)
    first.stop()
    second = new_coordinator(runtime_dir=str(tmp_path / "ipcsync"))
    assert second.endpoint == first.endpoint
    assert peer.call(_session) not in before
    assert peer.call(_listen) == [*before, peer.call(_session)]


def test_what_a_handler_connected_while_the_lost_one_closed_is_kept(
    coordinator: ipcsync.Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IPCSYNC_ENDPOINT", coordinator.endpoint)
    first, close = ipcsync.default_client(), ipcsync.Client.close
    made: list[ipcsync.Client] = []

    def close_and_be_interrupted(client: ipcsync.Client) -> None:
        close(client)
        if client is first and not made:
            made.append(ipcsync.default_client())

    first._session.lease.lose(ipcsync.SessionExpired("silent"))
    with monkeypatch.context() as patch:
        patch.setattr(ipcsync.Client, "close", close_and_be_interrupted)
        assert ipcsync.default_client() is made[0]
    made[0].close()
