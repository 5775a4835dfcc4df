"""IPC handles of the host driver: 64 bytes that name an event's line, or a file of memory, of one segment."""

from __future__ import annotations

import ctypes
import struct
import zlib
from typing import Any

from cuda.bindings.driver import CUevent, CUipcEventHandle

from ipcsync._drivers.host import context as contexts
from ipcsync._drivers.host import layout
from ipcsync._drivers.host.event import DISABLE_TIMING, INTERPROCESS, Event, events, find_event
from ipcsync._drivers.host.process import process
from ipcsync._drivers.host.results import (
    INVALID_CONTEXT,
    INVALID_HANDLE,
    INVALID_VALUE,
    SUCCESS,
    CallFailed,
    Result,
    entry,
)

_BODY = struct.Struct("<8s5Q8x")  # kind, the segment's nonce, the exporter's serial, three more by kind: 56 bytes
_CHECK = struct.Struct("<Q")
_EVENT = b"hostevnt"

Fields = tuple[int, int, int]


def pack_handle(kind: type[Any], tag: bytes, serial: int, fields: Fields) -> Any:
    """A handle of the binding's class `kind`."""
    body = _BODY.pack(tag, process.segment.nonce, serial, *fields)
    handle = kind()
    ctypes.memmove(handle.getPtr(), body + _CHECK.pack(zlib.crc32(body)), 64)
    return handle


def unpack_handle(handle: Any, tag: bytes) -> tuple[int, Fields]:
    """The exporter's serial and the fields of a handle of this segment; INVALID_VALUE for any other bytes."""
    data = ctypes.string_at(handle.getPtr(), 64)
    body = data[: _BODY.size]
    found, nonce, serial, *fields = _BODY.unpack(body)
    if found != tag or nonce != process.segment.nonce or data[_BODY.size :] != _CHECK.pack(zlib.crc32(body)):
        raise CallFailed(INVALID_VALUE)
    return serial, (fields[0], fields[1], fields[2])


@entry(1)
def cuIpcGetEventHandle(event: Any) -> Result:
    """The handle of an event that this process created with INTERPROCESS; the same bytes each time."""
    exported = find_event(event)
    contexts.current()
    if not exported.line or exported.imported:
        raise CallFailed(INVALID_HANDLE)
    word, device = (process.words[exported.line + offset] for offset in (layout.E_WORD, layout.E_DEVICE))
    fields = (exported.line, word, device)
    return SUCCESS, pack_handle(CUipcEventHandle, _EVENT, process.segment.serial, fields)


@entry(1)
def cuIpcOpenEventHandle(handle: Any) -> Result:
    """This process's import of another's event, under a context of the event's own device.

    INVALID_VALUE for noise and for an event that is gone, INVALID_CONTEXT in the process that created it,
    INVALID_HANDLE under a context of another device.
    """
    context = contexts.current()
    serial, (line, word, device) = unpack_handle(handle, _EVENT)
    if serial == process.segment.serial:
        raise CallFailed(INVALID_CONTEXT)
    words = process.words
    # The word last, as in Event._look_at_exporter.
    if not process.segment.is_member(words[line + layout.E_PROCESS], serial) or words[line + layout.E_WORD] != word:
        raise CallFailed(INVALID_VALUE)
    if device != context.physical:
        raise CallFailed(INVALID_HANDLE)
    event = Event(context, DISABLE_TIMING | INTERPROCESS)
    event.attach(line, word, serial)
    events[event.handle] = event
    return SUCCESS, CUevent(event.handle)
