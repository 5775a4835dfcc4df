"""The board protocol as a model for `explorer` to walk: one slot, its recorder, waiters, the coordinator, the driver.

Each generator here stands for the compiled core's function of the same name, with its steps in the same order; one step
is one load, one store or one call of the driver or the kernel. `test_board_order` has the core called over a board
and a driver that write down what is done, and compares that with the order here: a step moved in the code fails there.

    ipcsync/_engines/core_cython/   slot.pxi, query.pxi, wait.pxi, record.pxi
    ipcsync_coordinator/effects.py  store_slot, watermark; Releaser: hold, reassert, reset

What surrounds them: the GPU completes what was recorded when it likes, in the order of each stream; the recorder is
killed at any step, or expires and goes on; once it is dead, the driver may call its unfinished work complete, or never
does; a waiter is killed; another thread of a waiter's process closes the event; the coordinator is killed, and once its
events are gone the driver calls anything complete. The base of the first use is 0.

Mistakes that can be planted are in `MISTAKES`; the tests see each of them found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise

from tests.models import board_world as do
from tests.models.board_recorder import Model
from tests.models.board_world import FREE, MISTAKES, OPEN, RECORDER, Process, Scenario, World
from tests.models.explorer import Env, Explorer, Program, Result

__all__ = ["MISTAKES", "Scenario", "explore"]


def _gpu(world: World) -> Iterable[tuple[str, World]]:
    """The GPU completes a record, if what its stream holds before it is complete, and what it follows."""
    if not world.processes[RECORDER].is_alive:
        return  # the worst case: what it has not done by then, it never does
    for index, (generation, stream, follows) in enumerate(world.gpu):
        if any(other[1] == stream for other in world.gpu[:index]) or (follows and follows not in world.truth):
            continue
        rest = world._replace(gpu=world.gpu[:index] + world.gpu[index + 1 :], truth=world.truth | {generation})
        yield f"the GPU completes {generation}", rest


def _gpu_word(world: World) -> Iterable[tuple[str, World]]:
    """The same, and it writes the timeline's word."""
    for label, following in _gpu(world):
        (generation,) = following.truth - world.truth
        wrong = "a late write reached the new use" if world.incarnation != 1 or world.state == FREE else ""
        yield label, following._replace(completed=generation, wrong=following.wrong or wrong)


def _streams(world: World) -> Iterable[tuple[str, World]]:
    """A waiter's stream gets past its wait."""
    for number, process in enumerate(world.processes):
        if process.queued and (world.coordinator == "gone" or do.says_complete(world, process.queued[0])):
            yield f"stream of {number} goes on", world.put(number, queued=process.queued[1:])


def _streams_word(world: World) -> Iterable[tuple[str, World]]:
    """The same on a timeline."""
    for number, process in enumerate(world.processes):
        if process.queued and world.completed >= process.queued[0]:
            wrong = "" if world.state != OPEN or process.queued[0] in world.truth else "a stream went on too early"
            yield (
                f"stream of {number} goes on",
                world.put(number, queued=process.queued[1:])._replace(wrong=world.wrong or wrong),
            )


def _death(world: World) -> Iterable[tuple[str, World]]:
    if world.processes[RECORDER].is_alive:
        yield "the recorder is killed", world.put(RECORDER, is_alive=False)


def _expiry(world: World) -> Iterable[tuple[str, World]]:
    recorder = world.processes[RECORDER]
    if recorder.is_alive and not recorder.is_expired:
        yield "the recorder expires", world.put(RECORDER, is_expired=True)


def _lie(world: World) -> Iterable[tuple[str, World]]:
    if not world.processes[RECORDER].is_alive and not world.lies:
        yield "the driver calls the dead one's work complete", world._replace(lies=True)


def _coordinators_death(world: World) -> Iterable[tuple[str, World]]:
    if world.coordinator == "alive":
        yield "the coordinator is killed", world._replace(coordinator="marked")
    elif world.coordinator == "marked":
        yield "its events are gone", world._replace(coordinator="gone")


def _waiters_death(world: World) -> Iterable[tuple[str, World]]:
    for number, process in enumerate(world.processes):
        if number != RECORDER and process.is_alive:
            yield f"waiter {number} is killed", world.put(number, is_alive=False, asleep=0, queued=())


