"""A bridge's session that fails to begin leaves nothing, neither here nor with the coordinator."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import ipcsync
from ipcsync._linux.futex import DeathMark
from ipcsync._session import handshake, owner
from ipcsync._session.connection import Connection
from ipcsync._wire import messages
from ipcsync_bridge.session import BridgeSession
from tests.kit.descriptors import descriptors
from tests.kit.until import DEADLINE_S, until

pytestmark = pytest.mark.process

_WAIT_S = 20.0


class _PlannedError(OSError):
    """What the step fails with."""


def _fail(*_: object, **__: object) -> Any:
    raise _PlannedError("planned")


def _refuse_ready(patch: pytest.MonkeyPatch) -> None:
    request = Connection.request

    def refusing(self: Connection, body: messages.Message, *args: Any) -> messages.Message:
        return _fail() if isinstance(body, messages.Ready) else request(self, body, *args)

    patch.setattr(Connection, "request", refusing)


STEPS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "the board": lambda patch: patch.setattr(handshake, "open_board", _fail),
    "the lifeline": lambda patch: patch.setattr(handshake, "hold_lifeline", _fail),
    "the lease's bell": lambda patch: patch.setattr(os, "eventfd", _fail),
    "watching the coordinator": lambda patch: patch.setattr(owner, "Process", _fail),
    "ready": _refuse_ready,
    "the life thread": lambda patch: patch.setattr(DeathMark, "show", _fail),
    "the heartbeat's thread": lambda patch: patch.setattr(threading.Thread, "start", _fail),
}


@pytest.fixture
def client() -> Iterator[ipcsync.Client]:
    with (
        ipcsync.launch(log_level="warning", lease_ttl=300.0) as coordinator,
        ipcsync.connect(coordinator.endpoint) as client,
    ):
        yield client


@pytest.mark.parametrize("step", STEPS)
def test_a_session_that_fails_to_begin_leaves_nothing(
    client: ipcsync.Client, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    async def scenario() -> None:
        BridgeSession.opened(client.endpoint, "bridge a", _WAIT_S).close(says_goodbye=True)  # what a process opens once
        before, threads = len(descriptors()), set(threading.enumerate())
        with monkeypatch.context() as patch:
            patch.setattr(handshake, "_GOODBYE_S", DEADLINE_S)  # a busy machine may take longer than a caller waits
            STEPS[step](patch)
            with pytest.raises(_PlannedError):
                BridgeSession.opened(client.endpoint, "bridge a", _WAIT_S)
        assert "bridge a" not in [session.name for session in client.list_sessions()]
        with pytest.raises(ipcsync.NoBridge):
            client.event("kv", node="b")
        BridgeSession.opened(client.endpoint, "bridge a", _WAIT_S).close(says_goodbye=True)
        gc.collect()  # the exception's frames hold the board's mapping, which has a descriptor
        until(lambda: len(descriptors()) <= before, "its descriptors are closed")
        until(lambda: set(threading.enumerate()) <= threads, "its threads have ended")

    asyncio.run(scenario())
