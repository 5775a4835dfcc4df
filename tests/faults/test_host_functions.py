"""A host function that a program queued on a stream may call this library, on whichever thread the driver runs it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import ipcsync
from ipcsync._drivers import load, unwrap
from ipcsync.testing import StreamGate
from ipcsync.typing import EngineName
from tests.kit.until import DEADLINE_S

_HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def _outcome_within(function: Callable[[], Any]) -> object:
    """What `function` returns or raises, called by the driver in a host function of a stream of its own."""
    said: list[object] = []
    is_over = threading.Event()

    def call(_: object) -> None:
        try:
            said.append(function())
        except BaseException as error:  # noqa: BLE001 - what came is the result
            said.append(type(error))
        is_over.set()

    host_function, stream = _HostFunction(call), ipcsync.Stream()
    address = ctypes.cast(host_function, ctypes.c_void_p).value
    unwrap(load().cuLaunchHostFunc(stream._handle, address, 0), "cuLaunchHostFunc")
    assert is_over.wait(DEADLINE_S), "the call never returned"
    stream.synchronize(DEADLINE_S)
    return said[0]


def test_each_call_within_a_host_function_ends(
    client: ipcsync.Client, new_client: Callable[..., ipcsync.Client], engine: EngineName
) -> None:
    stream, held = ipcsync.Stream(), ipcsync.Stream()
    event = client.event("e", recorder=True, engine=engine)
    with StreamGate(held) as gate:
        pending = client.event("p", recorder=True, engine=engine).record(held)
        theirs = new_client().point(bytes(pending))
        recorded = _outcome_within(lambda: event.record(stream))
        assert isinstance(recorded, ipcsync.Point)
        assert isinstance(_outcome_within(lambda: client.record(stream)), ipcsync.Point)
        assert _outcome_within(lambda: theirs.wait(stream)) is None
        assert _outcome_within(theirs.query) is False
        assert _outcome_within(lambda: theirs.synchronize(0.05)) is ipcsync.WaitTimeout
        assert _outcome_within(lambda: stream.synchronize(0.05)) is ipcsync.WaitTimeout
        assert _outcome_within(lambda: client.stats()["sessions"]) == 2
        assert _outcome_within(lambda: client.event("opened").close()) is None
        gate.open()
    behind = event.record(stream)
    for point in (recorded, pending, behind):
        point.synchronize(DEADLINE_S)
    assert event.generation == 2
