"""What a tick sees of a session: its silence, of one that was never ready too, its goodbye, its death, or nothing."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ipcsync._board import Board
from ipcsync._wire import messages
from ipcsync_coordinator.deaths import is_gone
from ipcsync_coordinator.server import Server
from tests.kit.peer import Peer
from tests.unit.coordinator.coordinator_world import World

_S = 1_000_000_000
_kept: list[Board] = []


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.close()


def _without_sockets(world: World) -> Any:
    """A server whose ticks look at the sessions of `world`."""
    server: Any = object.__new__(Server)
    server.board, server.registry, server.handlers = world.board, world.registry, world.handlers
    server.sessions, server._transactions = world.sessions, world.transactions
    server._credit = SimpleNamespace(tick=lambda _: None, since_ns=0)
    server._zap = server.feed = SimpleNamespace(drain=lambda: None)
    server._kept = SimpleNamespace(look=lambda _: None)
    server._drain_link = server._drain_requests = lambda: None
    server._stop_if_idle = lambda _: None
    server._next_feed_tick, server.parent = math.inf, None
    return server


@pytest.mark.parametrize(
    ("is_ready", "ttl_s", "silent_after_s"),
    [(True, 600, 600), (False, 600, 30), (True, 5, 5), (False, 5, 5)],
)
def test_a_session_that_was_never_ready_is_not_kept_for_a_long_ttl(
    is_ready: bool, ttl_s: int, silent_after_s: int
) -> None:
    """Its process may have given up before the welcome came, and know nothing of it."""
    server: Any = object.__new__(Server)
    server.board = SimpleNamespace(session=lambda _line: SimpleNamespace(heartbeat=0))
    server._credit = SimpleNamespace(since_ns=0)
    session: Any = SimpleNamespace(line=0, ttl_ns=ttl_s * _S, is_ready=is_ready, beat_ns=7 * _S)
    assert not server._is_silent(session, (7 + silent_after_s) * _S)
    assert server._is_silent(session, (7 + silent_after_s) * _S + 1)


def test_a_goodbye_that_the_board_alone_has_is_logged_once(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """Its process is dead, and is gone too by the time at which that is seen."""
    token = world.hello().token
    world.ask(messages.Ready(), token)
    session: Any = world.sessions.find(token)
    session.peer = SimpleNamespace(is_alive=lambda: False)
    session.pid, session.started = os.getpid(), 1  # when this process did not start
    world.board.session(session.line).say_goodbye(session.serial)
    server: Any = object.__new__(Server)
    server.board, server.registry, server.handlers = world.board, world.registry, world.handlers
    server._credit = SimpleNamespace(since_ns=0)
    with caplog.at_level(logging.INFO, "ipcsync.coordinator"):
        server._check(session, session.beat_ns)
    assert [record.message for record in caplog.records] == ["session closed"]
    assert world.sessions.find(token) is None


def _hold_lifeline(path: str, line: int) -> None:
    """In a peer."""
    board = Board.open(path)
    assert board.hold_lifeline(board.session(line))
    _kept.append(board)


def test_a_process_that_we_cannot_see_and_that_dies_before_its_ready_is_read_is_gone(world: World, peer: Peer) -> None:
    welcome = world.hello()
    peer.call(_hold_lifeline, world.board.path, welcome.line)
    peer.kill()
    world.ask(messages.Ready(), welcome.token)
    session: Any = world.sessions.find(welcome.token)
    assert not session.started
    assert is_gone(world.board, session)


def test_a_session_that_no_descriptor_is_left_to_look_at_lives_on_and_keeps_nothing_of_the_tick_back(
    world: World,
) -> None:
    def none_left() -> bool:
        raise OSError(errno.ENFILE, os.strerror(errno.ENFILE))

    unseen, dead = (world.sessions.find(world.hello().token) for _ in range(2))
    assert unseen is not None
    assert dead is not None
    for session, is_alive in ((unseen, none_left), (dead, lambda: False)):
        session.is_ready = True
        session.peer = SimpleNamespace(is_alive=is_alive, is_over=lambda: True)  # type: ignore[assignment]
    done: list[str] = []
    server = _without_sockets(world)
    server._kept = SimpleNamespace(look=lambda _: done.append("kept"))
    server._tell_alive = lambda: done.append("alive")
    server._beat()
    assert (unseen.state, dead.state, done) == ("live", "gone", ["kept", "alive"])


def test_who_died_while_there_was_no_coordinator_is_seen_before_the_first_answer(world: World) -> None:
    """A client that saw RecorderLost meanwhile asks for the name."""
    dead, client = world.hello().token, world.hello().token
    world.ask(messages.Ready(), dead)
    opening = messages.Open("e", recorder=True)
    assert isinstance(world.ask(opening, dead), messages.Attachment)
    answers: list[messages.Message] = []

    async def serve(silent: int) -> None:
        server, done = _without_sockets(world), asyncio.Event()
        server._loop, server._done, server._differing, server._tick_s = asyncio.get_running_loop(), done, [], math.inf
        driver = SimpleNamespace(link=SimpleNamespace(socket=silent), report_serving=lambda: None)
        server._startup = SimpleNamespace(driver=driver, config=SimpleNamespace(starts=2))
        server._zap.socket = server.feed.socket = SimpleNamespace(fd=silent)
        server._requests = SimpleNamespace(socket=server._zap.socket)
        server._drain_requests = lambda: answers.append(world.ask(opening, client))
        server._tell_alive = done.set
        await server.run()

    ours, theirs = socket.socketpair()
    with ours, theirs:
        asyncio.run(serve(ours.fileno()))
    assert isinstance(answers[0], messages.Attachment)
