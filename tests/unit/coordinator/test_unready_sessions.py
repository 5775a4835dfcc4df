"""How long a coordinator keeps a session whose process never said that it is ready."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ipcsync_coordinator.server import Server

_S = 1_000_000_000


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
