"""The waits that this process has queued: for each stream, those that its next record stands behind.

All clients of the process share these lists. A wait leaves its list once it is known good. A lost one stays until
`drop`, and no record on the stream is possible meanwhile.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, TypeVar

from ipcsync import _drivers
from ipcsync._drivers import DriverObject, unwrap
from ipcsync._drivers.constants import EVENT_DISABLE_TIMING, STREAM_NON_BLOCKING
from ipcsync._engines.compiled import CallLock
from ipcsync._engines.loss import Loss
from ipcsync._engines.queued_wait import Holder, Lost, View, Wait
from ipcsync._locks import holding
from ipcsync._native import context
from ipcsync._native.capture import refuse_capturing, relaxed_call
from ipcsync._native.context import OnDevice
from ipcsync._shared import items_of
from ipcsync.errors import Reentered

T = TypeVar("T")

_SLICE_NS = 50_000_000
_PAUSE_S = 0.001
_MANY = 64
_NO_WAITS: dict[int, Wait] = {}

holders: dict[int, weakref.ref[Holder]] = {}
"""Other holders of waits, by the ids of their references: chains of this process's recorders, and records under way."""
lists: dict[int, dict[int, Wait]] = {}
"""By stream, then by slot. While it and `changed` are empty, a record looks no further."""
changed: list[Wait] = []
"""Waits on their way into a list: each is here first, and until it is surely there. A reader looks here first."""
lists_lock = CallLock()
"""Held while they change."""


def hold(holder: Holder) -> None:
    """Have the waits of `holder` found as long as it lives. Another thread may look meanwhile."""
    reference = weakref.ref(holder, lambda gone: holders.pop(id(gone), None))
    holders[id(reference)] = reference


def key_of(flags: DriverObject, stream_id: int, ordinal: int) -> int:
    """The key of the list of a stream with such flags. The legacy default stream and the blocking streams of its device
    wait for each other, so they share one list."""
    return stream_id if int(flags) & STREAM_NON_BLOCKING else -1 - ordinal


