"""An error that its caller has dropped is gone at once, with the frames of its traceback and what these had.

Tensors, say: else GPU memory stays in use until the garbage collector comes.
"""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

import ipcsync
from tests.client.loops import LONG_S, two_clients
from tests.faults import actions
from tests.kit.collector import collector_off
from tests.kit.peer import Peer
from tests.kit.until import DEADLINE_S, until

pytestmark = [pytest.mark.driver, pytest.mark.process]


@pytest.fixture
def kill(coordinator: ipcsync.Coordinator, peer: Peer) -> Callable[[], object]:
    """Kills the recorder of an event of that name."""
    peer.call(actions.open_recorder, coordinator.endpoint, "dying", "timeline")
    return peer.kill


def _raised(call: Callable[[], object], kind: type[Exception]) -> weakref.ref[Exception]:
    try:
        call()
    except kind as error:
        return weakref.ref(error)
    pytest.fail(f"no {kind.__name__}")


async def _raised_later(call: Callable[[], Awaitable[object]], kind: type[Exception]) -> weakref.ref[Exception]:
    try:
        await call()
    except kind as error:
        return weakref.ref(error)
    pytest.fail(f"no {kind.__name__}")


def _is_gone(error: weakref.ref[Exception]) -> bool:
    return error() is None


def test_of_a_client(
    new_client: Callable[..., ipcsync.Client], coordinator: ipcsync.Coordinator, kill: Callable[[], object]
) -> None:
    client, other, stream = new_client(), new_client(), ipcsync.Stream()
    other.event("e", recorder=True)
    event, dying = client.event("e"), client.event("dying")
    kill()
    calls: dict[str, tuple[type[Exception], Callable[[], object]]] = {
        "event": (ipcsync.RecorderTaken, lambda: client.event("e", recorder=True)),
        "nodes": (ipcsync.NoBridge, client.nodes),
        "record": (ipcsync.NotRecorder, lambda: event.record(stream)),
        "wait": (ipcsync.WaitTimeout, lambda: event.at(1).wait(stream, timeout=0)),
        "synchronize": (ipcsync.WaitTimeout, lambda: event.at(1).synchronize(0)),
        "of a dead recorder": (ipcsync.RecorderLost, lambda: dying.at(1).synchronize(DEADLINE_S)),
        "the first": (ipcsync.RecorderLost, lambda: ipcsync.synchronize_all([dying.at(1), event.at(1)])),
        "another": (ipcsync.RecorderLost, lambda: ipcsync.synchronize_all([event.at(1), dying.at(1)])),
        "late": (ipcsync.WaitTimeout, lambda: ipcsync.wait_all([event.at(1)], stream, timeout=0)),
        "connect": (ipcsync.ConnectError, lambda: ipcsync.connect(f"{coordinator.endpoint}-none", timeout=0.1)),
    }
    gc.collect()
    with collector_off():
        left = {what: _raised(call, kind) for what, (kind, call) in calls.items()}
        assert [what for what, error in left.items() if error() is not None] == []


def test_of_an_asynchronous_client(coordinator: ipcsync.Coordinator, kill: Callable[[], object]) -> None:
    async def main() -> None:
        async with two_clients(coordinator.endpoint) as (client, other):
            stream, _ = ipcsync.Stream(), await other.event("e", recorder=True)
            event, dying = await client.event("e"), await client.event("dying")
            kill()
            both = [event.at(1), dying.at(1)]
            calls: dict[str, tuple[type[Exception], Callable[[], Awaitable[object]]]] = {
                "event": (ipcsync.RecorderTaken, lambda: client.event("e", recorder=True)),
                "nodes": (ipcsync.NoBridge, client.nodes),
                "record": (ipcsync.NotRecorder, lambda: event.record(stream)),
                "wait": (ipcsync.WaitTimeout, lambda: event.at(1).wait(stream, timeout=0.01)),
                "synchronize": (ipcsync.WaitTimeout, lambda: event.at(1).synchronize(0.01)),
                "of a dead recorder": (ipcsync.RecorderLost, lambda: dying.at(1).synchronize(LONG_S)),
                "of several": (ipcsync.RecorderLost, lambda: client.synchronize_all(both, timeout=LONG_S)),
                "late": (ipcsync.WaitTimeout, lambda: client.wait_all([event.at(1)], stream, timeout=0.01)),
            }
            gc.collect()
            with collector_off():
                for what, (kind, call) in calls.items():
                    error = await _raised_later(call, kind)
                    # A thread's own last references go a moment later.
                    await asyncio.to_thread(until, partial(_is_gone, error), f"the error of {what} is gone")

    asyncio.run(main())
