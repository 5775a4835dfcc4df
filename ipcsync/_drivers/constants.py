"""Numbers of the CUDA driver API for arguments and results, by their names in cuda.h.

They are plain ints: an enum of the binding costs more to compare or pass than the rest of some calls.
"""

from __future__ import annotations

EVENT_BLOCKING_SYNC = 1
EVENT_DISABLE_TIMING = 2
EVENT_INTERPROCESS = 4
STREAM_NON_BLOCKING = 1
STREAM_WAIT_VALUE_GEQ = 0  # cyclic: (int64)(*address - value) >= 0
STREAM_WAIT_VALUE_FLUSH = 1 << 30  # a remote writer's earlier writes are visible after the wait
STREAM_WRITE_VALUE_DEFAULT = 0
MEMHOSTREGISTER_PORTABLE = 1  # for every context of this process
MEMHOSTREGISTER_DEVICEMAP = 2

ERROR_INVALID_VALUE = 1
ERROR_NO_DEVICE = 100
ERROR_INVALID_DEVICE = 101
ERROR_INVALID_CONTEXT = 201
ERROR_MAP_FAILED = 205
ERROR_OPERATING_SYSTEM = 304
ERROR_INVALID_HANDLE = 400
ERROR_NOT_READY = 600
ERROR_STREAM_CAPTURE_UNSUPPORTED = 900
ERROR_STREAM_CAPTURE_IMPLICIT = 906
