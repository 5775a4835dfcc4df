"""A client in unexpected surroundings: green threads, sub-interpreters, no metadata, and a program that drops it."""

from __future__ import annotations

import asyncio
import gc
import threading
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import pytest

import ipcsync
from ipcsync._native import context
from ipcsync._session.session import Session
from ipcsync.testing import StreamGate
from ipcsync.typing import EngineName
from tests.kit import scripts
from tests.kit.until import until

pytestmark = pytest.mark.process

_GREEN = """
import sys, types
import ipcsync
{patch}
for call in (lambda: ipcsync.connect({endpoint!r}), lambda: ipcsync.launch(log_level="error")):
    try:
        call()
    except ipcsync.IpcSyncError as error:
        assert "gevent has replaced this process's threads" in str(error), error
        assert "(thread=False, select=False, queue=False, subprocess=False)" in str(error), error
    else:
        raise AssertionError("it works")
"""
needs_gevent = pytest.mark.skipif(find_spec("gevent") is None, reason="gevent is not installed")


@needs_gevent
@pytest.mark.parametrize("but", ["", "thread=False, subprocess=False", "thread=False, select=False, queue=False"])
def test_threads_that_gevent_has_replaced_or_what_they_use_are_refused(
    coordinator: ipcsync.Coordinator, but: str
) -> None:
    patch = f"from gevent import monkey\nmonkey.patch_all({but})"
    scripts.run(_GREEN.format(endpoint=coordinator.endpoint, patch=patch))


_BESIDE_GEVENT = """
from gevent import monkey
monkey.patch_all(thread=False, select=False, queue=False, subprocess=False)
import asyncio, gevent, ipcsync

async def ask(endpoint):
    async with ipcsync.aconnect(endpoint) as client:
        await (await client.record(ipcsync.Stream())).synchronize(30)
        await client.stats()

with ipcsync.launch(log_level="error") as coordinator, ipcsync.connect(coordinator.endpoint) as client:
    def work(name):
        with client.event(name, recorder=True) as event:
            event.record(ipcsync.Stream()).synchronize(30)
            return event.generation

    assert [job.get() for job in [gevent.spawn(work, f"e{i}") for i in range(3)]] == [1, 1, 1]
    called = gevent.get_hub().loop.async_()
    with gevent.Timeout(30):
        waiting = gevent.spawn(gevent.get_hub().wait, called)
        gevent.sleep(0)
        client.record(ipcsync.Stream()).add_done_callback(lambda point: called.send())
        waiting.join()
    asyncio.run(ask(coordinator.endpoint))
"""


@needs_gevent
def test_what_the_refusal_tells_to_do_works() -> None:
    scripts.run(_BESIDE_GEVENT)


def test_whether_gevent_has_replaced_the_threads_is_asked_of_gevent_itself(coordinator: ipcsync.Coordinator) -> None:
    """In its place a module that says what gevent's says, for machines without it."""
    patch = """
monkey = types.ModuleType("gevent.monkey")
asked = []
monkey.is_module_patched = lambda name: asked.append(name)
sys.modules["gevent.monkey"] = monkey
ipcsync.connect({endpoint!r}).close()
assert asked == ["_thread", "select", "queue", "subprocess"]
monkey.is_module_patched = lambda name: name == "_thread"
"""
    patch = patch.format(endpoint=coordinator.endpoint)
    scripts.run(_GREEN.format(endpoint=coordinator.endpoint, patch=patch))


_SUB_INTERPRETER = """
import sys
try:
    import _xxsubinterpreters as interpreters
except ImportError:
    sys.exit(0)  # from 3.13, where the refusal of msgspec comes first
program = f"import sys; sys.path[:] = {sys.path}" + '''
import ipcsync
for call in (lambda: ipcsync.launch(log_level="error"), lambda: ipcsync.connect("ipc:///nowhere", timeout=0)):
    try:
        call()
    except ipcsync.IpcSyncError as error:
        assert "in a process of its own" in str(error), error
    else:
        raise AssertionError
'''
interpreters.run_string(interpreters.create(), program)
"""


def test_a_sub_interpreter_without_threads_is_refused_in_a_sentence() -> None:
    scripts.run(_SUB_INTERPRETER)


