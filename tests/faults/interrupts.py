"""Interrupts every public call at each of its points, and looks whether every promise still holds.

    python -m tests.faults.interrupts [--kind line|instruction] [--engine E] [--only CALL] [--every N]

It prints a table of what was interrupted where, with counts, and ends with 1 if anything does not hold. A point is a
line, or on Python 3.12 and later an instruction, of ipcsync's own code beneath the call; see `interrupting`.
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import ipcsync
from ipcsync.testing import StreamGate
from ipcsync.typing import EngineName
from tests.faults.interrupt_stage import Call, Stage
from tests.faults.interrupting import HAS_INSTRUCTIONS, Outcome, interrupted
from tests.kit.until import until

_RENEW = 100  # calls after which a scene has new events
_STUCK_S = 60.0
ENOUGH = 10  # failures of one call


@dataclass
class Result:
    """What became of one call's points."""

    call: str
    engine: str
    points: int = 0
    where: Counter[str] = field(default_factory=Counter)  # modules
    failures: list[str] = field(default_factory=list)


Scene = Callable[[Stage], tuple[Call, Callable[[Outcome], None]]]


def _nothing(_: Outcome) -> None:
    """`Stage.check` says it all."""


def record(stage: Stage) -> tuple[Call, Callable[[Outcome], None]]:
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


def reserve(stage: Stage) -> tuple[Call, Callable[[Outcome], None]]:
    before = stage.unnamed

    def after(outcome: Outcome) -> None:
        if outcome.result is not None:
            outcome.result.close()
        outcome.forget()
        until(lambda: stage.unnamed <= before, "what was reserved is given back", stage.wait_s)

    return lambda: stage.client.reserve(engine=stage.engine), after


def record_reserved(stage: Stage) -> tuple[Call, Callable[[Outcome], None]]:
    reservation = stage.client.reserve(engine=stage.engine)
    theirs = stage.peer.point(bytes(reservation.point))

    def after(_: Outcome) -> None:
        with suppress(ipcsync.EventClosed):  # it was made, and then the exception came
            reservation.record(stage.stream)
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
    client = ipcsync.connect(stage.coordinator.endpoint, name=name)
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

    return lambda: ipcsync.connect(stage.coordinator.endpoint, name=name), after


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


SCENES: dict[str, Scene] = {
    "record": record,
    "record on another stream": record_elsewhere,
    "wait": wait,
    "query": query,
    "synchronize": synchronize,
    "event": open_one,
    "events": open_many,
    "point": point,
    "record, unnamed": record_unnamed,
    "reserve": reserve,
    "record of a reservation": record_reserved,
    "close of an event": close_event,
    "close of a client": close_client,
    "connect": connect,
    "StreamGate": gate,
    "StreamGate.open": open_gate,
    "launch": launch,
}


def interrupt(stage: Stage, call: str, kind: str, every: int = 1, first: int = 1) -> Result:
    """Interrupt a call at each of its points, or at every so many from the `first` on; what did not hold."""
    result = Result(call, stage.engine)
    number = first
    while len(result.failures) < ENOUGH:
        if result.points % _RENEW == 0:
            stage.event.close()
            stage.seen.close()
            stage.renew()
        faulthandler.dump_traceback_later(_STUCK_S, exit=True)
        fn, after = SCENES[call](stage)
        stage.highest = max(stage.highest, stage.event._engine._begun)
        outcome = interrupted(fn, number, kind)
        try:
            if outcome.error is not None and not outcome.was_interrupted:
                raise outcome.error
            after(outcome)
            stage.check()
        except Exception as error:  # noqa: BLE001 - told in the table
            result.failures.append(f"{type(error).__name__}: {error}\n    interrupted at {outcome.stack}")
            stage.renew()
        faulthandler.cancel_dump_traceback_later()
        if not outcome.was_interrupted:
            break
        result.points += 1
        result.where[outcome.where.partition(":")[0]] += 1
        number += every
    return result


def main() -> None:
    """The whole."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.interrupts")
    parser.add_argument("--kind", choices=["line", "instruction"], action="append")
    parser.add_argument("--engine", choices=["event", "timeline"], action="append")
    parser.add_argument("--only", choices=SCENES, action="append")
    parser.add_argument("--every", type=int, default=1, help="of so many points, interrupt one")
    args = parser.parse_args()
    kinds = args.kind or ["line", *(["instruction"] if HAS_INSTRUCTIONS else [])]
    engines: list[EngineName] = args.engine or ["event", "timeline"]
    failed = False
    with ipcsync.launch(log_level="error", pool=8192) as coordinator:
        for kind in kinds:
            for engine in engines:
                stage = Stage(coordinator, engine)
                for call in args.only or SCENES:
                    result = interrupt(stage, call, kind, args.every)
                    failed |= bool(result.failures)
                    modules = ", ".join(f"{name} {count}" for name, count in result.where.most_common(6))
                    sys.stdout.write(
                        f"{kind:12}{engine:10}{call:26}{result.points:6} points, {len(result.failures)} failures"
                        f"   {modules}\n"
                    )
                    for failure in result.failures[:3]:
                        sys.stdout.write(f"  {failure[:1500]}\n")
                    sys.stdout.flush()
                stage.close()
    sys.exit(failed)


if __name__ == "__main__":
    main()
