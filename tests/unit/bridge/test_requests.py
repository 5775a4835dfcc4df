"""The bridge's requests over a socket whose other end does what a coordinator may do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from ipcsync._wire import codec, messages
from ipcsync.errors import CoordinatorLost, EventClosed, WaitTimeout
from ipcsync_bridge import requests
from ipcsync_bridge.requests import Requests
from tests.kit.until import DEADLINE_S

_WINDOW = 4


class Side:
    """The coordinator's end. `starts` and `problem` are what its board would say."""

    def __init__(self, path: Path) -> None:
        self.endpoint = f"ipc://{path}/coordinator.sock"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.starts = 1
        self.problem: Exception | None = None
        self._ids = iter(range(1, 1 << 30))
        self.late: list[messages.Attachment] = []

    def bind(self) -> None:
        self.socket.bind(self.endpoint)

    def requests(self) -> Requests:
        ids = self._ids
        return Requests(
            self.endpoint, b"t" * 16, _WINDOW, lambda: next(ids), lambda: self.starts, self.check, self.late.append
        )

    def check(self) -> None:
        if self.problem is not None:
            raise self.problem

    async def next(self) -> tuple[bytes, int]:
        """The next request's sender and id."""
        while self.nothing_comes():
            await asyncio.sleep(0.001)
        routing, frame = self.socket.recv_multipart()
        return routing, msgspec.msgpack.decode(frame)[1]

    def nothing_comes(self) -> bool:
        return not self.socket.poll(0)

    def answer(self, routing: bytes, id_: int, body: messages.Message | None = None) -> None:
        self.socket.send_multipart([routing, codec.encode_reply(id_, body or messages.Done())])

    def close(self) -> None:
        self.socket.close()
        self._context.term()


def run(path: Path, work: Callable[[Side, Requests], Awaitable[None]], is_bound: bool = True) -> None:
    side = Side(path)
    if is_bound:
        side.bind()

    async def both() -> None:
        asked = side.requests()
        try:
            await asyncio.wait_for(work(side, asked), DEADLINE_S)
        finally:
            asked.close()

    try:
        asyncio.run(both())
    finally:
        side.close()


def ask(asked: Requests, count: int = 1) -> list[asyncio.Task[Any]]:
    return [asyncio.ensure_future(asked.ask(messages.Ready())) for _ in range(count)]


def test_no_more_than_the_window_are_in_flight_and_each_gets_its_own_answer(tmp_path: Path) -> None:
    async def work(side: Side, asked: Requests) -> None:
        tasks = ask(asked, 2 * _WINDOW)
        came = [await side.next() for _ in range(_WINDOW)]
        await asyncio.sleep(0.05)  # in which more would come
        assert side.nothing_comes()
        for routing, id_ in reversed(came):
            refusal = codec.failure_of(EventClosed("over")) if id_ == 2 else None
            side.answer(routing, id_, refusal)
        for _ in range(_WINDOW):
            side.answer(*await side.next())
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(each).__name__ for each in outcomes] == ["Done", "EventClosed", *["Done"] * (2 * _WINDOW - 2)]

    run(tmp_path, work)


def test_another_coordinator_is_sent_what_is_unanswered_at_once_under_the_same_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "_AGAIN_S", 3600.0)

    async def work(side: Side, asked: Requests) -> None:
        (task,) = ask(asked)
        first = await side.next()
        side.starts += 1
        again = await side.next()
        assert again[1] == first[1]
        side.answer(*again)
        side.answer(*again)  # twice: the second is nobody's
        assert isinstance(await task, messages.Done)

    run(tmp_path, work)


def test_what_is_not_answered_is_sent_again_and_at_last_times_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "_AGAIN_S", 0.05)
    monkeypatch.setattr(requests, "REQUEST_S", 0.5)

    async def work(side: Side, asked: Requests) -> None:
        tasks = ask(asked, _WINDOW + 1)
        ids = {(await side.next())[1] for _ in range(3 * _WINDOW)}
        assert ids == set(range(1, _WINDOW + 1))
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(each, WaitTimeout) for each in outcomes)

    run(tmp_path, work)


def test_a_session_that_is_lost_ends_all_that_is_asked(tmp_path: Path) -> None:
    async def work(side: Side, asked: Requests) -> None:
        tasks = ask(asked, _WINDOW + 1)
        await side.next()
        side.problem = CoordinatorLost("it died")
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(each, CoordinatorLost) for each in outcomes)
        assert len(set(map(id, outcomes))) == len(outcomes)  # each with a traceback of its own

    run(tmp_path, work)


def test_a_request_that_nobody_waits_for_any_more_makes_room(tmp_path: Path) -> None:
    async def work(side: Side, asked: Requests) -> None:
        tasks = ask(asked, _WINDOW + 2)
        for _ in range(_WINDOW):
            await side.next()
        for task in (tasks[0], tasks[-1]):
            task.cancel()
        side.answer(*await side.next())
        assert isinstance(await tasks[_WINDOW], messages.Done)

    run(tmp_path, work)


def test_strange_replies_harm_nobody(tmp_path: Path) -> None:
    async def work(side: Side, asked: Requests) -> None:
        (task,) = ask(asked)
        routing, id_ = await side.next()
        side.socket.send_multipart([routing, b"\xff"])
        side.answer(routing, id_ + 1000)
        side.answer(routing, id_)
        assert isinstance(await task, messages.Done)

    run(tmp_path, work)


def test_what_is_asked_before_there_is_a_coordinator_is_sent_once_there_is(tmp_path: Path) -> None:
    async def work(side: Side, asked: Requests) -> None:
        (task,) = ask(asked)
        await asyncio.sleep(0)  # in which it would be sent
        side.bind()
        side.answer(*await side.next())
        assert isinstance(await task, messages.Done)

    run(tmp_path, work, is_bound=False)


_ATTACHED = messages.Attachment("kv", 3, 7, 0, "gpu", "timeline", 1, False, [], [])


@pytest.mark.parametrize("how", ["timed out", "cancelled", "timed out, and another coordinator has it"])
def test_what_a_request_attached_to_after_it_was_given_up_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(requests, "REQUEST_S", 0.05 if how != "cancelled" else 60.0)

    async def work(side: Side, asked: Requests) -> None:
        task = asyncio.create_task(asked.ask(messages.Open("kv")))
        routing, id_ = await side.next()
        if how == "cancelled":
            task.cancel()
        with pytest.raises(WaitTimeout if how != "cancelled" else asyncio.CancelledError):
            await task
        if "another" in how:
            side.starts = 2
            routing, again = await side.next()
            assert again == id_
        side.answer(routing, id_, _ATTACHED)
        while not side.late:
            await asyncio.sleep(0.001)
        assert side.late == [_ATTACHED]
        assert not asked._late

    run(tmp_path, work)


def test_a_request_that_was_given_up_is_forgotten_in_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "REQUEST_S", 0.02)
    monkeypatch.setattr(requests, "_LATE_S", 0.02)

    async def work(side: Side, asked: Requests) -> None:
        for body in (messages.Open("kv"), messages.ListEvents("")):
            with pytest.raises(WaitTimeout):
                await asked.ask(body)
        while asked._is_ticking:
            await asyncio.sleep(0.001)
        assert not asked._late
        assert side.late == []

    run(tmp_path, work)


def test_a_mirrors_late_import_is_not_told_since_it_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "REQUEST_S", 0.02)

    async def work(side: Side, asked: Requests) -> None:
        with pytest.raises(WaitTimeout):
            await asked.ask(messages.Import(1, b"e" * 16, 3, 7, "a", "kv"))
        assert not asked._late

    run(tmp_path, work)
