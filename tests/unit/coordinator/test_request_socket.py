"""The coordinator's request socket: every request is answered, no edge is lost, and no reply is held for long."""

from __future__ import annotations

import asyncio
import select
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from ipcsync_coordinator.gate import Sender, StrikeCounter
from ipcsync_coordinator.requests import Requests
from ipcsync_coordinator.server import Server
from ipcsync_keeper.config import Settings

_WAIT_MS = 20_000
_AT_ONCE = "inproc://requests"  # no thread between: what was sent is there


class Answers:
    """In the dispatcher's place: each frame comes back, after `at_each(how many came before)`."""

    def __init__(self) -> None:
        self.count = 0
        self.is_one_of_many = False
        self.strikes = StrikeCounter(100)
        self.at_each: Callable[[int], None] = lambda _: None

    def handle(self, frame: bytes, _sender: Sender, _now_ns: int) -> bytes:
        """The reply, which is the request."""
        self.at_each(self.count)
        self.count += 1
        return frame


class Served:
    """A bound socket with who answers on it, and whom it refused."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self.context = context
        self.endpoint = endpoint
        self.refused: list[str] = []
        self.answers = Answers()
        router = context.socket(zmq.ROUTER)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.bind(endpoint)
        router.bind(_AT_ONCE)
        answers: Any = self.answers
        self.sockets = [router]
        self.has_news = False
        self.told: list[int] = []  # how many requests had been answered whenever others were told
        self.requests = Requests(
            router,
            Settings(),
            answers,
            self._refuse,
            SimpleNamespace(flush=lambda: self.told.append(self.answers.count), has_any=lambda: self.has_news),  # type: ignore[arg-type] # as much of a feed as it needs
        )

    def _refuse(self, reason: str, **_: object) -> None:
        self.refused.append(reason)

    def client(self, endpoint: str = "") -> zmq.Socket[bytes]:
        """A connected DEALER."""
        dealer = self.context.socket(zmq.DEALER)
        dealer.connect(endpoint or self.endpoint)
        dealer.rcvtimeo = _WAIT_MS
        self.sockets.append(dealer)
        return dealer

    def serve(self, is_over: Callable[[], bool]) -> None:
        """As the coordinator's loop does, but with no tick that would find what an edge did not tell."""
        poll = select.poll()
        poll.register(int(self.requests.socket.fd), select.POLLIN)
        while not is_over():
            if not self.requests.drain() and not is_over():
                assert poll.poll(_WAIT_MS), "a request is there, and no edge told of it"


@pytest.fixture
def served(tmp_path: Any) -> Iterator[Served]:
    """A socket of the test's own."""
    with zmq.Context() as context:
        served = Served(context, f"ipc://{tmp_path}/requests.sock")
        yield served
        for socket in served.sockets:
            socket.close(linger=0)


def _arrived(socket: zmq.Socket[bytes]) -> int:
    """How many replies there are, which are read."""
    count = 0
    while socket.poll(0):
        socket.recv()
        count += 1
    return count


def _pipeline(socket: zmq.Socket[bytes], count: int, window: int) -> list[bytes]:
    replies = []
    for number in range(count + window):
        if number >= window:
            replies.append(socket.recv())
        if number < count:
            socket.send(b"%d" % number)
    return replies


@pytest.mark.parametrize("clients", [1, 4])
def test_every_request_of_many_in_flight_is_answered_in_order_and_no_edge_is_lost(served: Served, clients: int) -> None:
    count = 5000 // clients
    found: list[list[bytes]] = []
    sockets = [served.client() for _ in range(clients)]
    threads = [
        threading.Thread(target=lambda socket=socket: found.append(_pipeline(socket, count, 64))) for socket in sockets
    ]
    for thread in threads:
        thread.start()
    served.serve(lambda: served.answers.count == count * clients)
    for thread in threads:
        thread.join(_WAIT_MS / 1000)
    assert found == [[b"%d" % number for number in range(count)]] * clients
    assert served.refused == []


