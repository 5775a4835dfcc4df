"""A word in memory that several processes map, for the tests of what the kernel does with such words."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path

from ipcsync._linux.futex import Futex


def wait_until(condition: Callable[[], bool]) -> None:
    """Fails if it does not come true within 20 s."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "not within 20 s"


class Word:
    """A 32-bit word in a file that several processes map."""

    def __init__(self, path: Path) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(fd, mmap.PAGESIZE)
        self._map = mmap.mmap(fd, mmap.PAGESIZE)
        os.close(fd)
        self.value = ctypes.c_uint32.from_buffer(self._map)
        self.futex = Futex(ctypes.addressof(self.value))
