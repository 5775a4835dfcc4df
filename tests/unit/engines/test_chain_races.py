"""The lists of waits while several threads meet in their changes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import pytest

import ipcsync
from ipcsync._board import CLOSED
from ipcsync._engines import queued
from ipcsync._engines.core import Wait
from ipcsync._engines.loss import Loss
from ipcsync.errors import RecorderLost
from ipcsync.testing import StreamGate
from tests.kit.boards import store_bits
from tests.kit.driver_functions import amid, replaced
from tests.unit.engines.chain_row import KEY, Row
from tests.unit.engines.test_engine_chains import Chain, _serial, chain

__all__ = ["chain"]


def _in_a_thread(function: Callable[[], object]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def _resume(key: int) -> None:
    """As `Client.resume`, on a stream that is past everything."""
    for _ in range(5):
        lost = [wait for wait in queued.of(key) if isinstance(wait.known_outcome(), Loss)]
        if not lost:
            return
        queued.drop(lost)
    raise AssertionError("what is lost does not leave the list")


def _key(stream: ipcsync.Stream) -> int:
    return queued.list_of(stream._handle, 0)


# --- what leaves a list -----------------------------------------------------------------------------------------------


def test_what_a_record_has_looked_at_is_judged_though_a_later_wait_was_listed(chain: Chain) -> None:
    """Its recorder dies, and its use is released, between the look and the record."""
    stream = chain.stream
    with StreamGate(chain.held):
        chain.record(chain.a, chain.held)
        chain.mine.wait(1, stream, 1, False)
        waits = queued.latest(_key(stream))
        chain.record(chain.a, chain.held)
        chain.mine.wait(2, stream, 1, False)
        chain.kill(0)
        chain.board.slot(0).break_at(0)
    chain.held.synchronize()
    chain.release(0)
    stream.synchronize()
    chain.mine.close()
    assert chain.mine.try_release()
    with pytest.raises(RecorderLost):
        chain.b.chain.extend(chain.b, 1, 1, 5, waits)


def _record_behind(chain: Chain, count: int, *waited: int) -> None:
    """Records that stand behind others, so that only their recorder can judge them; the stream waits for some."""
    line = chain.board.slot(0)
    for _ in range(count):
        chain.record(chain.a, chain.held)
    store_bits(line, 1 << 5)  # of a session that is over
    line.valid_as_of = 2
    line.first_dependent = 1
    for generation in waited:
        chain.mine.wait(generation, chain.stream, 1, False)


def test_an_earlier_generation_that_is_open_is_still_waited_for_when_a_later_one_is_forgotten(chain: Chain) -> None:
    """The later record stands behind more than the earlier one, whose own outcome is judged later."""
    stream, line = chain.stream, chain.board.slot(0)
    with StreamGate(chain.held):
        _record_behind(chain, 2, 1, 2)
        line.lose(2, _serial(1))
    stream.synchronize()
    _resume(_key(stream))
    assert [(wait.generation, wait.is_queued) for wait in queued.of(_key(stream))] == [(1, True)]
    line.lose(1, _serial(1))
    with pytest.raises(RecorderLost):
        chain.record(chain.b, stream)
    _resume(_key(stream))
    assert chain.record(chain.b, stream) == 1


def test_what_a_stream_did_not_wait_for_is_not_waited_for_when_a_later_one_is_forgotten(chain: Chain) -> None:
    stream, line = chain.stream, chain.board.slot(0)
    with StreamGate(chain.held):
        _record_behind(chain, 5, 5, 3)
        line.lose(4, _serial(1))
    stream.synchronize()
    _resume(_key(stream))
    assert [wait.generation for wait in queued.of(_key(stream))] == [3]
    line.lose(3, _serial(1))
    _resume(_key(stream))
    assert queued.of(_key(stream)) == []
    chain.mine.close()
    assert chain.mine.try_release()


def test_a_use_is_released_once_the_earlier_generations_are_judged_too(chain: Chain) -> None:
    stream, line = chain.stream, chain.board.slot(0)
    with StreamGate(chain.held):
        _record_behind(chain, 2, 1, 2)
        line.lose(2, _serial(1))
    stream.synchronize()
    chain.mine.close()
    assert not chain.mine.try_release()
    line.lose(1, _serial(1))
    assert chain.mine.try_release()


def test_no_wait_is_forgotten_by_a_resume_between_its_listing_and_its_queueing(chain: Chain) -> None:
    """A record of another thread had listed a later generation in its place, which is lost."""
    stream, key = chain.stream, _key(chain.stream)
    with StreamGate(chain.held):
        chain.record(chain.a, chain.held)

        def others() -> None:
            queued.add(key, chain.mine, 2, 0)
            chain.b.record(stream._handle, 0, 1)
            chain.board.slot(0).finish(CLOSED)
            _resume(key)

        with replaced(amid("cuStreamWaitValue64", partial(_in_a_thread, others))):
            chain.mine.wait(1, stream, 1, False)
        assert [wait.generation for wait in queued.of(key)] == [1]


@pytest.mark.parametrize("is_early", [True, False])
def test_a_lost_wait_that_a_resume_forgets_before_it_is_queued_fails_the_next_record(
    chain: Chain, is_early: bool
) -> None:
    """Its recorder dies before the driver's call, and the stream is past all that was queued there."""
    stream, key = chain.stream, _key(chain.stream)
    seen: list[Wait] = []
    with StreamGate(chain.held):
        chain.record(chain.a, chain.held)

        def others() -> None:
            chain.kill(0)
            seen.extend(wait for wait in queued.of(key) if isinstance(wait.known_outcome(), Loss))
            if is_early:
                queued.drop(seen)

        with replaced(amid("cuStreamWaitValue64", partial(_in_a_thread, others))), pytest.raises(RecorderLost):
            chain.mine.wait(1, stream, 1, False)
        assert len(seen) == 1
        queued.drop(seen)  # it had looked before
        with pytest.raises(RecorderLost):
            chain.record(chain.b, stream)
        chain.board.slot(0).break_at(0)
    chain.release(0)
    _resume(key)


