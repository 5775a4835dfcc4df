"""Memory of the host driver: device memory is a file of the segment, and its address is the address of its mapping."""

from __future__ import annotations

import bisect
import ctypes
import errno
import itertools
import mmap
import os
from contextlib import suppress
from typing import Any

from cuda.bindings.driver import CUcontext, CUdeviceptr, CUipcMemHandle, CUmemorytype, CUpointer_attribute, CUresult

from ipcsync._drivers.host import capture as capturing
from ipcsync._drivers.host import context as contexts
from ipcsync._drivers.host.context import Context
from ipcsync._drivers.host.device import devices
from ipcsync._drivers.host.ipc import pack_handle, unpack_handle
from ipcsync._drivers.host.process import process
from ipcsync._drivers.host.results import (
    INVALID_CONTEXT,
    INVALID_HANDLE,
    INVALID_VALUE,
    OK,
    OUT_OF_MEMORY,
    SUCCESS,
    CallFailed,
    Result,
    entry,
    number,
)
from ipcsync._locks import CallLock, holding, under

DEVICE, IMPORTED, HOST, REGISTERED = "device", "imported", "host", "registered"
_MEMORY = b"hostmemo"
_HOST_ALLOC_FLAGS = 0x7  # PORTABLE, DEVICEMAP, WRITECOMBINED
_REGISTER_FLAGS = 0xF  # PORTABLE, DEVICEMAP, IOMEMORY, READ_ONLY
_LAZY_PEER_ACCESS = 1

_libc = ctypes.CDLL(None, use_errno=True)
_file_numbers = itertools.count(1)


class Range:
    """A piece of memory that the device can use. A reference keeps the mapping, also after it was freed."""

    __slots__ = ("_map", "context", "is_live", "kind", "number", "opened", "origin", "size", "start")

    def __init__(self, kind: str, context: Context, start: int, size: int) -> None:
        self.kind = kind
        self.context = context
        self.start = start
        self.size = size
        self.is_live = True
        self.number = 0  # of the file, in its owner's sequence
        self.opened = 1
        self.origin = (0, 0)  # of an import: the owner's serial, and its number of the file
        self._map: mmap.mmap | None = None

    @classmethod
    def of_map(cls, kind: str, context: Context, mapping: mmap.mmap, size: int) -> Range:
        """The range of a mapping, which it owns."""
        self = cls(kind, context, ctypes.addressof(ctypes.c_char.from_buffer(mapping)), size)
        self._map = mapping
        return self


class Ranges:
    """All ranges of this process, by address. Each change puts a new table in the old one's place, in one step."""

    def __init__(self) -> None:
        self._lock = CallLock()
        self._table: tuple[list[int], dict[int, Range]] = ([], {})

    @holding("_lock")
    def add(self, new: Range) -> bool:
        """Add a range; False if it overlaps one that is there."""
        starts, by_start = self._table
        here = bisect.bisect_left(starts, new.start)
        if here < len(starts) and starts[here] < new.start + new.size:
            return False
        if here and self._end(by_start[starts[here - 1]]) > new.start:
            return False
        self._table = [*starts[:here], new.start, *starts[here:]], {**by_start, new.start: new}
        return True

    def map(self, new: Range) -> None:
        """Add a new mapping. Memory that was registered at its address was unmapped by the program, and is removed."""
        while not self.add(new):
            end = new.start + new.size
            for stale in self._table[1].values():
                if stale.start < end and new.start < self._end(stale):
                    self.remove(stale.start, REGISTERED, INVALID_VALUE)

    @staticmethod
    def _end(found: Range) -> int:
        return found.start + found.size

    def find(self, address: int, size: int = 1) -> Range | None:
        """The range that has all of `size` bytes from `address` on."""
        starts, by_start = self._table
        here = bisect.bisect_right(starts, address) - 1
        if here < 0:
            return None
        found = by_start[starts[here]]
        return found if address + size <= self._end(found) else None

    @holding("_lock")
    def remove(self, start: int, kind: str, otherwise: Any) -> Range:
        """Take out the range of a kind that begins at `start`; refused with `otherwise` if there is none."""
        starts, by_start = self._table
        found = by_start.get(start)
        if found is None or found.kind != kind:
            raise CallFailed(otherwise)
        found.is_live = False
        left = {key: value for key, value in by_start.items() if key != start}
        self._table = [key for key in starts if key != start], left
        return found

    def imports(self, origin: tuple[int, int]) -> Range | None:
        """The import of a file that is open already."""
        return next((r for r in self._table[1].values() if r.kind == IMPORTED and r.origin == origin), None)


