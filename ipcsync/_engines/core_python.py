"""The core in Python: what runs where the compiled one is not, and what that one is the shorthand of."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappushpop
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, TypeVar

from ipcsync._board.lines import words

if TYPE_CHECKING:
    from ipcsync._board import Board, SessionLine
    from ipcsync._drivers import DriverObject
    from ipcsync._linux.fork import ForkMark

T = TypeVar("T", bound=type)

INTERFACE = 3
"""What the modules around the core expect of it; raised with any change that an older binary does not know."""


class Look:
    """Whether a session can be used: not forked, the line still `serial`'s and `live`, the header as it was, in time.

    `good_until` is CLOCK_MONOTONIC in ns; the session's lease writes it, and -1 once there is a problem.
    """

    __slots__ = ("_fork_mark", "_header", "_live", "_running_header", "_slowly", "_standing", "good_until")

    shortcuts = slow_calls = 0  # calls that the compiled core took, and those that it left to the Python engine

    def __init__(
        self, fork_mark: ForkMark, board: Board, line: SessionLine, serial: int, live: int, slowly: Callable[[], None]
    ) -> None:
        self._fork_mark = fork_mark.byte
        self._header, self._running_header = board.header, board.running_header
        self._standing, self._live = line.standing, words(live, serial)
        self._slowly = slowly
        self.good_until: int = -1

    def check(self) -> None:
        """Call `slowly` unless all is well. Costs about 0.3 µs, compiled 0.05."""
        if (
            self._fork_mark[0]
            and self._standing == self._live
            and self._header == self._running_header
            and monotonic_ns() <= self.good_until
        ):
            return
        self._slowly()


class Core:
    """What an engine is made over: the attributes that shortcuts use, and what each core does its own way.

    The compiled one holds `known_complete`, the counts of records, the locks and the last streams as C values.
    """

    known_complete: int

    has_chain = False
    """Whether anything recorded here stands behind something that is not settled, or that is lost."""

    _sleepers = 0
    """How many shortcuts sleep until an import of this use is complete, which may not be destroyed then."""

    def __init__(self) -> None:
        self.known_complete = 0
        self._seen = [0]  # the true `known_complete`, of which the attribute may be an older value

    def shorten(
        self, look: object, is_timeline: bool, waits: dict[int, Any], lock: object, make: type, behind_all: bool
    ) -> None:
        """Begin to take shortcuts, of which there are none here.

        `waits` are those that this process has queued, by stream: a record behind any of them is no shortcut, nor is
        anything of a recorder that has a chain. A wait that is queued adds one, made by `make`, with the lock held.
        """

    def _keep_event(self, index: int, address: DriverObject) -> None:
        """Know the CUevent of the ring at `index`."""

    def _keep_marker(self, stream: int, address: DriverObject) -> None:
        """Know the event that is recorded behind the waits on a stream; 0: it is about to be destroyed."""

    def _await_work(self, event: DriverObject, word: int, wanted: int, until: int, nudge: int) -> bool | None:  # noqa: ARG002
        """Sleep until `event` is complete, the 64-bit word at that address has reached `wanted`, or `until` in ns.

        Without an event (0) only for the word. `nudge` is the address of the recorder's, which is woken if it takes
        long. None: not here; else it is time to look.
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
    """A class decorator: its methods `names` become what their compiled shortcuts leave to them, if there are any."""
    return lambda cls: cls


def bind_driver() -> str:
    """Take the driver's functions for the shortcuts; why not, or an empty text."""
    return "pure Python"


def park(events: list[Any], word: int) -> bool:  # noqa: ARG001 - the compiled one's
    """Have a thread wait in the driver for these events, in their order, and wake who sleeps on `word` at each.

    False if it does not: there are few such threads, one for a word at most, and none here.
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
