"""The last step of a session: what stays mapped."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ipcsync._native import pinned
from ipcsync._session.shutdown import Shutdown


def _ignore() -> None: ...


@pytest.mark.parametrize(
    ("is_pinned", "is_making", "is_alive", "keeps"),
    [
        (False, False, True, False),
        (True, False, True, False),
        (True, False, False, True),
        (False, True, True, True),
        (False, True, False, True),
    ],
)
def test_a_board_stays_mapped_while_a_gpu_may_write_to_it_or_a_call_may_register_it(
    monkeypatch: pytest.MonkeyPatch, is_pinned: bool, is_making: bool, is_alive: bool, keeps: bool
) -> None:
    monkeypatch.setattr(pinned, "is_any", lambda *_: is_pinned)
    monkeypatch.setattr(pinned, "unpin", lambda *_: True)
    kept: list[bool] = []
    board = SimpleNamespace(address=0, length=1, close=lambda *, keep_mapping: kept.append(keep_mapping))
    lease: Any = SimpleNamespace(board=board, stop=_ignore, coordinator_is_alive=lambda: is_alive)
    draining = SimpleNamespace(is_making=is_making)
    table: Any = SimpleNamespace(draining=draining, closes=SimpleNamespace(end=_ignore))
    connection: Any = SimpleNamespace(close=_ignore)
    Shutdown(connection, b"", lease, table, _ignore).end()
    assert kept == [keeps]