def test_a_record_behind_one_of_another_stream_fails_though_a_resume_forgot_that_one_before_it_was_queued(
    chain: Chain,
) -> None:
    """B records on a second stream, which waits for the one before: that is lost, and the stream resumed."""
    second = ipcsync.Stream()
    key = _key(second)
    with StreamGate(chain.held):
        chain.record(chain.a, chain.held)
        chain.mine.wait(1, chain.stream, 1, False)
        chain.record(chain.b, chain.stream)
        chain.c.wait(1, second, 1, False)
        queued.drop(queued.of(key))

        def others() -> None:
            chain.kill(0)
            chain.b.publish_completed()
            _resume(key)

        with replaced(amid("cuStreamWaitValue64", partial(_in_a_thread, others))), suppress(RecorderLost):
            chain.record(chain.b, second)
        with pytest.raises(RecorderLost):
            chain.record(chain.open(1, recorder=True), second)
        chain.board.slot(0).break_at(0)
    chain.release(0)
    _resume(key)
    _resume(_key(chain.stream))


def test_threads_that_list_and_forget_waits_at_once_lose_none(row: Row) -> None:
    """Each thread has a list of its own, and all of them share one."""
    threads, rounds = 4, 300
    begin = threading.Barrier(threads)

    def work(number: int) -> None:
        begin.wait()
        view = row.theirs[number]
        for generation in range(1, rounds + 1):
            good = queued.add(number, view, generation, number)
            queued.add(KEY, view, generation, number)
            good.outcome = True
            queued.drop([good])

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [queued.of(number) for number in range(threads)] == [[]] * threads
    left = sorted((wait.view.name, wait.generation) for wait in queued.of(KEY))
    assert left == [(f"e{number}", each) for number in range(threads) for each in range(1, rounds + 1)]
