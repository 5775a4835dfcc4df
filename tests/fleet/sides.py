"""Every way to wait for a point, at once: on the host, by a stream, by asking, by a callback, and from asyncio."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import ipcsync
from tests.kit.until import DEADLINE_S, until

WAYS = ("host", "stream", "query", "callback", "asyncio")


class End(NamedTuple):
    """How a wait ended: "complete" or an error's class, its reason or cause, and when by CLOCK_MONOTONIC."""

    what: str
    why: str
    at: float


def end_of(wait: Callable[[], object]) -> End:
    """What comes of a wait."""
    what, why = "complete", ""
    try:
        wait()
    except ipcsync.NodeLost as error:
        what, why = "NodeLost", str(error.reason)
    except ipcsync.RecorderLost as error:
        what, why = "RecorderLost", str(error.cause)
    except ipcsync.IpcSyncError as error:
        what = type(error).__name__
    return End(what, why, time.monotonic())


class Sides:
    """Waits for one point of an event, begun by the time that this is made."""

    def __init__(
        self, client: ipcsync.Client, event: ipcsync.SharedEvent, generation: int, ways: tuple[str, ...] = WAYS
    ) -> None:
        self._endpoint = client.endpoint
        self._point = event.at(generation)
        self._ends: dict[str, End | BaseException] = {}
        self._is_connected = threading.Event()
        self._ended_at = 0.0  # the wait from asyncio
        self._threads = {
            way: threading.Thread(target=self._run, args=(way, wait), name=way, daemon=True)
            for way, wait in self._begin(ways)
        }
        for thread in self._threads.values():
            thread.start()
        if "asyncio" in ways:
            assert self._is_connected.wait(DEADLINE_S)

    def _begin(self, ways: tuple[str, ...]) -> list[tuple[str, Callable[[], object]]]:
        point, stream, called = self._point, ipcsync.Stream(), threading.Event()
        if "stream" in ways:
            point.wait(stream, ahead=True)
        if "callback" in ways:
            point.add_done_callback(lambda _: called.set())

        def by_stream() -> None:
            until(stream.query, "the stream to go on")
            point.synchronize(DEADLINE_S)  # a stream that is released says nothing of why

        def by_callback() -> None:
            assert called.wait(DEADLINE_S)
            point.synchronize(DEADLINE_S)

        waits: dict[str, Callable[[], object]] = {
            "host": lambda: point.synchronize(DEADLINE_S),
            "stream": by_stream,
            "query": lambda: until(point.query, "the point"),
            "callback": by_callback,
            "asyncio": lambda: asyncio.run(self._wait()),
        }
        return [(way, waits[way]) for way in ways]

    async def _wait(self) -> None:
        async with ipcsync.aconnect(self._endpoint, name="aside") as client:
            point = await client.point(bytes(self._point))
            self._is_connected.set()
            try:
                await point.synchronize(DEADLINE_S)
            finally:  # the client's end takes a second where a stream of this process stands
                self._ended_at = time.monotonic()

    def _run(self, way: str, wait: Callable[[], object]) -> None:
        try:
            end = end_of(wait)
            self._ends[way] = end._replace(at=self._ended_at) if way == "asyncio" else end
        except BaseException as error:  # noqa: BLE001 - told by `ends`
            self._ends[way] = error

    def ends(self) -> dict[str, End]:
        """How each wait ended; waits for that. AssertionError if one goes on, or ended by what no wait raises."""
        deadline = time.monotonic() + 2 * DEADLINE_S
        for thread in self._threads.values():
            thread.join(max(0.0, deadline - time.monotonic()))
        living = [way for way, thread in self._threads.items() if thread.is_alive()]
        assert not living, f"waits that do not end: {living}"
        ends = {way: end for way, end in self._ends.items() if isinstance(end, End)}
        wrong = {way: repr(end) for way, end in self._ends.items() if way not in ends}
        assert not wrong, f"waits that ended by what no wait raises: {wrong}"
        assert ends.keys() == self._threads.keys(), f"waits of which no end is known: {self._threads.keys() - ends}"
        return ends


def learn(ends: dict[str, End], what: str, why: str = "", within: float = DEADLINE_S, since: float = 0.0) -> None:
    """Each of the waits ended like this, at most so many seconds after `since`."""
    assert ends
    assert {way: (end.what, end.why) for way, end in ends.items()} == dict.fromkeys(ends, (what, why))
    if since:
        late = {way: end.at - since for way, end in ends.items() if end.at - since > within}
        assert not late, f"later than {within} s: {late}"
