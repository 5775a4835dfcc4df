"""A word in memory that several processes map, for the tests of what the kernel does with such words."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

from ipcsync._linux.futex import Futex


class Word:
    """A 32-bit word in a file that several processes map."""

    def __init__(self, path: Path) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(fd, mmap.PAGESIZE)
        self._map = mmap.mmap(fd, mmap.PAGESIZE)
        os.close(fd)
        self.value = ctypes.c_uint32.from_buffer(self._map)
        self.futex = Futex(ctypes.addressof(self.value))
