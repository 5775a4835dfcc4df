"""The board model's world: what takes part, its words and processes, and each atomic operation on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from tests.models.explorer import Moves

FREE, OPEN, BROKEN, CLOSED = 0, 1, 2, 3
MAX = 99  # stands for INT64_MAX
RECORDER = 0  # the number of the recorder's process; the waiters' follow

LOCKED = {"has_import", "room"}  # which no other thread of the process reads meanwhile

MISTAKES = {
    "publish before record": "`recorded` is stored before the driver's call",
    "record into a full ring": "an event is recorded again while its last record may be pending: no wait for room",
    "harvest after overwrite": "`completed` is stored only after the ring's event was recorded again",
    "reuse before detach": "a slot is used anew once its recorder is gone",
    "alive before query": "whether the recorder lives is asked before the driver, not after",
    "no look at the recorder": "a queued wait does not ask whether the recorder lives",
    "no look at the state": "what the driver says counts on a broken event, if its expired recorder lives",
    "wake before state": "a break wakes the waiters, then stores the state",
    "wake before publish": "a record wakes the waiters, then stores `recorded`",
    "watermark not taken": "a break does not say what was complete",
    "completed whatever the state": "a waiter believes `completed` of a broken event",
    "wait before recorded": "a wait is queued without a look at `recorded`",
    "no following": "a stream is recorded on that does not wait for the record on another one before",
    "no last look": "nothing looks whether this use was closed once the words were read",
    "let go while inside": "an import is destroyed while a thread waits in the driver for it",
    "inside after the look": "a thread looks whether this use was closed, then says that it is in the driver, unlocked",
    "let go without the lock": "who lets go looks who is in the driver, and a thread may be between that look and word",
    "release before state": "a timeline's word is released before the state says that it was",
    "release once": "a released word is not released again when a queued write pulled it down",
    "no look at the coordinator": "what the driver says of the coordinator's events counts whether or not it lives",
    "no last look at an orphan": "whether this use was closed is not asked after the guard, which is silent then",
    "told of an orphan": "the recorder tells the board what the driver says, whether or not the coordinator lives",
    "awaited before publish": "whether anybody waits is read before `recorded` is stored, as without a fence between",
    "asleep unawaited": "a waiter sleeps, and does not say so before",
    "room without a look": "the ring goes round whoever is about to queue a wait for what is complete",
    "look at hazards too early": "the hazards are read before `completed` is stored, as without a fence between",
    "look before the hazard": "a waiter looks what is complete, then says that it is about to queue a wait",
    "retract too early": "a waiter says that its wait is queued before the driver's call",
    "wait for the dead": "a recorder waits for the hazard of a dead process to end",
    "let go undrained": "a timeline's recorder lets go while a write of its own is queued",
}


class Process(NamedTuple):
    """One process: its engine's attributes, what the coordinator knows of it, and what the tests note."""

    is_alive: bool = True
    is_expired: bool = False
    lock: str = ""  # the thread that has `state`
    turn: str = ""  # the one that has `calls`
    is_closed: bool = False
    inside: int = 0
    seen: int = 0
    made: int = 0
    done: int = 0
    room: int = 0  # up to which generation a record has nothing to wait for
    hazard: int = 0  # odd: from before its last look what is complete until its wait is queued
    has_import: bool = True
    queued: tuple[int, ...] = ()  # what the waits queued on its stream wait for
    told: str = ""  # to the coordinator: "closed", "left"
    asleep: int = 0  # in the futex, 1 + what it saw
    is_due: bool = False  # it slept when a break began, which has to wake it
    is_late: bool = False  # its call began after a break, for what that had not kept
    is_unfounded: bool = False  # it queued a wait that nobody needs to fulfil


class World(NamedTuple):
    """The slot's line, the driver, the processes."""

    incarnation: int = 1
    state: int = OPEN
    recorder: int = 1
    watermark: int = 0
    recorded: int = 0
    completed: int = 0
    awaited: int = 0  # whether a record is to wake anybody
    announced: int = 0  # whether the recorder is to look at the hazards
    ring: tuple[int, ...] = (0,)
    gpu: tuple[tuple[int, int, int], ...] = ()  # recorded, not complete: (generation, stream, generation it follows)
    truth: frozenset[int] = frozenset()  # complete, really
    lies: bool = False  # the driver calls a dead process's work complete
    coordinator: str = "alive"  # "marked" on the header by the kernel, then "gone" with all the events that it exported
    processes: tuple[Process, ...] = ()
    owes_wake: bool = False
    breaking: str = ""  # "begun", "over"
    kept: int = 0  # what `completed` said when the break began
    wrong: str = ""

    def put(self, number: int, **values: Any) -> World:
        """The world with these values of one process."""
        processes = list(self.processes)
        processes[number] = processes[number]._replace(**values)
        return self._replace(processes=tuple(processes))

    def is_true(self, generation: int) -> bool:
        """Whether it and all before it are really complete."""
        return all(each in self.truth for each in range(1, generation + 1))


