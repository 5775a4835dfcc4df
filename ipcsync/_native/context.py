"""The driver of this process: its devices, its objects, and what is current on a thread: CUDA context, capture mode.

Work goes into the current context. If none is current, this package uses the device's primary context, as torch and
most others do. A primary context is retained once for each device of this process and never released.

While any thread captures a stream in global mode, a potentially unsafe call of another thread (a query of an event, for
instance) fails and invalidates that capture; in relaxed thread mode it succeeds (CUDA driver API,
cuThreadExchangeStreamCaptureMode). The mode belongs to the thread and costs 0.2 µs to change, so it is always changed.

The driver's wait for work cannot be bounded, and a stream that waits for the work of a dead process may never go on. So
work behind waits for other processes is waited for in slices, with looks at these waits in between.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import uuid
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any, TypeAlias, TypeVar

from cuda.bindings.driver import CUstreamCaptureMode, CUstreamCaptureStatus

from ipcsync import _drivers
from ipcsync._drivers import ERROR_INVALID_CONTEXT, ERROR_NOT_READY, SUCCESS, DriverObject, unwrap
from ipcsync._native import fork
from ipcsync.errors import InvalidDevice, StreamCapturing

log = logging.getLogger("ipcsync")

T = TypeVar("T")

DEFAULT_STREAMS = (0, 1, 2)
"""Their handles: legacy (or per-thread, by build mode), legacy, per-thread. They belong to a context."""
LEGACY = 1  # CU_STREAM_LEGACY; not 0, which is the thread's own default stream if the binding is set up so

_RELAXED = CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
_DEFAULT_MODE = CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
_INSTEAD = {
    "record": ": capture an ipcsync.GraphRecord, and name the event at Client.replay",
    "wait": ": capture an ipcsync.GraphWait, and name the point at Client.replay",
}
_primary: dict[int, Any] = {}
_thread = threading.local()  # `mode`: the last one found on the thread other than relaxed
_CHECK_NS = 50_000_000
_SPIN_NS = 20_000


def driver() -> ModuleType:
    """The driver's functions, with the fork guard armed. Raises ForkedProcessError in a forked child, and NoDriver."""
    fork.arm()
    return _drivers.load()


def call(name: str, *args: Any) -> DriverObject:
    """The value (or tuple of values, or None) of the driver's function `name`. Raises DriverError, and as `driver`."""
    return unwrap(getattr(driver(), name)(*args), name)


@cache
def _devices() -> list[Any]:
    return [call("cuDeviceGet", ordinal) for ordinal in range(call("cuDeviceGetCount"))]


def devices() -> list[Any]:
    """The driver's device handles, by ordinal."""
    fork.check()
    return _devices()


def count() -> int:
    """How many devices this process sees."""
    return len(devices())


@cache
def _ordinals() -> dict[int, int]:
    return {int(handle): ordinal for ordinal, handle in enumerate(devices())}


def current() -> int | None:
    """The device of the context that is current on this thread, None where none is. Creates nothing."""
    result = driver().cuCtxGetDevice()
    return None if bad_context(result) else _ordinals()[int(unwrap(result, "cuCtxGetDevice"))]


def current_ordinal() -> int:
    """As `current`, or 0 where none is."""
    return current() or 0


def has_primary(ordinal: int) -> bool:
    """Whether the primary context of a device is retained in this process. Asking creates nothing."""
    _flags, is_active = call("cuDevicePrimaryCtxGetState", devices()[ordinal])
    return bool(is_active)


def bad_context(result: tuple[Any, ...]) -> bool:
    """Whether a driver call failed because no context is current on the calling thread."""
    return result[0] is not SUCCESS and int(result[0]) == ERROR_INVALID_CONTEXT


def primary(ordinal: int) -> DriverObject:
    """The primary context of a device, retained at the first call."""
    context = _primary.get(ordinal)
    if context is None:
        # Two threads may both retain it at first, which does no harm: it is never released.
        context = _primary[ordinal] = call("cuDevicePrimaryCtxRetain", devices()[ordinal])
    return context


