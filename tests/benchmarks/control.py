"""The control plane: requests, round trips, opening and closing, announcements."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import zmq

import ipcsync
from ipcsync._wire import codec, messages
from ipcsync_bench.rows import Row, at_most, compare, interleave, percentile
from tests.benchmarks.peers import Echo, Manager, ManagerCallers, Redis, RedisConnection, manager_table
from tests.benchmarks.report import at_least
from tests.benchmarks.workers import Workers

_FOREVER = 1 << 62
_MOST_THREADS = 1000  # of a Manager's server, one a connection: 2,000 do nothing in minutes but wait for its GIL

# --- in a worker ------------------------------------------------------------------------------------------------------


def _connect(state: dict[str, Any], endpoint: str, echo: str, redis: str, manager: Any) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    client = ipcsync.connect(endpoint)
    state.update(client=client, ids=itertools.count(1 << 40))
    for name, where in (("raw", endpoint), ("echo", echo)):
        state[name] = context.socket(zmq.DEALER)
        state[name].linger = 0
        state[name].connect(where)
    if redis:
        state["redis"] = RedisConnection(redis)
    state["table"] = manager_table(manager)


def _pipelined(send: Callable[[], None], receive: Callable[[], object], count: int, window: int) -> float:
    start = time.perf_counter()
    sent = min(window, count)
    for _ in range(sent):
        send()
    for _ in range(count):
        receive()
        if sent < count:
            send()
            sent += 1
    return time.perf_counter() - start


def _request_frame(state: dict[str, Any]) -> bytes:
    """What `client.list_events` sends."""
    number = next(state["ids"])  # also in the deadline, as those of separate calls differ
    return codec.encode_request(number, messages.ListEvents(), state["client"]._session.token, _FOREVER + number)


def _flow(state: dict[str, Any], peer: str, count: int, window: int) -> float:
    """Seconds for `count` requests, `window` in flight."""
    if peer == "ipcsync":
        raw = state["raw"]

        def receive() -> None:
            codec.decode_reply(raw.recv())

        return _pipelined(lambda: raw.send(_request_frame(state)), receive, count, window)
    if peer == "bare ROUTER/DEALER":
        echo, frame = state["echo"], _request_frame(state)
        return _pipelined(lambda: echo.send(frame), echo.recv, count, window)
    if peer == "Redis":
        redis = state["redis"]
        return _pipelined(lambda: redis.send(b"SET", b"lease", b"x" * 24), redis.receive, count, window)
    table = state["table"]
    if window == 1:
        return _pipelined(lambda: None, lambda: table.renew(1), count, 1)
    return float(state["callers"].call(count // window))


def _open_callers(state: dict[str, Any], window: int) -> None:
    if "callers" not in state:
        state["callers"] = ManagerCallers(state["table"], window)


def _round_trips(state: dict[str, Any], peer: str, count: int) -> list[float]:
    """Seconds of each of `count` round trips, one in flight."""
    if peer == "ipcsync":
        once = state["client"].list_events
    else:

        def once() -> None:
            _flow(state, peer, 1, 1)

    times = []
    for _ in range(count):
        start = time.perf_counter()
        once()
        times.append(time.perf_counter() - start)
    return times


def _open_and_close(state: dict[str, Any], count: int) -> float:
    client = state["client"]
    start = time.perf_counter()
    for number in range(count):
        client.event(f"bench/{number}", recorder=True, engine="event", depth=1).close()
    return time.perf_counter() - start


def _subscribe(state: dict[str, Any], feed: str, sockets: int) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    for number in range(sockets):
        socket = state[f"{feed}/{number}"] = context.socket(zmq.SUB)
        socket.linger = 0
        socket.connect(feed)
        socket.subscribe(b"")


def _arrivals(state: dict[str, Any], feed: str, sockets: int, mark: bytes, seconds: float) -> list[float]:
    """When an announcement that holds `mark` came to each socket that it came to within `seconds`.

    On the clock that all processes share.
    """
    deadline = time.monotonic() + seconds
    poller = zmq.Poller()
    waiting = {state[f"{feed}/{number}"] for number in range(sockets)}
    for socket in waiting:
        poller.register(socket, zmq.POLLIN)
    times = []
    while waiting and (left := deadline - time.monotonic()) > 0:
        for socket, _ in poller.poll(int(left * 1000) + 1):
            if mark in socket.recv():
                times.append(time.monotonic())
                poller.unregister(socket)
                waiting.discard(socket)
    return times


# --- rows -------------------------------------------------------------------------------------------------------------


class Control:
    """Servers and workers that the rows of the control plane share."""

    def __init__(self, clients: int, stack: ExitStack) -> None:
        self.coordinator = stack.enter_context(ipcsync.launch(log_level="warning", max_sessions=256))
        self.echo = stack.enter_context(closing(Echo()))
        self.manager = stack.enter_context(closing(Manager()))
        self.redis = stack.enter_context(closing(Redis())) if Redis.is_installed() else None
        self.workers = stack.enter_context(Workers(clients))
        redis = self.redis.path if self.redis else ""
        endpoints = (self.coordinator.endpoint, self.echo.endpoint, redis)
        self.workers.together(clients, _connect, *endpoints, self.manager.token)
        self.peers = ["ipcsync", "bare ROUTER/DEALER", "multiprocessing.Manager", *(["Redis"] if redis else [])]

    def rate(self, peer: str, clients: int, count: int, window: int) -> float:
        """Requests a second of all clients together."""
        if peer == "multiprocessing.Manager" and window > 1:
            count = max(4, count // 4 // window) * window
            self.workers.together(clients, _open_callers, window)
        start = time.perf_counter()
        self.workers.together(clients, _flow, peer, count, window)
        return clients * count / (time.perf_counter() - start)


def rates(rounds: int, scale: float) -> Iterator[Row]:
    """Requests a second, of the cheapest kind that each side has."""
    with ExitStack() as stack:
        control = Control(32, stack)
        for clients in (1, 8, 32):
            for window in (1, 64):
                count = max(100, int(scale * (4000 if window == 1 else 50_000) / clients))
                peers = list(control.peers)
                if clients * window > _MOST_THREADS:
                    peers.remove("multiprocessing.Manager")
                contest = {
                    peer: lambda peer=peer: control.rate(peer, clients, count, window)  # noqa: B023 - called at once
                    for peer in peers
                }
                targets = {"bare ROUTER/DEALER": at_least(0.6), "multiprocessing.Manager": at_least(5)}
                name = f"requests, {clients} clients, {window} in flight"
                yield from compare(name, interleave(contest, rounds), "requests/s", targets)


def round_trip(rounds: int, scale: float) -> Iterator[Row]:
    """One request in flight: p50 and p99."""
    with ExitStack() as stack:
        control = Control(1, stack)
        worker = control.workers.all[0]
        count = max(200, int(2000 * scale))
        contest = {peer: partial(worker.call, _round_trips, peer, count) for peer in control.peers}
        times = interleave(contest, rounds)
        for percent, limit in ((50, 1.5), (99, 2.0)):
            figures = {peer: [percentile(run, percent) * 1e6 for run in runs] for peer, runs in times.items()}
            yield from compare(f"round trip p{percent}", figures, "µs", {"bare ROUTER/DEALER": at_most(limit)})


def open_close(rounds: int, scale: float) -> Iterator[Row]:
    """Open a named event and close it: two requests, held against two bare ones."""
    with ExitStack() as stack:
        control = Control(1, stack)
        worker = control.workers.all[0]
        count = max(100, int(1000 * scale))
        contest = {
            "ipcsync": lambda: count / worker.call(_open_and_close, count),
            "bare ROUTER/DEALER": lambda: count / worker.call(_flow, "bare ROUTER/DEALER", 2 * count, 1),
        }
        targets = {"bare ROUTER/DEALER": at_least(0.35)}
        yield from compare("open and close a named event", interleave(contest, rounds), "pairs/s", targets)


def fan_out(rounds: int, scale: float) -> Iterator[Row]:
    """From a request to its announcement at the last of 32 subscribers."""
    processes, sockets = 4, 8
    with ExitStack() as stack:
        control = Control(processes, stack)
        client = stack.enter_context(ipcsync.connect(control.coordinator.endpoint))
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        bare = stack.enter_context(closing(context.socket(zmq.DEALER)))
        bare.connect(control.echo.endpoint)
        feeds = {"ipcsync": client._session.feed_endpoint, "bare PUB/SUB": control.echo.feed}
        for feed in feeds.values():
            control.workers.together(processes, _subscribe, feed, sockets)
        numbers = itertools.count()
        count = max(20, int(100 * scale))

        def announce(peer: str, seconds: float) -> list[float]:
            mark = b"fan-%08d" % next(numbers)
            for worker in control.workers.all:
                worker.begin(_arrivals, feeds[peer], sockets, mark, seconds)
            start = time.monotonic()
            if peer == "ipcsync":
                client.event(mark.decode(), engine="event", depth=1).close()
            else:
                bare.send(b"!" + mark)
                bare.recv()
            return [arrival - start for worker in control.workers.all for arrival in worker.result()]

        def measure(peer: str) -> float:
            delays = [delay for _ in range(count) for delay in announce(peer, 10.0)]
            assert len(delays) == count * processes * sockets
            return percentile(delays, 99) * 1e6

        contest = {peer: lambda peer=peer: measure(peer) for peer in feeds}
        for peer in feeds:
            if not any(len(announce(peer, 0.2)) == processes * sockets for _ in range(100)):
                raise RuntimeError(f"not all subscriptions to {peer} arrived")
        targets = {"bare PUB/SUB": at_most(1.5)}
        yield from compare("announcement to 32 subscribers, p99", interleave(contest, rounds), "µs", targets)
