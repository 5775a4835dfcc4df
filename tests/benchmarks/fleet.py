"""Between nodes: two coordinators, two bridges and a nats-server on this machine, beside bare nats-py over the server.

Both ends are on one machine, so one way is told by the clock that both share.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator
from typing import Any

import ipcsync
from ipcsync._board import layout
from ipcsync._linux.futex import Futex
from ipcsync_bench.rows import Row, at_most, below, compare, interleave, percentile
from tests.benchmarks import bare_nats
from tests.benchmarks.report import alone, at_least
from tests.benchmarks.two_nodes import WAIT_S, Fleet, connect, two_nodes
from tests.benchmarks.workers import Worker

__all__ = ["beside", "flat_out", "idle", "opening", "words"]

_PACE_S = 0.002

# --- in the workers ---------------------------------------------------------------------------------------------------


def _record(state: dict[str, Any], name: str, count: int) -> list[int]:
    """Record so many generations, at a pace; when each was begun, in ns."""
    event = state["client"].event(name, recorder=True, engine="timeline")
    stream, times = ipcsync.Stream(), []
    time.sleep(0.3)  # until who waits does
    for _ in range(count):
        times.append(time.monotonic_ns())
        event.record(stream)
        time.sleep(_PACE_S)
    event.at(count).synchronize(WAIT_S)
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


def _request(state: dict[str, Any], count: int) -> float:
    """Seconds for so many requests, one after the other."""
    began = time.perf_counter()
    for _ in range(count):
        state["client"].list_events()
    return time.perf_counter() - began


def _open_and_close(state: dict[str, Any], count: int) -> float:
    """The same for events."""
    began = time.perf_counter()
    for _ in range(count):
        state["client"].event("local", engine="timeline").close()
    return time.perf_counter() - began


def _create(state: dict[str, Any], prefix: str, count: int) -> None:
    names = [f"{prefix}/{number}" for number in range(count)]
    state[prefix] = state["client"].events(names, recorder=True, engine="timeline", timeout=WAIT_S)


def _follow(state: dict[str, Any], prefix: str, count: int) -> None:
    names = [f"{prefix}/{number}" for number in range(count)]
    state[prefix] = state["client"].events(names, engine="timeline", node="a", timeout=WAIT_S)


def _drop(state: dict[str, Any], prefix: str) -> None:
    for event in state.pop(prefix):
        event.close()


def _record_flat_out(state: dict[str, Any], prefix: str, seconds: float) -> int:
    """Generations published in so many seconds, all complete at once: the stores of a record, and its wake if need be.

    As the compiled core does it, which asks whether anybody waits; with one fence for each pass over the events.
    """
    words = state["client"]._session.lease.board.words
    lines, asked = [], []
    for event in state[prefix]:
        first_word = event._engine.line.first
        recorded, completed = first_word + layout.L_RECORDED, first_word + layout.L_COMPLETED
        lines.append((event._engine.base, recorded, completed))
        asked.append((first_word + layout.L_AWAITED, first_word + layout.L_FOLLOWED))
    wakes = [event._engine.line.futex.wake for event in state[prefix]]
    fence = Futex(ctypes.addressof(state.setdefault("nobody's", ctypes.c_uint32(0)))).wake  # the kernel has one in it
    first: int = state.get(f"last {prefix}", 0)
    until, generation = time.perf_counter() + seconds, first
    while time.perf_counter() < until:
        for _ in range(max(1, 1000 // len(lines))):
            generation += 1
            for base, recorded, completed in lines:
                words[completed] = words[recorded] = base + generation
            fence()
            for (awaited, followed), wake in zip(asked, wakes, strict=True):
                if words[awaited] or words[followed]:
                    wake()
    state[f"last {prefix}"] = generation
    return generation - first


def _await_generation(state: dict[str, Any], prefix: str, generation: int) -> None:
    for event in state[prefix]:
        event.at(generation).synchronize(WAIT_S)


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
            other.call(connect, self._fleet.endpoints["a"])
            other.begin(function, name, None, self._count)
            self._fleet.a.begin(_record, name, self._count)
            began, ended = self._fleet.a.result(), other.result()
        return _one_way(began, ended, percent)

    def bare(self, percent: float) -> float:
        """From a publish to the callback of who subscribes, with nats-py alone."""
        subject = f"bench.{self._round}"
        self._fleet.b.begin(bare_nats.hear, self._fleet.url, subject, self._count)
        self._fleet.a.begin(bare_nats.send, self._fleet.url, subject, self._count, _PACE_S)
        began, ended = self._fleet.a.result(), self._fleet.b.result()
        return _one_way(began, ended, percent)


def words(rounds: int, scale: float) -> Iterator[Row]:
    """Word on `a` to word on `b`, and a record to a stream that goes on."""
    with two_nodes() as fleet:
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
    """Generations told a second, beside messages that nats-py sends a second, and beside what is recorded unlinked.

    A generation is told when the other node knows of it or of a later one of its event, since that covers it.
    """
    seconds = max(0.5, 2.0 * scale)
    messages = max(5_000, int(50_000 * scale))
    with two_nodes() as fleet:
        for events, target in ((1000, at_least(5.0)), (1, at_least(0.5))):
            linked, unlinked = f"linked{events}", f"unlinked{events}"
            fleet.a.call(_create, linked, events)
            fleet.a.call(_create, unlinked, events)
            fleet.b.call(_follow, linked, events)
            done = [0]

            def ours(events: int = events, linked: str = linked, done: list[int] = done) -> float:
                began = time.perf_counter()
                count = fleet.a.call(_record_flat_out, linked, seconds)
                done[0] += count
                fleet.b.call(_await_generation, linked, done[0])
                return float(events * count / (time.perf_counter() - began))

            def theirs() -> float:
                times = fleet.a.call(bare_nats.send, fleet.url, "bench.flat", messages, 0.0)
                return 1e9 * messages / float(times[-1] - times[0])

            def recorder(events: int = events, unlinked: str = unlinked) -> float:
                return float(events * fleet.a.call(_record_flat_out, unlinked, seconds) / seconds)

            contest = {"ipcsync": ours, "nats-py": theirs, "recorder, unlinked": recorder}
            yield from compare(f"{events} events flat out", interleave(contest, rounds), "1/s", {"nats-py": target})
            fleet.b.call(_drop, linked)
            for prefix in (linked, unlinked):
                fleet.a.call(_drop, prefix)


def opening(rounds: int, scale: float) -> Iterator[Row]:
    """Opening a name of another node, beside a bare request with its reply and a local opening."""
    count = max(10, int(50 * scale))
    with two_nodes() as fleet:
        numbers = iter(range(10_000))

        def remote() -> float:
            return _median_us(fleet.b.call(_open, f"open{next(numbers)}", count, "a", False))

        def bare() -> float:
            fleet.a.begin(bare_nats.answer, fleet.url, "bench.ask", count)
            asked = fleet.b.call(bare_nats.ask, fleet.url, "bench.ask", count)
            fleet.a.result()
            return _median_us(asked) + local()

        def local() -> float:
            return _median_us(fleet.b.call(_open, f"local{next(numbers)}", count, None, False))

        figures = interleave({"ipcsync": remote, "request + local": bare}, rounds)
        yield from compare("open a remote name", figures, "us", {"request + local": at_most(3.0)})

        def hundred(node: str | None = "a") -> float:
            return _median_us(fleet.b.call(_open, f"many{next(numbers)}", 100, node, True))

        contest = {"ipcsync": hundred, "one of them": remote, "100 on one node": lambda: hundred(None)}
        figures = interleave(contest, rounds)
        yield from compare("open 100 remote names", figures, "us", {"one of them": at_most(5.0)})


def idle(rounds: int, scale: float) -> Iterator[Row]:
    """What the bridges take while nothing happens."""
    seconds = max(2.0, 10.0 * scale)
    with two_nodes() as fleet:
        for events, limit in ((0, 1.0), (1000, 1.0)):
            if events:
                fleet.a.call(_create, "idle", events)
                fleet.b.call(_follow, "idle", events)
            for name in ("a", "b"):
                shares = [_share(fleet.bridges[name].pid, seconds) for _ in range(rounds)]
                what = f"{events} linked events" if events else "nothing linked"
                yield alone(f"bridge {name}, idle, {what}", shares, "% of a core", below(limit, "% of a core"))


def beside(rounds: int, scale: float) -> Iterator[Row]:
    """What a node with a bridge does locally, beside one without: requests, and events, of which its bridge hears."""
    count = max(50, int(500 * scale))
    with two_nodes() as fleet, ipcsync.launch(log_level="error", lease_ttl=30) as alone, Worker() as other:
        other.call(connect, alone.endpoint)
        workers = {"ipcsync": fleet.a, "without a bridge": other}
        for what, function in (("requests", _request), ("events opened and closed", _open_and_close)):
            contest = {
                peer: lambda worker=worker, function=function: count / worker.call(function, count)
                for peer, worker in workers.items()
            }
            figures = interleave(contest, rounds)
            yield from compare(f"local {what} of a node", figures, "1/s", {"without a bridge": at_least(0.95)})


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
