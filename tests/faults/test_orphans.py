"""Row 8, in the moment itself: a driver may say anything of events whose coordinator is gone, and none of it counts."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

import ipcsync
from ipcsync._engines.base import Engine
from ipcsync.testing import StreamGate
from tests.kit.until import until

pytestmark = [pytest.mark.driver, pytest.mark.keeper]

_Dying = Callable[[ipcsync.Point, str], Engine]


@pytest.fixture(params=[signal.SIGKILL, signal.SIGTERM])
def dying(
    request: pytest.FixtureRequest,
    coordinator: ipcsync.Coordinator,
    client: ipcsync.Client,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[_Dying]:
    """Have this thread's call on a point's event find the coordinator dying, and the driver say that all is well."""
    told = []

    def begin(point: ipcsync.Point, call: str) -> Engine:
        assert point._attached is not None
        engine = point._attached.engine
        real, caller = getattr(engine, call), threading.current_thread()

        def lie(*args: object) -> object:
            if threading.current_thread() is not caller:  # the heartbeat's harvest
                return real(*args)
            os.kill(coordinator.pid, request.param)
            until(lambda: engine.board.coordinator_is_over, "what the header says before anything is destroyed")
            told.append(call)
            return True

        monkeypatch.setattr(engine, call, lie)
        return engine

    yield begin
    assert told, "the driver was not asked"


def _by_the_python_engine(point: ipcsync.Point, use: str) -> Callable[..., object]:
    """The call with no shortcut, which asks the driver by other means: `test_compiled_order` has the same."""
    function: Callable[..., object] = getattr(point, f"_slow_{use}", getattr(point, use))
    return function


@pytest.mark.parametrize(
    ("call", "use"),
    [("_driver_query", "query"), ("_driver_wait", "synchronize"), ("_driver_stream_wait", "wait")],
)
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
            _by_the_python_engine(seen, use)(*[ipcsync.Stream()] * (use == "wait"))
        assert engine.known_complete == engine.line.completed == 0


@pytest.mark.parametrize(("call", "use"), [("_driver_query", "query"), ("_driver_stream_wait", "wait")])
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

        def close_then_ask() -> bool:
            monkeypatch.setattr(waiter._session.lease, "coordinator_is_alive", real)
            waiter.close()
            return real()

        monkeypatch.setattr(waiter._session.lease, "coordinator_is_alive", close_then_ask)
        with pytest.raises((ipcsync.EventClosed, ipcsync.CoordinatorLost)):  # the heartbeat may have seen it first
            _by_the_python_engine(point, use)(*[ipcsync.Stream()] * (use == "wait"))
        assert engine.known_complete == 0


def test_row_08_of_the_events_of_a_coordinator_that_is_gone_nothing_is_told_on_the_board(
    client: ipcsync.Client, dying: _Dying
) -> None:
    stream = ipcsync.Stream()
    with StreamGate(stream):
        engine = dying(client.event("e", recorder=True, engine="event").record(stream), "_driver_query")
        engine.publish_completed()
        assert engine.line.completed == 0
