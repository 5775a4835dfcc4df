"""A call's `timeout` is for all that it waits for."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest

import ipcsync
from ipcsync._board import layout
from ipcsync._linux import files
from ipcsync._session.connection import Connection, Request
from ipcsync._session.driving import Driving
from ipcsync._session.session import Session
from ipcsync._threads import Job
from ipcsync._wire import codec as wire
from ipcsync._wire import messages
from ipcsync.client.aio.event import AsyncPoint
from ipcsync.client.point import _unpickle
from tests.faults import fixtures
from tests.kit.machine import FEW_WAKE_UPS, Machine
from tests.kit.until import DEADLINE_S, until

pytestmark = pytest.mark.driver

NewClient = Callable[..., ipcsync.Client]


@contextmanager
def _stopped(client: ipcsync.Client) -> Iterator[None]:
    """The coordinator does not answer."""
    pid = int(client.stats(timeout=DEADLINE_S)["pid"])
    fixtures.stop(pid)
    try:
        yield
    finally:
        fixtures.resume(pid)


def _took(call: Callable[[], object]) -> float:
    """How long a call takes that ends by its timeout."""
    began = time.monotonic()
    with pytest.raises(ipcsync.WaitTimeout):
        call()
    return time.monotonic() - began


def _is_within(machine: Machine, seconds: float, took: float) -> bool:
    """Whether what has just ended took no longer than that, on this machine as it is now."""
    return took < machine.limit(seconds, time.monotonic() - took, FEW_WAKE_UPS)


@pytest.fixture
def unpickled(client: ipcsync.Client, new_client: NewClient) -> ipcsync.Point:
    """A point of this process that nobody has used yet, and that the client is not attached to."""
    other = new_client("other")
    event = other.event("x", recorder=True, engine="timeline")
    data = pickle.dumps(event.record(ipcsync.Stream()))
    other.close()
    assert client.is_connected
    point: ipcsync.Point = pickle.loads(data)
    return point


def test_an_opening_that_waits_for_another_ones_turn_has_the_rest_of_its_time(
    client: ipcsync.Client, machine: Machine
) -> None:
    def open_one() -> None:
        with pytest.raises(ipcsync.WaitTimeout):
            client.event("first", timeout=1.0)

    with _stopped(client):
        thread = threading.Thread(target=open_one)
        thread.start()
        until(lambda: client._session.owner.job is not None, "the first has its turn")
        took = _took(lambda: client.event("second", timeout=1.5))
        assert _is_within(machine, 2.2, took), "not one second, and then one and a half"
        thread.join()


def _job_of(client: ipcsync.Client) -> Job[Any]:
    """What its session's owner does for a call."""
    until(lambda: client._session.owner.job is not None, "a call has its turn")
    job = client._session.owner.job
    assert job is not None
    return job


def test_an_opening_behind_a_close_that_was_not_taken_ends_with_its_client(client: ipcsync.Client) -> None:
    """Else the client's own close waits for the opening's timeout."""
    first, errors = client.event("first", recorder=True), list[BaseException]()

    def open_one() -> None:
        try:
            client.event("second", timeout=10 * DEADLINE_S)
        except ipcsync.ClientClosed as error:
            errors.append(error)

    with _stopped(client):
        first.close()
        thread = threading.Thread(target=open_one)
        thread.start()
        _job_of(client)
        client.close()
        assert client._session._has_ended.is_set
        thread.join(DEADLINE_S)
    assert len(errors) == 1