def test_a_client_that_is_dropped_before_it_is_closed_gives_a_warning(coordinator: ipcsync.Coordinator) -> None:
    client = ipcsync.connect(coordinator.endpoint, name="dropped")
    session = client._session
    with pytest.warns(ResourceWarning, match=r"the client 'dropped' of .* was dropped before it was closed"):
        del client  # which nothing else holds
    assert session.is_connected  # the program may hold its events
    session.close()


def test_the_requests_of_an_asynchronous_client_that_is_dropped_keep_no_threads(
    coordinator: ipcsync.Coordinator,
) -> None:
    before = set(threading.enumerate())

    def requesters() -> list[threading.Thread]:
        return [one for one in set(threading.enumerate()) - before if one.name == "ipcsync-requests"]

    async def open_and_drop() -> Session:
        client = await ipcsync.aconnect(coordinator.endpoint, name="dropped")
        await client.list_events()
        assert requesters()
        return client._session

    def dropped() -> Session:
        session = asyncio.run(open_and_drop())
        gc.collect()
        return session

    with pytest.warns(ResourceWarning, match=r"the client 'dropped' of .* was dropped before it was closed"):
        session = dropped()
    until(lambda: not requesters(), "the threads for its requests end")
    session.close()


def test_a_client_that_was_closed_or_never_opened_gives_none(coordinator: ipcsync.Coordinator) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        client = ipcsync.connect(coordinator.endpoint)
        client.close()
        del client
        with pytest.raises(ipcsync.ConnectError):
            ipcsync.connect("ipc:///nowhere", timeout=0)


@pytest.mark.parametrize("timeout", [10**400, 1e300, float("inf")])
def test_a_timeout_that_no_clock_can_hold_is_a_long_one(coordinator: ipcsync.Coordinator, timeout: float) -> None:
    with ipcsync.connect(coordinator.endpoint, timeout=timeout) as client:
        assert next(client.watch(timeout=timeout)).kind == "session_opened"
        client.timeout = timeout
        assert client.stats()["sessions"] >= 1
        point = client.record(ipcsync.Stream(), timeout=timeout)
        point.synchronize(timeout)
        point.wait(ipcsync.Stream(), timeout=timeout)

    async def ask() -> None:
        async with ipcsync.aconnect(coordinator.endpoint, timeout=timeout) as client:
            assert (await client.stats(timeout=timeout))["sessions"] >= 1
            await client.event("e", timeout=timeout)
            await (await client.record(ipcsync.Stream(), timeout=timeout)).synchronize(timeout)

    asyncio.run(ask())


def _is_late(point: ipcsync.Point) -> None:
    with pytest.raises(ipcsync.WaitTimeout):
        point.synchronize(0.01)


@pytest.mark.usefixtures("nothing_queued")
def test_which_calls_leave_a_context_current_on_a_thread_that_has_none(
    coordinator: ipcsync.Coordinator, engine: EngineName
) -> None:
    """As docs/cli.md says, "What a process takes over"."""
    other, held = ipcsync.Stream(), ipcsync.Stream()
    with (
        ipcsync.connect(coordinator.endpoint) as client,
        client.event("e", recorder=True, engine=engine) as event,
        StreamGate(held) as gate,
    ):
        point = event.record(held)
        calls: dict[str, tuple[bool, Callable[[], object]]] = {
            "connect": (False, lambda: ipcsync.connect(coordinator.endpoint).close()),
            "list": (False, client.list_events),
            "query": (False, point.query),
            "synchronize": (False, partial(_is_late, point)),
            "wait": (False, lambda: point.wait(other)),  # its marker is made in the stream's own
            "Stream": (True, ipcsync.Stream),
            "record_all": (True, client.record_all),
            "check": (True, client.check),
        }
        found = {}

        def make(name: str) -> None:
            calls[name][1]()
            found[name] = context.current() is not None

        for name in calls:
            thread = threading.Thread(target=make, args=(name,))  # a new one has no context
            thread.start()
            thread.join()
        gate.open()
        assert found == {name: leaves for name, (leaves, _) in calls.items()}
