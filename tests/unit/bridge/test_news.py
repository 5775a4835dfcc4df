"""How much of the processor the bridge takes for events that change all the time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("nats", reason="nats-py is not installed: pip install -e '.[fleet]'")

from ipcsync_bridge import answers, exports, wire
from ipcsync_bridge.answers import Answers
from ipcsync_bridge.config import Settings
from ipcsync_bridge.exports import Exports, Follower, Watcher
from ipcsync_bridge.store import Identity
from ipcsync_bridge.transport import CutOff
from ipcsync_bridge.wire import Counters
from tests.kit.until import DEADLINE_S


def _exports(failed: Any = None) -> Exports:
    board: Any = None
    return Exports(board, lambda _: None, failed)


def test_looks_that_take_more_than_their_share_rest_in_proportion() -> None:
    before = time.monotonic()
    budget = _exports()
    rest = budget.rest_s(0.012)
    after = time.monotonic()

    def owed(passed: float) -> float:
        """For what was used above what may be used at once, less the share of the time that has passed."""
        return min(max((0.012 - exports._CREDIT_S - exports._SHARE * passed) / exports._SHARE, 0.0), 0.05)

    assert owed(after - before) <= rest <= owed(0.0)
    assert budget.rest_s(10.0) == exports._LONGEST_REST_S


def test_looks_now_and_then_never_rest_and_what_one_thread_leaves_others_may_use() -> None:
    budget = _exports()
    for _ in range(20):
        time.sleep(0.002)
        assert budget.rest_s(exports._SHARE * 0.002) == 0
    assert budget.rest_s(0.9 * exports._CREDIT_S) == 0


class _Wire:
    """What is told, and when by the loop's clock. The first messages are lost, as `lost` says."""

    def __init__(self, lost: list[Exception]) -> None:
        self.told: list[tuple[float, wire.News]] = []
        self._lost = lost

    async def ask(self, _to: str, data: bytes, _timeout: float) -> bytes:
        body = wire.decode(data)
        assert isinstance(body, wire.News)
        self.told.append((asyncio.get_running_loop().time(), body))
        if self._lost:
            raise self._lost.pop()
        return wire.encode(wire.Ack())


_ME = Identity("a", b"o" * 16, b"e" * 16)


def _raise(error: Exception) -> None:
    raise error


def _publish(rows: int, monkeypatch: pytest.MonkeyPatch, *lost: Exception) -> tuple[Follower, list[Any]]:
    """Two changes of each of so many uses, the second when the first are told."""
    monkeypatch.setattr(answers, "_ROW_S", 0.001)
    transport: Any = _Wire([*lost])
    session: Any = SimpleNamespace(board=None)
    transport.settings = Settings("a", ("nats://127.0.0.1:4222",))

    async def run() -> Follower:
        tasks: list[asyncio.Task[object]] = []

        def begin(work: Coroutine[Any, Any, object]) -> None:
            tasks.append(asyncio.ensure_future(work))

        one = Answers(session, transport, _ME, Counters(), begin, _raise)
        follower = one.followers["b"] = Follower("b", 0.0, {(slot, 1): 0.0 for slot in range(rows)})
        for generation in (1, 2):
            for slot in range(rows):
                one._put(follower, wire.Row(slot, 1, generation, generation))
            while len(transport.told) < generation:
                await asyncio.sleep(0)
        await asyncio.wait(tasks)
        return follower

    return asyncio.run(asyncio.wait_for(run(), 30)), transport.told


def test_after_many_rows_a_node_is_told_nothing_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    follower, told = _publish(100, monkeypatch)
    assert told[1][0] - told[0][0] >= 0.099
    assert {row.recorded for row in told[1][1].rows} == {2}
    assert not follower.rows


def test_a_few_rows_are_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    follower, told = _publish(3, monkeypatch)
    assert len(told) == 2
    assert not follower.rows


@pytest.mark.parametrize("lost", [TimeoutError(), CutOff("no connection")], ids=repr)
def test_news_that_nobody_acknowledges_are_sent_again_with_what_is_newer(
    monkeypatch: pytest.MonkeyPatch, lost: Exception
) -> None:
    follower, told = _publish(3, monkeypatch, lost)
    assert [row.recorded for row in told[-1][1].rows] == [2, 2, 2]
    assert not follower.rows


def test_what_ends_a_thread_that_looks_is_told() -> None:
    failures: SimpleQueue[Exception] = SimpleQueue()
    watcher = Watcher(_exports(failures.put))
    watcher.look_at((None,))  # type: ignore[arg-type] # no export
    assert isinstance(failures.get(timeout=DEADLINE_S), AttributeError)
