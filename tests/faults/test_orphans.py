"""Row 8, in the moment itself: a driver may say anything of events whose coordinator is gone, and none of it counts."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import ipcsync
from ipcsync._engines.engine import Engine
from ipcsync.testing import StreamGate
from tests.kit import driver_functions
from tests.kit.until import until

pytestmark = [pytest.mark.driver, pytest.mark.keeper, pytest.mark.own_coordinator]

_Dying = Callable[[ipcsync.Point, str], Engine]
_QUERY, _WAIT = "cuEventQuery", "cuStreamWaitEvent"


@pytest.fixture(params=[signal.SIGKILL, signal.SIGTERM])
def dying(request: pytest.FixtureRequest, coordinator: ipcsync.Coordinator) -> Iterator[_Dying]:
    """Have this thread's call on a point's event find the coordinator dying, and the driver say that all is well."""
    told: list[str] = []

    def begin(point: ipcsync.Point, call: str) -> Engine:
        engine, caller = point._bound().engine, threading.current_thread()

        def lie(real: driver_functions.Call, *args: object) -> int:
            if threading.current_thread() is not caller:  # the heartbeat's harvest
                return real(*args)
            if not told:
                os.kill(coordinator.pid, request.param)
                until(lambda: engine.board.coordinator_is_over, "what the header says before anything is destroyed")
            told.append(call)
            return 0

        driver_functions.replace({call: lie})
        return engine

    yield begin
    driver_functions.restore()
    assert told, "the driver was not asked"


def _use(point: ipcsync.Point, use: str) -> None:
    calls: dict[str, Callable[[], Any]] = {
        "query": point.query,
        "synchronize": point.synchronize,
        "wait": lambda: point.wait(ipcsync.Stream()),
    }
    calls[use]()


_CALLS = [(_QUERY, "query"), (_QUERY, "synchronize"), (_QUERY, "wait"), (_WAIT, "wait")]


@pytest.mark.parametrize(("call", "use"), _CALLS)
@pytest.mark.parametrize("role", ["recorder", "waiter"])
def test_row_08_what_a_driver_says_of_the_events_of_a_coordinator_that_is_gone_counts_for_nothing(
    client: ipcsync.Client, new_client: Callable[[], ipcsync.Client], dying: _Dying, call: str, use: str, role: str
) -> None:
    stream = ipcsync.Stream()
    with StreamGate(stream):
        point = client.event("e", recorder=True, engine="event").record(stream)
        seen = point if role == "recorder" else new_client().point(bytes(point))
        engine = dying(seen, call)
        with pytest.raises(ipcsync.CoordinatorLost):
            _use(seen, use)
        assert engine.known_complete == engine.line.completed == 0


@pytest.mark.parametrize(("call", "use"), _CALLS)
def test_row_08_nor_does_it_if_the_client_is_closed_meanwhile(
    client: ipcsync.Client,
    new_client: Callable[[], ipcsync.Client],
    dying: _Dying,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    use: str,
) -> None:
    stream, waiter = ipcsync.Stream(), new_client()
    with StreamGate(stream):
        point = waiter.point(bytes(client.event("e", recorder=True, engine="event").record(stream)))
        engine, real = dying(point, call), waiter._session.lease.coordinator_is_alive
        caller = threading.current_thread()

        def close_then_ask() -> bool:
            if threading.current_thread() is not caller:  # the heartbeat, before the call
                return real()
            monkeypatch.setattr(waiter._session.lease, "coordinator_is_alive", real)
            waiter.close()
            return real()

        monkeypatch.setattr(waiter._session.lease, "coordinator_is_alive", close_then_ask)
        with pytest.raises((ipcsync.EventClosed, ipcsync.CoordinatorLost)):  # the heartbeat may have seen it first
            _use(point, use)
        assert engine.known_complete == 0


def test_row_08_of_the_events_of_a_coordinator_that_is_gone_nothing_is_told_on_the_board(
    client: ipcsync.Client, dying: _Dying
) -> None:
    stream = ipcsync.Stream()
    with StreamGate(stream):
        engine = dying(client.event("e", recorder=True, engine="event").record(stream), _QUERY)
        engine.publish_completed()
        assert engine.line.completed == 0
