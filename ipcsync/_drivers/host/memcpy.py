"""Copies and fills of the host driver: memmove and memset, with the GIL released, in a stream's order."""

from __future__ import annotations

import ctypes
from functools import partial
from typing import Any

from ipcsync._drivers.host import capture as capturing
from ipcsync._drivers.host.memory import Range, address_of, ranges, usable
from ipcsync._drivers.host.process import process
from ipcsync._drivers.host.results import INVALID_VALUE, OK, CallFailed, Result, entry, number
from ipcsync._drivers.host.stream import Stream, find_stream

LEGACY_STREAM = 0


class _Place:
    """One side of a copy: an address, and the object that keeps it mapped until the copy is done."""

    __slots__ = ("address", "is_pageable", "keep")

    def __init__(self, address: int, keep: Any, *, is_pageable: bool) -> None:
        self.address = address
        self.keep = keep
        self.is_pageable = is_pageable


def _device(pointer: Any, size: int) -> _Place:
    address = number(pointer)
    return _Place(address, usable(address, size) if size else None, is_pageable=False)


def _host(pointer: Any, size: int) -> _Place:
    if isinstance(pointer, (bytes, bytearray, memoryview)):
        view = memoryview(pointer)
        if view.nbytes < size:
            raise CallFailed(INVALID_VALUE)
        if view.readonly:  # ctypes lends no address of it
            staged = ctypes.create_string_buffer(view.tobytes(), view.nbytes)
            return _Place(ctypes.addressof(staged), staged, is_pageable=True)
    address = address_of(pointer)
    known: Range | None = ranges.find(address, size)
    return _Place(address, known or pointer, is_pageable=known is None)


def _move(dst: _Place, src: _Place, size: int) -> None:
    ctypes.memmove(dst.address, src.address, size)


def _copy(dst: _Place, src: _Place, size: int, stream: Stream, *, wait: bool) -> Result:
    """Queue a copy. Pageable memory is the caller's again after the call, so it is staged or waited for."""
    if size and not (dst.address and src.address):
        raise CallFailed(INVALID_VALUE)
    if wait and capturing.active:
        capturing.look_at_stream(stream)
    if capturing.active and capturing.capture_op(stream):
        return OK
    if src.is_pageable and not wait:
        staged = ctypes.create_string_buffer(size)
        ctypes.memmove(staged, src.address, size)
        src = _Place(ctypes.addressof(staged), staged, is_pageable=False)
    record = stream.submit(partial(_move, dst, src, size))
    if wait or dst.is_pageable:
        process.segment.wait_record(record)
    return OK


@entry()
def cuMemcpyHtoD(dstDevice: Any, srcHost: Any, ByteCount: Any) -> Result:
    """Copy host memory to the device, and wait for it."""
    n = number(ByteCount)
    return _copy(_device(dstDevice, n), _host(srcHost, n), n, find_stream(LEGACY_STREAM), wait=True)


@entry()
def cuMemcpyHtoDAsync(dstDevice: Any, srcHost: Any, ByteCount: Any, hStream: Any) -> Result:
    """Copy host memory to the device in a stream; pageable memory was read when the call returns."""
    n = number(ByteCount)
    return _copy(_device(dstDevice, n), _host(srcHost, n), n, find_stream(hStream), wait=False)


@entry()
def cuMemcpyDtoH(dstHost: Any, srcDevice: Any, ByteCount: Any) -> Result:
    """Copy device memory to the host, and wait for it."""
    n = number(ByteCount)
    return _copy(_host(dstHost, n), _device(srcDevice, n), n, find_stream(LEGACY_STREAM), wait=True)


@entry()
def cuMemcpyDtoHAsync(dstHost: Any, srcDevice: Any, ByteCount: Any, hStream: Any) -> Result:
    """Copy device memory to the host in a stream; a pageable destination makes the call wait."""
    n = number(ByteCount)
    return _copy(_host(dstHost, n), _device(srcDevice, n), n, find_stream(hStream), wait=False)


@entry()
def cuMemcpyDtoD(dstDevice: Any, srcDevice: Any, ByteCount: Any) -> Result:
    """Copy within device memory, in the legacy stream."""
    n = number(ByteCount)
    return _copy(_device(dstDevice, n), _device(srcDevice, n), n, find_stream(LEGACY_STREAM), wait=True)


@entry()
def cuMemcpyDtoDAsync(dstDevice: Any, srcDevice: Any, ByteCount: Any, hStream: Any) -> Result:
    """Copy within device memory, in a stream."""
    n = number(ByteCount)
    return _copy(_device(dstDevice, n), _device(srcDevice, n), n, find_stream(hStream), wait=False)


@entry()
def cuMemcpyAsync(dst: Any, src: Any, ByteCount: Any, hStream: Any) -> Result:
    """Copy between any two addresses, in a stream."""
    n = number(ByteCount)
    return _copy(_host(number(dst), n), _host(number(src), n), n, find_stream(hStream), wait=False)


def _fill(place: _Place, pattern: bytes, count: int) -> None:
    if len(pattern) == 1:
        ctypes.memset(place.address, pattern[0], count)
    else:
        ctypes.memmove(place.address, pattern * count, len(pattern) * count)


def _set(dst: Any, pattern: bytes, count: int, stream: Stream, *, wait: bool) -> Result:
    if number(dst) % len(pattern):
        raise CallFailed(INVALID_VALUE)
    place = _device(dst, len(pattern) * count)
    if wait and capturing.active:
        capturing.look_at_stream(stream)
    if not (capturing.active and capturing.capture_op(stream)):
        record = stream.submit(partial(_fill, place, pattern, count))
        if wait:
            process.segment.wait_record(record)
    return OK


@entry()
def cuMemsetD8(dstDevice: Any, uc: Any, N: Any) -> Result:
    """Set N bytes of device memory, and wait for it."""
    return _set(dstDevice, bytes([number(uc) & 0xFF]), number(N), find_stream(LEGACY_STREAM), wait=True)


@entry()
def cuMemsetD8Async(dstDevice: Any, uc: Any, N: Any, hStream: Any) -> Result:
    """Set N bytes of device memory, in a stream."""
    return _set(dstDevice, bytes([number(uc) & 0xFF]), number(N), find_stream(hStream), wait=False)


@entry()
def cuMemsetD32(dstDevice: Any, ui: Any, N: Any) -> Result:
    """Set N words of 32 bits of device memory, and wait for it."""
    pattern = (number(ui) & 0xFFFFFFFF).to_bytes(4, "little")
    return _set(dstDevice, pattern, number(N), find_stream(LEGACY_STREAM), wait=True)


@entry()
def cuMemsetD32Async(dstDevice: Any, ui: Any, N: Any, hStream: Any) -> Result:
    """Set N words of 32 bits of device memory, in a stream."""
    pattern = (number(ui) & 0xFFFFFFFF).to_bytes(4, "little")
    return _set(dstDevice, pattern, number(N), find_stream(hStream), wait=False)
