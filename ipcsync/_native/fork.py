"""The fork guard: whether this process was forked after ipcsync was used.

CUDA does not survive a fork, nor do sockets, threads and leases. So the first use arms a mark that the kernel wipes in
every child, by whichever code, and each call checks it before it touches CUDA, a socket or the board. A child forked
before the first use has no mark, and arms its own.

`check` is for hot paths. It costs about 0.04 µs.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from ipcsync._linux.fork import ForkMark
from ipcsync.errors import ForkedProcessError

__all__ = ["arm", "at_child", "check", "is_in_bad_fork", "keep_from_children", "mark"]

log = logging.getLogger("ipcsync")

T = TypeVar("T")

_TRIES = 1000
_PAUSE_S = 0.001

_mark: ForkMark | None = None
_in_child: list[Callable[[], None]] = []
_begun = _over = 0  # forks of this process, by Python


def check() -> None:
    """Return at once, or raise ForkedProcessError in a child (or its child) forked after first use."""
    if _mark is not None and not _mark.byte[0]:
        raise ForkedProcessError


def arm() -> None:
    """Mark this process as one that has used ipcsync; every later call is a `check`.

    Raises ForkedProcessError in a child forked after first use.
    """
    global _mark  # noqa: PLW0603 - one mark a process, for its whole life
    if _mark is None:
        # No lock: of two threads that arm at the same time the later mark wins, and either is right. A lock could be
        # held during a fork.
        _mark = ForkMark()
    else:
        check()


def mark() -> ForkMark:
    """The mark itself, armed: its one byte is 0 in a child forked after this. For hot paths that look themselves."""
    arm()
    assert _mark is not None
    return _mark


def is_in_bad_fork() -> bool:
    """Whether this process was forked after ipcsync was used, so that nothing of it works here. Touches no driver."""
    return _mark is not None and not _mark.byte[0]


def at_child(function: Callable[[], None]) -> Callable[[], None]:
    """Have `function` called in each child that Python forks, to release what only the parent may hold.

    It must touch neither CUDA nor a socket nor the board's words. A fork made by C code calls nothing. Returns a
    function that takes the request back; taking it back twice does nothing.
    """
    _in_child.append(function)

    def forget() -> None:
        if function in _in_child:
            _in_child.remove(function)

    return forget


def keep_from_children(make: Callable[[], T], drop: Callable[[T], None]) -> tuple[T, Callable[[], None]]:
    """What `make()` returns, for which `drop` is called in each child, by `at_child`; and what takes that back.

    Another thread may fork between the two: then it is dropped here too, and made anew. Not for ever: some function
    that is called before a fork may wait for this very thread.
    """
    for _ in range(_TRIES):
        begun, over = _begun, _over
        made = make()
        forget = at_child(partial(drop, made))
        if begun == over == _begun:
            break
        forget()
        drop(made)
        time.sleep(_PAUSE_S)
    return made, forget


def _note_begun() -> None:
    global _begun  # noqa: PLW0603 - one count a process
    _begun += 1


def _note_over() -> None:
    global _over  # noqa: PLW0603 - one count a process
    _over += 1


def _run_in_child() -> None:
    global _over  # noqa: PLW0603 - one count a process
    _over = _begun  # no other thread's fork is under way here
    for function in tuple(_in_child):
        try:
            function()
        except Exception:  # noqa: PERF203 - one that fails must not stop the others
            log.exception("%r failed in a forked child", function)


os.register_at_fork(before=_note_begun, after_in_parent=_note_over, after_in_child=_run_in_child)