def _invariant(world: World) -> str:
    if world.wrong:
        return world.wrong
    for generation in world.truth:
        if not world.is_true(generation):
            return f"generation {generation} is complete before one that came before it"
    recorder = world.processes[RECORDER]
    for process in world.processes:
        misses_record = process.asleep and process.asleep - 1 != world.recorded and world.incarnation == 1
        if misses_record and recorder.is_alive and not world.owes_wake:
            return "a waiter sleeps through a record"
        if process.asleep and process.is_due and world.breaking == "over":
            return "a waiter sleeps through a break"
    return ""


def _process_of(name: str) -> int | None:
    """The number of the process that a thread is of; None for the coordinator."""
    return None if name == "coordinator" else RECORDER if name[0] in "rh" else int(name[-1])


def explore(scenario: Scenario) -> Result:
    """Walk all of a scenario. Raises Violation."""
    model = Model(scenario)
    waiters = range(1, len(scenario.calls) + 1)
    threads: list[tuple[str, Callable[[], Program]]] = [("recorder", model.recorder)]
    if scenario.heartbeat:
        threads.append(("heartbeat", model.heartbeat))
    for number in waiters:
        threads.append((f"waiter {number}", lambda number=number: model.waiter(number)))  # type: ignore[misc] # mypy loses the default
        if number in scenario.closers:
            threads.append((f"closer {number}", lambda number=number: model.close(number, "c")))  # type: ignore[misc] # the same
    if scenario.dies or scenario.expires or scenario.closes:
        threads.append(("coordinator", model.coordinator))
    env = [
        Env(_gpu_word if model.is_timeline else _gpu, True),
        Env(_streams_word if model.is_timeline else _streams, True),
    ]
    env += [Env(_death), Env(_lie)] if scenario.dies else []
    env += [Env(_expiry)] if scenario.expires else []
    env += [Env(_coordinators_death)] if scenario.orphans else []
    env += [Env(_waiters_death)] if scenario.waiters_die else []

    def on_end(world: World, name: str, outcome: str) -> str:
        number = _process_of(name)
        if not name.startswith("waiter") or number is None:
            return ""
        return _judge_calls(world, world.processes[number], scenario.calls[number - 1], outcome)

    def is_running(world: World, name: str) -> bool:
        number = _process_of(name)
        return world.coordinator == "alive" if number is None else world.processes[number].is_alive

    def must_end(world: World) -> Iterable[str]:
        recorder = world.processes[RECORDER]
        if recorder.is_alive:
            yield "recorder"
        is_over = not recorder.is_alive or recorder.is_expired or recorder.told == "left"
        if is_over or world.coordinator != "alive":
            for number in waiters:
                if world.processes[number].is_alive:
                    yield f"waiter {number}"
                    if number in scenario.closers and model.is_timeline:
                        yield f"closer {number}"  # on the event engine a queued wait is the driver's

    world = _beginning(scenario)
    explorer = Explorer(
        world, threads, env, is_running=is_running, on_end=on_end, invariant=_invariant, must_end=must_end
    )
    return explorer.run()


def _beginning(scenario: Scenario) -> World:
    count = scenario.recorded
    assert count <= scenario.depth
    return World(
        recorded=count,
        ring=(*range(1, count + 1), *(0,) * (scenario.depth - count)),
        gpu=tuple((index + 1, scenario.streams[index], index) for index in range(count)),
        processes=(Process(made=count, room=scenario.depth), *(Process(),) * len(scenario.calls)),
    )


def _judge_calls(world: World, process: Process, calls: tuple[tuple[str, int], ...], outcome: str) -> str:
    results = outcome.split(",")
    name, generation = calls[len(results) - 1]
    result = results[-1]
    if any(before == "True" and after != "True" for before, after in pairwise(results)):
        return "what was complete is not any more"
    if result in ("ok", "True"):
        is_true = world.is_true(generation)
        if (name in ("query", "synchronize") or generation <= process.seen) and not is_true:
            return f"generation {generation} is not complete: a silent pass"
        if process.is_unfounded and not is_true:
            return f"a stream waits for generation {generation} of a recorder that was dead already: a silent pass"
        if process.is_late:
            return f"generation {generation} counts though it was lost at the break"
    if result == "orphaned" and world.coordinator == "alive":
        return "nothing is wrong with the coordinator"
    if result == "lost":
        recorder = world.processes[RECORDER]
        if world.breaking and generation <= min(world.kept, world.recorded):
            return f"generation {generation} was known complete, and is lost"
        if recorder.is_alive and not recorder.is_expired and not recorder.told:
            return "nothing is wrong with the recorder"
    return ""
