"""What threads tell a loop: all of it arrives in order, and a signal beside a thousand of it does too."""

from __future__ import annotations

import asyncio
import contextvars
import os
import signal
import threading

import pytest

from ipcsync._inbox import Inbox, LoopCalls

_MANY = 10_000  # the loop's own socket holds some 280 wake-ups


def _putting(inbox: Inbox[int]) -> threading.Thread:
    def put_all() -> None:
        for number in range(_MANY):
            inbox.put(number)

    thread = threading.Thread(target=put_all)
    thread.start()
    return thread


def test_all_arrives_in_order_and_on_the_loop() -> None:
    seen: list[tuple[int, int]] = []

    async def main() -> None:
        done = asyncio.Event()

        def take(number: int) -> None:
            seen.append((number, threading.get_ident()))
            if number == _MANY - 1:
                done.set()

        thread = _putting(Inbox(take))
        await asyncio.wait_for(done.wait(), 30)
        thread.join()

    asyncio.run(main())
    assert seen == [(number, threading.get_ident()) for number in range(_MANY)]


def test_a_signal_beside_thousands_of_things_is_seen() -> None:
    async def main() -> None:
        ended = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, ended.set)
        _putting(Inbox(lambda number: None)).join()  # the loop is busy meanwhile
        os.kill(os.getpid(), signal.SIGUSR1)
        await asyncio.wait_for(ended.wait(), 10)

    asyncio.run(main())


def test_what_is_put_after_the_loops_end_is_let_go() -> None:
    async def make() -> Inbox[int]:
        return Inbox(lambda number: None)

    asyncio.run(make()).put(1)


def test_what_comes_behind_an_exception_that_ended_the_loop_arrives_all_the_same() -> None:
    seen: list[int] = []

    def interrupt() -> None:
        raise KeyboardInterrupt

    async def begin() -> LoopCalls:
        return LoopCalls()

    async def go_on(calls: LoopCalls) -> None:
        calls.soon(seen.append, 2)
        LoopCalls()  # as each later call makes one
        for _ in range(10):
            await asyncio.sleep(0)

    loop = asyncio.new_event_loop()
    try:
        calls = loop.run_until_complete(begin())
        calls.soon(interrupt)
        with pytest.raises(KeyboardInterrupt):
            loop.run_forever()
        calls.soon(seen.append, 1)
        assert loop._ready  # type: ignore[attr-defined]
        loop._ready.clear()  # type: ignore[attr-defined] # as if the exception had come as the loop took that
        loop.run_until_complete(go_on(calls))
    finally:
        loop.close()
    assert seen == [1, 2]


def test_a_function_is_called_in_the_context_of_who_asked() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="none")
    seen: list[str] = []

    async def ask(name: str) -> LoopCalls:
        variable.set(name)
        return LoopCalls()

    async def main() -> None:
        first, second = [await asyncio.create_task(ask(name)) for name in ("first", "second")]
        for calls in (first, second, first):
            calls.soon(lambda: seen.append(variable.get()))
        while len(seen) < 3:
            await asyncio.sleep(0)

    asyncio.run(main())
    assert seen == ["first", "second", "first"]