def ensure_context(ordinal: int) -> None:
    """Make a context of this device current on this thread for good: the present one if it fits, else the primary."""
    result = driver().cuCtxGetDevice()  # which may fail: another library may have destroyed the current context
    if result[0] is not SUCCESS or _ordinals()[int(result[1])] != ordinal:
        call("cuCtxSetCurrent", primary(ordinal))


def ordinal_of_context(context: DriverObject) -> int:
    """The device of a context, which need not be current."""
    for ordinal, known in _primary.copy().items():  # retained, so no other context can have its address
        if known == context:
            return ordinal
    with OnDevice(0, context) as inside, inside:
        return current_ordinal()


@cache
def _uuids() -> list[str]:
    # CUDA 12 has both, and the first of them knows nothing of MIG.
    name = "cuDeviceGetUuid_v2" if hasattr(driver(), "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
    return [str(uuid.UUID(bytes=call(name, handle).bytes)) for handle in devices()]


def uuid_of(ordinal: int) -> str:
    """The UUID of a device as 8-4-4-4-12 hexadecimal digits: its name in every process of this machine."""
    fork.check()
    return _uuids()[ordinal]


def ordinal_of(device_uuid: str) -> int:
    """This process's ordinal of the device with a UUID ("GPU-…" or bare); InvalidDevice if it does not see it."""
    fork.check()
    known = _uuids()
    bare = device_uuid[4:] if device_uuid[:4].upper() == "GPU-" else device_uuid
    try:
        return known.index(str(uuid.UUID(bare)))
    except ValueError:
        raise InvalidDevice(
            f"no device of this process has the UUID {device_uuid!r}: it sees {', '.join(known) or 'none'}"
        ) from None


# --- calls in a context, and in relaxed capture mode ------------------------------------------------------------------


class OnDevice:
    """A `with` block in which a context of the device `ordinal` is current on this thread.

    It is entered twice, `with OnDevice(ordinal) as inside, inside:`, because a signal's handler may raise in an
    `__exit__` before its first step: the outer one then does what the inner one did not. Afterwards the thread's
    earlier context is current again; a thread that had none keeps this one, as after a first call of the CUDA runtime.
    None is pushed: an exception between two lines leaves the thread's stack of contexts as deep as it was.
    """

    __slots__ = ("_before", "_context", "_is_entered", "_ordinal")

    def __init__(self, ordinal: int, context: DriverObject = None) -> None:
        self._ordinal = ordinal
        self._context = context  # this one, instead of any of the device
        self._before: DriverObject = None  # None if nothing is to be undone
        self._is_entered = False

    def __enter__(self) -> OnDevice:
        if self._is_entered:
            return self
        self._is_entered = True
        try:
            self._enter()
            return self  # inside of the block, so that an exception at this very step is seen too
        except BaseException:
            self.__exit__()
            raise

    def _enter(self) -> None:
        if self._context is None:
            here = current()
            if here is None:
                call("cuCtxSetCurrent", primary(self._ordinal))
            if here is None or here == self._ordinal:
                return
        context = primary(self._ordinal) if self._context is None else self._context
        self._before = call("cuCtxGetCurrent")
        call("cuCtxSetCurrent", context)

    def __exit__(self, *error: object) -> None:
        """Make the earlier context current again; a second call does nothing."""
        if self._before is not None:
            try:
                call("cuCtxSetCurrent", self._before)
            except BaseException:
                driver().cuCtxSetCurrent(self._before)
                raise
            self._before = None


def stream_call(handle: DriverObject, ordinal: int, name: str, *args: Any) -> DriverObject:
    """`call(name, *args)` for the stream `handle` of the device `ordinal`.

    A context of that device is current during the call if the thread has none, or the handle has no meaning without.
    """
    if int(handle) not in DEFAULT_STREAMS:
        result = getattr(driver(), name)(*args)
        if not bad_context(result):
            return unwrap(result, name)
    with OnDevice(ordinal) as inside, inside:
        return call(name, *args)


def relaxed_call(function: Callable[..., T], *args: Any) -> T:
    """`function(*args)`, driver calls, in relaxed thread capture mode; the thread's own mode is restored."""
    exchange = _drivers.load().cuThreadExchangeStreamCaptureMode
    previous = None
    try:
        previous = unwrap(exchange(_RELAXED), "cuThreadExchangeStreamCaptureMode")
        result = function(*args)
        exchange(previous)
    except BaseException:
        if previous is None:  # it may have come before the mode was known
            now = exchange(_RELAXED)[1]
            previous = getattr(_thread, "mode", _DEFAULT_MODE) if now == _RELAXED else now
        _thread.mode = previous
        exchange(previous)
        raise
    return result


def is_capturing(handle: DriverObject) -> bool | None:
    """Whether the stream is in a capture, valid or not; None: it is the legacy one, and one that waits for it is."""
    ask = _drivers.load().cuStreamIsCapturing
    result: tuple[Any, ...] = ask(handle)
    if result[0] is not SUCCESS and bad_context(result):  # the thread's first use of CUDA
        ensure_context(0)
        result = ask(handle)
    if result[0] == _drivers.ERROR_STREAM_CAPTURE_IMPLICIT:
        return None
    return bool(unwrap(result, "cuStreamIsCapturing") != CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE)


def refuse_capturing(handle: DriverObject, what: str) -> None:
    """Raise StreamCapturing if `what` ("record", "wait") on this stream would go into a graph, or break a capture."""
    state = is_capturing(handle)
    if state is None:
        raise StreamCapturing(f"cannot {what} on the legacy stream while a stream that waits for it is being captured")
    if state:
        how = _INSTEAD.get(what, "")
        raise StreamCapturing(f"cannot {what} on a stream that is being captured into a CUDA graph{how}")


# --- objects ----------------------------------------------------------------------------------------------------------


class Owner:
    """Destroys `handle` by the driver function named `call` when its last reference goes; never raises.

    A finalizer runs on any thread, at any instruction, and must not hang: a driver's call that destroys takes no lock
    of Python's and waits for no work. Nothing is called in a forked child, whose parent still has the handle, nor while
    the interpreter exits: the driver releases everything with the process, and must not be waited for by then.
    """

    _call = ""  # until it has the handle: an exception may end the constructor anywhere

    def __init__(self, call: str, handle: DriverObject) -> None:
        self._handle = handle
        self._call = call

    def __del__(self) -> None:
        if not self._call or sys.is_finalizing() or fork.is_in_bad_fork():
            return
        try:
            unwrap(getattr(_drivers.load(), self._call)(self._handle), self._call)
        except Exception:
            # The context may be gone already, and a finalizer cannot raise.
            log.debug("%s of %#x failed", self._call, int(self._handle), exc_info=True)


# --- how the host waits for this process's own work -------------------------------------------------------------------


Behind: TypeAlias = Callable[[str], str]
"""Looks at the waits for other processes that some work depends on: which are not over, in a text, "" for none.

RecorderLost if the work, which is its argument in texts, may stand still behind one for ever.
"""


def behind(handle: DriverObject | None, ordinal: int) -> Behind | None:  # noqa: ARG001 - as the one of the engines
    """The waits that the work submitted so far to a stream of a device depends on; for None, to all its streams.

    The engines, which know it, set another one in its place.
    """
    return None


def is_complete(event: DriverObject) -> bool:
    """Whether the driver's `event` is complete; True too if it was never recorded."""
    result = relaxed_call(_drivers.load().cuEventQuery, event)
    if result[0] is not SUCCESS and result[0] == ERROR_NOT_READY:
        return False
    unwrap(result, "cuEventQuery")
    return True


def await_event(event: DriverObject, deadline_ns: int, check: Callable[[], object] = bool) -> bool:
    """Query for about 20 µs, then with sleeps of up to 1 ms, until `event` is complete; CUDA has no such wait.

    `check` is called at first, and then every 50 ms. False if CLOCK_MONOTONIC passes `deadline_ns` before.
    """
    start, next_check, pause_s = time.monotonic_ns(), 0, 10e-6
    while True:
        if is_complete(event):
            return True
        now = time.monotonic_ns()
        if now >= min(next_check, deadline_ns):
            check()
            next_check = now + _CHECK_NS
        if now >= deadline_ns:
            return False
        if now - start > _SPIN_NS:
            time.sleep(min(pause_s, (deadline_ns - now) / 1e9))
            pause_s = min(pause_s * 1.5, 1e-3)
