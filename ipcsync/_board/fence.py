"""The memory fence between two steps of the board protocol."""

from __future__ import annotations

import ctypes
import ctypes.util
import platform
from collections.abc import Callable

_SEQ_CST = 5


def _nothing() -> None:
    """x86-64 keeps loads in order and stores in order.

    The one pair it may turn round, a store and a later load of another word, never decides: the other side wakes and
    looks again.
    """


def _choose() -> Callable[[], object]:
    if platform.machine() == "x86_64":
        return _nothing
    library = ctypes.CDLL(ctypes.util.find_library("atomic") or "libatomic.so.1")
    function = library.atomic_thread_fence
    order = ctypes.c_int(_SEQ_CST)
    return lambda: function(order)


fence = _choose()
