"""Who may not speak harms nobody: silent connections, another uid, forged tokens and routing ids: rows 28 to 30."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable

import pytest
import zmq

import ipcsync
from ipcsync._session.connection import Connection
from ipcsync._session.handshake import Reader
from ipcsync._wire import codec, endpoints, messages
from tests.faults import fixtures
from tests.kit.peer import Peer
from tests.kit.raw_client import Raw, assert_serves, await_end, refusals, request, unix_socket
from tests.kit.until import DEADLINE_S, until
from tests.kit.zygote import IPCSYNC

pytestmark = [pytest.mark.keeper, pytest.mark.own_coordinator]

# --- row 28 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first_words", [b"", b"\xff" + bytes(7) + b"\x01\x7f"], ids=["nothing", "half a greeting"])
def test_row_28_a_connection_that_says_nothing_is_closed_at_the_handshake_limit(
    new_coordinator: object, first_words: bytes
) -> None:
    coordinator = ipcsync.launch(handshake_s=0.4)
    with coordinator, ipcsync.connect(coordinator.endpoint, name="main") as client:
        before = refusals(client).get("handshake", 0)  # of its own connection, on a busy machine
        with unix_socket(coordinator.endpoint) as connection:
            began = time.monotonic()
            connection.sendall(first_words)
            await_end(connection)
            assert time.monotonic() - began >= 0.35
            assert client.list_sessions()
            until(lambda: refusals(client) == {"handshake": before + 1}, "the silent one was counted")


# --- row 29 -----------------------------------------------------------------------------------------------------------


def _knock_as_nobody(endpoint: str) -> None:
    """In the peer: become another user and send well-formed requests."""
    hello = codec.encode_request(1, messages.Hello(b"n" * 16, ipcsync.driver_name()), b"", 0)
    importlib.import_module("ipcsync.client")  # all that is needed, while its files can still be read
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    raw = Raw(endpoint)
    _peer["raw"] = raw
    raw.socket.send(hello, zmq.NOBLOCK)
    raw.socket.send(request("stats"), zmq.NOBLOCK)


def _heard() -> bool:
    """In the peer: whether any reply came."""
    return _peer["raw"].receive_bytes(0.2) is not None


def _leave() -> None:
    """In the peer: close the connection, which may be one of ZeroMQ's further tries and within its handshake."""
    with _peer.pop("raw"):
        pass


def _connect_to_a_closed_directory(endpoint: str) -> tuple[str, float]:
    """In the peer, as another user: the error, and after how many seconds it came."""
    importlib.import_module("ipcsync.client")
    ipcsync.driver_name()  # whose machine, in software, is the other user's here
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    began = time.monotonic()
    return _connect_as_nobody(endpoint, DEADLINE_S), time.monotonic() - began


_peer: dict[str, Raw] = {}


def _connect_as_nobody(endpoint: str, timeout: float = 5.0) -> str:
    try:
        ipcsync.connect(endpoint, timeout=timeout)
    except ipcsync.ConnectError as error:
        return str(error)
    return ""


def _serve_as_nobody(endpoint: str) -> None:
    """In the peer: become another user, and answer whatever is asked at an endpoint."""
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    os.makedirs(os.path.dirname(endpoints.socket_path(endpoint)), exist_ok=True)
    router: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
    router.bind(endpoint)

    def answer() -> None:
        while True:
            routing, _ = router.recv_multipart()
            router.send_multipart([routing, b"welcome"])

    threading.Thread(target=answer, daemon=True).start()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("whose", ["its", "ours"])
def test_row_29_a_client_hears_no_other_user_who_serves_where_it_waits_for_a_coordinator(
    peer: Peer, whose: str
) -> None:
    with tempfile.TemporaryDirectory() as open_to_all:
        os.chmod(open_to_all, 0o1777)
        endpoint = f"ipc://{open_to_all}/{'run/' if whose == 'its' else ''}coordinator.sock"
        connection = Connection(endpoint)  # while there is nothing that could be checked
        peer.call(_serve_as_nobody, endpoint)
        said = "the directory of .* belongs to uid 65534" if whose == "its" else "a process of uid 65534 answers"
        with pytest.raises(ipcsync.ConnectError, match=said):
            connection.request(messages.Stats(), b"", 10.0)
        connection.close()
        peer.kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_row_29_another_uid_never_reaches_the_dispatcher_and_is_counted(
    new_coordinator: Callable[..., ipcsync.Coordinator], peer: Peer
) -> None:
    coordinator = new_coordinator(handshake_s=600)  # a greeting is not late though the coordinator is stopped below
    with ipcsync.connect(coordinator.endpoint, name="main") as client:
        _assert_another_uid_is_refused(coordinator, client, peer)


