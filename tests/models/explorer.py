"""An explicit-state explorer: every interleaving of a few small threads over shared words.

A thread is a generator function that yields atomic operations and is sent their values, so that it reads like the code
it stands for. Between two operations a generator is what its frames hold: where each stands, and its locals. From that
the explorer builds an automaton of each thread as it goes, and a state of the whole is the world, and a small number
for where each automaton stands. Rules for threads: locals are hashable, an operation's value is bound to a name at once
(`value = yield op`), and loops are `while` loops, since what lies on a frame's stack is not seen.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Generic, NamedTuple, TypeVar

from tests.kit.collector import collector_off

W = TypeVar("W", bound=tuple[Any, ...])

Program = Generator["Op", Any, Any]
Moves = Iterable[tuple[Any, Any]]


class Op(NamedTuple):
    """One atomic operation. `apply(world, *args)` gives the (value, next world) that it may have; none: it blocks.

    `is_private`: nobody else can tell when it happens, nor change what it gives, in the scenario explored.
    """

    label: str
    apply: Callable[..., Moves]
    args: tuple[Any, ...] = ()
    is_private: bool = False


class Ended(Exception):  # noqa: N818 - how a thread ends, not an error
    """Raised in a thread: it ends here, with this outcome."""


class Violation(AssertionError):  # noqa: N818 - it is what a checker calls it
    """Something that must always hold does not; the text tells the steps that led there."""


class Env(NamedTuple):
    """What may happen from outside in any state: `moves(world)` gives (label, next world).

    `is_fair`: it does happen at last, so that a thread may wait for it.
    """

    moves: Callable[[Any], Iterable[tuple[str, Any]]]
    is_fair: bool = False


@dataclass
class _Node:
    op: Op | None  # None: ended
    outcome: str
    history: tuple[Any, ...]
    after: dict[Any, int] = field(default_factory=dict)


class Automaton:
    """One thread's program, unfolded as far as it was needed."""

    def __init__(self, name: str, program: Callable[[], Program]) -> None:
        self.name = name
        self._program = program
        self.nodes: list[_Node] = []
        self._numbers: dict[Any, int] = {}
        self.start = self._number(())

    def step(self, number: int, value: Any) -> int:
        """Where the thread stands after its operation gave `value`."""
        node = self.nodes[number]
        found = node.after.get(value)
        if found is None:
            found = node.after[value] = self._number((*node.history, value))
        return found

    def _number(self, history: tuple[Any, ...]) -> int:
        program = self._program()
        op: Op | None = None
        outcome = ""
        try:
            op = next(program)
            for value in history:
                op = program.send(value)
            key: Any = (op, tuple(_frames(program)))
        except StopIteration as stop:
            op, outcome = None, str(stop.value)
            key = outcome
        except Ended as ended:
            op, outcome = None, str(ended)
            key = outcome
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.nodes)
            self.nodes.append(_Node(op, outcome, history))
        return number


def _frames(program: Any) -> Iterator[tuple[str, int, tuple[tuple[str, Any], ...]]]:
    while program is not None:
        frame: FrameType = program.gi_frame
        yield frame.f_code.co_name, frame.f_lasti, tuple(sorted(frame.f_locals.items(), key=lambda item: item[0]))
        program = program.gi_yieldfrom


@dataclass(frozen=True)
class Result:
    """How much was looked at, and in which ways each thread ended."""

    states: int
    transitions: int
    outcomes: dict[str, frozenset[str]]


