"""The memory fence between two steps of the board protocol, where the processor needs one."""

from __future__ import annotations

import ctypes
import ctypes.util
import platform
from collections.abc import Callable

_SEQ_CST = 5


def _choose() -> Callable[[], object] | None:
    if platform.machine() == "x86_64":
        return None
    library = ctypes.CDLL(ctypes.util.find_library("atomic") or "libatomic.so.1")
    function = library.atomic_thread_fence
    order = ctypes.c_int(_SEQ_CST)
    return lambda: function(order)


fence = _choose()
"""None on x86-64, which keeps loads in order and stores in order. It may reorder a store with a later load of another
word, but nothing depends on that pair: the other side is woken and reads again."""
