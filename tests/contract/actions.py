"""What peers are asked to do. Driver objects stay in the peer, under names; what travels is codes, handles and numbers.

Functions that return an int without saying more return the call's CUresult.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from typing import Any

from cuda.bindings import driver as driver_api

from ipcsync._drivers import handle_bytes, handle_from_bytes, load, open_library
from tests.kit import driver_kit as kit
from tests.kit.driver_kit import code, ok

_named: dict[str, Any] = {}


def named(name: str) -> Any:
    """The driver object of that name, for actions of other modules."""
    return _named[name]


def start(device: int = 0) -> None:
    """Make the primary context of `device` current."""
    kit.use_device(device)


def device_count() -> int:
    """How many devices this process sees."""
    return int(ok(load().cuDeviceGetCount()))


def uuids() -> list[bytes]:
    """The devices' UUIDs in this process's order."""
    return [kit.device_uuid(i) for i in range(device_count())]


# ---- streams


def create_stream(name: str, flags: int = kit.NON_BLOCKING) -> None:
    """Create a stream of the current device."""
    _named[name] = ok(load().cuStreamCreate(flags))


def hold(stream: str) -> None:
    """Hold back what is put on the stream from now on."""
    _named["latch of " + stream] = kit.Latch(_named[stream])


def release(stream: str) -> None:
    """Let it go on."""
    _named.pop("latch of " + stream).open()


def query_stream(stream: str) -> int:
    """Whether its work is done."""
    return code(load().cuStreamQuery(_named[stream]))


def destroy_stream(stream: str) -> int:
    """Destroy it; its work still runs."""
    return code(load().cuStreamDestroy(_named.pop(stream)))


def finish(stream: str) -> None:
    """Wait until its work is done."""
    kit.finish(_named[stream])


# ---- events


def create_event(name: str, flags: int = kit.SHAREABLE) -> None:
    """Create an event of the current device."""
    _named[name] = ok(load().cuEventCreate(flags))


def share_event(name: str) -> bytes:
    """Create an interprocess event; its handle."""
    create_event(name)
    return handle_bytes(ok(load().cuIpcGetEventHandle(_named[name])))


def export(event: str) -> int:
    """Ask for the event's handle."""
    return code(load().cuIpcGetEventHandle(_named[event]))


def open_event(name: str, handle: bytes) -> int:
    """Open a handle."""
    drv = load()
    result = drv.cuIpcOpenEventHandle(handle_from_bytes(drv.CUipcEventHandle, handle))
    if code(result) == kit.SUCCESS:
        _named[name] = result[1]
    return code(result)


def destroy_event(event: str) -> int:
    """Destroy the event, or the import of it."""
    return code(load().cuEventDestroy(_named.pop(event)))


def record(event: str, stream: str) -> int:
    """Record the event on the stream."""
    return code(load().cuEventRecord(_named[event], _named[stream]))


def record_many(event: str, stream: str, times: int) -> int:
    """Record the event so often; how often that succeeded."""
    return sum(record(event, stream) == kit.SUCCESS for _ in range(times))


def wait(stream: str, event: str) -> int:
    """Make the stream wait for the event."""
    return code(load().cuStreamWaitEvent(_named[stream], _named[event], 0))


def query(event: str) -> int:
    """Whether the event's latest record is complete."""
    return code(load().cuEventQuery(_named[event]))


def synchronize(event: str) -> int:
    """Block until the event's latest record is complete."""
    return code(load().cuEventSynchronize(_named[event]))


def complete(event: str) -> None:
    """Wait, with a deadline, until the event's latest record is complete."""
    kit.complete(_named[event])


def elapsed(first: str, second: str) -> int:
    """Ask for the time between two events."""
    return code(load().cuEventElapsedTime(_named[first], _named[second]))


# ---- memory


def share_memory(name: str, size: int) -> bytes:
    """Allocate device memory; its handle."""
    drv = load()
    _named[name] = ok(drv.cuMemAlloc(size))
    return handle_bytes(ok(drv.cuIpcGetMemHandle(_named[name])))


def open_memory(name: str, handle: bytes) -> int:
    """Map another process's device memory."""
    drv = load()
    result = drv.cuIpcOpenMemHandle(handle_from_bytes(drv.CUipcMemHandle, handle), 1)  # LAZY_ENABLE_PEER_ACCESS
    if code(result) == kit.SUCCESS:
        _named[name] = result[1]
    return code(result)


def close_memory(name: str) -> int:
    """Unmap it."""
    return code(load().cuIpcCloseMemHandle(_named.pop(name)))


def fill(memory: str, value: int, size: int, stream: str) -> int:
    """Put a set of bytes on the stream."""
    return code(load().cuMemsetD8Async(_named[memory], value, size, _named[stream]))


def read_memory(memory: str, size: int) -> bytes:
    """What the memory holds now."""
    data = bytearray(size)
    ok(load().cuMemcpyDtoH(data, _named[memory], size))
    return bytes(data)


# ---- a page of tmpfs


def map_page(name: str, path: str) -> None:
    """Map the page at `path`."""
    _named[name] = kit.Page(path)


def register_page(name: str, path: str) -> None:
    """Map it, and register it with the driver."""
    page = kit.Page(path)
    _named[name], _named["device address of " + name] = page, page.register()


def unregister_page(name: str) -> int:
    """Take the registration back."""
    return int(_named[name].unregister())


def load_word(page: str, index: int) -> int:
    """A plain load."""
    return int(_named[page].words[index])


