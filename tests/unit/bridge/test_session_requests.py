"""What a bridge's tasks ask of its coordinator, through the thread that has the socket."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

import ipcsync
from ipcsync._wire import messages
from ipcsync.errors import ConnectError, CoordinatorLost, EventClosed
from ipcsync_bridge.session import BridgeSession
from tests.kit.until import DEADLINE_S

pytestmark = pytest.mark.process


@pytest.fixture
def coordinator() -> Iterator[ipcsync.Coordinator]:
    with ipcsync.launch(log_level="error", lease_ttl=300.0, keeper=False) as coordinator:
        yield coordinator


def _run(coordinator: ipcsync.Coordinator, work: Callable[[BridgeSession], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        session = BridgeSession.opened(coordinator.endpoint, "bridge a", DEADLINE_S)
        try:
            await asyncio.wait_for(work(session), DEADLINE_S)
        finally:
            session.close(says_goodbye=True)

    asyncio.run(run())


def _pid(session: BridgeSession) -> int:
    return session.board.coordinator[0]


def test_each_of_many_gets_its_own_answer(coordinator: ipcsync.Coordinator) -> None:
    async def work(session: BridgeSession) -> None:
        bodies = [messages.Open(f"e{number}") if number % 2 else messages.Close(900, 9) for number in range(200)]
        replies = await asyncio.gather(*map(session.ask, bodies), return_exceptions=True)
        for number, reply in enumerate(replies):
            if number % 2:
                assert isinstance(reply, messages.Attachment)
                assert reply.name == f"e{number}"
            else:
                assert isinstance(reply, EventClosed)

    _run(coordinator, work)


def test_a_session_that_is_lost_ends_all_that_is_asked(coordinator: ipcsync.Coordinator) -> None:
    async def work(session: BridgeSession) -> None:
        os.kill(_pid(session), signal.SIGSTOP)
        tasks = [asyncio.ensure_future(session.ask(messages.ListEvents(""))) for _ in range(5)]
        await asyncio.sleep(0)  # in which they are begun
        os.kill(_pid(session), signal.SIGKILL)
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(each) for each in outcomes] == 5 * [CoordinatorLost]
        assert len(set(map(id, outcomes))) == len(outcomes), "each has a traceback of its own"

    _run(coordinator, work)


def test_what_is_asked_is_not_given_up_while_the_coordinator_stands_still(coordinator: ipcsync.Coordinator) -> None:
    async def work(session: BridgeSession) -> None:
        deadlines: list[int] = []
        connection: Any = session._connection
        exchange = connection.exchange

        def noting(requests: Any, token: bytes, deadline: int, *rest: Any) -> None:
            deadlines.append(deadline)
            exchange(requests, token, deadline, *rest)

        connection.exchange = noting
        os.kill(_pid(session), signal.SIGSTOP)
        try:
            sent = session._connection.sent
            task = asyncio.ensure_future(session.ask(messages.Open("kv")))
            while session._connection.sent == sent:
                await asyncio.sleep(0.001)
        finally:
            os.kill(_pid(session), signal.SIGCONT)
        assert isinstance(await task, messages.Attachment)
        assert deadlines[0] - time.monotonic_ns() > 3600e9
        assert isinstance(await session.ask(messages.Open("other")), messages.Attachment)
        assert len(set(deadlines)) == 2, "requests of one deadline are one call to the coordinator"

    _run(coordinator, work)


def test_no_use_is_open_of_a_slot_that_the_board_does_not_have(coordinator: ipcsync.Coordinator) -> None:
    """A claim in the store names it, which anybody may have written."""

    async def work(session: BridgeSession) -> None:
        attached = await session.ask(messages.Open("kv"))
        assert isinstance(attached, messages.Attachment)
        assert session.is_open((attached.slot, attached.incarnation))
        for slot in (session.board.slots, 1 << 62):
            assert not session.is_open((slot, 1))

    _run(coordinator, work)


def test_nothing_is_asked_of_a_closed_session(coordinator: ipcsync.Coordinator) -> None:
    async def work() -> None:
        session = BridgeSession.opened(coordinator.endpoint, "bridge a", DEADLINE_S)
        os.kill(_pid(session), signal.SIGSTOP)
        task = asyncio.ensure_future(session.ask(messages.ListEvents("")))
        await asyncio.sleep(0)  # in which it is begun
        session.close(says_goodbye=False)
        os.kill(_pid(session), signal.SIGCONT)
        with pytest.raises(ConnectError):
            await task
        with pytest.raises(ConnectError):
            await session.ask(messages.ListEvents(""))

    asyncio.run(work())
