"""Engines in one process over a real board: A records, B's stream waits for that, B records behind it, C looks at B.

The three are sessions of the board alone, which a test marks as the kernel and the coordinator would.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

import ipcsync
from ipcsync._board import BROKEN, CLOSED, EXPIRED, INT64_MAX, Board, layout
from ipcsync._engines import queued
from ipcsync._engines.engine import Engine
from ipcsync._linux.futex import OWNER_DIED
from ipcsync._native import context
from ipcsync._wire.messages import Attachment
from ipcsync.errors import EventClosed, RecorderLost, WaitTimeout
from ipcsync.testing import StreamGate
from tests.kit.boards import bits_of, store_bits
from tests.kit.steps import at_step
from tests.unit.session.attachment_scene import Lease

_NAMES = "abc"


def _serial(line: int) -> int:
    return (line + 1) << 16 | line


class Chain:
    """The sessions and their events; what a test opens of them is closed at its end."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.engines: list[Engine] = []
        self.stream = ipcsync.Stream()
        self.held = ipcsync.Stream()
        for line in range(2):
            board.session(line).assign(_serial(line), 4711 + line, 0, 0, time.monotonic_ns(), _NAMES[line])
            board.words[self._owner(line)] = 1
            board.slot(line).open(1)
            board.slot(line).recorder = _serial(line)
        board.newest = 2
        self.a, self.b, self.c = self.open(0, recorder=True), self.open(1, recorder=True), self.open(1)
        self.mine = self.open(0)  # as B sees A's

    def _owner(self, line: int) -> int:
        return (layout.HEADER + line * layout.LINE) // 8 + layout.S_OWNER

    def open(self, slot: int, *, recorder: bool = False) -> Engine:
        reply = Attachment(
            name=f"{_NAMES[slot]}/out",
            slot=slot,
            incarnation=1,
            base=0,
            device=context.uuid_of(0),
            engine="timeline",
            depth=1,
            recorder=recorder,
            handles=[],
        )
        guard: Any = Lease(self.board)
        engine = Engine(self.board, guard, reply, 0)
        engine.open_first()
        self.engines.append(engine)
        return engine

    def record(self, engine: Engine, stream: ipcsync.Stream) -> int:
        return engine.record(stream._handle, 0, 1)

    def begin(self) -> StreamGate:
        """A's first record, behind a gate, and B's first behind a wait for it."""
        gate = StreamGate(self.held)
        self.record(self.a, self.held)
        self.mine.wait(1, self.stream, 1, False)
        assert self.record(self.b, self.stream) == 1
        return gate

    def kill(self, line: int) -> None:
        """As the kernel marks it."""
        self.board.words[self._owner(line)] |= OWNER_DIED

    def release(self, slot: int) -> None:
        """As the coordinator does behind a break."""
        self.board.slot(slot).store_completed(INT64_MAX)


@pytest.fixture
def chain(board: Board) -> Iterator[Chain]:
    one = Chain(board)
    yield one
    one.held.synchronize()  # first: a record that comes later would take the release back
    one.release(0)
    one.stream.synchronize()
    for engine in one.engines:
        engine.close()
    queued.drop(queued.of(None))


def test_what_stands_behind_nothing_says_so(chain: Chain) -> None:
    assert chain.record(chain.b, chain.stream) == 1
    assert (chain.c.first_unsettled(), chain.b.chain.entries, bits_of(chain.board.slot(1))) == (0, {}, 0)
    chain.c.synchronize(1, 5)
    assert chain.c.query(1)


def test_a_record_behind_a_wait_names_whom_it_stands_behind_until_that_is_settled(chain: Chain) -> None:
    with chain.begin():
        line = chain.board.slot(1)
        assert (chain.c.first_unsettled(), bits_of(line), line.recorded) == (1, 1, 1)
        assert not chain.c.query(1)
        with pytest.raises(WaitTimeout, match=r"^generation 1 of .*b/out.* was not complete within 0.02 s$"):
            chain.c.synchronize(1, 0.02)
        assert [(entry.first, entry.last, entry.bits) for entry in chain.b.chain.entries.values()] == [(1, 1, 1)]
        (wait,) = queued.of(None)
        assert (wait.generation, wait.outcome, wait.label) == (1, None, f"generation 1 of {chain.mine.label}")
    chain.stream.synchronize()
    assert chain.c.query(1)
    chain.b.publish_completed()
    assert (chain.c.first_unsettled(), bits_of(line), line.lost, chain.b.chain.entries) == (0, 0, 0, {})
    assert wait.outcome is True, "it stood on the stream of what was found complete"
    assert chain.record(chain.b, chain.stream) == 2
    assert chain.c.first_unsettled() == 0


def test_what_is_closed_once_a_record_has_looked_at_it_is_not_left_out(chain: Chain) -> None:
    with StreamGate(chain.held):
        chain.record(chain.a, chain.held)
        with at_step("cuStreamGetId", chain.mine.close), pytest.raises(EventClosed):
            chain.b.record(chain.stream._handle, 0, 1, after=[(chain.mine, 1)])
    assert chain.b.generation == 0


