"""The feed across losses, late subscribers and those that stop reading: rows 21 to 23."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
import zmq

import ipcsync
from ipcsync._wire import codec
from ipcsync._wire.messages import Announcement
from tests.kit.examples import LONG
from tests.kit.raw_client import resident_kib
from tests.kit.until import until

pytestmark = [pytest.mark.keeper, pytest.mark.own_coordinator]

NewCoordinator = Callable[..., ipcsync.Coordinator]
NewClient = Callable[..., ipcsync.Client]
_END = "end"
_TIMEOUT = 20.0


class Relay(threading.Thread):
    """Stands between the feed and a subscriber; `passes` says how often each announcement goes through."""

    def __init__(self, feed: str, own: str, passes: Callable[[Announcement], int]) -> None:
        super().__init__(daemon=True)
        self.endpoint = own
        self._passes = passes
        self._ending = threading.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._back = self._context.socket(zmq.XSUB)
        self._front = self._context.socket(zmq.XPUB)
        self._front.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._front.bind(own)
        self._back.connect(feed)

    def run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._front, zmq.POLLIN)
        poller.register(self._back, zmq.POLLIN)
        while not self._ending.is_set():
            for ready, _ in poller.poll(20):
                with contextlib.suppress(zmq.Again):  # what was there went with the connection it came by
                    self._pass(ready, ready.recv(zmq.NOBLOCK))
        self._context.destroy(linger=0)

    def _pass(self, ready: object, frame: bytes) -> None:
        if ready is self._front:  # a subscription
            self._back.send(frame)
        else:
            for _ in range(self._passes(codec.decode_announcement(frame))):
                self._front.send(frame)

    def end(self) -> None:
        self._ending.set()
        self.join(10)
        assert not self.is_alive()


class Watcher:
    """What a client's watch tells, held against the rule that nothing opens or closes twice."""

    def __init__(self, client: ipcsync.Client) -> None:
        self.told: list[tuple[str, str]] = []
        self.open: set[str] = set()
        self._notices = client.watch("e/", timeout=_TIMEOUT)

    def see(self, notice: ipcsync.Notice) -> None:
        if notice.kind in ("opened", "closed", "broken"):
            self.told.append((notice.kind, notice.name))
            assert (notice.name in self.open) == (notice.kind != "opened"), f"{notice.kind} {notice.name} told twice"
            self.open ^= {notice.name}

    def go_on(self, until_told: tuple[str, str]) -> None:
        """Read until a change was told."""
        for notice in self._notices:
            self.see(notice)
            if (notice.kind, notice.name) == until_told:
                return
        raise AssertionError(f"{until_told} was not told within {_TIMEOUT:g} s, only {self.told[-10:]}")

    def go_on_to(self, wanted: set[str]) -> None:
        """Read until just these events are open."""
        while self.open != wanted:
            self.see(next(self._notices))


@pytest.fixture
def relay(coordinator: ipcsync.Coordinator, client: ipcsync.Client) -> Iterator[Callable[..., Watcher]]:
    """Watches by way of a relay with a rule of its own; it is in place when it returns."""
    relays: list[Relay] = []

    def watch(passes: Callable[[Announcement], int]) -> Watcher:
        directory = coordinator.runtime_dir
        relays.append(Relay(client._session.feed_endpoint, f"ipc://{directory}/relay{len(relays)}.sock", passes))
        relays[-1].start()
        client._session.feed_endpoint = relays[-1].endpoint
        client.event("e/first", recorder=True)
        watcher = Watcher(client)
        watcher.go_on(("opened", "e/first"))  # from the snapshot
        client.event("e/second", recorder=True)
        watcher.go_on(("opened", "e/second"))  # by way of the relay, which has taken in the subscription then
        watcher.told.clear()
        return watcher

    yield watch
    for one in relays:
        one.end()


# --- row 21 -----------------------------------------------------------------------------------------------------------


def test_row_21_a_lost_change_is_made_up_for_by_a_snapshot_and_nothing_is_told_twice(
    client: ipcsync.Client, relay: Callable[..., Watcher]
) -> None:
    watcher = relay(lambda said: 0 if said.name == "e/lost" else 1)
    client.event("e/a", recorder=True)
    client.event("e/lost", recorder=True)
    client.event("e/b", recorder=True)
    watcher.go_on(("opened", "e/b"))
    while "e/lost" not in watcher.open:
        watcher.go_on(("opened", "e/lost"))
    assert sorted(watcher.told) == [("opened", f"e/{name}") for name in ("a", "b", "lost")]


