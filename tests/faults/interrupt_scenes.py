"""The calls that are interrupted: each with what it needs before, and what must hold once all of it is over."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ipcsync
from ipcsync._engines import EventEngine, queued
from ipcsync._native.stream import stream_handle
from ipcsync.testing import StreamGate
from tests.faults.interrupt_stage import LONG_TTL_S, Call, Stage
from tests.faults.interrupting import Outcome
from tests.kit.until import until

Scene = Callable[[Stage], tuple[Call, Callable[[Outcome], None]]]


def _nothing(_: Outcome) -> None:
    """`Stage.check` says it all."""


def record(stage: Stage) -> tuple[Call, Callable[[Outcome], None]]:
    if isinstance(stage.event._engine, EventEngine):
        stage.event._engine._give_room(stage.event.generation)  # each time, so that every call has the same points
    return lambda: stage.event.record(stage.stream), _nothing


def record_at_the_rings_end(stage: Stage) -> tuple[Call, Callable[[Outcome], None]]:
    if isinstance(stage.event._engine, EventEngine):
        stage.event._engine._room = 0
    return lambda: stage.event.record(stage.stream), _nothing


def record_elsewhere(stage: Stage) -> tuple[Call, Callable[[Outcome], None]]:
    stage.event.record(stage.stream)
    return lambda: stage.event.record(stage.other), _nothing


def wait(stage: Stage) -> tuple[Call, Callable[[Outcome], None]]:
    gate = StreamGate(stage.stream)
    point = stage.peer.point(bytes(stage.event.record(stage.stream)))

    def after(_: Outcome) -> None:
        gate.open()
        stage.other.synchronize()

    return lambda: point.wait(stage.other), after


def query(stage: Stage) -> tuple[Call, Callable[[Outcome], None]]:
    point = stage.event.record(stage.stream)
    return stage.seen.at(point.generation).query, _nothing


def synchronize(stage: Stage) -> tuple[Call, Callable[[Outcome], None]]:
    point = stage.event.record(stage.stream)
    return lambda: stage.seen.at(point.generation).synchronize(10), _nothing


def open_one(stage: Stage) -> tuple[Call, Callable[[Outcome], None]]:
    name = stage.name()

    def after(outcome: Outcome) -> None:
        if outcome.result is not None:
            outcome.result.close()
        stage.check_gone(name)

    return lambda: stage.client.event(name, recorder=True, engine=stage.engine), after


def open_many(stage: Stage) -> tuple[Call, Callable[[Outcome], None]]:
    names = [stage.name() for _ in range(3)]

    def after(outcome: Outcome) -> None:
        for event in outcome.result or ():
            event.close()
        for name in names:
            stage.check_gone(name)

    return lambda: stage.client.events(names, recorder=True, engine=stage.engine), after


def point(stage: Stage) -> tuple[Call, Callable[[Outcome], None]]:
    event = stage.client.event(stage.name(), recorder=True, engine=stage.engine)
    data = bytes(event.record(stage.stream))

    def after(outcome: Outcome) -> None:
        outcome.forget()
        stage.peer.point(data).synchronize(10)
        event.close()
        stage.check_gone(event.name)

    return lambda: stage.peer.point(data), after


def record_unnamed(stage: Stage) -> tuple[Call, Callable[[Outcome], None]]:
    stream = ipcsync.Stream()

    def after(_: Outcome) -> None:
        first = stage.client.record(stream, engine=stage.engine).generation
        second = stage.client.record(stream, engine=stage.engine)
        stage.require(second.generation == first + 1, "the next record is of another event")
        stage.peer.point(bytes(second)).synchronize(10)

    return lambda: stage.client.record(stream, engine=stage.engine), after


def record_all(stage: Stage) -> tuple[Call, Callable[[Outcome], None]]:
    gate = StreamGate(stage.other)

    def after(outcome: Outcome) -> None:
        point = outcome.result or stage.client.record_all(engine=stage.engine)
        stage.require(not stage.peer.point(bytes(point)).query(), "it passes a stream that is held")
        gate.open()
        stage.peer.point(bytes(point)).synchronize(10)

    return lambda: stage.client.record_all(engine=stage.engine), after


def record_all_of_some(stage: Stage) -> tuple[Call, Callable[[Outcome], None]]:
    named = [stage.stream, stage.other]
    return lambda: stage.client.record_all(streams=named, engine=stage.engine), _nothing


def reserve(stage: Stage) -> tuple[Call, Callable[[Outcome], None]]:
    before = stage.unnamed

    def after(outcome: Outcome) -> None:
        if outcome.result is not None:
            outcome.result.close()
        outcome.forget()
        until(lambda: stage.unnamed <= before, "what was reserved is given back", stage.wait_s)

    return lambda: stage.client.reserve(engine=stage.engine), after


def record_reserved(stage: Stage) -> tuple[Call, Callable[[Outcome], None]]:
    reservation = stage.reserve()
    theirs = stage.peer.point(bytes(reservation.point))

    def after(_: Outcome) -> None:
        try:
            reservation.record(stage.stream)
        except ipcsync.EventClosed:  # it was made, and then the exception came; or on timeline it may have been
            if not reservation.point.is_recorded:
                reservation.close()
                with suppress(ipcsync.RecorderLost):
                    theirs.synchronize(stage.wait_s)
                return
        theirs.synchronize(stage.wait_s)
        reservation.close()

    return lambda: reservation.record(stage.stream), after


def close_event(stage: Stage) -> tuple[Call, Callable[[Outcome], None]]:
    event = stage.client.event(stage.name(), recorder=True, engine=stage.engine)
    event.record(stage.stream)

    def after(_: Outcome) -> None:
        event.close()
        stage.check_gone(event.name)

    return event.close, after


def close_client(stage: Stage) -> tuple[Call, Callable[[Outcome], None]]:
    name = stage.name()
    client = ipcsync.connect(stage.coordinator.endpoint, name=name, lease_ttl=LONG_TTL_S)
    client.event(name, recorder=True, engine=stage.engine).record(stage.stream)

    def after(_: Outcome) -> None:
        client.close()
        stage.check_ended(name)
        stage.check_gone(name)
        thread = client._session._thread
        stage.require(thread is None or not thread.is_alive(), "the session's thread goes on")

    return client.close, after


def connect(stage: Stage) -> tuple[Call, Callable[[Outcome], None]]:
    name = stage.name()

    def after(outcome: Outcome) -> None:
        if outcome.result is not None:
            outcome.result.close()
        stage.check_ended(name)

    return lambda: ipcsync.connect(stage.coordinator.endpoint, name=name, lease_ttl=LONG_TTL_S), after


def gate(stage: Stage) -> tuple[Call, Callable[[Outcome], None]]:
    stream = ipcsync.Stream()

    def after(outcome: Outcome) -> None:
        if outcome.result is not None:
            outcome.result.open()
        stream.synchronize()  # held by nobody any more

    return lambda: StreamGate(stream), after


def open_gate(stage: Stage) -> tuple[Call, Callable[[Outcome], None]]:
    stream = ipcsync.Stream()
    held = StreamGate(stream)

    def after(_: Outcome) -> None:
        held.open()
        stream.synchronize()

    return held.open, after


def launch(stage: Stage) -> tuple[Call, Callable[[Outcome], None]]:
    def after(outcome: Outcome) -> None:
        if outcome.result is not None:
            outcome.result.stop()

    return lambda: ipcsync.launch(log_level="error"), after


def record_behind_a_wait(stage: Stage) -> tuple[Call, Callable[[Outcome], None]]:
    held, before = ipcsync.Stream(), stage.event.generation
    source = stage.peer.event(stage.name(), recorder=True, engine=stage.engine)
    gate = StreamGate(held)
    stage.client.point(bytes(source.record(held))).wait(stage.stream)

    def after(_: Outcome) -> None:
        made = stage.event.generation
        stage.require(made == before or not stage.seen.at(made).query(), "complete before what it stands behind")
        gate.open()
        stage.stream.synchronize()
        source.close()

    return lambda: stage.event.record(stage.stream), after


def record_after(stage: Stage) -> tuple[Call, Callable[[Outcome], None]]:
    before = stage.event.generation
    source = stage.peer.event(stage.name(), recorder=True, engine=stage.engine)
    gate = StreamGate(stage.other)
    point = stage.client.point(bytes(source.record(stage.other)))

    def after(_: Outcome) -> None:
        made = stage.event.generation
        stage.require(made == before or not stage.seen.at(made).query(), "complete before the point that it is after")
        gate.open()
        stage.stream.synchronize()
        source.close()

    return lambda: stage.event.record(stage.stream, after=[point]), after


def record_in_a_full_ring(stage: Stage) -> tuple[Call, Callable[[Outcome], None]]:
    event = stage.client.event(stage.name(), recorder=True, engine=stage.engine, depth=2)
    gate = StreamGate(stage.stream)
    event.record(stage.stream)
    event.record(stage.stream)

    def record() -> None:
        with suppress(ipcsync.WaitTimeout):
            event.record(stage.stream, timeout=0.001)

    def after(_: Outcome) -> None:
        gate.open()
        event.record(stage.stream, timeout=stage.wait_s).synchronize(stage.wait_s)
        event.close()

    return record, after


def wait_ahead(stage: Stage) -> tuple[Call, Callable[[Outcome], None]]:
    theirs = stage.seen.at(max(stage.highest, stage.event.generation) + 1)

    def wait() -> None:
        with suppress(ipcsync.EngineMismatch, ipcsync.WaitTimeout):  # `event` cannot, and says so
            theirs.wait(stage.other, ahead=True, timeout=0)

    def after(_: Outcome) -> None:
        stage.event.record(stage.stream)
        stage.other.synchronize()

    return wait, after


def resume(stage: Stage) -> tuple[Call, Callable[[Outcome], None]]:
    stream, held = ipcsync.Stream(), ipcsync.Stream()
    source = _lose_a_wait(stage, stream, held)
    changed: Any = queued
    real, has_passed = queued.await_passed, []

    def await_passed(*args: Any) -> bool:
        is_past = real(*args)
        has_passed.append(is_past)
        return is_past

    changed.await_passed = await_passed

    def after(_: Outcome) -> None:
        changed.await_passed = real
        if not has_passed:
            stage.require(_lost_on(stream), "a wait that was lost is forgotten before the stream was found past it")
            _refuses(stage, stream)
        stage.client.resume(stream, stage.wait_s)
        stage.event.record(stream, timeout=stage.wait_s).synchronize(stage.wait_s)
        source.close()
        stage.peer.resume(held, stage.wait_s)

    return lambda: stage.client.resume(stream, stage.wait_s), after


def _lose_a_wait(stage: Stage, stream: ipcsync.Stream, held: ipcsync.Stream) -> ipcsync.SharedEvent:
    """Have the client queue a wait on `stream` that is lost: its event stands, on `held`, behind what never comes."""
    reservation = stage.peer.reserve(engine="timeline")  # which can be waited for ahead
    reservation.point.wait(held, ahead=True)
    source = stage.peer.event(stage.name(), recorder=True, engine=stage.engine)
    stage.client.point(bytes(source.record(held))).wait(stream)
    stage.require(not _lost_on(stream), "it is lost already")
    reservation.close()

    def is_lost() -> bool:
        stage.wake()
        return _lost_on(stream)

    until(is_lost, "the wait is lost", stage.wait_s)
    _refuses(stage, stream)
    return source


def _lost_on(stream: ipcsync.Stream) -> bool:
    return bool(queued.lost_on(*stream_handle(stream)))


def _refuses(stage: Stage, stream: ipcsync.Stream) -> None:
    error: Exception | None = None
    try:
        stage.event.record(stream, timeout=stage.wait_s)
    except ipcsync.RecorderLost as raised:
        error = raised
    stage.require(error, "a record is made behind a wait that was lost")


def all_of(call: Callable[..., object]) -> Scene:
    """`synchronize_all` or `wait_all` of points of several events."""

    def scene(stage: Stage) -> tuple[Call, Callable[[Outcome], None]]:
        stage.event.record(stage.stream)
        events = stage.client.events([stage.name(), stage.name()], recorder=True, engine=stage.engine)
        points = [stage.seen.at(stage.event.generation)]
        points += [stage.peer.point(bytes(event.record(stage.stream))) for event in events]

        def after(outcome: Outcome) -> None:
            outcome.forget()
            for event in events:
                event.close()

        return lambda: call(points), after

    return scene


def add_done_callback(stage: Stage) -> tuple[Call, Callable[[Outcome], None]]:
    point, called = stage.event.record(stage.stream), threading.Semaphore(0)

    def after(outcome: Outcome) -> None:
        if not outcome.was_interrupted:
            stage.require(called.acquire(timeout=stage.wait_s), "the callback is called")
        point.add_done_callback(lambda _: called.release())
        stage.require(called.acquire(timeout=stage.wait_s), "the next callback is called")

    return lambda: point.add_done_callback(lambda _: called.release()), after


def copy_event(stage: Stage) -> tuple[Call, Callable[[Outcome], None]]:
    event = stage.client.event(stage.name(), recorder=True, engine=stage.engine)

    def after(outcome: Outcome) -> None:
        if outcome.result is not None:
            outcome.result.close()
        outcome.forget()
        event.record(stage.stream)
        event.close()
        stage.check_gone(event.name)

    return lambda: copy.copy(event), after


def close_what_drains(stage: Stage) -> tuple[Call, Callable[[Outcome], None]]:
    held = ipcsync.Stream()
    event = stage.client.event(stage.name(), recorder=True, engine=stage.engine)
    gate = StreamGate(held)
    event.record(held)

    def after(_: Outcome) -> None:
        event.close()
        gate.open()
        stage.check_gone(event.name)

    return event.close, after


def stats(stage: Stage) -> tuple[Call, Callable[[Outcome], None]]:
    return stage.client.stats, _nothing


def watch(stage: Stage) -> tuple[Call, Callable[[Outcome], None]]:
    return lambda: next(stage.client.watch(timeout=10)), _nothing


def default_client(stage: Stage) -> tuple[Call, Callable[[Outcome], None]]:
    os.environ["IPCSYNC_ENDPOINT"] = stage.coordinator.endpoint
    ipcsync.default_client().close()
    before = len(stage.peer.list_sessions())

    def after(outcome: Outcome) -> None:
        outcome.forget()
        ipcsync.default_client().close()
        until(lambda: len(stage.peer.list_sessions()) <= before, "no session is left", stage.wait_s)
        del os.environ["IPCSYNC_ENDPOINT"]  # later tests of this process start programs that heed it

    return ipcsync.default_client, after


def collect(stage: Stage) -> tuple[Call, Callable[[Outcome], None]]:
    event = stage.client.event(stage.name(), recorder=True, engine=stage.engine)
    stage.peer.point(bytes(event.record(stage.stream))).synchronize(10)
    event.close()

    def after(_: Outcome) -> None:
        stage.check_gone(event.name)

    return ipcsync.ipc_collect, after


def native_event(stage: Stage) -> tuple[Call, Callable[[Outcome], None]]:
    def use() -> None:
        event = ipcsync.Event(interprocess=True)
        event.record(stage.stream)
        event.wait(stage.other)
        event.ipc_handle()
        event.synchronize()

    return use, _nothing


SCENES: dict[str, Scene] = {
    "record": record,
    "record at the ring's end": record_at_the_rings_end,
    "record on another stream": record_elsewhere,
    "wait": wait,
    "query": query,
    "synchronize": synchronize,
    "event": open_one,
    "events": open_many,
    "point": point,
    "record, unnamed": record_unnamed,
    "record_all": record_all,
    "record_all of named streams": record_all_of_some,
    "reserve": reserve,
    "record of a reservation": record_reserved,
    "close of an event": close_event,
    "close of a client": close_client,
    "connect": connect,
    "record behind a wait": record_behind_a_wait,
    "record after points": record_after,
    "record in a full ring": record_in_a_full_ring,
    "wait ahead": wait_ahead,
    "resume": resume,
    "synchronize_all": all_of(ipcsync.synchronize_all),
    "wait_all": all_of(ipcsync.wait_all),
    "add_done_callback": add_done_callback,
    "copy of an event": copy_event,
    "close of what drains": close_what_drains,
    "stats": stats,
    "watch": watch,
    "default_client": default_client,
    "ipc_collect": collect,
    "Event": native_event,
    "StreamGate": gate,
    "StreamGate.open": open_gate,
    "launch": launch,
}
