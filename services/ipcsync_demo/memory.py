"""The memory that the pipeline's processes share: a file without a name, which goes with the last of them."""

from __future__ import annotations

import ctypes
import mmap
import os

from ipcsync._linux.memory_file import memory_file
from ipcsync_demo.plan import Plan

# Mapped until the process ends: a stage that ends since its neighbour died leaves work on its stream, which uses it.
_mapped: list[mmap.mmap] = []
_ALL_HOLDS = 0x7FFFFFFF  # the greatest value, since the wait compares cyclically


class SharedMemory:
    """One process's mapping of it. `fd` is its descriptor, to be inherited."""

    def __init__(self, plan: Plan, fd: int) -> None:
        self.fd = fd
        self._plan = plan
        self._map = mmap.mmap(fd, plan.size)
        _mapped.append(self._map)
        self._view = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._gates = {
            stage: ctypes.c_uint32.from_buffer(self._map, plan.gate_of(stage)) for stage in range(1, plan.workers + 1)
        }

    @classmethod
    def create(cls, plan: Plan) -> SharedMemory:
        """New memory, all zeros. OSError if there is not enough."""
        fd = memory_file("ipcsync-demo")
        try:
            os.posix_fallocate(fd, 0, plan.size)  # else SIGBUS if memory is short
            return cls(plan, fd)
        except BaseException:
            os.close(fd)
            raise

    def read(self, link: int, buffer: int, length: int) -> memoryview:
        """The present content of a buffer."""
        start = self._plan.buffer(link, buffer)
        return self._view[start : start + length]

    def write(self, link: int, buffer: int, data: bytes) -> None:
        """Put `data` in a buffer."""
        start = self._plan.buffer(link, buffer)
        self._view[start : start + len(data)] = data

    def open_gate(self, stage: int, hold: int) -> None:
        """Let a stage's stream go on past its first `hold` holds."""
        self._gates[stage].value = hold

    def open_all_gates(self) -> None:
        """Open all gates for good, since no process will open them later."""
        for stage in self._gates:
            self.open_gate(stage, _ALL_HOLDS)
