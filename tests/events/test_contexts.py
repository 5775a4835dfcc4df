"""Several CUDA contexts in one process, of which another library ends one."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from cuda import bindings

import ipcsync
from ipcsync._drivers import load
from ipcsync._native import context
from ipcsync._native.context import DEFAULT_STREAMS
from ipcsync.testing import StreamGate
from ipcsync.typing import EngineName
from tests.graphs.layers import Layers, Sender
from tests.kit.driver_kit import ok
from tests.kit.steps import at_step
from tests.kit.until import DEADLINE_S, until

NewClient = Callable[..., ipcsync.Client]

_OPEN = "its records need streams of the primary CUDA context"


class Other:
    """Another library's context, current on this thread within a block of it; at first it is not."""

    def __init__(self) -> None:
        ok(load().cuCtxSetCurrent(context.primary(0)))
        parameters = () if bindings.__version__.startswith("12.") else (None,)  # since CUDA 13
        self._handle: Any = ok(load().cuCtxCreate(*parameters, 0, 0))
        ok(load().cuCtxPopCurrent())

    @contextmanager
    def current(self) -> Iterator[None]:
        ok(load().cuCtxPushCurrent(self._handle))
        yield
        ok(load().cuCtxPopCurrent())

    def stream(self) -> ipcsync.Stream:
        with self.current():
            return ipcsync.Stream()

    def end(self) -> None:
        if self._handle is not None:
            ok(load().cuCtxDestroy(self._handle))
            self._handle = None


@pytest.fixture
def other() -> Iterator[Other]:
    made = Other()
    yield made
    made.end()


def test_a_words_page_stays_registered_though_the_context_of_its_first_use_ends(
    new_client: NewClient, other: Other
) -> None:
    with other.current():
        client = new_client()
        event = client.event("e", recorder=True, engine="timeline")
        event.record(ipcsync.Stream()).synchronize(DEADLINE_S)
    mine = ipcsync.Stream()
    event.record(mine).synchronize(DEADLINE_S)
    other.end()
    event.record(mine).synchronize(DEADLINE_S)
    event.close()
    client.event("e", recorder=True, engine="timeline").record(mine).synchronize(DEADLINE_S)
    client.record(mine, engine="timeline").synchronize(DEADLINE_S)


def test_a_stream_of_another_context_waits_for_a_pending_point(
    new_client: NewClient, engine: EngineName, other: Other
) -> None:
    held, stream = ipcsync.Stream(), other.stream()
    with StreamGate(held):
        point = new_client().record(held, engine=engine)
        new_client().point(bytes(point)).wait(stream)
        assert not stream.query()
    point.synchronize(DEADLINE_S)
    stream.synchronize(DEADLINE_S)


def test_a_timeline_records_in_each_context_in_turn(client: ipcsync.Client, other: Other) -> None:
    mine, theirs = ipcsync.Stream(), other.stream()
    event = client.event("e", recorder=True, engine="timeline")
    with StreamGate(mine):
        points = [event.record(stream) for stream in (mine, theirs, mine, theirs)]
        with other.current():
            points.append(event.record())
        assert not any(point.query() for point in points)
    ipcsync.synchronize_all(points, timeout=DEADLINE_S)


# --- CUDA events, which belong to the primary context -----------------------------------------------------------------


def _unopened(client: ipcsync.Client, **options: Any) -> ipcsync.SharedEvent:
    """An event of a ring of CUDA events, of which none is opened yet: that is done at once for the client's first."""
    client.event("first", recorder=True, engine="event")
    return client.event("e", recorder=True, engine="event", **options)


@pytest.mark.parametrize("is_known", [False, True])
def test_a_cuda_event_is_not_recorded_on_a_stream_of_another_context(
    client: ipcsync.Client, other: Other, is_known: bool
) -> None:
    mine, theirs = ipcsync.Stream(), other.stream()
    event = _unopened(client)
    if is_known:
        event.record(mine)
        client.event("t", recorder=True, engine="timeline").record(theirs)
    for _ in range(2):
        with pytest.raises(ipcsync.EngineMismatch, match=_OPEN):
            event.record(theirs)
    assert event.record(mine).generation == 1 + is_known
    for default in (None, *DEFAULT_STREAMS):
        event.record(default and ipcsync.ExternalStream(default, 0)).synchronize(DEADLINE_S)
        with other.current(), pytest.raises(ipcsync.EngineMismatch, match=_OPEN):
            event.record(default and ipcsync.ExternalStream(default, 0))


def test_a_cuda_event_that_another_thread_opens_amid_a_first_record_is_not_recorded_in_another_context(
    client: ipcsync.Client, other: Other
) -> None:
    theirs, event = other.stream(), _unopened(client)
    with at_step("lock", event._engine.open_first), pytest.raises(ipcsync.EngineMismatch, match=_OPEN):
        event.record(theirs)
    event.record(ipcsync.Stream()).synchronize(DEADLINE_S)


def test_a_replay_records_no_cuda_event_of_another_context(new_client: NewClient, other: Other) -> None:
    client = new_client()
    event = client.event("e", recorder=True, engine="event")
    event.record(ipcsync.Stream()).synchronize(DEADLINE_S)
    with other.current():
        layers = Layers(1)
        (point,) = Sender(new_client(), layers).send(1)
        records = dict.fromkeys(layers.records, event)
        replaying = client.replay({layers.waits[0]: point}, records, stream=layers.stream, timeout=DEADLINE_S)
        replaying.__enter__()
        layers.launch()
        with pytest.raises(ipcsync.EngineMismatch, match=_OPEN):
            replaying.__exit__(None, None, None)
        layers.stream.synchronize(DEADLINE_S)
        assert layers.found() == [1]
    assert event.record(ipcsync.Stream()).generation == 2


def test_a_waiters_cuda_events_outlive_the_context_of_its_first_use(new_client: NewClient, other: Other) -> None:
    mine, event = ipcsync.Stream(), new_client().event("e", recorder=True, engine="event")
    seen = new_client().event("e")
    event.record(mine)
    with other.current():
        seen.at(1).synchronize(DEADLINE_S)
    other.end()
    with StreamGate(mine):
        point = seen.at(event.record(mine).generation)
        point.wait(waiting := ipcsync.Stream())
        assert not waiting.query()
    point.synchronize(DEADLINE_S)


# --- contexts that have ended -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("nothing_queued")
def test_a_point_behind_everything_does_not_ask_the_streams_of_a_context_that_has_ended(
    client: ipcsync.Client, other: Other
) -> None:
    stream = other.stream()
    with other.current():
        client.record_all(engine="timeline").synchronize(DEADLINE_S)
    other.end()
    client.record_all(engine="timeline").synchronize(DEADLINE_S)
    ipcsync.synchronize(timeout=DEADLINE_S)
    assert stream  # somebody still has it


def test_a_use_whose_context_has_ended_is_released(client: ipcsync.Client, other: Other) -> None:
    with other.current():
        stream, event = ipcsync.Stream(), client.event("e", recorder=True, engine="timeline")
        event.record(stream).synchronize(DEADLINE_S)
    del stream
    gc.collect()
    other.end()
    event.close()
    until(lambda: client.stats()["pool_in_use"] == 0, "the slot is free again")
