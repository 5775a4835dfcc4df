"""Between nodes: two coordinators, two bridges and a nats-server on this machine, beside bare nats-py over the server.

Both ends are on one machine, so one way is told by the clock that both share.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import ipcsync
from ipcsync_bench.rows import Row, alone, at_least, at_most, below, compare, interleave, percentile
from ipcsync_bench.workers import Worker

_PACE_S = 0.002
_WAIT_S = 30.0


def why_not() -> str | None:
    """Why none of this can be measured here, None if it can."""
    try:
        import nats  # noqa: F401 - whether it is there
    except ModuleNotFoundError:
        return "nats-py is not installed (the extra ipcsync[fleet])"
    return None if _program() else "there is no nats-server"


def _program() -> str | None:
    return shutil.which("nats-server", path=f"{os.environ.get('PATH', '')}:/usr/sbin")


# --- two nodes --------------------------------------------------------------------------------------------------------


@contextmanager
def _server() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    program = _program()
    assert program is not None
    with tempfile.TemporaryDirectory() as store:
        process = subprocess.Popen(
            [program, "-js", "-sd", store, "-a", "127.0.0.1", "-p", str(port)], stderr=subprocess.DEVNULL
        )
        try:
            yield f"nats://127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()


class Fleet:
    """Nodes `a` and `b` with a worker each: the worker on `a` records, the one on `b` waits."""

    def __init__(self, stack: ExitStack) -> None:
        self.url = stack.enter_context(_server())
        self.bridges: dict[str, subprocess.Popen[bytes]] = {}
        self.endpoints = {name: self._node(stack, name) for name in ("a", "b")}
        self.a, self.b = stack.enter_context(Worker()), stack.enter_context(Worker())
        self.a.call(_connect, self.endpoints["a"])
        self.b.call(_connect, self.endpoints["b"])

    def _node(self, stack: ExitStack, name: str) -> str:
        coordinator = stack.enter_context(ipcsync.launch(log_level="error", lease_ttl=30))
        command = [sys.executable, "-m", "ipcsync_bridge", "--node", name, "--nats", self.url]
        command += ["--runtime-dir", coordinator.runtime_dir, "--log-level", "error", "--link-ttl", "30"]
        bridge = self.bridges[name] = subprocess.Popen(command)
        stack.callback(bridge.wait)
        stack.callback(bridge.terminate)
        with ipcsync.connect(coordinator.endpoint) as client:
            deadline = time.monotonic() + _WAIT_S
            while not _answers(client) and time.monotonic() < deadline:
                time.sleep(0.05)
        return coordinator.endpoint


def _answers(client: ipcsync.Client) -> bool:
    try:
        return bool(client.nodes())
    except (ipcsync.NoBridge, ipcsync.FleetUnavailable):
        return False


@contextmanager
def _fleet() -> Iterator[Fleet]:
    with ExitStack() as stack:
        yield Fleet(stack)


# --- in the workers ---------------------------------------------------------------------------------------------------


def _connect(state: dict[str, Any], endpoint: str) -> None:
    state["client"] = ipcsync.connect(endpoint, timeout=_WAIT_S)
    state["client"].timeout = _WAIT_S


def _record(state: dict[str, Any], name: str, count: int) -> list[int]:
    """Record so many generations, at a pace; when each was begun, in ns."""
    event = state["client"].event(name, recorder=True, engine="timeline")
    stream, times = ipcsync.Stream(), []
    time.sleep(0.3)  # until who waits does
    for _ in range(count):
        times.append(time.monotonic_ns())
        event.record(stream)
        time.sleep(_PACE_S)
    event.at(count).synchronize(_WAIT_S)
    state["keep"] = event
    return times


def _await_words(state: dict[str, Any], name: str, node: str | None, count: int) -> list[int]:
    """When each generation was seen to be recorded, in ns."""
    times = []
    with state["client"].event(name, engine="timeline", **_at(node)) as event:
        engine = event._engine
        for generation in range(1, count + 1):
            engine.await_recorded(generation, 1 << 62, None)
            times.append(time.monotonic_ns())
    return times


def _await_streams(state: dict[str, Any], name: str, node: str | None, count: int) -> list[int]:
    """When a stream that had waited for each generation was past it, in ns."""
    stream, times = ipcsync.Stream(), []
    with state["client"].event(name, engine="timeline", **_at(node)) as event:
        for generation in range(1, count + 1):
            event.at(generation).wait(stream, ahead=True)
            stream.synchronize()
            times.append(time.monotonic_ns())
    return times


def _at(node: str | None) -> dict[str, str]:
    return {} if node is None else {"node": node}


def _nats_send(_state: dict[str, Any], url: str, subject: str, count: int, pace_s: float) -> list[int]:
    async def run() -> list[int]:
        import nats

        client = await nats.connect(url)
        await asyncio.sleep(0.3)
        times = []
        for _ in range(count):
            times.append(time.monotonic_ns())
            await client.publish(subject, b"x" * 64)
            if pace_s:
                await client._flush_pending()
                await asyncio.sleep(pace_s)
        await client.flush(timeout=60)
        times.append(time.monotonic_ns())
        await client.close()
        return times

    return asyncio.run(run())


def _nats_hear(_state: dict[str, Any], url: str, subject: str, count: int) -> list[int]:
    async def run() -> list[int]:
        import nats

        client = await nats.connect(url)
        times: list[int] = []
        done = asyncio.Event()

        async def hear(_message: object) -> None:
            times.append(time.monotonic_ns())
            if len(times) == count:
                done.set()

        await client.subscribe(subject, cb=hear)
        await client.flush()
        await asyncio.wait_for(done.wait(), _WAIT_S)
        await client.close()
        return times

    return asyncio.run(run())


def _nats_answer(_state: dict[str, Any], url: str, subject: str, count: int) -> None:
    async def run() -> None:
        import nats

        client = await nats.connect(url)
        seen = 0
        done = asyncio.Event()

        async def answer(message: Any) -> None:
            nonlocal seen
            await message.respond(b"y" * 64)
            seen += 1
            if seen == count:
                done.set()

        await client.subscribe(subject, cb=answer)
        await client.flush()
        await asyncio.wait_for(done.wait(), _WAIT_S)
        await client.flush()
        await client.close()

    asyncio.run(run())


def _nats_ask(_state: dict[str, Any], url: str, subject: str, count: int) -> list[float]:
    async def run() -> list[float]:
        import nats

        client = await nats.connect(url)
        await asyncio.sleep(0.3)
        times = []
        for _ in range(count):
            began = time.perf_counter()
            await client.request(subject, b"x" * 64, timeout=10)
            times.append(time.perf_counter() - began)
        await client.close()
        return times

    return asyncio.run(run())


def _open(state: dict[str, Any], prefix: str, count: int, node: str | None, together: bool) -> list[float]:
    """Seconds to open events, each, or (`together`) all at once."""
    client, times, opened = state["client"], [], []
    names = [f"{prefix}/{number}" for number in range(count)]
    if together:
        began = time.perf_counter()
        opened = client.events(names, engine="timeline", **_at(node))
        times.append(time.perf_counter() - began)
    else:
        for name in names:
            began = time.perf_counter()
            opened.append(client.event(name, engine="timeline", **_at(node)))
            times.append(time.perf_counter() - began)
    for event in opened:
        event.close()
    return times


def _create(state: dict[str, Any], prefix: str, count: int) -> None:
    names = [f"{prefix}/{number}" for number in range(count)]
    state["many"] = state["client"].events(names, recorder=True, engine="timeline", timeout=_WAIT_S)


def _follow(state: dict[str, Any], prefix: str, count: int) -> None:
    names = [f"{prefix}/{number}" for number in range(count)]
    state["many"] = state["client"].events(names, engine="timeline", node="a", timeout=_WAIT_S)


def _drop(state: dict[str, Any]) -> None:
    for event in state.pop("many"):
        event.close()


def _record_flat_out(state: dict[str, Any], seconds: float) -> int:
    """Generations published in so many seconds, all complete at once: as fast as words can be stored."""
    lines = [(event._engine.line, event._engine.base) for event in state["many"]]
    until, generation = time.perf_counter() + seconds, 0
    while time.perf_counter() < until:
        for _ in range(max(1, 1000 // len(lines))):
            generation += 1
            for line, base in lines:
                line.store_completed(base + generation)
                line.publish(base + generation)
                line.futex.wake()
    return generation


def _await_generation(state: dict[str, Any], generation: int) -> None:
    for event in state["many"]:
        event.at(generation).synchronize(_WAIT_S)


# --- the benchmarks ---------------------------------------------------------------------------------------------------


def _one_way(began: list[int], ended: list[int], percent: float) -> float:
    return percentile([(end - begin) / 1e3 for begin, end in zip(began, ended, strict=False)], percent)


class _Ways:
    """One way by each contestant: seconds at a percentage, with the last run's times kept for another percentage."""

    def __init__(self, fleet: Fleet, count: int) -> None:
        self._fleet = fleet
        self._count = count
        self._round = 0

    def _name(self, what: str) -> str:
        self._round += 1
        return f"{what}/{self._round}"

    def between_nodes(self, function: Any, percent: float) -> float:
        """From a record on `a` to what `function` sees on `b`, in µs."""
        name = self._name("way")
        self._fleet.b.begin(function, name, "a", self._count)
        self._fleet.a.begin(_record, name, self._count)
        began, ended = self._fleet.a.result(), self._fleet.b.result()
        return _one_way(began, ended, percent)

    def on_one_node(self, function: Any, percent: float) -> float:
        """The same between two processes of one node."""
        name = self._name("home")
        with Worker() as other:
            other.call(_connect, self._fleet.endpoints["a"])
            other.begin(function, name, None, self._count)
            self._fleet.a.begin(_record, name, self._count)
            began, ended = self._fleet.a.result(), other.result()
        return _one_way(began, ended, percent)

    def bare(self, percent: float) -> float:
        """From a publish to the callback of who subscribes, with nats-py alone."""
        subject = f"bench.{self._round}"
        self._fleet.b.begin(_nats_hear, self._fleet.url, subject, self._count)
        self._fleet.a.begin(_nats_send, self._fleet.url, subject, self._count, _PACE_S)
        began, ended = self._fleet.a.result(), self._fleet.b.result()
        return _one_way(began, ended, percent)


