"""The driver's calls on streams."""

from __future__ import annotations

import ctypes
from functools import partial
from typing import Any

from cuda.bindings.driver import CUcontext, CUdevice, CUstream

from ipcsync._drivers.host import capture as capturing
from ipcsync._drivers.host import context as contexts
from ipcsync._drivers.host.context import GREATEST_PRIORITY, LEAST_PRIORITY
from ipcsync._drivers.host.process import process
from ipcsync._drivers.host.results import (
    INVALID_HANDLE,
    INVALID_VALUE,
    NOT_READY,
    OK,
    SUCCESS,
    CallFailed,
    Result,
    entry,
    number,
)
from ipcsync._drivers.host.stream import Stream, find_stream, streams

NON_BLOCKING = 1


def _create(flags: Any, priority: Any) -> Result:
    if number(flags) & ~NON_BLOCKING:
        raise CallFailed(INVALID_VALUE)
    stream = Stream(
        contexts.current(),
        blocking=not number(flags) & NON_BLOCKING,
        priority=max(GREATEST_PRIORITY, min(LEAST_PRIORITY, number(priority))),
    )
    streams[stream.handle] = stream
    return SUCCESS, CUstream(stream.handle)


@entry(1)
def cuStreamCreate(Flags: Any) -> Result:
    """A new stream of the current context. Flags: CUstream_flags."""
    return _create(Flags, 0)


@entry(1)
def cuStreamCreateWithPriority(flags: Any, priority: Any) -> Result:
    """A new stream of the current context; the priority is clamped to the range."""
    return _create(flags, priority)


@entry()
def cuStreamDestroy(hStream: Any) -> Result:
    """Destroy a created stream; its queued work still runs."""
    stream = streams.get(number(hStream))
    if stream is None:
        raise CallFailed(INVALID_HANDLE)
    stream.destroy()
    return OK


@entry(1)
def cuStreamGetPriority(hStream: Any) -> Result:
    """The priority of a stream, as clamped."""
    return SUCCESS, find_stream(hStream).priority


@entry(1)
def cuStreamGetFlags(hStream: Any) -> Result:
    """The CUstream_flags of a stream."""
    stream = find_stream(hStream)
    return SUCCESS, 0 if stream.is_blocking or stream.is_legacy else NON_BLOCKING


@entry(1)
def cuStreamGetId(hStream: Any) -> Result:
    """A number that no other stream of this process ever has."""
    return SUCCESS, find_stream(hStream).number


@entry(1)
def cuStreamGetCtx(hStream: Any) -> Result:
    """The context of a stream."""
    return SUCCESS, CUcontext(find_stream(hStream).context.handle)


@entry(1)
def cuStreamGetDevice(hStream: Any) -> Result:
    """The device of a stream."""
    return SUCCESS, CUdevice(find_stream(hStream).context.ordinal)


def _all_work(stream: Stream) -> list[int]:
    """The records to wait for so that `stream` is idle; the legacy stream stands for all blocking ones too."""
    return [stream.latest(), *stream.implicit()] if stream.is_legacy else [stream.latest()]


@entry()
def cuStreamQuery(hStream: Any) -> Result:
    """SUCCESS if a stream has nothing left to do, NOT_READY otherwise."""
    stream = find_stream(hStream)
    if capturing.active:
        capturing.look_at_stream(stream)
    stream.go_on()
    done = stream.is_idle() and not (stream.is_legacy and stream.implicit())
    return OK if done else NOT_READY


@entry()
def cuStreamSynchronize(hStream: Any) -> Result:
    """Wait until a stream has finished its present work."""
    stream = find_stream(hStream)
    if capturing.active:
        capturing.look_at_stream(stream)
    stream.go_on()
    for record in _all_work(stream):
        process.segment.wait_record(record)
    return OK


@entry()
def cuLaunchHostFunc(hStream: Any, fn: Any, userData: Any) -> Result:
    """Call the C function at address `fn` with `userData`, on the stream's thread, when all before it is done."""
    stream, address, data = find_stream(hStream), number(fn), number(userData)
    if not address:
        raise CallFailed(INVALID_VALUE)
    if not (capturing.active and capturing.capture_op(stream)):
        function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)
        stream.submit(partial(function, data), at_once=False)
    return OK


@entry()
def cuCtxSynchronize() -> Result:
    """Wait for all work of the current context."""
    ctx = contexts.current()
    if capturing.active:
        capturing.look_at_context(ctx)
    for stream in list(ctx.streams):
        process.segment.wait_record(stream.latest())
    return OK