ranges = Ranges()


def usable(address: int, size: int) -> Range:
    """The range that has these bytes; refused if the device cannot use them."""
    found = ranges.find(address, size)
    if found is None:
        raise CallFailed(INVALID_VALUE)
    return found


def _file(serial: int, file_number: int) -> str:
    return f"{process.segment.path}-mem-{serial}-{file_number}"


def _size(bytesize: Any) -> int:
    size = number(bytesize)
    if size <= 0:
        raise CallFailed(INVALID_VALUE)
    return size


@entry(1)
def cuMemAlloc(bytesize: Any) -> Result:
    """Memory of the current device, zeros; OUT_OF_MEMORY beyond its size, or when the machine has no more."""
    context, size = contexts.current(), _size(bytesize)
    if capturing.active:
        capturing.unsafe()
    if not process.segment.take_memory(context.physical, size, devices.memory_limit):
        raise CallFailed(OUT_OF_MEMORY)
    file_number = next(_file_numbers)
    path = _file(process.segment.serial, file_number)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(fd, 0, size)  # a hole would be SIGBUS on a full tmpfs
            mapping = mmap.mmap(fd, size)
        except BaseException:
            os.unlink(path)
            raise
        finally:
            os.close(fd)
    except OSError as error:
        process.segment.give_memory(context.physical, size)
        if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise CallFailed(OUT_OF_MEMORY) from error
        raise CallFailed(CUresult.CUDA_ERROR_OPERATING_SYSTEM) from error
    new = Range.of_map(DEVICE, context, mapping, size)
    new.number = file_number
    ranges.map(new)
    return SUCCESS, CUdeviceptr(new.start)


@entry()
def cuMemFree(dptr: Any) -> Result:
    """Free device memory; 0 does nothing. Queued work on it still runs."""
    start = number(dptr)
    if not start:
        return OK
    if capturing.active:
        capturing.unsafe()
    freed = ranges.remove(start, DEVICE, INVALID_VALUE)
    with suppress(FileNotFoundError):  # it was removed by hand: that is fine
        os.unlink(_file(process.segment.serial, freed.number))
    process.segment.give_memory(freed.context.physical, freed.size)
    return OK


@entry(1)
def cuIpcGetMemHandle(dptr: Any) -> Result:
    """The handle of device memory that this process allocated, by any address in it."""
    found = ranges.find(number(dptr))
    if found is None or found.kind != DEVICE:
        raise CallFailed(INVALID_VALUE)
    contexts.current()
    fields = (found.number, found.size, found.context.physical)
    return SUCCESS, pack_handle(CUipcMemHandle, _MEMORY, process.segment.serial, fields)


@entry(1)
def cuIpcOpenMemHandle(handle: Any, Flags: Any) -> Result:
    """Another process's device memory, here. Flags must be 1 (LAZY_ENABLE_PEER_ACCESS).

    Opening it again gives the same address, and wants one more close. INVALID_VALUE for noise, INVALID_CONTEXT in the
    process that allocated it, INVALID_HANDLE if it was freed.
    """
    context = contexts.current()
    if number(Flags) != _LAZY_PEER_ACCESS:
        raise CallFailed(INVALID_VALUE)
    serial, (file_number, size, _device) = unpack_handle(handle, _MEMORY)
    if serial == process.segment.serial:
        raise CallFailed(INVALID_CONTEXT)
    return SUCCESS, CUdeviceptr(under(_opening, _import, context, (serial, file_number), size).start)


