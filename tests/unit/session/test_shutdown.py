"""The last step of a session: which pages stay registered."""

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
    ("is_used", "is_alive", "keeps"), [(False, True, False), (False, False, True), (True, True, True)]
)
def test_a_boards_pages_stay_registered_while_a_gpu_may_write_to_them(
    monkeypatch: pytest.MonkeyPatch, is_used: bool, is_alive: bool, keeps: bool
) -> None:
    """Of a lost coordinator's, queued work may; of a call's trial, its own stream may."""
    unpinned: list[int] = []
    monkeypatch.setattr(pinned, "unpin", lambda *where: unpinned.extend(where))
    board = SimpleNamespace(address=7, length=1, close=_ignore)
    lease: Any = SimpleNamespace(board=board, mark=SimpleNamespace(end=_ignore), coordinator_is_alive=lambda: is_alive)
    session: Any = Session("ipc:///none")
    session.lease, session.connection = lease, SimpleNamespace(close=_ignore)
    session.owner = Owner(lease)
    session.attachments = SimpleNamespace(is_due=False)
    session.driving = SimpleNamespace(stop=_ignore, is_trying=is_used)
    session._driver_thread = SimpleNamespace(join=_ignore)
    living.append(session)
    devices.collectors.append(session._collect)
    session._forget_child = _ignore
    session._release()
    assert unpinned == ([] if keeps else [7, 1])
