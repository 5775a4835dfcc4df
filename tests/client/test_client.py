"""The client: connecting, names, named streams, timeouts, and what it lists."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

import ipcsync
from ipcsync.testing import StreamGate
from ipcsync.typing import EngineName
from tests.faults import fixtures
from tests.kit import remote
from tests.kit.peer import Peer
from tests.kit.until import until

pytestmark = pytest.mark.driver

NewClient = Callable[..., ipcsync.Client]


# --- connecting -------------------------------------------------------------------------------------------------------


def test_a_client_says_what_it_is_connected_to(coordinator: ipcsync.Coordinator) -> None:
    with ipcsync.connect(coordinator.endpoint, name="worker") as client:
        assert (client.endpoint, client.name, client.is_connected) == (coordinator.endpoint, "worker", True)
        assert isinstance(client.epoch, bytes)
        assert len(client.epoch) == 16
        assert repr(client) == f"<ipcsync.Client 'worker' connected {coordinator.endpoint}>"
    assert not client.is_connected
    assert "closed" in repr(client)


def test_clients_of_one_coordinator_share_its_epoch_and_have_sessions_of_their_own(
    new_client: NewClient, new_coordinator: Callable[..., ipcsync.Coordinator]
) -> None:
    first, second = new_client(), new_client()
    assert first.epoch == second.epoch
    assert len({row.id for row in first.list_sessions()}) == 2
    with ipcsync.connect(new_coordinator().endpoint) as elsewhere:
        assert elsewhere.epoch != first.epoch


def test_the_endpoint_is_taken_from_the_environment(
    coordinator: ipcsync.Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IPCSYNC_ENDPOINT", coordinator.endpoint)
    with ipcsync.connect() as client:
        assert client.endpoint == coordinator.endpoint
    monkeypatch.delenv("IPCSYNC_ENDPOINT")
    monkeypatch.setenv("IPCSYNC_RUNTIME_DIR", coordinator.runtime_dir)
    with ipcsync.connect() as client:
        assert client.endpoint == coordinator.endpoint


def test_no_coordinator_is_a_connect_error_with_the_endpoint(tmp_path: Any) -> None:
    endpoint = f"ipc://{tmp_path}/coordinator.sock"
    with pytest.raises(
        ipcsync.ConnectError, match=f"no coordinator answered at {endpoint} .*: there is no socket"
    ) as caught:
        ipcsync.connect(endpoint, timeout=0.1)
    assert caught.value.endpoint == endpoint


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:1", "ipc://", "/run/x.sock", f"ipc:///tmp/{'x' * 120}"])
def test_an_endpoint_of_another_kind_is_a_connect_error(endpoint: str) -> None:
    with pytest.raises(ipcsync.ConnectError) as caught:
        ipcsync.connect(endpoint, timeout=0.1)
    assert caught.value.endpoint == endpoint


@pytest.mark.parametrize("timeout", [-1, float("nan")])
def test_an_invalid_timeout_is_refused_everywhere(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, timeout: float
) -> None:
    uses: list[Callable[[], object]] = [
        lambda: ipcsync.connect(coordinator.endpoint, timeout=timeout),
        lambda: client.event("e", timeout=timeout),
        lambda: client.watch(timeout=timeout),
    ]
    for use in uses:
        with pytest.raises(ValueError, match="timeout"):
            use()
    assert client.list_events() == []
    assert len(client.list_sessions()) == 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"timeout": None}, "^timeout is a number of seconds from 0 up, not None$"),
        ({"name": 0}, "^a name is a str, but got int$"),
    ],
    ids=["timeout", "name"],
)
def test_a_session_has_a_timeout_and_a_name_of_the_right_types(
    client: ipcsync.Client, options: dict[str, Any], text: str
) -> None:
    async def connect() -> None:
        await ipcsync.aconnect(client.endpoint, **options)

    for call in (lambda: ipcsync.connect(client.endpoint, **options), lambda: asyncio.run(connect())):
        with pytest.raises(TypeError, match=text):
            call()
    assert len(client.list_sessions()) == 1


def test_a_very_long_timeout_is_as_good_as_any(coordinator: ipcsync.Coordinator) -> None:
    for timeout in (1e300, float("inf")):
        with ipcsync.connect(coordinator.endpoint, timeout=timeout) as client:
            event = client.event("e", recorder=True, timeout=timeout)
            event.record(ipcsync.Stream(), timeout=timeout).synchronize(timeout)
            event.at(1).wait(ipcsync.Stream(), timeout=timeout)
            event.close()


# --- names ------------------------------------------------------------------------------------------------------------

GOOD_NAMES = ["e", "a/b/c", "x" * 255, "ü" * 127, "with space", "..a", "a..", "…", "0"]
BAD_NAMES = [
    "",
    "/",
    "/a",
    "a/",
    "a//b",
    ".",
    "..",
    "a/../b",
    "a/.",
    "a\0b",
    "a\nb",
    "\x7f",
    "\x85",
    "x" * 256,
    "ü" * 128,
    "\ud800",
]


@pytest.mark.parametrize("name", GOOD_NAMES)
def test_a_good_name_names_an_event_and_a_stream(client: ipcsync.Client, name: str) -> None:
    with client.event(name) as event:
        assert event.name == name
        assert [row.name for row in client.list_events(name)] == [name]
    assert client.stream(name).query()


def test_the_call_of_a_first_event_is_read_in_few_files(client: ipcsync.Client) -> None:
    package, entered = os.path.dirname(ipcsync.__file__), set[str]()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            entered.add(os.path.relpath(frame.f_code.co_filename, package))

    ipcsync.Stream()  # this process has a context by now
    sys.setprofile(note)
    try:
        client.event("e")
    finally:
        sys.setprofile(None)
    assert len(entered) <= 12, sorted(entered)


def test_a_bad_name_is_refused_for_events_and_streams(client: ipcsync.Client) -> None:
    for name in BAD_NAMES:
        for use in (client.event, client.stream):
            with pytest.raises(ipcsync.ProtocolError) as caught:
                use(name)
            assert caught.value.code == "name", repr(name)
    assert client.list_events() == []


@pytest.mark.parametrize("name", [None, 1, b"e", ["e"]])
def test_a_name_that_is_no_str_is_a_type_error(client: ipcsync.Client, name: Any) -> None:
    for use in (client.event, client.stream):
        with pytest.raises(TypeError):
            use(name)


# --- named streams ----------------------------------------------------------------------------------------------------


def _named(name: str, priority: int) -> tuple[int, str]:
    stream = remote.client().stream(name, priority=priority)
    assert stream.query()
    return stream.priority, ipcsync.get_device_properties(stream.device).uuid


def test_a_named_stream_is_made_to_one_specification_in_every_process(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, peer: Peer
) -> None:
    _, greatest = ipcsync.Stream.priority_range()
    mine = client.stream("decode", priority=greatest)
    peer.call(remote.connect, coordinator.endpoint)
    spec = (greatest, ipcsync.get_device_properties(mine.device).uuid)
    assert (mine.priority, ipcsync.get_device_properties(mine.device).uuid) == spec
    assert peer.call(_named, "decode", 0) == spec
    assert client.stream("decode").priority == greatest
    assert client.stream("other").priority == 0


def test_a_named_stream_is_a_new_stream_each_time(client: ipcsync.Client) -> None:
    assert client.stream("decode") != client.stream("decode")


# --- lists ------------------------------------------------------------------------------------------------------------


def test_list_events_tells_all_of_each_event(new_client: NewClient, engine: EngineName) -> None:
    recorder, waiter = new_client("rec"), new_client("wait")
    event = recorder.event("a/one", recorder=True, engine=engine)
    waiter.event("a/one")
    waiter.event("b/two", engine=engine)
    stream = ipcsync.Stream()
    event.record(stream).synchronize(10)
    with StreamGate(stream):
        event.record(stream)
        (row,) = waiter.list_events("a/")
        assert (row.name, row.engine, row.state, row.recorder) == ("a/one", engine, "open", "rec")
        assert row.device == ipcsync.get_device_properties(event.device).uuid
        assert (row.generation, row.completed, row.attached) == (2, 1, 2)
    assert {row.name: row.recorder for row in waiter.list_events()} == {"a/one": "rec", "b/two": ""}
    assert waiter.list_events("nothing") == []
    with pytest.raises(AttributeError):
        row.name = "x"  # type: ignore[misc] # on purpose


def test_list_sessions_tells_who_is_connected(
    coordinator: ipcsync.Coordinator, new_client: NewClient, peer: Peer
) -> None:
    client = new_client("mine")
    peer.call(remote.connect, coordinator.endpoint, "theirs")
    peer.call(remote.open_event, "e")
    rows = {row.name: row for row in client.list_sessions()}
    assert set(rows) == {"mine", "theirs"}
    assert rows["theirs"].pid == peer.pid
    assert (rows["mine"].events, rows["theirs"].events) == (0, 1)
    assert rows["mine"].id != rows["theirs"].id
    for row in rows.values():
        assert 0 <= row.last_seen_s <= client.lease_ttl
        assert row.connected_s >= 0
    peer.call(remote.close)
    assert [row.name for row in client.list_sessions()] == ["mine"]


@pytest.mark.own_coordinator
def test_stats_count_what_is_there(coordinator: ipcsync.Coordinator, new_client: NewClient, peer: Peer) -> None:
    client, other = new_client(), new_client()
    first = client.stats()
    assert first["sessions"] == 2
    assert (first["events"], first["pool_in_use"], first["quarantined"]) == (0, 0, 0)
    assert first["pool_size"] == 2048
    assert first["deaths"] == {"pidfd": 0, "ttl": 0}
    with client.event("a"), client.event("b"):
        with pytest.raises(ipcsync.EngineMismatch):
            other.event("a", engine="event")
        during = client.stats()
    assert (during["events"], during["pool_in_use"]) == (2, 2)
    assert during["requests"]["open"] == 3
    assert during["refusals"]["EngineMismatch"] == 1
    assert during["feed_number"] > first["feed_number"]
    peer.call(remote.connect, coordinator.endpoint)
    peer.kill()
    until(lambda: client.stats()["deaths"]["pidfd"] == 1, "the death is counted")
    last = client.stats()
    assert (last["sessions"], last["events"], last["pool_high_water"]) == (2, 0, 2)
    assert last["uptime_s"] > first["uptime_s"]
    assert last["client"]["messages_sent"] == client.messages_sent
    assert last["client"]["full_ring_waits"] == 0


def test_watch_begins_with_what_is_there_and_tells_every_change(new_client: NewClient) -> None:
    client, other = new_client("watching"), new_client("acting")
    with other.event("kept"):
        notices = client.watch(timeout=5)
        first = [next(notices) for _ in range(3)]
        assert {(notice.kind, notice.name) for notice in first} == {
            ("session_opened", "watching"),
            ("session_opened", "acting"),
            ("opened", "kept"),
        }
        with other.event("new", engine="timeline"):
            opened = next(notices)
            assert (opened.kind, opened.name, opened.engine) == ("opened", "new", "timeline")
        closed = next(notices)
        assert (closed.kind, closed.name) == ("closed", "new")
        assert closed.number == opened.number + 1 > first[0].number
        notices.close()  # type: ignore[attr-defined] # a generator, told here to end its subscription


# --- timeouts and imports ---------------------------------------------------------------------------------------------


def test_ipc_collect_closes_the_imports_that_nothing_uses(new_client: NewClient) -> None:
    from ipcsync._engines.core import import_count

    ipcsync.ipc_collect()  # an earlier test's
    before = import_count()
    recorder, waiter = new_client(), new_client()
    event = recorder.event("e", recorder=True, engine="event", depth=2)
    data = [bytes(event.record(ipcsync.Stream())) for _ in range(2)]
    point = waiter.point(data[1])
    point.synchronize(10)
    assert import_count() > before
    event.close()
    del point
    until(lambda: (ipcsync.ipc_collect(), import_count())[1] <= before, "the imports are closed")


def test_a_client_has_one_timeout_for_all_requests_and_each_call_may_say_another(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client
) -> None:
    assert client.timeout == 5.0
    with pytest.raises(ValueError, match="from 0 up"):
        client.timeout = float("nan")
    data = bytes(client.event("e").at(1))
    client.timeout = 0.05
    calls: list[Callable[..., object]] = [
        lambda **options: client.event("f", **options),
        lambda **options: client.events(["f"], **options),
        lambda **options: client.stream("s", **options),
        client.list_events,
        client.list_sessions,
        client.list_attachments,
        client.stats,
        client.check,
    ]
    fixtures.stop(coordinator.pid)
    try:
        for call in calls:
            with pytest.raises(ipcsync.WaitTimeout) as caught:
                call()
            assert caught.value.timeout == 0.05
            with pytest.raises(ipcsync.WaitTimeout) as caught:
                call(timeout=0.1)
            assert caught.value.timeout == 0.1
        assert client.point(data).generation == 1, "what is attached already asks nobody"
    finally:
        fixtures.resume(coordinator.pid)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda client: client.event("e", node="not a node!"), ValueError, "a node's name"),
        (lambda client: client.event("e", node="b", recorder=True), ValueError, "is recorded there"),
        (lambda client: client.event("e", node="b", engine="event"), ipcsync.EngineMismatch, "'timeline'"),
        (lambda client: client.event("e", fleet=True, engine="event"), ipcsync.EngineMismatch, "'timeline'"),
        (lambda client: client.event("e", node="b"), ipcsync.NoBridge, "ipcsync bridge"),
        (lambda client: client.event("e", fleet=True), ipcsync.NoBridge, "ipcsync bridge"),
    ],
)
def test_what_cannot_be_opened_on_another_node_is_refused_and_leaves_nothing(
    client: ipcsync.Client, call: Callable[[ipcsync.Client], object], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        call(client)
    assert client.stats()["pool_in_use"] == 0
    assert client.list_attachments() == []