def _import(context: Context, origin: tuple[int, int], size: int) -> Range:
    known = ranges.imports(origin)
    if known is not None:
        known.opened += 1
        return known
    try:
        fd = os.open(_file(*origin), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise CallFailed(INVALID_HANDLE) from None
    try:
        mapping = mmap.mmap(fd, size)
    finally:
        os.close(fd)
    new = Range.of_map(IMPORTED, context, mapping, size)
    new.origin = origin
    ranges.map(new)
    return new


_opening = CallLock()


@entry()
def cuIpcCloseMemHandle(dptr: Any) -> Result:
    """Undo one open; the last one unmaps the memory."""
    under(_opening, _close_import, number(dptr))
    return OK


def _close_import(start: int) -> None:
    found = ranges.find(start)
    if found is None or found.start != start or found.kind != IMPORTED:
        raise CallFailed(INVALID_VALUE)
    found.opened -= 1
    if not found.opened:
        ranges.remove(start, IMPORTED, INVALID_VALUE)


@entry(1)
def cuMemAllocHost(bytesize: Any) -> Result:
    """Host memory that the device can use: its address."""
    return _allocate_host(bytesize, 0)


@entry(1)
def cuMemHostAlloc(bytesize: Any, Flags: Any) -> Result:
    """Host memory that the device can use. Flags: CU_MEMHOSTALLOC_…, which change nothing here."""
    return _allocate_host(bytesize, number(Flags))


def _allocate_host(bytesize: Any, flags: int) -> Result:
    context, size = contexts.current(), _size(bytesize)
    if flags & ~_HOST_ALLOC_FLAGS:
        raise CallFailed(INVALID_VALUE)
    if capturing.active:
        capturing.unsafe()
    try:
        mapping = mmap.mmap(-1, size)
    except (OSError, OverflowError) as error:
        raise CallFailed(OUT_OF_MEMORY) from error
    new = Range.of_map(HOST, context, mapping, size)
    ranges.map(new)
    return SUCCESS, new.start


@entry()
def cuMemFreeHost(p: Any) -> Result:
    """Free host memory that was allocated here."""
    if capturing.active:
        capturing.unsafe()
    ranges.remove(address_of(p), HOST, INVALID_VALUE)
    return OK


@entry()
def cuMemHostRegister(p: Any, bytesize: Any, Flags: Any) -> Result:
    """Let the device use memory of the program's own, which must be mapped.

    INVALID_VALUE for size 0, unknown flags or memory that is not there; HOST_MEMORY_ALREADY_REGISTERED if any of it is
    known already.
    """
    context, start, size, flags = contexts.current(), address_of(p), _size(bytesize), number(Flags)
    if flags & ~_REGISTER_FLAGS or not _is_mapped(start, size):
        raise CallFailed(INVALID_VALUE)
    if capturing.active:
        capturing.unsafe()
    if not ranges.add(Range(REGISTERED, context, start, size)):
        raise CallFailed(CUresult.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED)
    return OK


def _is_mapped(start: int, size: int) -> bool:
    first = start - start % mmap.PAGESIZE
    length = start + size - first
    if not start or start + size > 1 << 63:
        return False
    residency = ctypes.create_string_buffer((length + mmap.PAGESIZE - 1) // mmap.PAGESIZE)
    return bool(_libc.mincore(ctypes.c_void_p(first), ctypes.c_size_t(length), residency) == 0)


@entry()
def cuMemHostUnregister(p: Any) -> Result:
    """Undo a registration; HOST_MEMORY_NOT_REGISTERED if none begins at the address."""
    if capturing.active:
        capturing.unsafe()
    ranges.remove(address_of(p), REGISTERED, CUresult.CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED)
    return OK


@entry(1)
def cuMemHostGetDevicePointer(p: Any, Flags: Any) -> Result:
    """The device's address of host memory, which is the same; Flags must be 0."""
    address = address_of(p)
    found = ranges.find(address)
    if number(Flags) or found is None or found.kind not in (HOST, REGISTERED):
        raise CallFailed(INVALID_VALUE)
    return SUCCESS, CUdeviceptr(address)


def address_of(p: Any) -> int:
    """The address that a host pointer argument means: an int, None, or an object with the buffer protocol."""
    if p is None or isinstance(p, int):
        return number(p)
    try:
        view = memoryview(p)
    except TypeError:
        return number(p)
    if view.readonly:
        raise TypeError("a host pointer must be an int or a writable buffer")
    return ctypes.addressof(ctypes.c_char.from_buffer(view.cast("B"))) if view.nbytes else 0


@entry(1)
def cuPointerGetAttribute(attribute: Any, ptr: Any) -> Result:
    """The attributes of memory that the device can use; INVALID_VALUE for any other."""
    found = usable(number(ptr), 1)
    name = CUpointer_attribute(attribute).name.removeprefix("CU_POINTER_ATTRIBUTE_")
    on_host = found.kind in (HOST, REGISTERED)
    answers: dict[str, Any] = {
        "CONTEXT": CUcontext(found.context.handle),
        "MEMORY_TYPE": int(CUmemorytype.CU_MEMORYTYPE_HOST if on_host else CUmemorytype.CU_MEMORYTYPE_DEVICE),
        "DEVICE_POINTER": CUdeviceptr(number(ptr)),
        "DEVICE_ORDINAL": found.context.ordinal,
        "RANGE_START_ADDR": CUdeviceptr(found.start),
        "RANGE_SIZE": found.size,
        "IS_MANAGED": False,
        "MAPPED": True,
    }
    if on_host:
        answers["HOST_POINTER"] = number(ptr)
    if name not in answers:
        raise CallFailed(INVALID_VALUE)
    return SUCCESS, answers[name]