def store_word(page: str, index: int, value: int) -> None:
    """A plain store."""
    _named[page].words[index] = value


def _word(page: str, index: int) -> Any:
    return load().CUdeviceptr(_named["device address of " + page] + 8 * index)


def write_word(stream: str, page: str, index: int, value: int) -> int:
    """Put a 64-bit write on the stream."""
    return code(load().cuStreamWriteValue64(_named[stream], _word(page, index), value, 0))


def wait_word(stream: str, page: str, index: int, value: int) -> int:
    """Make the stream wait until the word is at least `value`."""
    return code(load().cuStreamWaitValue64(_named[stream], _word(page, index), value, kit.GEQ))


def synchronize_then_load(event: str, page: str, index: int) -> tuple[int, int]:
    """Synchronize with the event; its result code, and what the word held afterwards."""
    result = synchronize(event)
    return result, load_word(page, index)


# ---- devices and contexts


def count_before_init(driver: str) -> int:
    """Ask for the number of devices before anything initialised the driver."""
    if driver == "host":
        open_library()
    return code(driver_api.cuDeviceGetCount())


def primary_context_states() -> list[bool]:
    """Whether device 0's primary context is active: at first, retained, retained twice, released, released twice."""
    drv = load()
    device = ok(drv.cuDeviceGet(0))

    def is_active() -> bool:
        return bool(ok(drv.cuDevicePrimaryCtxGetState(device))[1])

    states = [is_active()]
    contexts = []
    for _ in range(2):
        contexts.append(int(ok(drv.cuDevicePrimaryCtxRetain(device))))
        states.append(is_active())
    assert contexts[0] == contexts[1]
    for _ in range(2):
        ok(drv.cuDevicePrimaryCtxRelease(device))
        states.append(is_active())
    return states


def default_stream_ids() -> tuple[int, int, int]:
    """The ids of the stream handles 0, 1 (legacy) and 2 (per thread)."""
    drv = load()
    zero, legacy, per_thread = (int(ok(drv.cuStreamGetId(drv.CUstream(handle)))) for handle in (0, 1, 2))
    return zero, legacy, per_thread


def _fork() -> int:
    with warnings.catch_warnings():
        # Python 3.12 warns of forking beside other threads; what the driver makes of it is the question here.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def codes_in_forked_child() -> list[int]:
    """What driver calls answer in a child forked by this process, which used the driver before."""
    drv = load()
    event = ok(drv.cuEventCreate(kit.SHAREABLE))
    reader, writer = os.pipe()
    pid = _fork()
    if pid == 0:
        try:
            results = [drv.cuInit(0), drv.cuDeviceGetCount(), drv.cuStreamCreate(1), drv.cuEventCreate(2)]
            results.append(drv.cuEventQuery(event))
            os.write(writer, bytes(min(code(result), 255) for result in results))
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answers:
        codes = list(answers.read())
    os.waitpid(pid, 0)
    ok(drv.cuEventQuery(event))  # the child's end took nothing away
    return codes


def use_in_child_forked_before_use() -> int:
    """Fork first, then use the driver in the child; the child's exit status, 0 if all went well."""
    pid = _fork()
    if pid == 0:
        status = 1
        try:
            kit.use_device()
            ok(load().cuEventCreate(kit.SHAREABLE))
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def across_devices() -> dict[str, int]:
    """With streams and events of devices 0 and 1 in one process: the codes of what touches both."""
    drv = load()
    contexts = [kit.use_device(ordinal) for ordinal in (0, 1)]
    streams, events, timed = [], [], []
    for context in contexts:
        ok(drv.cuCtxSetCurrent(context))
        streams.append(ok(drv.cuStreamCreate(kit.NON_BLOCKING)))
        events.append(ok(drv.cuEventCreate(kit.DISABLE_TIMING)))
        timed.append(ok(drv.cuEventCreate(0)))
        ok(drv.cuEventRecord(timed[-1], streams[-1]))
        kit.complete(timed[-1])
    ok(drv.cuCtxSetCurrent(contexts[0]))
    latch = kit.Latch(streams[0])
    ok(drv.cuEventRecord(events[0], streams[0]))
    ok(drv.cuCtxSetCurrent(contexts[1]))
    codes = {
        "record on a stream of another device": code(drv.cuEventRecord(events[0], streams[1])),
        "wait from another device": code(drv.cuStreamWaitEvent(streams[1], events[0], 0)),
        "stream of another device that waits": code(drv.cuStreamQuery(streams[1])),
        "query of a pending event with another device current": code(drv.cuEventQuery(events[0])),
        "elapsed time across devices": code(drv.cuEventElapsedTime(timed[0], timed[1])),
    }
    latch.open()
    kit.finish(streams[1])
    codes["synchronize with another device current"] = code(drv.cuEventSynchronize(events[0]))
    codes["query with another device current"] = code(drv.cuEventQuery(events[0]))
    return codes


def record_context_of_another_device() -> int:
    """Record all of device 0's context with an event of device 1's."""
    drv, first = load(), kit.use_device(0)
    kit.use_device(1)
    event = ok(drv.cuEventCreate(kit.SHAREABLE))
    return code(drv.cuCtxRecordEvent(first, event))


def peer_access() -> list[bool]:
    """Whether devices (0, 0) and (0, 1) can reach each other's memory."""
    drv = load()
    return [bool(ok(drv.cuDeviceCanAccessPeer(0, other))) for other in (0, 1)]


def read_bytes(address: int, size: int) -> bytes:
    """Plain memory of this process."""
    return ctypes.string_at(address, size)