def test_row_21_the_last_change_is_not_missed_though_none_follows_it(
    client: ipcsync.Client, relay: Callable[..., Watcher]
) -> None:
    watcher = relay(lambda said: 0 if said.name == "e/lost" else 1)
    client.event("e/lost", recorder=True)
    watcher.go_on(("opened", "e/lost"))
    assert watcher.told == [("opened", "e/lost")]
    assert client.stats()["resyncs"] > 0


def test_row_21_a_lost_close_is_told_once(client: ipcsync.Client, relay: Callable[..., Watcher]) -> None:
    watcher = relay(lambda said: 0 if (said.name, said.kind) == ("e/lost", "closed") else 1)
    event = client.event("e/lost", recorder=True)
    watcher.go_on(("opened", "e/lost"))
    event.close()
    client.event("e/a", recorder=True)
    watcher.go_on(("opened", "e/a"))
    assert watcher.told == [("opened", "e/lost"), ("closed", "e/lost"), ("opened", "e/a")]


def test_row_21_changes_that_come_twice_are_told_once(client: ipcsync.Client, relay: Callable[..., Watcher]) -> None:
    watcher = relay(lambda _: 3)
    resyncs = client.stats()["resyncs"]
    for number in range(10):
        client.event(f"e/{number}", recorder=True).close()
    client.event("e/a", recorder=True)
    watcher.go_on(("opened", "e/a"))
    assert client.stats()["resyncs"] == resyncs
    assert len(watcher.told) == 20 + 1


def test_row_21_any_losses_leave_the_state_right(client: ipcsync.Client, relay: Callable[..., Watcher]) -> None:
    chance = random.Random(21)
    watcher = relay(lambda said: 1 if said.kind == "tick" else chance.choice((0, 0, 1, 1, 2)))
    held: dict[str, ipcsync.SharedEvent] = {}
    for _ in range(300):
        name = f"e/{chance.randrange(12)}"
        if name in held:
            held.pop(name).close()
        else:
            held[name] = client.event(name, recorder=True)
    client.event("e/last", recorder=True)
    watcher.go_on_to({"e/first", "e/second", "e/last", *held})


# --- row 22 -----------------------------------------------------------------------------------------------------------


def _churn(client: ipcsync.Client, ending: threading.Event) -> set[str]:
    """Open and close events in one's own order until told to end; what is left open."""
    chance = random.Random(22)
    held: dict[str, ipcsync.SharedEvent] = {}
    while not ending.is_set():
        name = f"e/{chance.randrange(20)}"
        if name in held:
            held.pop(name).close()
        else:
            held[name] = client.event(name, recorder=True)
    client.event(f"e/{_END}", recorder=True)
    return set(held)


def test_row_22_subscribing_in_the_middle_of_changes_misses_none(new_client: NewClient) -> None:
    churner, reader = new_client("churner"), new_client("reader")
    ending = threading.Event()
    left: list[set[str]] = []
    churning = threading.Thread(target=lambda: left.append(_churn(churner, ending)))
    churning.start()
    watchers: list[Watcher] = []
    failed: list[BaseException] = []

    def follow(watcher: Watcher) -> None:
        try:
            watcher.go_on(("opened", f"e/{_END}"))
        except BaseException as error:
            failed.append(error)
            raise

    threads = []
    for _ in range(15):
        watchers.append(Watcher(reader))
        threads.append(threading.Thread(target=follow, args=(watchers[-1],)))
        threads[-1].start()
        until(lambda: failed or watchers[-1].told, "the new subscriber was told something")
    ending.set()
    for thread in [churning, *threads]:
        thread.join(_TIMEOUT)
    assert not failed
    assert [watcher.open for watcher in watchers] == [left[0] | {f"e/{_END}"}] * len(watchers)


class LateSubscription(threading.Thread):
    """Stands between the feed and one subscriber, and lets its subscription wait: for `passes`, at most 0.3 s."""

    def __init__(self, feed: str, own: str) -> None:
        super().__init__(daemon=True)
        self.endpoint = own
        self.passes = threading.Event()
        self._feed = feed.removeprefix("ipc://")
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(own.removeprefix("ipc://"))
        self._listening.listen()

    def run(self) -> None:
        subscriber, _ = self._listening.accept()
        publisher = socket.socket(socket.AF_UNIX)
        publisher.connect(self._feed)
        back = threading.Thread(target=_copy, args=(publisher, subscriber))
        back.start()
        _copy(subscriber, publisher, 64)  # ZMTP's greeting
        ready = subscriber.recv(2, socket.MSG_WAITALL)  # the flags of the command READY, and its length
        publisher.sendall(ready)
        _copy(subscriber, publisher, ready[1])
        self.passes.wait(0.3)
        _copy(subscriber, publisher)
        back.join(_TIMEOUT)
        for end in (self._listening, subscriber, publisher):
            end.close()


