"""Events of this node that others mirror: looked at by threads, which sleep while nothing happens.

A thread looks at no more events than one `futex_waitv` takes. While any of them has work in flight it looks every
50 µs, ever slower up to 1 ms, since a GPU wakes nobody; else it sleeps until a recorder publishes, or the coordinator
finishes an event. A wake that comes between look and sleep is lost; the next look is a second later at most, and the
coordinator's feed tells of an end besides.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from ipcsync._board import BROKEN, CLOSED, INT64_MAX, OPEN, Board
from ipcsync._engines.behind import Behind
from ipcsync._linux.futex import MOST_FUTEXES, FutexSet, Word
from ipcsync._wire.messages import Attachment
from ipcsync_bridge.wire import Key, Row

_FIRST_NS, _LONGEST_NS = 50_000, 1_000_000
_IDLE_NS = 1_000_000_000


class Export:
    """One use of a slot of this node's that others wait for. `followers` are the nodes that do."""

    def __init__(self, board: Board, attachment: Attachment) -> None:
        self.name = attachment.name
        self.key: Key = (attachment.slot, attachment.incarnation)
        self.followers: set[str] = set()
        self._base = attachment.base
        self._line = board.slot(attachment.slot)
        self._behind = Behind(board, self._line, attachment.base)
        self.row = Row(*self.key)
        self.futex_address = self._line.futex.address

    def look(self) -> Row:
        """How it is, in the order in which a waiter here looks."""
        line, base = self._line, self._base
        count = line.completed  # before the state: a word that was released is seen as such
        if count != INT64_MAX and line.state != BROKEN:
            count = min(count, self._clear(count - base) + base)
        state = line.state
        if state == BROKEN or count == INT64_MAX:
            count = line.watermark
        lost = max(line.lost - base, 0)
        recorded = max(line.recorded - base, 0)
        completed = min(max(count - base, 0), recorded)
        if lost:
            completed = min(completed, lost - 1)
        name = "open" if state == OPEN else "broken" if state == BROKEN else "closed" if state == CLOSED else "gone"
        cause = ("expired" if line.has_expired else "died") if state == BROKEN else ""
        return Row(*self.key, recorded, completed, lost, name, cause)

    def _clear(self, done: int) -> int:
        """Up to where what is complete counts: what stands behind something does if all is well there."""
        first = self._behind.first
        if not first or done < first:
            return done
        recorder = self._line.recorder
        if self._behind.is_clear(recorder):
            return done
        self._behind.nudge(recorder)
        return first - 1

    @property
    def published(self) -> int:
        """The low half of `recorded`, which is the futex."""
        return self._line.recorded & 0xFFFFFFFF

    @property
    def is_in_flight(self) -> bool:
        """Whether more of it may be complete at any moment, of which nobody is woken."""
        row = self.row
        return row.completed < row.recorded and row.state in ("open", "closed") and not row.lost


class Watcher:
    """A thread that looks at some exports. `changed` is called on it with those whose row is another one now."""

    def __init__(self, changed: Callable[[list[Export]], None]) -> None:
        self._changed = changed
        self._exports: list[Export] = []
        self._changing = threading.Lock()
        self._word = Word()  # stored to have the thread look anew
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="ipcsync-exports", daemon=True)
        self._thread.start()

    @property
    def room(self) -> int:
        """How many more it takes."""
        return MOST_FUTEXES - 1 - len(self._exports)

    def add(self, export: Export) -> None:
        """Look at one more."""
        with self._changing:
            self._exports = [*self._exports, export]
        self.kick()

    def remove(self, export: Export) -> bool:
        """Look at it no more; whether it did."""
        with self._changing:
            left = [each for each in self._exports if each is not export]
            was_here = len(left) != len(self._exports)
            self._exports = left
        if was_here:
            self.kick()
        return was_here

    def kick(self) -> None:
        """Look at all of them now."""
        self._word.bump()

    def stop(self) -> None:
        """End the thread."""
        self._is_over = True
        self.kick()
        self._thread.join(5.0)

    def _run(self) -> None:
        known: list[Export] = []
        futexes = FutexSet([self._word.address])
        pause = _FIRST_NS
        while not self._is_over:
            if known is not self._exports:
                known = self._exports
                futexes = FutexSet([self._word.address, *(export.futex_address for export in known)])
            futexes.expect([self._word.value, *(export.published for export in known)])
            changed = []
            for export in known:
                row = export.look()
                if row != export.row:
                    export.row = row
                    changed.append(export)
            if changed:
                pause = _FIRST_NS
                self._changed(changed)
            if any(export.is_in_flight for export in known):
                futexes.wait(pause)
                pause = min(2 * pause, _LONGEST_NS)
            else:
                futexes.wait(_IDLE_NS)


class Exports:
    """All exports of this node, and the threads that look at them."""

    def __init__(self, board: Board, changed: Callable[[list[Export]], None]) -> None:
        self._board = board
        self._changed = changed
        self._watchers: list[Watcher] = []
        self._by_key: dict[Key, Export] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Export]:
        return iter(list(self._by_key.values()))

    def get(self, key: Key) -> Export | None:
        """The export of a use, if it is one."""
        return self._by_key.get(key)

    def put(self, attachment: Attachment) -> Export:
        """The export of what this node's bridge is attached to."""
        key = (attachment.slot, attachment.incarnation)
        export = self._by_key.get(key)
        if export is None:
            export = self._by_key[key] = Export(self._board, attachment)
            export.row = export.look()
            watcher = next((each for each in self._watchers if each.room), None)
            if watcher is None:
                watcher = Watcher(self._changed)
                self._watchers.append(watcher)
            watcher.add(export)
        return export

    def drop(self, export: Export) -> None:
        """It is exported no more."""
        self._by_key.pop(export.key, None)
        for watcher in self._watchers:
            if watcher.remove(export):
                return

    def kick(self) -> None:
        """Have all threads look now."""
        for watcher in self._watchers:
            watcher.kick()

    def close(self) -> None:
        """End the threads."""
        for watcher in self._watchers:
            watcher.stop()