def words(rounds: int, scale: float) -> Iterator[Row]:
    """Word on `a` to word on `b`, and a record to a stream that goes on."""
    with _fleet() as fleet:
        ways = _Ways(fleet, max(50, int(500 * scale)))
        for percent, target in ((50.0, at_most(2.0)), (99.0, at_most(3.0))):
            contest = {
                "ipcsync": lambda p=percent: ways.between_nodes(_await_words, p),
                "nats-py": lambda p=percent: ways.bare(p),
            }
            figures = interleave(contest, rounds)
            yield from compare(f"word to word, p{percent:g}", figures, "us", {"nats-py": target})
        streams = {
            "ipcsync": lambda: ways.between_nodes(_await_streams, 50.0),
            "nats-py + 2 local": lambda: ways.bare(50.0) + 2 * ways.on_one_node(_await_streams, 50.0),
        }
        figures = interleave(streams, rounds)
        yield from compare("record to stream, p50", figures, "us", {"nats-py + 2 local": at_most(1.5)})


def flat_out(rounds: int, scale: float) -> Iterator[Row]:
    """Generations told a second, beside messages that nats-py sends a second."""
    seconds = max(0.5, 2.0 * scale)
    messages = max(5_000, int(50_000 * scale))
    with _fleet() as fleet:
        for events, target in ((1000, at_least(5.0)), (1, at_least(0.5))):
            fleet.a.call(_create, f"flat{events}", events)
            fleet.b.call(_follow, f"flat{events}", events)
            done = [0]

            def ours(events: int = events, done: list[int] = done) -> float:
                began = time.perf_counter()
                generation = fleet.a.call(_record_flat_out, seconds)
                last = done[0] = max(done[0], generation)
                fleet.b.call(_await_generation, last)
                return float(events * generation / (time.perf_counter() - began))

            def theirs() -> float:
                times = fleet.a.call(_nats_send, fleet.url, "bench.flat", messages, 0.0)
                return 1e9 * messages / float(times[-1] - times[0])

            contest = {"ipcsync": ours, "nats-py": theirs}
            yield from compare(f"{events} events flat out", interleave(contest, rounds), "1/s", {"nats-py": target})
            fleet.b.call(_drop)
            fleet.a.call(_drop)


