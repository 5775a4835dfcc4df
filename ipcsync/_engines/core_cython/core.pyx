# cython: language_level=3, cdivision=True, embedsignature=True, freethreading_compatible=True, binding=False, infer_types=True
"""The compiled core: every record, wait, query and synchronize, from its first check to its wake.

No Python code runs between the steps of a call that must not be torn, so an exception (of a signal's handler, for
instance) comes before or after it, never within. What is rare and tears nothing is asked of Python: errors and their
texts, whether a process lives that the kernel does not mark, the first opening of a handle. Each access to a word of
the board, each lock, wake, sleep and driver call goes through a function that first looks at `hook`, which is null but
in tests: there the order of the steps is held against the models in tests/models.

One extension of these parts, in this order, each of which needs only those before it.
"""

from collections.abc import Mapping
from inspect import Parameter, Signature
from sys import modules

cimport cython
from cpython.object cimport PyObject

cdef object Loss, Stream  # which are looked up at each call

from ipcsync._deadline import deadline_of, left_of
from ipcsync._drivers import describe
from ipcsync._engines.loss import Loss
from ipcsync._native.context import OnDevice, refuse_capturing
from ipcsync._native.stream import Stream
from ipcsync._wire.messages import Origin
from ipcsync.errors import (
    CaptureError, CoordinatorLost, DeviceMismatch, DriverError, EngineMismatch, IpcSyncError, NoDriver
)

INTERFACE = 28  # as in `__init__`

cdef enum:
    NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
    WAIT_GEQ = 0  # CU_STREAM_WAIT_VALUE_GEQ

include "words.pxi"       # the board's words, the steps, and the hook
include "driver.pxi"      # the driver's functions, and waits of the host
include "locks.pxi"       # the locks
include "line.pxi"        # whether this session can be used; what a slot's generations depend on, and who lives
include "table.pxi"       # the waits that this process has queued
include "use.pxi"         # one use of a slot
include "slot.pxi"        # what its words say
include "streams.pxi"     # streams, and what it has there; what differs between the engines
include "chain.pxi"       # what its records depend on, in the recorder's process
include "query.pxi"       # query and synchronize, and the end of a use
include "wait.pxi"        # wait
include "record.pxi"      # record
include "users.pxi"       # what users hold
include "lane.pxi"        # the brackets around launches of graphs, and the lanes that have them
include "lane_steps.pxi"  # what they queue
include "replay.pxi"      # one such bracket, as users have it