class _Table:
    """The changes of `lists`.

    A finalizer or a signal's handler may change them too within any change, on the same thread, and so between a look
    and the store that follows from it. What such calls add is in `changed` before it is in a list, and the outermost
    change puts back what it has overwritten or taken out.
    """

    def __init__(self) -> None:
        self._lock = lists_lock
        self._sweep_at = _MANY

    def add(self, key: int, view: View, generation: int, stream: int) -> Wait:
        """Have the stream's next record stand behind `generation`; called before the wait is queued.

        The listed wait, which may be an earlier one, and for a later generation.
        """
        listed = lists.get(key, _NO_WAITS).get(id(view))
        if listed and listed.stream == stream and listed.verdict is not True:
            later = listed.generation
            if later == generation or (later > generation and listed.since <= generation):
                return listed  # nothing changes, so nothing is locked
        return self._change(self._add, key, view, generation, stream)

    def drop(self, waits: Iterable[Wait]) -> None:
        """Remove waits that are known good, or to be forgotten."""
        self._change(self._drop, waits)

    def set_aside(self, waits: Iterable[Wait]) -> None:
        """Have these lost waits stand for no other one, earlier or later, so that `drop` forgets them alone."""
        self._change(self._set_aside, waits)

    def release(self, view: View) -> None:
        """Remove the waits for a view, which have their verdicts; of the lost ones a `Lost` stays."""
        self._change(self._release, view)

    @holding("_lock")
    def everything(self) -> list[Wait]:
        """The waits of all streams of this process."""
        return _listed(None)

    def _change(self, change: Callable[..., T], *args: Any) -> T:
        lock = self._lock
        within = lock.is_mine() and lock.is_held_below()
        try:
            with lock:
                return change(*args) if within else self._outermost(change, *args)
        except BaseException:
            if not within:
                lock.unwind()
            raise

    def _outermost(self, change: Callable[..., T], *args: Any) -> T:
        try:
            return change(*args)
        finally:
            self._put_back()

    def _add(self, key: int, view: View, generation: int, stream: int) -> Wait:
        listed = lists.get(key, _NO_WAITS).get(id(view))
        if listed is not None and _stands_for(listed, generation, stream):
            if stream == listed.stream and listed.since <= generation:
                return listed  # and nothing changes
            wait = listed
            wait.stand_for(generation)
        else:
            wait = Wait(view, generation, key, stream)
        changed.append(wait)
        self._put(wait, listed, stream)
        if len(lists) > self._sweep_at:  # including streams without further records
            self._drop([each for each in self.everything() if each.known() is True])
            self._sweep_at = max(_MANY, 2 * len(lists))
        return wait

    def _put(self, wait: Wait, listed: Wait | None, stream: int) -> None:
        """List a wait, in place of the one that is listed; it stands for that one, and for a wait on `stream`."""
        if wait is listed:
            if stream != wait.stream and stream not in wait.others:
                wait.others |= {stream}
            return
        if listed is not None and listed.verdict is not True:
            wait.stand_for(listed.since)
            if listed.others or listed.stream != stream:
                wait.others = (wait.others | listed.others | {listed.stream, stream}) - {wait.stream}
        lists.setdefault(wait.key, {})[wait.place] = wait

    def _put_back(self) -> None:
        while waits := changed[-1:]:
            (wait,) = waits
            listed = lists.get(wait.key, _NO_WAITS).get(wait.place)
            if listed is wait or wait.verdict is True:
                self._leave(wait)
            elif listed is None or not _stands_for(listed, wait.generation, wait.stream):
                self._put(wait, listed, wait.stream)  # and looks again: a handler may have taken it out
            elif wait.since < listed.since:
                listed.stand_for(wait.since)
            elif missing := {wait.stream, *wait.others} - {listed.stream, *listed.others}:
                listed.others |= missing
            else:
                self._leave(wait)

    def _leave(self, wait: Wait) -> None:
        """It is listed, or not wanted any more; an exception before this leaves it to the next change."""
        while wait in changed:
            with suppress(ValueError):  # a handler was first
                changed.remove(wait)

    def _drop(self, waits: Iterable[Wait]) -> None:
        for wait in waits:
            self._take_out(wait)

    def _set_aside(self, waits: Iterable[Wait]) -> None:
        for wait in waits:
            held = lists.setdefault(wait.key, {})
            if not (_places(held, wait) or wait in changed):
                continue  # it was forgotten meanwhile
            held[id(wait)] = wait  # first, so that it is in the list at every moment
            wait.place = id(wait)
            for place in _places(held, wait):
                if place != wait.place:
                    held.pop(place, None)
            if earlier := wait.open_before():
                kept = self._add(wait.key, wait.view, earlier, wait.stream)
                kept.stand_for(wait.since)
                kept.others |= wait.others - {kept.stream}
                kept.is_queued |= wait.is_queued

    def _take_out(self, wait: Wait) -> None:
        self._leave(wait)
        held = lists.get(wait.key, {})
        # A lost one is in two places if an exception came while it was set aside, and another may stand in its own.
        places = _places(held, wait) if isinstance(wait.verdict, Loss) else [wait.place]
        for place in places:
            if held.get(place) is wait:
                held.pop(place, None)
                if not held:
                    lists.pop(wait.key, None)
                wait.end()

    def _release(self, view: View) -> None:
        for wait in dict.fromkeys(self.everything()):
            if not wait.is_for(view):
                continue
            if isinstance(wait.verdict, Loss):  # one without a verdict was listed just now, and is not queued
                lost = Lost(wait)
                changed.append(lost)
                # First, so that a lost wait is in the list at every moment.
                lists.setdefault(wait.key, {})[lost.place] = lost
            self._take_out(wait)


def _places(held: dict[int, Wait], wait: Wait) -> list[int]:
    return [place for place, each in items_of(held) if each is wait]


def _listed(key: int | None) -> list[Wait]:
    """The waits of a list, or of all, those on their way there included."""
    found: list[Wait] = []
    fill(found, key)
    return found


def fill(found: list[Wait], key: int | None) -> None:
    """Add the waits of a list (None: of all) to `found`: each list's by one step, so that none is in neither place."""
    found.extend(wait for wait in list(changed) if key in (None, wait.key))
    for waits in list(lists.values()) if key is None else [lists.get(key, _NO_WAITS)]:
        found.extend(waits.values())
    if changed:
        found[:] = dict.fromkeys(found)


