"""The memory fence between two steps of the board protocol."""

from __future__ import annotations

import ctypes
import ctypes.util
import platform
from _thread import allocate_lock
from collections.abc import Callable

_SEQ_CST = 5


def _choose() -> Callable[[], object]:
    if platform.machine() == "x86_64":
        return lambda: None
    library = ctypes.CDLL(ctypes.util.find_library("atomic") or "libatomic.so.1")
    return lambda: library.atomic_thread_fence(ctypes.c_int(_SEQ_CST))


fence = _choose()
"""Called between two steps of which other processes may see the second only behind the first.

Nothing on x86-64, which keeps loads in order and stores in order. It may reorder a store with a later load of another
word: where something depends on that pair, and the other side is not woken to read again, there is `full_fence`.
"""


def full_fence() -> None:
    """Between a store and a later load: who stores and looks the other way round sees that store, or is seen."""
    fence()
    allocate_lock().acquire()  # an atomic exchange, which is a full fence on x86-64; no other thread has this lock
