"""`watch`: a snapshot, then every change in order, across gaps, storms and slow readers; and named streams."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from itertools import islice, pairwise
from typing import Any

import pytest

import ipcsync
from ipcsync.typing import NoticeKind
from tests.faults import fixtures
from tests.kit.peer import Peer

pytestmark = [pytest.mark.own_coordinator, pytest.mark.process]

LONG_S = 30.0
STORM = 600  # events, of two announcements each


def told(notices: Iterator[ipcsync.Notice], count: int) -> list[tuple[NoticeKind, str]]:
    """Kind and name of the next `count` notices."""
    found = [(notice.kind, notice.name) for notice in islice(notices, count)]
    assert len(found) == count, f"the watch ended after {found}"
    return found


def until(notices: Iterator[ipcsync.Notice], kind: str, name: str) -> list[ipcsync.Notice]:
    """The notices up to that one, which is the last."""
    found = []
    for notice in notices:
        found.append(notice)
        if (notice.kind, notice.name) == (kind, name):
            return found
    raise AssertionError(f"{name} was not {kind} within the watch's time; told were {found}")


def replayed(notices: list[ipcsync.Notice], before: set[str] | None = None) -> set[str]:
    """The names that are open after the notices. What is told twice, or ends without having begun, fails."""
    names = set(before or ())
    for notice in notices:
        if notice.kind.startswith("recorder_"):  # beside the end of its event
            continue
        if notice.kind.endswith("opened"):
            assert notice.name not in names, f"told twice: {notice}"
            names.add(notice.name)
        else:
            assert notice.name in names, f"never told of: {notice}"
            names.remove(notice.name)
    return names


# --- what is told -----------------------------------------------------------------------------------------------------


def test_a_snapshot_that_does_not_come_is_waited_for_no_longer_than_the_feed(
    coordinator: ipcsync.Coordinator, new_client: Callable[..., ipcsync.Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = new_client("one", timeout=LONG_S)
    request = client._session.request

    def stop_and_request(*args: Any) -> Any:
        fixtures.stop(coordinator.pid)
        return request(*args)

    monkeypatch.setattr(client._session, "request", stop_and_request)
    try:
        with pytest.raises(ipcsync.WaitTimeout) as late:
            next(client.watch(timeout=0.2))
    finally:
        fixtures.resume(coordinator.pid)
    assert late.value.timeout == 2.0


def test_a_snapshot_comes_first_and_then_every_change_in_order(new_client: Callable[..., ipcsync.Client]) -> None:
    one, two = new_client("one"), new_client("two")
    first = one.event("a/1", engine="timeline")
    notices = two.watch("a/", timeout=LONG_S)
    snapshot = [next(notices) for _ in range(3)]
    assert [(notice.kind, notice.name) for notice in snapshot] == [
        ("session_opened", "one"),
        ("session_opened", "two"),
        ("opened", "a/1"),
    ]
    assert len({notice.number for notice in snapshot}) == 1
    opened = snapshot[2]
    assert (opened.device, opened.engine) == (ipcsync.get_device_properties().uuid, "timeline")
    second = one.event("a/2")
    one.event("b")
    first.close()
    second.close()
    third = new_client("three")
    third.close()
    changes = [next(notices) for _ in range(5)]
    assert [(notice.kind, notice.name) for notice in changes] == [
        ("opened", "a/2"),
        ("closed", "a/1"),
        ("closed", "a/2"),
        ("session_opened", "three"),
        ("session_closed", "three"),
    ]
    numbers = [notice.number for notice in changes]
    assert numbers == sorted(set(numbers))
    assert numbers[0] > opened.number
    closed = changes[1]
    assert (closed.device, closed.engine) == (opened.device, opened.engine)


def _hold_events(endpoint: str, names: list[str]) -> None:
    """In a peer: become the recorder of events, and keep them."""
    client = ipcsync.connect(endpoint, name="holder")
    _kept.extend([client, *(client.event(name, recorder=True) for name in names)])


_kept: list[object] = []


def test_a_recorders_death_breaks_each_of_its_events_once(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, peer: Peer
) -> None:
    notices = client.watch(timeout=LONG_S)
    peer.call(_hold_events, coordinator.endpoint, ["x", "y"])
    client.event("x")
    assert told(notices, 4) == [
        ("session_opened", "main"),
        ("session_opened", "holder"),
        ("opened", "x"),
        ("opened", "y"),
    ]
    peer.kill()
    found = told(notices, 5)
    assert sorted(found) == [
        ("broken", "x"),
        ("broken", "y"),
        ("recorder_died", "x"),
        ("recorder_died", "y"),
        ("session_closed", "holder"),
    ]
    client.event("x")  # the name is free at once
    assert told(notices, 1) == [("opened", "x")]


def _end_as_told(endpoint: str, how: str) -> None:
    """In a peer: record on an event, and close it, or have it broken by a wait that was lost."""
    client = ipcsync.connect(endpoint, name="holder", lease_ttl=2.0 if how == "expired" else None)
    event = client.event("x", recorder=True)
    _kept.extend([client, event])
    if how == "closed":
        event.close()


@pytest.mark.parametrize("how", ["closed", "died", "expired"])
def test_a_watch_tells_how_the_recorder_ended(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, peer: Peer, how: str
) -> None:
    notices = client.watch("x", timeout=LONG_S)
    next(notices)
    peer.call(_end_as_told, coordinator.endpoint, how)
    if how == "died":
        peer.kill()
    elif how == "expired":
        peer.signal(signal.SIGSTOP)
    last = until(notices, f"recorder_{how}", "x")
    told_of, ended = last[-2:]
    assert (told_of.kind, told_of.name) == ("closed" if how == "closed" else "broken", "x")
    assert told_of.number == ended.number
    for notice in (told_of, ended):
        assert (notice.session, notice.pid, notice.cause) == ("holder", peer.pid, how)
        assert (notice.device, notice.engine != "") == (ipcsync.get_device_properties().uuid, True)
    if how != "closed":
        gone = [notice for notice in last if notice.kind == "session_closed"] or [next(notices)]
        assert [(notice.kind, notice.pid, notice.cause) for notice in gone] == [("session_closed", peer.pid, how)]
    peer.signal(signal.SIGCONT)


def test_an_event_without_a_recorder_ends_without_one(client: ipcsync.Client) -> None:
    notices = client.watch("x", timeout=LONG_S)
    next(notices)
    client.event("x").close()
    client.event("xx").close()
    found = until(notices, "closed", "xx")
    assert [notice.kind for notice in found] == ["opened", "closed", "opened", "closed"]
    assert {notice.cause for notice in found} == {""}


def test_a_watch_ends_when_nothing_came_for_its_time(client: ipcsync.Client) -> None:
    assert [notice.name for notice in client.watch(timeout=0)] == ["main"]
    assert [notice.name for notice in client.watch(timeout=0.05)] == ["main"]
    with pytest.raises(ValueError, match="timeout"):
        client.watch(timeout=-1)


def test_a_watch_ends_with_its_client(client: ipcsync.Client) -> None:
    notices = client.watch()
    assert told(notices, 1) == [("session_opened", "main")]
    client.close()
    with pytest.raises(ipcsync.ClientClosed):
        next(notices)
    with pytest.raises(ipcsync.ClientClosed):
        client.watch()


def test_a_watch_ends_with_its_coordinator(coordinator: ipcsync.Coordinator, client: ipcsync.Client) -> None:
    notices = client.watch()
    assert told(notices, 1) == [("session_opened", "main")]
    os.kill(coordinator.pid, signal.SIGKILL)
    with pytest.raises(ipcsync.CoordinatorLost):
        next(notices)


def test_a_coordinator_in_the_same_place_is_not_taken_for_the_old_one(
    new_coordinator: Callable[..., ipcsync.Coordinator], tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("c")
    directory.chmod(0o700)
    first = new_coordinator(runtime_dir=str(directory))
    with ipcsync.connect(first.endpoint, name="early") as client:
        notices = client.watch()
        assert told(notices, 1) == [("session_opened", "early")]
        first.stop()
        second = new_coordinator(runtime_dir=str(directory))
        with ipcsync.connect(second.endpoint, name="late") as late:
            late.event("e")
            with pytest.raises(ipcsync.CoordinatorLost):
                next(notices)


# --- storms, gaps and slow readers ------------------------------------------------------------------------------------


def test_who_subscribes_in_the_middle_of_a_storm_misses_nothing_and_sees_nothing_twice(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, new_peer: Callable[..., Peer]
) -> None:
    peers = [new_peer() for _ in range(2)]
    for i, peer in enumerate(peers):
        peer.begin(_prefixed_storm, coordinator.endpoint, f"{i}/", 150)
    found: list[list[ipcsync.Notice]] = []
    while not all(peer.has_result for peer in peers) or len(found) < 5:
        found.append(list(client.watch(timeout=0.02)))
    for peer in peers:
        peer.result()
    for notices in found:
        replayed([notice for notice in notices if notice.session == ""])
        numbers = [notice.number for notice in notices]
        assert numbers == sorted(numbers)
        after = [number for number in numbers if number > numbers[0]]
        assert all(later == earlier + 1 for earlier, later in pairwise(after))
        assert not after or after[0] == numbers[0] + 1
    assert replayed([n for n in client.watch(timeout=0) if n.session == ""]) == {"0/last", "1/last"}


def _prefixed_storm(endpoint: str, prefix: str, events: int) -> None:
    client = ipcsync.connect(endpoint, name=f"storm-{prefix[:-1]}")
    _kept.append(client)
    for i in range(events):
        client.event(f"{prefix}{i}").close()
    _kept.append(client.event(f"{prefix}last"))


def _watch_until(endpoint: str, last: str, ready: str) -> list[tuple[str, str, int]]:
    """In a peer: say by opening an event that the watch is on, then tell what came until `last` was opened."""
    client = ipcsync.connect(endpoint, name="watcher")
    notices = client.watch(timeout=LONG_S)
    found = [next(notices)]
    client.event(ready, timeout=LONG_S)  # it may be stopped before it has read the answer
    found += until(notices, "opened", last)
    return [(notice.kind, notice.name, notice.number) for notice in found]


def test_a_reader_that_was_stopped_is_led_across_the_gap(
    new_coordinator: Callable[..., ipcsync.Coordinator], peer: Peer
) -> None:
    # The coordinator queues 2 announcements for it, and the socket between them buffers some hundred: most of the storm
    # is lost to a process that is stopped.
    coordinator = new_coordinator(feed_queue=2, lease_ttl=120, log_level="warning")
    with ipcsync.connect(coordinator.endpoint, name="main") as client:
        mine = client.watch(timeout=LONG_S)
        kept = client.event("kept")
        ended = client.event("ended")
        peer.begin(_watch_until, coordinator.endpoint, "last", "ready")
        until(mine, "opened", "ready")
        peer.signal(signal.SIGSTOP)
        for i in range(STORM):
            client.event(f"e{i}").close()
        ended.close()
        client.event("new")
        peer.signal(signal.SIGCONT)
        client.event("last")
        found = [ipcsync.Notice(*row) for row in peer.result()]
        events = [notice for notice in found if not notice.kind.startswith("session")]
        assert len(found) < 2 * STORM, "nothing was lost, so nothing is shown"
        assert replayed(events) == {"kept", "ready", "new", "last"}
        numbers = [notice.number for notice in found]
        assert numbers == sorted(numbers)
        assert kept.state == "open"


def test_a_gap_at_the_end_is_noticed_without_a_further_change(
    new_coordinator: Callable[..., ipcsync.Coordinator], peer: Peer
) -> None:
    # The current number is repeated every second: nothing else tells of a loss after which nothing changes.
    coordinator = new_coordinator(feed_queue=2, lease_ttl=120, log_level="warning")
    with ipcsync.connect(coordinator.endpoint, name="main") as client:
        mine = client.watch(timeout=LONG_S)
        peer.begin(_watch_until, coordinator.endpoint, "last", "ready")
        until(mine, "opened", "ready")
        peer.signal(signal.SIGSTOP)
        for i in range(STORM):
            client.event(f"e{i}").close()
        client.event("last")
        peer.signal(signal.SIGCONT)
        found = [ipcsync.Notice(*row) for row in peer.result()]
        assert replayed([n for n in found if not n.kind.startswith("session")]) == {"ready", "last"}


def test_changes_while_nobody_asks_come_afterwards(client: ipcsync.Client) -> None:
    notices = client.watch("n", timeout=LONG_S)
    assert told(notices, 1) == [("session_opened", "main")]
    for i in range(50):
        client.event(f"n{i}").close()
    expected = [(kind, f"n{i}") for i in range(50) for kind in ("opened", "closed")]
    assert told(notices, 100) == expected


def test_each_watch_of_a_client_has_its_own_place(client: ipcsync.Client) -> None:
    early = client.watch("n", timeout=LONG_S)
    assert told(early, 1) == [("session_opened", "main")]
    event = client.event("n")
    late = client.watch("n", timeout=LONG_S)
    assert told(late, 2) == [("session_opened", "main"), ("opened", "n")]
    event.close()
    assert told(early, 2) == [("opened", "n"), ("closed", "n")]
    assert told(late, 1) == [("closed", "n")]


def test_a_watch_that_is_left_gives_its_socket_back(client: ipcsync.Client) -> None:
    def read() -> None:
        notices = client.watch()
        next(notices)
        assert isinstance(notices, Iterator)
        notices.close()  # type: ignore[attr-defined] # of a generator

    read()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        read()
    # ZeroMQ's own thread closes the connections, one after the other.
    deadline = threading.Event()
    for _ in range(1000):
        if len(os.listdir("/proc/self/fd")) <= before:
            break
        deadline.wait(0.01)
    assert len(os.listdir("/proc/self/fd")) <= before


# --- named streams ----------------------------------------------------------------------------------------------------


def _named_stream(endpoint: str, name: str) -> tuple[int, int]:
    """In a peer: device and priority of a named stream."""
    with ipcsync.connect(endpoint) as client:
        stream = client.stream(name)
        return stream.device_index, stream.priority


def test_a_named_stream_is_made_alike_in_every_process(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, peer: Peer
) -> None:
    least, greatest = ipcsync.Stream.priority_range()
    stream = client.stream("decode", priority=greatest)
    assert stream.priority == greatest
    assert peer.call(_named_stream, coordinator.endpoint, "decode") == (stream.device_index, greatest)
    assert client.stream("decode", priority=least).priority == greatest  # the first to name it decides
    assert client.stream("decode") != stream  # a stream of its own, made as the other
    assert peer.call(_named_stream, coordinator.endpoint, "other") == (stream.device_index, least)
    for bad in ("", "a//b", "..", "x" * 256):
        with pytest.raises(ipcsync.ProtocolError):
            client.stream(bad)
