"""The fork guard: whether this process was forked after ipcsync was used.

CUDA does not survive a fork, nor do sockets, threads and leases. So the first use arms a mark that the kernel wipes in
every child, by whichever code, and each call checks it before it touches CUDA, a socket or the board, in about 0.04 µs.
A child forked before the first use has no mark, and arms its own.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from ipcsync._linux.process import ForkMark, open_standard
from ipcsync.errors import ForkedProcessError

log = logging.getLogger("ipcsync")

T = TypeVar("T")

_PATIENCE_S = 0.3
_PAUSE_S = 0.001

_mark: ForkMark | None = None
_in_child: dict[Callable[[], None], None] = {}
# Forks by Python, since this was loaded and here or in an ancestor. C counts them: an exception of a signal's handler
# within a function of Python's would be lost, and the count be wrong for ever.
_begun, _over = itertools.count(), itertools.count()
_ahead = 0  # how much less the second one counted in ancestors


def check() -> None:
    """Return at once, or raise ForkedProcessError in a child (or its child) forked after first use."""
    if _mark is not None and not _mark.byte[0]:
        raise ForkedProcessError


def arm() -> ForkMark:
    """The mark of this process as one that has used ipcsync, made once; ForkedProcessError in a child forked since."""
    global _mark  # noqa: PLW0603 - one mark a process, for its whole life
    if _mark is None:
        open_standard()  # before anything is opened that processes share
        # No lock, which a fork could leave held: of two threads that arm at once the later mark wins; either is right.
        _mark = ForkMark()
    else:
        check()
    return _mark


def is_in_bad_fork() -> bool:
    """Whether this process was forked after ipcsync was used, so that nothing of it works here. Touches no driver."""
    return _mark is not None and not _mark.byte[0]


def keep_from_children(make: Callable[[], T], drop: Callable[[T], None]) -> tuple[T, Callable[[], None]]:
    """What `make()` returns, for which `drop` is called in each child that Python forks; and what takes that back.

    `drop` releases what only the parent may hold; it must touch neither CUDA nor a socket nor the board's words. A fork
    made by C code calls nothing. Taking it back twice does nothing.
    Another thread may fork between the two, and its child have what was made: then it is dropped here, and made anew.
    After 0.3 s the last one stays: a function that some library calls before a fork may wait for this very thread.
    """
    until = time.monotonic() + _PATIENCE_S
    while True:
        before, is_quiet = _count_of(_begun), _count_of(_begun) == _count_of(_over) + _ahead
        made = make()
        in_child = partial(drop, made)
        forget = partial(_in_child.pop, in_child, None)
        _in_child[in_child] = None
        if (is_quiet and _count_of(_begun) == before) or time.monotonic() >= until:
            return made, forget
        forget()
        drop(made)
        time.sleep(_PAUSE_S)


def _count_of(count: itertools.count[int]) -> int:
    return int(repr(count).removeprefix("count(").removesuffix(")"))


def _run_in_child() -> None:
    global _ahead  # noqa: PLW0603 - one a process
    _ahead = _count_of(_begun) - _count_of(_over)  # no other thread's fork is under way here
    for function in tuple(_in_child):
        try:
            function()
        except Exception:  # noqa: PERF203 - one that fails must not stop the others
            log.exception("%r failed in a forked child", function)


os.register_at_fork(before=_begun.__next__, after_in_parent=_over.__next__, after_in_child=_run_in_child)