def opening(rounds: int, scale: float) -> Iterator[Row]:
    """Opening a name of another node, beside a bare request with its reply and a local opening."""
    count = max(10, int(50 * scale))
    with _fleet() as fleet:
        numbers = iter(range(10_000))

        def remote() -> float:
            return _median_us(fleet.b.call(_open, f"open{next(numbers)}", count, "a", False))

        def bare() -> float:
            fleet.a.begin(_nats_answer, fleet.url, "bench.ask", count)
            asked = fleet.b.call(_nats_ask, fleet.url, "bench.ask", count)
            fleet.a.result()
            return _median_us(asked) + local()

        def local() -> float:
            return _median_us(fleet.b.call(_open, f"local{next(numbers)}", count, None, False))

        figures = interleave({"ipcsync": remote, "request + local": bare}, rounds)
        yield from compare("open a remote name", figures, "us", {"request + local": at_most(3.0)})

        def hundred() -> float:
            return _median_us(fleet.b.call(_open, f"many{next(numbers)}", 100, "a", True))

        figures = interleave({"ipcsync": hundred, "one of them": remote}, rounds)
        yield from compare("open 100 remote names", figures, "us", {"one of them": at_most(5.0)})


def idle(rounds: int, scale: float) -> Iterator[Row]:
    """What the bridges take while nothing happens."""
    seconds = max(2.0, 10.0 * scale)
    with _fleet() as fleet:
        for events, limit in ((0, 1.0), (1000, 1.0)):
            if events:
                fleet.a.call(_create, "idle", events)
                fleet.b.call(_follow, "idle", events)
            for name in ("a", "b"):
                shares = [_share(fleet.bridges[name].pid, seconds) for _ in range(rounds)]
                what = f"{events} linked events" if events else "nothing linked"
                yield alone(f"bridge {name}, idle, {what}", shares, "% of a core", below(limit, "% of a core"))


def _median_us(seconds: list[float]) -> float:
    return 1e6 * percentile(seconds, 50)


def _share(pid: int, seconds: float) -> float:
    """Per cent of a core that a process took in so many seconds."""
    before, began = _cpu_s(pid), time.monotonic()
    time.sleep(seconds)
    return 100 * (_cpu_s(pid) - before) / (time.monotonic() - began)


def _cpu_s(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        parts = file.read().rpartition(")")[2].split()
    return (int(parts[11]) + int(parts[12])) / os.sysconf("SC_CLK_TCK")
