"""Events of this node that others mirror: looked at by threads, which sleep while nothing happens.

A thread looks at no more events than one `futex_waitv` takes. While any has work in flight it looks every 50 µs, ever
slower up to 1 ms, as a GPU wakes no process; else it sleeps until a recorder publishes, or the coordinator finishes an
event. It tells each recorder whether to wake it, a system call for each record: not while work is in flight, nor while
many records are made between two looks. All looks take an eighth of a core at most, and what is recorded between two is
in the newest state. A wake that comes between look and sleep is lost; the next look is a second later at most, and the
coordinator's feed announces an end besides.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

from ipcsync import _room as room
from ipcsync._board import BROKEN, CLOSED, INT64_MAX, OPEN, Board
from ipcsync._board.layout import L_RECORDED
from ipcsync._engines.core import Line
from ipcsync._linux.futex import MOST_FUTEXES, FutexSet, Word
from ipcsync._wire.messages import Attachment
from ipcsync_bridge.wire import UNSURE, CauseName, Key, Row, StateName

_STATES: dict[int, StateName] = {OPEN: "open", BROKEN: "broken", CLOSED: "closed"}
_FIRST_NS, _LONGEST_NS = 50_000, 1_000_000
_IDLE_NS = 1_000_000_000
_MANY = 8  # records between two looks
_SHARE = 1 / 8  # of a core, for the looks of all threads
_CREDIT_S = 0.002  # unused time is kept up to this: a look now and then never has to rest
_LONGEST_REST_S = 0.05
_ANSWER_S = 3.0  # from an answer until it is used, or was asked for again: three pings, and three tries of a question


@dataclass(eq=False)
class Follower:
    """A node that mirrors events of this one, and what to send it next: at most one row for each use.

    `keys` are the uses that it wants, each with the time until which it may not know that it does.
    """

    node: str
    last_asked: float
    keys: dict[Key, float] = field(default_factory=dict)
    version: int = UNSURE  # of what it wants, as it last said
    is_sent_to: bool = False
    rows: dict[Key, Row] = field(default_factory=dict)  # what it does not have yet, as it has said, the oldest first
    _sent: dict[Key, Row] = field(default_factory=dict)  # of them, those of the last message

    def put(self, row: Row) -> bool:
        """Send it this state of a use, if it wants it. Whether that replaces an older one that was not sent yet."""
        old = self.rows.pop(row.key, None)
        if row.key in self.keys:
            self.rows[row.key] = row
        return old is not None and self._sent.get(row.key) is not old

    def take(self, most: int) -> list[Row]:
        """The rows to send now, and again unless `acked` is called."""
        self._sent = dict(islice(self.rows.items(), most))
        return list(self._sent.values())

    def acked(self) -> None:
        for key, row in self._sent.items():
            if self.rows.get(key) is row:
                del self.rows[key]

    def answered(self, key: Key, now: float) -> None:
        """Send it the news of a use from now on: it has asked, and the answer is under way."""
        if key not in self.keys:
            self.version = UNSURE
        self.keys[key] = now + _ANSWER_S

    def unwanted(self, wanted: set[Key], now: float) -> set[Key]:
        """Of its keys, those that it does not want, but for what it may not know of yet."""
        return {key for key in self.keys.keys() - wanted if now >= self.keys[key]}

    def drop(self, key: Key) -> None:
        self.keys.pop(key, None)
        self.rows.pop(key, None)


class Export:
    """One use of a slot of this node that others wait for: `followers`."""

    def __init__(self, board: Board, attachment: Attachment) -> None:
        self.key: Key = (attachment.slot, attachment.incarnation)
        self.followers: set[Follower] = set()
        self._base = attachment.base
        self._board = board
        self._line = board.slot(attachment.slot)
        self._dependencies = Line(board, self._line, attachment.base)
        self.row, _ = self.read()
        # Of the last look of the thread that watches it:
        self.is_in_flight = False  # a GPU may complete more of it at any moment, which wakes no process
        self.is_unclear = False  # what it stands behind is not judged yet
        self.is_busy = False  # many records were made since the last look but one
        self.futex_address = self._line.futex.address
        self.words = self._line.all_words
        self.seen = memoryview(b"")

    def follow(self) -> bool:
        """Whether it is to be looked at soon; if not, its next record is to wake the bridge."""
        soon = self.is_busy or self.is_in_flight
        # Asked for, not remembered: an earlier export of the use, not removed yet, may store too.
        if bool(self._line.followed) is soon and self._line.incarnation == self.key[1]:
            self._line.followed = not soon
        return soon

    def has_changed(self) -> bool:
        """Whether it has another row than at the last look of the thread that watches it, which calls this."""
        if self.words == self.seen and not self.is_unclear:
            self.is_busy = False
            return False
        self.seen = memoryview(self.words.tobytes()).cast("Q")  # before the look: what changes then is seen again
        row, self.is_unclear = self.read()
        known = min(row.recorded, row.lost - 1) if row.lost else row.recorded
        self.is_in_flight = row.completed < known and row.state != "broken"
        self.is_busy = row.recorded - self.row.recorded >= _MANY
        before, self.row = self.row, row
        return row != before

    def read(self) -> tuple[Row, bool]:
        """Its state, and whether more of it is complete and not judged yet. Any thread may call it.

        It is read in the order in which a local waiter reads it.
        """
        line, base = self._line, self._base
        count = line.completed  # before the state: a word that was released is seen as such
        is_unclear = False
        if count != INT64_MAX and line.state != BROKEN:
            first = base + self._dependencies.first_unsettled()
            # What stands behind something counts only if all is well there. Once the coordinator is lost, nobody knows:
            # then the streams go on that wait for sessions which live.
            if base < first <= count:
                is_unclear = not self._dependencies.is_clear(count - base) or self._board.coordinator_is_over
                count = first - 1 if is_unclear else count
        state = line.state
        if state == BROKEN or count == INT64_MAX:
            count = line.watermark
        lost = max(line.lost - base, 0)
        recorded = max(line.recorded - base, 0)
        completed = min(max(count - base, 0), recorded)
        if lost:
            completed = min(completed, lost - 1)
        cause: CauseName = ("expired" if line.has_expired else "died") if state == BROKEN else ""
        return Row(*self.key, recorded, completed, lost, _STATES.get(state, "gone"), cause), is_unclear


class Watcher:
    """A thread that looks at some of `all_` exports, and tells of those that have another row now."""

    def __init__(self, all_: Exports) -> None:
        self._all = all_
        self.exports: tuple[Export, ...] = ()  # another one at each change, which the thread takes up at its next look
        self._futexes = FutexSet()  # the first one is the word's
        self.bell = Word()  # stored to wake the thread
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="ipcsync-exports", daemon=True)
        self._thread.start()

    def look_at(self, exports: tuple[Export, ...]) -> None:
        self.exports = exports
        self.bell.bump()

    def end(self, wait_s: float = 0.0) -> None:
        self._is_stopped = True
        self.bell.bump()
        self._thread.join(wait_s)

    def _run(self) -> None:
        try:
            self._watch_until_ended()
        except Exception as error:  # noqa: BLE001 - whatever it is: no follower hears of these exports any more
            self._all.failed(error)

    def _watch_until_ended(self) -> None:
        pause = _FIRST_NS
        used_s = time.thread_time()
        exports: tuple[Export, ...] = ()
        while not self._is_stopped:
            self._futexes.put(0, self.bell.address, self.bell.value)
            known, exports = exports, self.exports
            changed = []
            for index, export in enumerate(exports, 1):
                seen = export.seen
                if export.has_changed():
                    changed.append(export)
                if export.seen is not seen or exports is not known:
                    self._futexes.put(index, export.futex_address, export.seen[L_RECORDED])
            before_s, used_s = used_s, time.thread_time()
            rest_s = self._all.rest_s(used_s - before_s)
            self._futexes.count = 1 + len(exports)
            soon = [export for export in exports if export.follow()]
            if changed:  # last: the loop's thread, which this wakes, then finds the GIL free
                pause = _FIRST_NS
                self._all.changed(changed)
            if rest_s > 0:
                time.sleep(rest_s)
            if soon:
                self._futexes.wait(pause)
                pause = min(2 * pause, _LONGEST_NS)
            else:
                self._futexes.wait(_IDLE_NS)


class Exports(dict[Key, Export]):
    """All exports of this node, and the threads that look at them.

    These call `changed` with exports that have another row now, and `failed` with the error that ends a thread.
    """

    def __init__(
        self, board: Board, changed: Callable[[list[Export]], None], failed: Callable[[Exception], None]
    ) -> None:
        super().__init__()
        self._board = board
        self.changed = changed
        self.failed = failed
        self._lock = threading.Lock()
        self._credit_s = _CREDIT_S
        self._now_s = time.monotonic()
        self._watchers: list[Watcher] = []

    def put(self, attachment: Attachment) -> Export:
        """Export what this node's bridge is attached to; the existing export if there is one. Raises QuotaExceeded."""
        key = (attachment.slot, attachment.incarnation)
        if (export := self.get(key)) is None:
            export = Export(self._board, attachment)
            watcher = next((each for each in self._watchers if len(each.exports) < MOST_FUTEXES - 1), None)
            if watcher is None:
                room.look("events that other nodes wait for", descriptors=0, threads=1)
                watcher = Watcher(self)
                self._watchers.append(watcher)
            watcher.look_at((*watcher.exports, export))
            self[key] = export  # last: one that no thread looks at would never have news
        return export

    def drop(self, key: Key) -> None:
        if (export := self.pop(key, None)) is None:
            return
        watcher = next(each for each in self._watchers if export in each.exports)
        watcher.look_at(tuple(each for each in watcher.exports if each is not export))
        if not watcher.exports and len(self._watchers) > 1:
            self._watchers.remove(watcher)
            watcher.end()

    def rest_s(self, used_s: float) -> float:
        """How many seconds a thread that has used `used_s` of a core since its last call must rest now.

        That is by CPU time, since waiting for a processor costs nothing. What one does not use, the others may.
        """
        with self._lock:
            now_s = time.monotonic()
            self._credit_s = min(self._credit_s + _SHARE * (now_s - self._now_s) - used_s, _CREDIT_S)
            self._now_s = now_s
            return min(max(-self._credit_s / _SHARE, 0.0), _LONGEST_REST_S)

    def kick(self) -> None:
        for watcher in self._watchers:
            watcher.bell.bump()

    def close(self) -> None:
        for watcher in self._watchers:
            watcher.end(5.0)