def test_what_stands_behind_the_dead_is_lost_and_says_whose_end_it_was(chain: Chain) -> None:
    with chain.begin():
        chain.kill(0)
        chain.b.publish_completed()
        line = chain.board.slot(1)
        assert (line.lost - chain.c.base, line.root_cause) == (1, _serial(0))
        with pytest.raises(RecorderLost) as caught:
            chain.c.synchronize(1, 5)
        error = caught.value
        assert (error.cause, error.session, error.pid, error.generation) == ("behind", "a", 4711, 1)
        assert error.event == "b/out"
        with pytest.raises(RecorderLost, match=r"^generation 1 of 'b/out' is lost: it stands behind work of .*'a' "):
            chain.b.query(1)
        assert chain.b.chain.wants_break
        assert chain.b.chain.loss.root.startswith(f"generation 1 of {chain.mine.label}, whose recorder 'a' (pid 4711)")


@pytest.mark.parametrize("ends", ["broken", "expired", "closed"])
def test_how_the_first_one_ended_is_how_the_others_are_lost(chain: Chain, ends: str) -> None:
    with chain.begin():
        line = chain.board.slot(0)
        if ends == "closed":
            chain.mine.wait(2, chain.stream, 1, True)
            chain.record(chain.b, chain.stream)
            line.finish(CLOSED)
        else:
            chain.board.session(0).state = EXPIRED
            line.break_at(0, has_expired=ends == "expired")
        chain.b.publish_completed()
        assert chain.c.line.lost - chain.c.base == (2 if ends == "closed" else 1)
        assert chain.b.chain.loss is not None
        how = {
            "broken": "died",
            "expired": "was silent",
            "closed": "closed the event before it recorded this generation",
        }[ends]
        assert how in chain.b.chain.loss.root


def test_a_released_wait_proves_nothing(chain: Chain) -> None:
    gate = chain.begin()
    chain.kill(0)
    chain.board.slot(0).break_at(0)
    chain.release(0)
    chain.stream.synchronize()  # it went on over what A never did
    assert not chain.c.query(1), "a silent pass"
    chain.b.publish_completed()
    with pytest.raises(RecorderLost):
        chain.c.query(1)
    gate.open()


def test_no_record_is_made_behind_what_is_lost_on_whichever_stream(chain: Chain) -> None:
    with chain.begin():
        chain.kill(0)
        chain.b.publish_completed()
        for stream in (chain.stream, ipcsync.Stream()):
            with pytest.raises(RecorderLost):
                chain.record(chain.b, stream)
        assert chain.board.slot(1).recorded == 1


def test_a_stream_behind_the_dead_is_spoilt_until_it_is_resumed(chain: Chain) -> None:
    with chain.begin():
        chain.kill(0)
        other = chain.open(1, recorder=True)
        with pytest.raises(RecorderLost, match="a/out"):
            chain.record(other, chain.stream)
        lost = queued.lost_on(chain.stream._handle, 0)
        assert [(wait.generation, wait.view is chain.mine) for wait in lost] == [(1, True)]
        began = time.monotonic_ns()
        assert not queued.await_passed(lost, chain.stream._handle, 0, began + 20_000_000, lambda: None)
        assert time.monotonic_ns() - began >= 20_000_000
        chain.release(0)
        assert queued.await_passed(lost, chain.stream._handle, 0, time.monotonic_ns() + 5 * 10**9, lambda: None)


def test_what_was_released_keeps_its_verdict(chain: Chain) -> None:
    with chain.begin():
        (wait,) = queued.of(None)
        assert wait.known_outcome() is None
        chain.kill(0)
        outcome = wait.known_outcome()
        assert outcome is not None
        assert outcome is not True
        chain.board.words[chain._owner(0)] = 1  # the line is another's now
        assert wait.known_outcome() is outcome


def test_only_who_is_named_and_lives_since_is_good(chain: Chain) -> None:
    with chain.begin():
        line = chain.board.slot(1)
        assert bits_of(line) == 1
        line.recorder = _serial(0)
        assert not chain.c.is_clear(1), "of its own it tells nothing"
        line.recorder = _serial(1)
        assert chain.c.is_clear(1)
        for serial, is_clear in ((9 << 16, False), (_serial(0), True)):  # valid_as_of is of before the ninth came
            chain.board.session(0).assign(serial, 1, 0, 0, 1, "new")
            assert not chain.c.is_clear(1)  # nobody holds its mark yet
            chain.board.words[chain._owner(0)] = 1
            assert chain.c.is_clear(1) is is_clear
        chain.board.session(0).state = EXPIRED
        assert not chain.c.is_clear(1)
        store_bits(line, 0)
        assert chain.c.is_clear(1)


def test_an_event_that_broke_says_of_each_generation_what_is_true(chain: Chain) -> None:
    chain.record(chain.a, chain.stream)
    chain.mine.synchronize(1, 5)
    chain.record(chain.a, chain.stream)
    line = chain.board.slot(0)
    line.break_at(1)
    other = chain.open(0)
    assert other.outcome_of(1) is True
    outcome = other.outcome_of(2)
    assert isinstance(outcome, tuple)
    assert (outcome.cause, outcome.session, outcome.pid) == ("died", "a", 4711)
    assert other.query(1)
    with pytest.raises(RecorderLost, match=r"^generation 2 of .*a/out") as caught:
        other.query(2)
    assert (caught.value.cause, caught.value.generation) == ("died", 2)
    assert other.state == "broken"
    assert line.state == BROKEN
