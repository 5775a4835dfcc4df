"""The last step of a session: what stays mapped."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ipcsync._native import device as devices
from ipcsync._native import pinned
from ipcsync._session.owner import Owner
from ipcsync._session.session import Session, living


def _ignore(*_: object) -> None: ...


@pytest.mark.parametrize(
    ("is_pinned", "is_used", "is_alive", "keeps"),
    [
        (False, "", True, False),
        (True, "", True, False),
        (True, "", False, True),
        (False, "a call", True, True),
        (False, "a call", False, True),
        (False, "the driver", True, True),
    ],
)
def test_a_board_stays_mapped_while_a_gpu_may_write_to_it_or_a_call_may_register_it(
    monkeypatch: pytest.MonkeyPatch, is_pinned: bool, is_used: str, is_alive: bool, keeps: bool
) -> None:
    monkeypatch.setattr(pinned, "is_any", lambda *_: is_pinned)
    monkeypatch.setattr(pinned, "unpin", lambda *_: True)
    kept: list[bool] = []

    def let_go() -> None:
        kept[:] = [False]

    board = SimpleNamespace(address=0, length=1, close=lambda *, keep_mapping: kept.append(keep_mapping), let_go=let_go)
    lease: Any = SimpleNamespace(board=board, stop=_ignore, coordinator_is_alive=lambda: is_alive)
    session: Any = Session("ipc:///none")
    session.lease, session.connection = lease, SimpleNamespace(close=_ignore)
    session.owner = Owner(lease)
    session.attachments = SimpleNamespace(is_due=False)
    session.driving = SimpleNamespace(stop=_ignore)
    session.trials = SimpleNamespace(are_under_way=is_used == "a call")
    session._driver_thread = SimpleNamespace(join=_ignore, is_alive=lambda: is_used == "the driver")
    living.append(session)
    devices.collectors.append(session._collect)
    session._forget_child = _ignore
    session._release()
    assert kept == [keeps]