def test_replies_behind_the_first_are_held_no_longer_than_was_said(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, now_ns, found = served.client(_AT_ONCE), [5_000_000], []
    monkeypatch.setattr("ipcsync_coordinator.requests.time.monotonic_ns", lambda: now_ns[0])

    def work(_: int) -> None:
        """A request that takes 0.9 ms; what its client has got until then."""
        found.append([client.recv() for _ in iter(lambda: client.poll(0), 0)])
        now_ns[0] += 900_000

    served.answers.at_each = work
    for number in range(6):
        client.send(b"%d" % number)
    served.serve(lambda: served.answers.count == 6)
    found.append([client.recv(), client.recv()])
    # The first request of a drain is served alone. Of those behind it, each 2 ms, the first one's reply goes at once.
    assert found == [[], [b"0"], [b"1"], [b"2"], [b"3"], [], [b"4", b"5"]]


def test_of_several_clients_each_ones_first_reply_is_sent_at_once(served: Served) -> None:
    clients = [served.client(_AT_ONCE) for _ in range(3)]
    found: list[bool] = []
    served.answers.at_each = lambda _: found.append(bool(sum(client.poll(0) for client in clients)))
    for client in clients:
        client.send(b"request")
    served.serve(lambda: served.answers.count == 3)
    assert found == [False, True, True]
    assert [client.recv() for client in clients] == [b"request"] * 3


def test_replies_to_calls_that_wait_for_many_are_held_until_there_are_several_and_no_others(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ns = 5_000_000
    monkeypatch.setattr("ipcsync_coordinator.requests.time.monotonic_ns", lambda: now_ns)
    monkeypatch.setattr("ipcsync_coordinator.requests._LONGEST_NS", 10**9)  # one drain
    clients = [served.client(_AT_ONCE) for _ in range(3)]
    rounds = 20
    found: list[list[int]] = []

    def work(_: int) -> None:
        """A request that takes 2 ms; how many replies each client has got until then. The last client sends singly."""
        nonlocal now_ns
        found.append([_arrived(client) for client in clients])
        now_ns += 2_100_000
        served.answers.is_one_of_many = served.answers.count % len(clients) != len(clients) - 1

    served.answers.at_each = work
    for number in range(rounds):
        for client in clients:
            client.send(b"%d" % number)
    served.serve(lambda: served.answers.count == rounds * len(clients))
    found.append([_arrived(client) for client in clients])
    first, second, alone = ([count for count in counts if count] for counts in zip(*found, strict=True))
    assert first == [1, 16, 1, 2], "the drain's first reply of all, and one behind several, goes at once"
    assert second == [1, 16, 3]
    assert alone == [1] * rounds


@pytest.mark.parametrize("has_news", [False, True])
def test_replies_to_calls_that_wait_for_many_are_not_held_while_others_are_to_be_told_of_something(
    served: Served, monkeypatch: pytest.MonkeyPatch, has_news: bool
) -> None:
    now_ns = 5_000_000
    monkeypatch.setattr("ipcsync_coordinator.requests.time.monotonic_ns", lambda: now_ns)
    clients = [served.client(_AT_ONCE) for _ in range(3)]
    served.answers.is_one_of_many, served.has_news = True, has_news

    def work(_: int) -> None:
        nonlocal now_ns
        now_ns += 2_100_000

    served.answers.at_each = work
    for _ in range(3):
        for client in clients:
            client.send(b"request")
    served.serve(lambda: served.answers.count == 9)
    assert [_arrived(client) for client in clients] == [3, 3, 3]
    while_it_drained = [count for count in served.told if 1 < count < 9]
    assert while_it_drained == ([2, 3, 4, 5, 6, 7, 8] if has_news else [])


def test_a_reply_to_who_is_gone_keeps_none_from_the_others(served: Served) -> None:
    gone, other = served.client(), served.client()
    seen = threading.Event()

    def leave(count: int) -> None:
        if count == 1:
            gone.close()
            seen.set()

    served.answers.at_each = leave
    gone.send(b"from who is gone")
    served.serve(lambda: served.answers.count == 1)
    assert gone.recv() == b"from who is gone"
    gone.send(b"again")
    other.send(b"from the other")
    served.serve(lambda: served.answers.count == 3)
    assert other.recv() == b"from the other"
    assert seen.is_set()


def test_a_drain_ends_after_a_moment_however_long_its_requests_take(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, now_ns = served.client(_AT_ONCE), 5_000_000
    monkeypatch.setattr("ipcsync_coordinator.requests.time.monotonic_ns", lambda: now_ns)

    def work(_: int) -> None:
        nonlocal now_ns
        now_ns += 20_000_000

    served.answers.at_each = work
    for number in range(10):
        client.send(b"%d" % number)
    assert served.requests.drain()
    assert served.answers.count == 1 + 3
    served.serve(lambda: served.answers.count == 10)
    assert [client.recv() for _ in range(10)] == [b"%d" % number for number in range(10)]


def test_in_a_flood_ticks_begin_no_further_drains() -> None:
    server, due = Server.__new__(Server), list[Callable[[], None]]()
    fake: Any = server
    fake._done, fake._is_drain_due = asyncio.Event(), False
    fake._requests = SimpleNamespace(drain=lambda: True)
    fake._loop = SimpleNamespace(call_soon=lambda *call: due.append(partial(*call)))
    for _ in range(3):
        server._drain_requests()
    assert len(due) == 1
    due.pop()()
    assert len(due) == 1