@dataclass(frozen=True)
class Scenario:
    """What takes part."""

    engine: Literal["event", "timeline"] = "event"
    depth: int = 1
    streams: tuple[int, ...] = (1,)  # which stream each record is made on
    recorded: int = 0  # how many of them were made, and are not complete, when it begins
    calls: tuple[tuple[tuple[str, int], ...], ...] = ()  # for each waiter: what it calls, for which generation
    dies: bool = False  # the recorder, at any step
    expires: bool = False  # the recorder, which goes on
    orphans: bool = False  # the coordinator dies
    closes: bool = False  # the recorder, when it has recorded
    closers: frozenset[int] = frozenset()  # waiters whose event another thread closes
    waiters_die: bool = False
    heartbeat: bool = False  # the recorder's other thread harvests
    reuse: bool = False  # the slot is used anew once it is free
    mistakes: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        assert self.mistakes <= MISTAKES.keys()


def load(world: World, name: str) -> Moves:
    return ((getattr(world, name), world),)


def store(world: World, name: str, value: Any) -> Moves:
    return ((None, world._replace(**{name: value})),)


def load_own(world: World, number: int, name: str) -> Moves:
    return ((getattr(world.processes[number], name), world),)


def store_own(world: World, number: int, name: str, value: Any) -> Moves:
    return ((None, world.put(number, **{name: value})),)


def lock(world: World, number: int, which: str, thread: str) -> Moves:
    return () if getattr(world.processes[number], which) else ((None, world.put(number, **{which: thread})),)


def publish(world: World, count: int, owes_wake: bool) -> Moves:
    if world.incarnation != 1:
        world = world._replace(wrong="a record of the old use was published in the new one")
    return ((None, world._replace(recorded=count, owes_wake=owes_wake)),)


def store_completed(world: World, count: int) -> Moves:
    if world.incarnation != 1:
        world = world._replace(wrong="`completed` of the new use was stored by the old one")
    if not world.is_true(count):
        world = world._replace(wrong=f"`completed` became {count}, which is not complete")
    return ((None, world._replace(completed=count)),)


def ask_awaited(world: World) -> Moves:
    """Whether a record is to wake anybody; if not, it owes no wake."""
    return ((world.awaited, world._replace(owes_wake=world.owes_wake and bool(world.awaited))),)


def owe_nothing(world: World) -> Moves:
    """The recorder wakes nobody."""
    return ((None, world._replace(owes_wake=False)),)


def wake(world: World, is_break: bool = False) -> Moves:
    processes = tuple(
        each._replace(asleep=0, is_due=each.is_due and is_break) if each.asleep else each for each in world.processes
    )
    return ((None, world._replace(processes=processes, owes_wake=False)),)


def sleep(world: World, number: int, seen: int) -> Moves:
    return ((None, world.put(number, asleep=1 + seen) if world.recorded == seen else world),)


def slept(world: World, number: int) -> Moves:
    """Woken, or its slice is over."""
    if not world.processes[number].asleep:
        return ((None, world),)
    return ((None, world.put(number, asleep=0, is_due=False)),)


def ask_alive(world: World, serial: int) -> Moves:
    if serial != 1:
        return ((True, world),)
    recorder = world.processes[RECORDER]
    if recorder.is_alive and recorder.told == "left":
        return ((True, world), (False, world))  # it may have ended its session too
    return ((recorder.is_alive, world),)


def announce(world: World, number: int) -> Moves:
    return ((None, world.put(number, hazard=world.processes[number].hazard + 1 | 1)),)


def retract(world: World, number: int) -> Moves:
    return ((None, world.put(number, hazard=world.processes[number].hazard + 1)),)


def load_hazards(world: World) -> Moves:
    return (
        (frozenset((number, each.hazard) for number, each in enumerate(world.processes) if each.hazard & 1), world),
    )


def ask_announcer(world: World, number: int) -> Moves:
    return ((world.processes[number].is_alive, world),)


def ask_coordinator(world: World) -> Moves:
    """Whether the header says that it is over."""
    return ((world.coordinator != "alive", world),)


