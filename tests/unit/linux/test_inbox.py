"""What threads tell a loop: all of it arrives in order, and a signal beside a thousand of it does too."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

from ipcsync._inbox import Inbox

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
