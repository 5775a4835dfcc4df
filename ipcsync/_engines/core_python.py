"""The core in Python: it runs where there is no compiled one, whose interface it defines."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heappushpop
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ipcsync._board.words import words

if TYPE_CHECKING:
    from ipcsync._board import Board, SessionLine
    from ipcsync._drivers import DriverObject
    from ipcsync._linux.fork import ForkMark

T = TypeVar("T", bound=type)

INTERFACE = 15
"""The interface's version, which a binary must have too; raised with each change of the interface."""


class SessionCheck:
    """Whether a session can be used: no fork, its line `live` and `serial`'s, the header unchanged, the lease in time.

    `good_until` is CLOCK_MONOTONIC in ns; the session's lease writes it, and -1 once there is a problem.
    """

    __slots__ = ("_fork_mark", "_header", "_live", "_running_header", "_slowly", "_state_and_serial", "good_until")

    shortcuts = slow_calls = 0  # calls that the compiled core took, and those that it left to the Python engine

    def __init__(
        self, fork_mark: ForkMark, board: Board, line: SessionLine, serial: int, live: int, slowly: Callable[[], None]
    ) -> None:
        self._fork_mark = fork_mark.byte
        self._header, self._running_header = board.header, board.running_header
        self._state_and_serial, self._live = line.state_and_serial, words(live, serial)
        self._slowly = slowly
        self.good_until: int = -1

    def check(self) -> None:
        """Call `slowly` unless all is well. Costs about 0.3 µs, compiled 0.05."""
        if (
            self._fork_mark[0]
            and self._state_and_serial == self._live
            and self._header == self._running_header
            and monotonic_ns() <= self.good_until
        ):
            return
        self._slowly()


class Links(NamedTuple):
    """What a shortcut needs to note what stands behind what."""

    waits: dict[int, dict[int, Any]]
    """The waits that this process has queued, by stream: a record stands behind those on its stream."""
    changed: list[Any]
    """Those on their way into that; while there are any, no record is a shortcut."""
    lock: object
    """Held while they change."""
    drop: Callable[[Iterable[Any]], object]
    """Removes waits that are known good."""
    make_wait: type
    chain: object
    """The recorder's chain, whose entries are replaced with the engine's lock held."""
    make_entry: type
    behind_all: bool
    """Whether a record stands behind the waits of every stream; then none is a shortcut."""


class Core:
    """The base of an engine: the attributes that shortcuts use, and the operations that differ between the cores.

    The compiled one holds `known_complete`, the counts of records, the locks and the last streams as C values.
    """

    known_complete: int

    has_chain = False
    """Whether anything recorded here stands behind something that is not settled, or that is lost."""

    _room: int
    """Up to this generation a record has nothing to wait for."""

    _unmarked = 0
    """The address of a stream that may have work of a refused shortcut, and no marker behind it; 0: there is none."""

    _unmarked_id = 0
    """Its id."""

    _sleepers = 0
    """How many shortcuts sleep on an import of this use, which may not be destroyed meanwhile."""

    def __init__(self) -> None:
        self.known_complete = 0
        self._seen = [0]  # the true value; the attribute may be an older one

    def shorten(self, session: object, is_timeline: bool, links: Links) -> None:
        """Begin to take shortcuts; does nothing in this core."""

    def _note_visits(self, found: bool) -> None:
        """Remember whether the recorder's last look at the visits found any: then the next look is to be here too."""

    def _keep_event(self, index: int, address: DriverObject) -> None:
        """Remember the CUevent of the ring at `index`."""

    def keep_marker(self, stream: int, address: DriverObject) -> None:
        """Remember the marker of a stream; 0: it is about to be destroyed."""

    def _await_work(self, event: DriverObject, word: int, wanted: int, until: int, nudge: int) -> bool | None:  # noqa: ARG002
        """Sleep until `event` is complete, the 64-bit word at that address has reached `wanted`, or `until` in ns.

        Without an event (0) it waits for the word only. `nudge` is the address of the recorder's nudge, which is woken
        if the wait takes long. Returns None if this core cannot do it; else the caller looks again.
        """
        return None

    def _knows_complete(self, generation: int) -> bool:
        return generation <= self._seen[0]

    def _note_complete(self, generation: int) -> None:
        """Remember that everything up to `generation` is complete; of two threads, neither undoes the other's."""
        heappushpop(self._seen, generation)  # the greater one stays, in a single step
        self.known_complete = self._seen[0]


class PointBase:
    """What a point holds."""

    __slots__ = ("_attached", "_generation")


class EventBase:
    """What a shared event holds."""


def shortened(names: str) -> Callable[[T], T]:  # noqa: ARG001 - the compiled one's
    """A class decorator: compiled shortcuts, if there are any, replace the methods `names` and call them if need be.

    A shortcut has the method's docstring, and its signature without the annotations, which CPython has for no builtin.
    """
    return lambda cls: cls


def bind_driver() -> str | None:
    """Get the driver's functions for the shortcuts; returns why that failed, or None."""
    return "pure Python"


def park(events: list[Any], word: int) -> bool:  # noqa: ARG001 - the compiled one's
    """Have a thread wait in the driver for these events, in order, and wake the sleepers on `word` at each.

    False if none does: there are few such threads, at most one for a word, and none in this core.
    """
    return False


def is_parked(event: DriverObject) -> bool:  # noqa: ARG001 - the compiled one's
    """Whether a thread is in the driver's wait for `event`, or will be: it may not be destroyed then."""
    return False


def parked() -> tuple[int, int]:
    """How many threads are in the driver's wait now, and how often one of them has woken others so far."""
    return 0, 0


def know_streams(cls: type) -> None:
    """Tell which class has the address of its stream in `_pointer`."""