def _copy(source: socket.socket, to: socket.socket, count: int | None = None) -> None:
    """So many bytes, each as it comes; all until one of the two ends."""
    with contextlib.suppress(OSError):
        while count != 0 and (chunk := source.recv(65536 if count is None else count)):
            to.sendall(chunk)
            count = None if count is None else count - len(chunk)
        if count is None:
            to.shutdown(socket.SHUT_WR)


def test_row_22_a_snapshot_is_asked_for_once_the_subscription_is_taken_in(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client
) -> None:
    late = LateSubscription(client._session.feed_endpoint, f"ipc://{coordinator.runtime_dir}/late.sock")
    late.start()
    client._session.feed_endpoint = late.endpoint
    client.event("e/first", recorder=True)
    watcher = Watcher(client)
    watcher.go_on(("opened", "e/first"))  # from the snapshot
    client.event("e/short", recorder=True).close()
    late.passes.set()
    client.event("e/last", recorder=True)
    watcher.go_on(("opened", "e/last"))
    assert watcher.told[1:] == [("opened", "e/short"), ("closed", "e/short"), ("opened", "e/last")]


# --- row 23 -----------------------------------------------------------------------------------------------------------


def test_row_23_a_subscriber_that_stops_reading_costs_bounded_memory_and_nobody_else_anything(
    new_coordinator: NewCoordinator,
) -> None:
    coordinator = new_coordinator(feed_queue=50)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with (
        ipcsync.connect(coordinator.endpoint) as client,
        context.socket(zmq.SUB) as deaf,
    ):
        deaf.linger = 0
        deaf.rcvhwm = 1
        deaf.subscribe(b"")
        deaf.connect(f"ipc://{coordinator.runtime_dir}/feed.sock")
        paused = Watcher(client)
        client.event("e/first", recorder=True)
        paused.go_on(("opened", "e/first"))
        _announce(client, 100)
        before = resident_kib(coordinator.pid)
        _announce(client, 600)
        assert resident_kib(coordinator.pid) - before < 4 * 1024
        # The next subscriber is served as if there were no deaf one, and the one that paused catches up.
        late = Watcher(client)
        late.go_on(("opened", "e/first"))
        client.event("e/last", recorder=True)
        for watcher in (late, paused):
            watcher.go_on(("opened", "e/last"))
            assert watcher.open == {"e/first", "e/last"}
    context.term()


def _announce(client: ipcsync.Client, times: int) -> None:
    """Two announcements each time, one of them with 16 KiB of handles."""
    for _ in range(times):
        client.event("e/churned", recorder=True, engine="event", depth=256).close()


def test_row_23_a_subscription_to_more_than_a_topic_may_be_costs_no_memory(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client
) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context.socket(zmq.SUB) as wordy:
        wordy.linger = 0
        wordy.connect(f"ipc://{coordinator.runtime_dir}/feed.sock")
        before = resident_kib(coordinator.pid)
        for number in range(100):
            wordy.subscribe(number.to_bytes(4, "little") + bytes(5_000))
        watcher = Watcher(client)
        client.event("e/a", recorder=True)
        watcher.go_on(("opened", "e/a"))
        assert resident_kib(coordinator.pid) - before < 8 * 1024
    context.term()


def test_row_23_many_topics_cost_bounded_memory(coordinator: ipcsync.Coordinator, client: ipcsync.Client) -> None:
    """There are no topics: who subscribes to one is cut off. ZeroMQ keeps some memory for each of their bytes.

    Without that each would cost 24 kB, so these 140 or 470 MB. ZeroMQ takes some in before the connection is shut down.
    """
    watcher = Watcher(client)
    with zmq.Context() as context, context.socket(zmq.XSUB) as wordy:
        wordy.linger = 0
        wordy.sndhwm = 0
        wordy.connect(f"ipc://{coordinator.runtime_dir}/feed.sock")
        before = resident_kib(coordinator.pid)
        for number in range(20_000 if LONG else 6_000):
            wordy.send(b"\x01" + number.to_bytes(4, "little") + bytes(476))
        until(lambda: "topic" in client.stats()["refusals"], "it is cut off")
        client.event("e/a", recorder=True)
        watcher.go_on(("opened", "e/a"))
        assert resident_kib(coordinator.pid) - before < 64 * 1024