def ask_guard(world: World, number: int) -> Moves:
    """Whether the guard raises for it: not if all of the client was closed, which a closed event may mean."""
    if world.coordinator == "alive":
        return ((False, world),)
    return ((True, world), (False, world)) if world.processes[number].is_closed else ((True, world),)


def _touch(world: World, number: int) -> World:
    """A driver call with an import."""
    if not world.processes[number].has_import:
        return world._replace(wrong="an import was used after it was let go of")
    if world.incarnation != 1:
        return world._replace(wrong="the old use's import was used in the new one")
    return world


def says_complete(world: World, captured: int) -> bool:
    is_lie = world.lies and not world.processes[RECORDER].is_alive
    return captured == 0 or captured in world.truth or is_lie


def event_query(world: World, number: int, generation: int) -> Moves:
    """Whether the driver calls the event complete. It may say anything of what was exported and is gone."""
    world = _touch(world, number)
    if world.coordinator == "gone":
        return ((True, world), (False, world))
    return ((says_complete(world, world.ring[(generation - 1) % len(world.ring)]), world),)


def record(world: World, generation: int, stream: int, follows: int) -> Moves:
    world = _touch(world, RECORDER)
    ring = list(world.ring)
    index = (generation - 1) % len(ring)
    if ring[index] and ring[index] not in world.truth:
        world = world._replace(wrong="an event was recorded again before its last record was complete")
    if ring[index] > world.completed and world.state == OPEN:
        world = world._replace(wrong="an event was recorded again before the board said that its last was complete")
    ring[index] = generation
    return ((None, world._replace(ring=tuple(ring), gpu=(*world.gpu, (generation, stream, follows)))),)


def write_word(world: World, generation: int, stream: int, follows: int) -> Moves:
    return ((None, world._replace(gpu=(*world.gpu, (generation, stream, follows)))),)


def queue_wait(world: World, number: int, generation: int) -> Moves:
    """cuStreamWaitEvent: it captures what the event holds now."""
    world = _touch(world, number)
    captured = world.ring[(generation - 1) % len(world.ring)]
    if captured < generation:
        world = world._replace(wrong=f"a wait for {generation} was queued on an event that holds {captured}")
    elif captured > generation:
        world = world._replace(wrong=f"a wait for {generation} was queued on the record of {captured}")
    return ((None, _queued(world, number, generation, captured)),)


def queue_wait_value(world: World, number: int, generation: int) -> Moves:
    return ((None, _queued(_touch(world, number), number, generation, generation)),)


def _queued(world: World, number: int, generation: int, captured: int) -> World:
    is_alive = world.processes[RECORDER].is_alive and world.coordinator != "gone"
    founded = generation in world.truth or (is_alive and world.completed != MAX)
    queued = world.processes[number].queued
    return world.put(number, queued=(*queued, captured), is_unfounded=not founded)


def ask_markers(world: World, number: int) -> Moves:
    return ((not world.processes[number].queued, world),)


def ask_own_markers(world: World) -> Moves:
    return ((not world.gpu, world),)


def begin_call(world: World, number: int, generation: int) -> Moves:
    kept = min(world.kept, world.recorded)
    late = world.state == BROKEN and generation > max(kept, world.processes[number].seen)
    return ((None, world.put(number, is_late=late, is_unfounded=False)),)


def begin_break(world: World) -> Moves:
    """The coordinator's load of `completed`."""
    processes = tuple(each._replace(is_due=bool(each.asleep)) for each in world.processes)
    return ((world.completed, world._replace(processes=processes, breaking="begun", kept=world.completed)),)


def see_what_is_kept(world: World) -> Moves:
    """Its load of `recorded`."""
    return ((world.recorded, world._replace(kept=min(world.kept, world.recorded))),)


def work_anew(world: World, count: int) -> Moves:
    return ((None, world._replace(recorder=2, recorded=count, completed=count)),)


def notice(world: World, before: str) -> Moves:
    """What the coordinator hears of the recorder: its death, the end of its lease, what it said."""
    recorder = world.processes[RECORDER]
    if not recorder.is_alive:
        return (("dead", world),)
    moves = []
    if recorder.is_expired:
        moves.append(("expired", world))
    if recorder.told != before:
        moves.append((recorder.told, world))
    return moves


def await_proof(world: World, is_hasty: bool, holds: bool) -> Moves:
    """That nobody can touch the slot any more; meanwhile, that a released word was pulled down."""
    who = world.processes[:1] if is_hasty else world.processes
    if all(each.told == "left" or not each.is_alive for each in who):
        return (("proven", world),)
    return (("pulled down", world),) if holds and world.completed != MAX else ()
