"""What a tick sees of a session: its silence, of one that was never ready too, and its goodbye."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ipcsync._wire import messages
from ipcsync_coordinator.server import Server
from tests.unit.coordinator.coordinator_world import World

_S = 1_000_000_000


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.close()


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
