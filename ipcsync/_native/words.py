"""Words of this process that graphs and streams wait for and write.

They are pinned host memory, which every context of the process reaches. They are never freed nor given to another use:
a graph that was captured with one may be launched for as long as the process lives.
"""

from __future__ import annotations

import ctypes

from ipcsync._drivers.constants import MEMHOSTREGISTER_DEVICEMAP, MEMHOSTREGISTER_PORTABLE
from ipcsync._locks import CallLock, under
from ipcsync._native.context import OnDevice, call, primary, relaxed_call

_BYTES = 4096
_FLAGS = MEMHOSTREGISTER_PORTABLE | MEMHOSTREGISTER_DEVICEMAP  # those of cuMemHostAlloc have the same numbers

_lock = CallLock()
_free: dict[tuple[int, str], list[tuple[int, int]]] = {}


def take(ordinal: int, kind: str, size: int) -> tuple[int, int]:
    """The address of a word of `size` bytes that is 0 and nothing else uses, for the host and for the device `ordinal`.

    Those of a kind lie together, in the order in which they are taken.
    """
    return under(_lock, _take, ordinal, kind, size)


def _take(ordinal: int, kind: str, size: int) -> tuple[int, int]:
    free = _free.setdefault((ordinal, kind), [])
    if not free:
        with OnDevice(ordinal, primary(ordinal)) as inside, inside:
            # An allocation is an unsafe call, which would break another thread's capture.
            host = int(relaxed_call(call, "cuMemHostAlloc", _BYTES, _FLAGS))
            address = int(call("cuMemHostGetDevicePointer", host, 0))
        ctypes.memset(host, 0, _BYTES)
        free.extend((host + at, address + at) for at in range(0, _BYTES, size))
    return free.pop(0)