class Gathered:
    """Waits that a record is about to stand behind, or the host waits for.

    They get their verdicts before the uses they are for are released.

    So one that another takes the place of in its list is not forgotten meanwhile.
    """

    def __init__(self) -> None:
        self._waits: list[Wait] = []
        hold(self)

    def add(self, key: int | None) -> None:
        """Add the waits of a list; None: of all."""
        fill(self._waits, key)

    def keep(self, is_kept: Callable[[Wait], bool]) -> None:
        """Forget the others."""
        self._waits = [wait for wait in self._waits if is_kept(wait)]

    def waits(self) -> list[Wait]:
        """All of them."""
        return self._waits


def _stands_for(wait: Wait, generation: int, stream: int) -> bool:
    """Whether a listed wait stands for one for `generation` on `stream` too."""
    if wait.verdict is True or wait.generation < generation:
        return False
    # Blocking streams share a list: a wait that one of them did not get is not called queued when another gets it.
    return wait.generation > generation or wait.is_queued or wait.stream == stream


_table = _Table()
add, drop, set_aside = _table.add, _table.drop, _table.set_aside
release, everything = _table.release, _table.everything


def waits_on(view: View) -> list[Wait]:
    """All waits of this process for a slot."""
    listed = everything()  # first: waits go from lists to holders
    held = [wait for reference in list(holders.values()) if (holder := reference()) for wait in holder.waits()]
    return [wait for wait in (*listed, *held) if wait.is_for(view)]


def of(key: int) -> list[Wait]:
    """The waits that the stream's next record stands behind."""
    return _listed(key)


def lost_on(handle: DriverObject, ordinal: int) -> list[Wait]:
    """The lost waits that were queued on a stream of device `ordinal`."""
    return [wait for wait in on_stream(handle, ordinal) if isinstance(wait.known(), Loss)]


def on_stream(handle: DriverObject, ordinal: int) -> list[Wait]:
    """The waits that were queued on a stream of device `ordinal`."""
    return of(list_of(handle, ordinal))


def list_of(handle: DriverObject, ordinal: int, what: str = "resume") -> int:
    """The key of the list of a stream of device `ordinal`. StreamCapturing, for `what`, if it captures."""
    with OnDevice(ordinal) as inside, inside:
        driver = context.driver()
        refuse_capturing(handle, what)  # asking for the id would invalidate the capture
        stream_id = int(unwrap(driver.cuStreamGetId(handle), "cuStreamGetId"))
        flags = unwrap(driver.cuStreamGetFlags(handle), "cuStreamGetFlags")
        return key_of(flags, stream_id, ordinal)


def await_passed(
    waits: Iterable[Wait], handle: DriverObject, ordinal: int, deadline_ns: int, check: Callable[[], None]
) -> bool:
    """Block until a stream has finished all that is queued there now; False if `deadline_ns` passes before.

    Then also until every other stream that has queued one of `waits` is past it: blocking streams share a list, and do
    not wait for each other. Reentered within a change of the lists, whose lock the threads that it waits for may want.
    """
    lock = lists_lock
    if lock.is_mine() and lock.is_held_below():
        raise Reentered("waits are listed on this thread by a call that this one interrupts")
    if not _await_stream(handle, ordinal, deadline_ns, check):
        return False
    with OnDevice(ordinal) as inside, inside:
        mine = int(unwrap(context.driver().cuStreamGetId(handle), "cuStreamGetId"))
    while not all(wait.is_passed(mine) for wait in waits):
        check()
        if time.monotonic_ns() >= deadline_ns:
            return False
        time.sleep(_PAUSE_S)
    return True


def _await_stream(handle: DriverObject, ordinal: int, deadline_ns: int, check: Callable[[], None]) -> bool:
    """Block until a stream has finished all that is queued there now; False if `deadline_ns` passes before."""
    driver = context.driver()
    with OnDevice(ordinal) as inside, inside:
        refuse_capturing(handle, "resume")  # the event would go into the graph, and a question about it spoil that
        event = unwrap(driver.cuEventCreate(EVENT_DISABLE_TIMING), "cuEventCreate")
    try:
        unwrap(driver.cuEventRecord(event, handle), "cuEventRecord")
        while True:
            now = time.monotonic_ns()
            if relaxed_call(_drivers.wait_event, event, min(deadline_ns, now + _SLICE_NS)):
                return True
            check()
            if now >= deadline_ns:
                return False
    finally:
        unwrap(driver.cuEventDestroy(event), "cuEventDestroy")