def test_an_opening_behind_a_close_that_was_not_taken_ends_with_its_caller(client: ipcsync.Client) -> None:
    """Else the requests of other threads wait for its timeout."""

    class InterruptError(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise InterruptError

    first, jobs = client.event("first", recorder=True), list[Job[Any]]()

    def end_call() -> None:
        jobs.append(_job_of(client))
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with _stopped(client):
            first.close()
            thread = threading.Thread(target=end_call)
            thread.start()
            with pytest.raises(InterruptError):
                client.event("second", timeout=10 * DEADLINE_S)
            until(lambda: jobs[0].is_set, "the owner goes on")
    finally:
        signal.signal(signal.SIGUSR1, before)
    thread.join()


def test_the_first_records_of_streams_in_several_threads_have_a_clients_timeout_each(
    client: ipcsync.Client, machine: Machine
) -> None:
    client.timeout = 2.0
    took: list[float] = []

    def record() -> None:
        took.append(_took(lambda: client.record(ipcsync.Stream())))

    threads = [threading.Thread(target=record) for _ in range(4)]
    with _stopped(client):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert _is_within(machine, 3.5, max(took)), "not two seconds for the turn, and two more for the opening"


@pytest.mark.parametrize("seconds", [Decimal("0.2"), Fraction(1, 5)])
def test_a_clients_timeout_of_any_number_ends_a_first_record_behind_another_threads(
    client: ipcsync.Client, seconds: Any
) -> None:
    client.timeout = seconds
    goes_on, has_it = threading.Event(), threading.Event()

    def hold() -> None:
        with client._unnamed._lock:
            has_it.set()
            goes_on.wait(DEADLINE_S)

    thread = threading.Thread(target=hold)
    thread.start()
    assert has_it.wait(DEADLINE_S)
    with pytest.raises(ipcsync.WaitTimeout, match="other threads' first records"):
        client.record(ipcsync.Stream())
    goes_on.set()
    thread.join()


def test_what_claims_a_name_of_the_fleet_has_one_timeout(
    client: ipcsync.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float | None] = []

    def request(_session: Session, _body: object, _kind: object, timeout: float | None = None) -> object:
        asked.append(timeout)
        raise ipcsync.NoBridge("there is none")

    monkeypatch.setattr(Session, "request", request)
    with pytest.raises(ipcsync.NoBridge):
        client.event("x", recorder=True, fleet=True, timeout=10.0)
    (left,) = asked
    assert left is not None
    assert left < 10.0, "what the opening left of it"


def test_what_an_engines_trial_took_the_opening_has_no_more(
    client: ipcsync.Client, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def passed_slowly(*_: object) -> str:
        time.sleep(1.0)
        return ""

    monkeypatch.setattr(Driving, "why_not_timeline", passed_slowly)
    with _stopped(client):
        took = _took(lambda: client.event("x", device=0, timeout=1.5))
        assert _is_within(machine, 2.2, took), "not one second, and then one and a half"


def test_a_check_that_waits_for_another_threads_trial_has_its_timeout(client: ipcsync.Client, machine: Machine) -> None:
    goes_on, has_begun = threading.Event(), threading.Event()

    def stay() -> None:
        has_begun.set()
        goes_on.wait(DEADLINE_S)

    thread = threading.Thread(target=client._session.driving._tried, args=(stay, DEADLINE_S))
    thread.start()
    try:
        assert has_begun.wait(DEADLINE_S)
        assert _is_within(machine, 3.0, _took(lambda: client.check(timeout=1.0)))
    finally:
        goes_on.set()
        thread.join()


def test_the_name_of_a_node_is_looked_at_before_anybody_is_asked(client: ipcsync.Client) -> None:
    for name in ("a b", "", "a.>"):
        with pytest.raises(ValueError, match="a node's name is 1 to"):
            client.list_events(node=name)


@pytest.mark.parametrize("call", ["synchronize", "wait", "wait_over", "synchronize_all", "record", "record all"])
def test_the_first_use_of_an_unpickled_point_is_part_of_its_wait(
    client: ipcsync.Client, unpickled: ipcsync.Point, machine: Machine, call: str
) -> None:
    stream, event = ipcsync.Stream(), client.event("mine", recorder=True)
    calls = {
        "synchronize": lambda: unpickled.synchronize(0.1),
        "wait": lambda: unpickled.wait(stream, timeout=0.1),
        "wait_over": lambda: client.wait_over(unpickled, 0.1),
        "synchronize_all": lambda: ipcsync.synchronize_all([unpickled], timeout=0.1),
        "record": lambda: event.record(stream, timeout=0.1, after=[unpickled]),
        "record all": lambda: client.record_all(timeout=0.1, after=[unpickled]),
    }
    with _stopped(client):
        assert _is_within(machine, 3.0, _took(calls[call]))


def test_nor_does_the_first_look_at_another_point_lengthen_the_wait_for_many(
    client: ipcsync.Client, unpickled: ipcsync.Point, machine: Machine
) -> None:
    first = client.event("first", recorder=True).at(1)
    with _stopped(client):
        assert _is_within(machine, 3.0, _took(lambda: ipcsync.synchronize_all([first, unpickled], timeout=0.2)))


def test_nor_do_many_of_them(client: ipcsync.Client, new_client: NewClient, machine: Machine) -> None:
    other = new_client("other")
    events = [other.event(f"e{number}", recorder=True, engine="timeline") for number in range(60)]
    data = [pickle.dumps(event.record(ipcsync.Stream())) for event in events]
    other.close()
    points: list[ipcsync.Point] = [pickle.loads(each) for each in data]
    first = client.event("first", recorder=True).at(1)
    with _stopped(client):
        took = _took(lambda: ipcsync.synchronize_all([first, *points], timeout=0.2))
        assert _is_within(machine, 2.0, took), "not 50 ms for each"


@pytest.mark.parametrize(
    "call", ["synchronize", "wait", "wait_over", "synchronize_all", "wait_all", "record", "replay"]
)
def test_the_first_use_of_an_unpickled_point_is_part_of_its_wait_in_asyncio(
    client: ipcsync.Client, unpickled: ipcsync.Point, machine: Machine, call: str
) -> None:
    async def scenario() -> float:
        async with await ipcsync.aconnect(client.endpoint) as mine:
            client.close()
            point, event = AsyncPoint(unpickled), await mine.event("mine", recorder=True)
            calls: dict[str, Callable[[], Awaitable[object]]] = {
                "synchronize": lambda: point.synchronize(0.1),
                "wait": lambda: point.wait(ipcsync.Stream(), timeout=0.1),
                "wait_over": lambda: mine.wait_over(point, 0.1),
                "synchronize_all": lambda: mine.synchronize_all([point], timeout=0.1),
                "wait_all": lambda: mine.wait_all([point], ipcsync.Stream(), timeout=0.1),
                "record": lambda: event.record(ipcsync.Stream(), timeout=0.1, after=[point]),
                "replay": mine.replay({ipcsync.GraphWait(): point}, timeout=0.1).__aenter__,
            }
            fixtures.stop(pid)
            began = time.monotonic()
            try:
                with pytest.raises(ipcsync.WaitTimeout):
                    await calls[call]()
                return time.monotonic() - began
            finally:
                fixtures.resume(pid)

    pid = int(client.stats()["pid"])
    assert _is_within(machine, 3.0, asyncio.run(scenario()))


def test_the_turn_of_a_thread_is_part_of_an_asyncio_requests_time(
    coordinator: ipcsync.Coordinator, machine: Machine
) -> None:
    async def ask_with_all() -> float:
        async with ipcsync.aconnect(coordinator.endpoint) as client:
            pid = (await client.stats(timeout=DEADLINE_S))["pid"]
            fixtures.stop(pid)
            try:
                began = time.monotonic()
                # Ten times as many as there are threads.
                asked = [client.event(f"e{number}", timeout=0.5) for number in range(160)]
                results = await asyncio.gather(*asked, return_exceptions=True)
                took = time.monotonic() - began
            finally:
                fixtures.resume(pid)
        assert {type(result) for result in results} == {ipcsync.WaitTimeout}
        return took

    assert _is_within(machine, 2.5, asyncio.run(ask_with_all()))


def test_an_asyncio_request_that_gets_no_thread_in_its_time_ends_and_is_not_made(
    coordinator: ipcsync.Coordinator, machine: Machine
) -> None:
    async def ask_behind_all() -> tuple[float, list[str]]:
        async with ipcsync.aconnect(coordinator.endpoint) as client:
            pid = (await client.stats(timeout=DEADLINE_S))["pid"]
            fixtures.stop(pid)
            try:
                busy = [asyncio.ensure_future(client.stats(timeout=10 * DEADLINE_S)) for _ in range(16)]
                began = time.monotonic()
                with pytest.raises(ipcsync.WaitTimeout, match=r"no answer within 0\.3 s") as late:
                    await asyncio.wait_for(client.event("late", timeout=0.3), DEADLINE_S)
                took = time.monotonic() - began
                assert late.value.timeout == 0.3
            finally:
                fixtures.resume(pid)
            await asyncio.gather(*busy)
            return took, [info.name for info in await client.list_events()]

    took, names = asyncio.run(ask_behind_all())
    assert _is_within(machine, 2.5, took)
    assert names == []


def test_why_a_point_is_over_is_not_that_nobody_answers(client: ipcsync.Client, unpickled: ipcsync.Point) -> None:
    client.timeout = 0.1
    with _stopped(client), pytest.raises(ipcsync.WaitTimeout):
        unpickled.exception()


def _why_over(data: bytes, *, is_async: bool) -> ipcsync.IpcSyncError | None:
    point: ipcsync.Point = pickle.loads(data)
    return asyncio.run(AsyncPoint(point).exception()) if is_async else point.exception()


@pytest.mark.parametrize("is_async", [False, True])
def test_why_a_point_is_over_is_not_that_no_client_is_here(
    new_coordinator: Callable[..., ipcsync.Coordinator], *, is_async: bool
) -> None:
    one = new_coordinator()
    with ipcsync.connect(one.endpoint) as sender:
        data = pickle.dumps(sender.record(ipcsync.Stream()))
    with pytest.raises(ipcsync.ConnectError):
        _why_over(data, is_async=is_async)
    with ipcsync.connect(one.endpoint):
        assert _why_over(data, is_async=is_async) is None


@pytest.mark.parametrize("is_async", [False, True])
def test_why_a_point_is_over_may_be_that_it_is_of_an_earlier_coordinator(
    new_coordinator: Callable[..., ipcsync.Coordinator], *, is_async: bool
) -> None:
    with ipcsync.connect(new_coordinator().endpoint) as sender:
        data = pickle.dumps(sender.record(ipcsync.Stream()))
    with ipcsync.connect(new_coordinator().endpoint):
        assert isinstance(_why_over(data, is_async=is_async), ipcsync.StalePoint)


def test_a_connects_timeout_is_for_its_answer_and_its_lock_together(
    new_coordinator: Callable[..., ipcsync.Coordinator], machine: Machine
) -> None:
    """The coordinator answers late, and then another process still has the lock of the only session line."""
    one = new_coordinator(max_sessions=1)
    with ipcsync.connect(one.endpoint, timeout=DEADLINE_S) as last:
        board = os.open(last._session.lease.board.path, os.O_RDWR)
    assert files.try_lock(board, layout.HEADER)
    fixtures.stop(one.pid)
    late = threading.Timer(1.5, fixtures.resume, (one.pid,))
    began = time.monotonic()
    late.start()
    with pytest.raises(ipcsync.ConnectError):
        ipcsync.connect(one.endpoint, timeout=2.0)
    assert time.monotonic() - began < machine.limit(3.0, began, FEW_WAKE_UPS)
    late.join()
    os.close(board)


def test_a_connect_that_is_late_at_its_end_names_its_own_timeout(
    coordinator: ipcsync.Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange = Connection.exchange

    def unanswered(self: Connection, requests: Sequence[Request], *args: Any) -> None:
        if not isinstance(requests[0].body, messages.Ready):
            exchange(self, requests, *args)

    monkeypatch.setattr(Connection, "exchange", unanswered)
    with pytest.raises(ipcsync.WaitTimeout, match=r"did not answer within 30\.0 s$") as late:
        ipcsync.connect(coordinator.endpoint, timeout=30.0)
    assert late.value.timeout == 30.0


def test_what_the_bridge_answers_names_it_as_late_too(client: ipcsync.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "exchange", lambda *_: None)
    for call, who in ((client.nodes, "the coordinator or its bridge"), (client.list_sessions, "the coordinator")):
        with pytest.raises(ipcsync.WaitTimeout, match=rf"^{who} at {client.endpoint} did not answer within 30\.0 s$"):
            call(timeout=30.0)


def test_another_nodes_point_has_a_clients_timeout_for_its_first_use(
    client: ipcsync.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Less may be too little for the way there, and its silence would be a loss."""
    point = client.event("x", recorder=True).record(ipcsync.Stream())
    key = point._key
    far = _unpickle(wire.pack(key._replace(epoch=bytes(byte ^ 255 for byte in key.epoch))))
    asked: list[float | None] = []

    def attach(_session: Session, _key: object, timeout: float | None = None) -> object:
        asked.append(timeout)
        raise ipcsync.NoBridge("there is none")

    monkeypatch.setattr(Session, "attach", attach)
    with pytest.raises(ipcsync.NoBridge):
        far.synchronize(0.1)
    assert asked == [None]


def test_a_point_that_is_only_looked_at_is_attached_to_all_the_same(
    client: ipcsync.Client, new_client: NewClient
) -> None:
    other = new_client("other")
    point = other.event("x", recorder=True).record(ipcsync.Stream())
    point.synchronize(10)
    theirs: ipcsync.Point = pickle.loads(pickle.dumps(point))
    assert client.is_connected, "to which the point may belong"
    theirs.synchronize(0)
