"""Streams and events of other libraries: torch, cuda.core, cupy, numba, or a bare pointer."""

from __future__ import annotations

import operator
import sys
from numbers import Real
from typing import Any

from ipcsync import _drivers
from ipcsync._drivers import DriverObject
from ipcsync._native import context
from ipcsync._native.context import is_capturing
from ipcsync.typing import EventLike, StreamLike

_POINTERS = 1 << 64
_NO_OBJECT = 4096  # no object lies below this address


def pointer(value: Any, noun: str) -> int | None:  # noqa: ANN401 - whatever a user gave
    """The address in an int or a handle of cuda-python, None in anything else. ValueError for an int that is none."""
    if isinstance(value, bool):
        return None
    try:
        address = operator.index(value)
    except TypeError:
        if not hasattr(value, "getPtr"):  # handles of older cuda-bindings have __int__ only
            return None
        address = int(value)
    if not 0 <= address < _POINTERS:
        raise ValueError(f"a {noun} pointer is an int from 0 to 2**64 - 1, but got {address}")
    return address


def refuse_small_number(value: object, least: int) -> None:
    """Raise TypeError for a number from `least` to 4095, which is no address: it was meant as a timeout."""
    if isinstance(value, Real) and not isinstance(value, bool) and not value < least and value < _NO_OBJECT:
        raise TypeError(f"{value!r} is not a stream; did you mean timeout={value!r}?")


def stream_pointer(stream: StreamLike | None) -> int:
    """The CUstream address of another library's stream object, or of an int.

    Raises TypeError for an argument that is not a stream, also for an int from 3 to 4095 (0, 1 and 2 are the default
    streams); ValueError for an int that is not an address.
    """
    refuse_small_number(stream, 3)  # below are the default streams
    address = pointer(stream, "stream")
    thing = None if isinstance(stream, type) else stream  # a class has the attributes of its objects, but no stream
    protocol = getattr(thing, "__cuda_stream__", None)
    if address is None and protocol is not None:
        answer = protocol() if callable(protocol) else protocol
        if not isinstance(answer, tuple) or len(answer) != 2 or answer[0] != 0:
            raise TypeError(f"__cuda_stream__ of {type(stream).__name__} must give (0, pointer), but gave {answer!r}")
        address = pointer(answer[1], "stream")
    for name in ("cuda_stream", "ptr"):
        if address is None:
            address = pointer(getattr(thing, name, None), "stream")
    if address is None:
        raise TypeError(
            "a stream is an ipcsync.Stream, an int pointer, or an object with __cuda_stream__, cuda_stream or ptr, "
            f"but got {type(stream).__name__}"
        )
    return address


def ordinal_of_stream(address: int, hint: object = None) -> int:
    """The device of the stream at `address`; `hint` is the stream object's own `device_index`, if it has one.

    Default streams, and those in a capture, which a question may break, are taken to be of the current device.
    """
    if isinstance(hint, int) and 0 <= hint < context.count():
        return hint
    handle = _drivers.load().CUstream(address)
    if address in context.DEFAULT_STREAMS or is_capturing(handle):
        return context.current_ordinal()
    return context.ordinal_of_context(context.call("cuStreamGetCtx", handle))


def torch_stream(device: int | None) -> StreamLike | None:
    """torch's current stream (of a device) once torch is imported and has initialised CUDA, else None."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)  # None too while torch is being imported
    if cuda is None or not cuda.is_initialized():
        return None
    stream: StreamLike = cuda.current_stream() if device is None else cuda.current_stream(device)
    return stream


def event_handle(event: EventLike) -> DriverObject:
    """The CUevent of another library's event, or of an int; None: torch never recorded it. TypeError for all else."""
    address = pointer(event, "event")
    if address is not None and address < _NO_OBJECT:
        raise TypeError(f"{address} is not an event: no object lies at an address below {_NO_OBJECT}")
    if address is None and not isinstance(event, type):
        address = pointer(getattr(event, "cuda_event", None), "event")
        if address == 0:
            return None
        if address is None:
            address = pointer(getattr(event, "handle", None), "event")
    if address is not None:
        return _drivers.load().CUevent(address)
    raise TypeError(
        "an event is an ipcsync.Event, an int pointer, or an object with cuda_event, handle or wait(stream), but got "
        f"{type(event).__name__}"
    )