class Explorer(Generic[W]):
    """All states of `threads` and `env` from `world` on.

    `on_end(world, name, outcome)` and `invariant(world)` give "" or what is wrong. `must_end(world)` names the threads
    that have to come to an end from there on, by their own steps, other threads' and fair ones from outside.
    """

    def __init__(
        self,
        world: W,
        threads: Sequence[tuple[str, Callable[[], Program]]],
        env: Sequence[Env],
        *,
        is_running: Callable[[W, str], bool],
        on_end: Callable[[W, str, str], str],
        invariant: Callable[[W], str],
        must_end: Callable[[W], Iterable[str]],
    ) -> None:
        self._automata = [Automaton(name, program) for name, program in threads]
        self._names = [automaton.name for automaton in self._automata]
        self._env = env
        self._is_running = is_running
        self._on_end = on_end
        self._invariant = invariant
        self._must_end = must_end
        start = (world, tuple(automaton.start for automaton in self._automata))
        self._numbers = {start: 0}
        self._states = [start]  # by number, as are these
        self._from, self._labels = array("l", [-1]), [""]  # how it was reached first
        self._back: list[list[int]] = [[]]  # from where fair steps lead to it

    def run(self) -> Result:
        """Look at all of it. Raises Violation with a shortest way to what must not be."""
        with collector_off():  # what lives here grows by the million, and has no cycles
            transitions = self._walk()
            self._judge_endings()
        outcomes = {
            automaton.name: frozenset(node.outcome for node in automaton.nodes if node.op is None)
            for automaton in self._automata
        }
        return Result(len(self._states), transitions, outcomes)

    def _walk(self) -> int:
        transitions = here = 0
        while here < len(self._states):
            state = self._states[here]
            for label, following, is_fair in self._moves(state):
                transitions += 1
                there = self._numbers.get(following)
                if there is None:
                    there = self._add(following, here, label)
                    self._judge(state, following)
                if is_fair and there != here:
                    self._back[there].append(here)
            here += 1
        return transitions

    def _add(self, state: Any, came_from: int, label: str) -> int:
        number = self._numbers[state] = len(self._states)
        self._states.append(state)
        self._from.append(came_from)
        self._labels.append(label)
        self._back.append([])
        return number

    def _moves(self, state: Any) -> Iterator[tuple[str, Any, bool]]:
        world, places = state
        for index, automaton in enumerate(self._automata):
            op = automaton.nodes[places[index]].op
            if op is not None and op.is_private and self._is_running(world, automaton.name):
                yield from self._steps(state, index, op)
                return  # nobody can tell it from happening at any other time: it happens now
        for index, automaton in enumerate(self._automata):
            op = automaton.nodes[places[index]].op
            if op is not None and self._is_running(world, automaton.name):
                yield from self._steps(state, index, op)
        for env in self._env:
            for label, following in env.moves(world):
                yield label, (following, places), env.is_fair

    def _steps(self, state: Any, index: int, op: Op) -> Iterator[tuple[str, Any, bool]]:
        world, places = state
        automaton = self._automata[index]
        for value, following in op.apply(world, *op.args):
            place = automaton.step(places[index], value)
            label = f"{automaton.name}: {op.label} → {value}"
            yield label, (following, (*places[:index], place, *places[index + 1 :])), True

    def _judge(self, before: Any, state: Any) -> None:
        world, places = state
        wrong = self._invariant(world)
        if not wrong:
            for automaton, old, new in zip(self._automata, before[1], places, strict=True):
                if old != new and automaton.nodes[new].op is None:
                    wrong = self._on_end(world, automaton.name, automaton.nodes[new].outcome)
                    if wrong:
                        wrong = f"{automaton.name} ended with {automaton.nodes[new].outcome!r}: {wrong}"
                        break
        if wrong:
            self._fail(wrong, state)

    def _judge_endings(self) -> None:
        for index, automaton in enumerate(self._automata):
            has_ended = [node.op is None for node in automaton.nodes]
            reached = bytearray(has_ended[places[index]] for _, places in self._states)
            todo = [number for number, is_reached in enumerate(reached) if is_reached]
            while todo:
                for number in self._back[todo.pop()]:
                    if not reached[number]:
                        reached[number] = 1
                        todo.append(number)
            for is_reached, state in zip(reached, self._states, strict=True):
                if not is_reached and automaton.name in self._must_end(state[0]):
                    self._fail(f"{automaton.name} may wait for ever", state)

    def _fail(self, wrong: str, state: Any) -> None:
        steps = []
        at = self._numbers[state]
        while at > 0:
            steps.append(self._labels[at])
            at = self._from[at]
        raise Violation("\n  ".join([wrong, *reversed(steps), f"in the end: {state[0]}"]))


def run_alone(world: W, program: Program, after: Callable[[str, W], W]) -> tuple[list[str], str]:
    """Run one thread by itself: the labels of its operations, and how it ended.

    `after(label, world)` is what the world has become after an operation by somebody else's doing.
    """
    labels: list[str] = []
    try:
        op = next(program)
        while True:
            moves = list(op.apply(world, *op.args))
            assert moves, f"{op.label} blocks, and nobody else runs"
            labels.append(op.label)
            value, following = moves[0]
            world = after(op.label, following)
            op = program.send(value)
    except StopIteration as stop:
        return labels, str(stop.value)
    except Ended as ended:
        return labels, str(ended)