def _assert_another_uid_is_refused(coordinator: ipcsync.Coordinator, client: ipcsync.Client, peer: Peer) -> None:
    # Its mode keeps others out of the directory; the door is what is tried here.
    os.chmod(coordinator.runtime_dir, 0o711)
    os.chmod(endpoints.socket_path(coordinator.endpoint), 0o777)
    asked = client.stats()["requests"]
    fixtures.stop(coordinator.pid)  # or it refuses the connection before both requests are in it
    try:
        peer.call(_knock_as_nobody, coordinator.endpoint)
    finally:
        fixtures.resume(coordinator.pid)
    until(lambda: refusals(client).get("uid"), "the other uid was counted")
    assert not peer.call(_heard)
    now = client.stats()
    assert now["requests"]["hello"] == asked["hello"]
    assert set(now["refusals"]) == {"uid"}
    peer.call(_leave)
    assert "uid 0" in peer.call(_connect_as_nobody, coordinator.endpoint)
    assert_serves(coordinator, client)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_row_29_another_uid_is_told_at_once_whose_the_directory_is(
    coordinator: ipcsync.Coordinator, peer: Peer
) -> None:
    error, seconds = peer.call(_connect_to_a_closed_directory, coordinator.endpoint)
    assert error.startswith(f"the directory {coordinator.runtime_dir} belongs to uid 0, and this is uid 65534")
    assert seconds < DEADLINE_S / 2  # and not all of them, after which nobody has answered


@pytest.mark.process
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_row_29_root_may_look_at_another_users_coordinator_and_gets_no_session() -> None:
    with tempfile.TemporaryDirectory() as directory:
        os.chown(directory, 65534, 65534)
        endpoint = endpoints.endpoint_in(directory)
        command = [sys.executable, "-m", "ipcsync_coordinator", "--runtime-dir", directory, "--no-keeper"]
        env = {**os.environ, "IPCSYNC_HOST_SEGMENT": f"nobody-{os.getpid()}"}
        try:
            program = subprocess.Popen(
                [*command, "--max-sessions", "1"], cwd="/", env=env, user=65534, group=65534, extra_groups=[]
            )
        except PermissionError:
            pytest.skip("another user cannot run this Python")
        try:
            until(lambda: program.poll() is not None or os.path.exists(endpoints.socket_path(endpoint)), "it serves")
            if program.poll() is not None:
                pytest.skip("another user cannot run this Python")
            with Reader(endpoint, DEADLINE_S) as reader, Raw(endpoint) as raw:
                assert (reader.stats()["sessions"], reader.list_sessions(), reader.list_events()) == (0, [], [])
                hello = messages.Hello(os.urandom(16), ipcsync.driver_name(), "root's")
                refusal = raw.refused(hello, b"")
                assert isinstance(refusal, ipcsync.ConnectError)
                assert "this is uid 0, and the coordinator is of uid 65534" in str(refusal)
                assert reader.stats()["sessions"] == 0
            for words in (["status"], ["top", "--once"]):
                done = subprocess.run([*IPCSYNC, *words, "--endpoint", endpoint], timeout=DEADLINE_S, check=False)
                assert done.returncode == 0
        finally:
            program.terminate()
            program.wait(DEADLINE_S)


# --- row 30 -----------------------------------------------------------------------------------------------------------


def test_row_30_a_forged_token_is_refused(coordinator: ipcsync.Coordinator, client: ipcsync.Client) -> None:
    with Raw(coordinator.endpoint) as owner, Raw(coordinator.endpoint) as thief:
        welcome = owner.hello("owner")
        held = owner.ask(messages.Open("e", recorder=True), welcome.token, messages.Attachment)
        known = thief.hello("thief")
        guesses = [
            b"",
            os.urandom(16),
            bytes(16),
            welcome.token[:-1],
            welcome.token + b"\x00",
            welcome.epoch,
            welcome.session.encode().ljust(16, b"\x00"),
            welcome.serial.to_bytes(16, "little"),
            bytes([known.token[0] ^ 1]) + known.token[1:],
        ]
        for token in guesses:
            for body in (messages.Close(held.slot, held.incarnation), messages.Bye(), messages.Open("e")):
                assert isinstance(thief.refused(body, token), ipcsync.SessionExpired)
        assert refusals(client)["SessionExpired"] == 3 * len(guesses)
        (row,) = owner.ask(messages.ListEvents("e"), welcome.token, messages.EventList).events
        assert (row.state, row.recorder, row.attached) == ("open", "owner", 1)


def test_row_30_a_forged_routing_id_gets_nothing_of_its_owner(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client
) -> None:
    with Raw(coordinator.endpoint, routing=b"owner") as owner:
        token = owner.hello("owner").token
        with Raw(coordinator.endpoint, routing=b"owner") as thief:
            thief.send(request("stats", token=os.urandom(16)))
            for _ in range(100):
                owner.ask(messages.Open("e", recorder=True), token, messages.Attachment)
            assert thief.receive_bytes(0.1) is None, "a second connection of one routing id was served"
        owner.ask(messages.ListSessions(), token, messages.SessionList)
    assert_serves(coordinator, client)


def test_row_30_the_tokens_owner_goes_on_over_another_connection(coordinator: ipcsync.Coordinator) -> None:
    with Raw(coordinator.endpoint, routing=b"first") as first:
        token = first.hello("owner").token
        first.ask(messages.Open("e", recorder=True), token, messages.Attachment, request_id=1000)
    with Raw(coordinator.endpoint, routing=b"second") as second:
        (row,) = second.ask(messages.ListEvents(), token, messages.EventList, request_id=1001).events
        assert row.recorder == "owner"
