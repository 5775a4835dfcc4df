"""Memory: copies and sets in stream order, and device memory shared between processes."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from ipcsync._drivers import handle_bytes, handle_from_bytes
from tests.contract import actions
from tests.kit import driver_kit as kit
from tests.kit.driver_kit import Latch, code, finish, ok
from tests.kit.peer import Peer
from tests.kit.until import until

pytestmark = [pytest.mark.driver, pytest.mark.process]

New = Callable[..., Any]
SIZE = 10_000


def test_copies_bring_bytes_to_the_device_and_back(drv: ModuleType, ctx: Any) -> None:
    source, target = bytes(i % 251 for i in range(SIZE)), bytearray(SIZE)
    first, second = ok(drv.cuMemAlloc(SIZE)), ok(drv.cuMemAlloc(SIZE))
    ok(drv.cuMemcpyHtoD(first, source, SIZE))
    ok(drv.cuMemcpyDtoD(second, first, SIZE))
    ok(drv.cuMemcpyDtoH(target, second, SIZE))
    assert target == source
    for memory in (first, second):
        ok(drv.cuMemFree(memory))


def test_sets_fill_bytes_and_words(drv: ModuleType, stream: Any) -> None:
    memory, target = ok(drv.cuMemAlloc(64)), bytearray(64)
    ok(drv.cuMemsetD8(memory, 7, 64))
    ok(drv.cuMemsetD32(drv.CUdeviceptr(int(memory) + 32), 0x01020304, 4))
    finish(drv.CUstream(kit.LEGACY))
    ok(drv.cuMemcpyDtoH(target, memory, 64))
    assert target == b"\7" * 32 + b"\4\3\2\1" * 4 + b"\7" * 16
    ok(drv.cuMemFree(memory))


def test_copies_and_sets_happen_in_the_order_of_their_stream(drv: ModuleType, stream: Any) -> None:
    memory, host = ok(drv.cuMemAlloc(64)), int(ok(drv.cuMemAllocHost(128)))
    ctypes.memset(host, ord("a"), 128)
    latch = Latch(stream)
    ok(drv.cuMemcpyHtoDAsync(memory, host, 64, stream))
    ok(drv.cuMemsetD8Async(drv.CUdeviceptr(int(memory) + 32), ord("b"), 32, stream))
    ok(drv.cuMemcpyDtoHAsync(host + 64, memory, 64, stream))
    assert ctypes.string_at(host + 64, 64) == b"a" * 64
    assert code(drv.cuStreamQuery(stream)) == kit.NOT_READY
    latch.open()
    finish(stream)
    assert ctypes.string_at(host + 64, 64) == b"a" * 32 + b"b" * 32
    ok(drv.cuMemFree(memory))
    ok(drv.cuMemFreeHost(host))


def test_what_was_copied_before_a_record_is_there_after_the_wait(
    drv: ModuleType, new_stream: New, ipc_event: Any
) -> None:
    producer, consumer = new_stream(), new_stream()
    memory, host = ok(drv.cuMemAlloc(SIZE)), int(ok(drv.cuMemAllocHost(SIZE)))
    ctypes.memset(host, 0, SIZE)
    latch = Latch(producer)
    ok(drv.cuMemsetD8Async(memory, 5, SIZE, producer))
    ok(drv.cuEventRecord(ipc_event, producer))
    ok(drv.cuStreamWaitEvent(consumer, ipc_event, 0))
    ok(drv.cuMemcpyDtoHAsync(host, memory, SIZE, consumer))
    latch.open()
    finish(consumer)
    assert ctypes.string_at(host, SIZE) == b"\5" * SIZE
    ok(drv.cuMemFree(memory))
    ok(drv.cuMemFreeHost(host))


def test_allocating_nothing_is_an_invalid_value(drv: ModuleType, ctx: Any) -> None:
    assert code(drv.cuMemAlloc(0)) == kit.INVALID_VALUE


def test_allocating_more_than_there_is_fails_and_less_succeeds(drv: ModuleType, ctx: Any) -> None:
    free, total = ok(drv.cuMemGetInfo())
    assert 0 < free <= total
    assert code(drv.cuMemAlloc(int(total) + 1)) == kit.OUT_OF_MEMORY
    ok(drv.cuMemFree(ok(drv.cuMemAlloc(SIZE))))


@pytest.mark.parametrize("of_host", [False, True])
def test_freeing_memory_waits_for_the_work_of_its_context(
    drv: ModuleType, ctx: Any, stream: Any, of_host: bool
) -> None:
    memory = ok((drv.cuMemAllocHost if of_host else drv.cuMemAlloc)(SIZE))
    latch = Latch(stream)

    def free() -> None:
        ok(drv.cuCtxSetCurrent(ctx))
        ok((drv.cuMemFreeHost if of_host else drv.cuMemFree)(memory))

    freeing = threading.Thread(target=free, daemon=True)
    freeing.start()
    freeing.join(0.1)
    assert freeing.is_alive()
    assert code(drv.cuStreamQuery(stream)) == kit.NOT_READY
    latch.open()
    until(lambda: not freeing.is_alive(), "it is freed")
    finish(stream)


def test_copies_and_sets_stay_inside_of_what_they_are_given(drv: ModuleType, stream: Any) -> None:
    memory = ok(drv.cuMemAlloc(16))
    assert code(drv.cuMemsetD8(memory, 1, 1 << 40)) == kit.INVALID_VALUE
    assert code(drv.cuMemsetD32(drv.CUdeviceptr(int(memory) + 2), 1, 1)) == kit.INVALID_VALUE
    target = bytearray(16)
    ok(drv.cuMemsetD32Async(memory, 0x01020304, 4, stream))
    ok(drv.cuMemcpyDtoHAsync(target, memory, 16, stream))
    finish(stream)
    assert target == b"\4\3\2\1" * 4
    ok(drv.cuMemFree(memory))


def test_memory_is_freed_once_by_its_first_byte_and_by_its_own_call(drv: ModuleType, ctx: Any) -> None:
    memory, host = ok(drv.cuMemAlloc(SIZE)), ok(drv.cuMemAllocHost(SIZE))
    assert code(drv.cuMemFree(drv.CUdeviceptr(int(memory) + 8))) == kit.INVALID_VALUE
    ok(drv.cuMemFree(memory))
    assert code(drv.cuMemFree(memory)) == kit.INVALID_VALUE
    ok(drv.cuMemFree(drv.CUdeviceptr(0)))
    ok(drv.cuMemFreeHost(host))
    assert code(drv.cuMemFreeHost(host)) == kit.INVALID_VALUE


def test_attributes_tell_device_memory_from_host_memory_and_from_any_other(drv: ModuleType, ctx: Any) -> None:
    def ask(what: str, address: Any) -> Any:
        attribute = getattr(drv.CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{what}")
        return drv.cuPointerGetAttribute(attribute, drv.CUdeviceptr(int(address)))

    memory, host = ok(drv.cuMemAlloc(SIZE)), ok(drv.cuMemHostAlloc(SIZE, 0))
    assert int(ok(ask("MEMORY_TYPE", memory))) == int(drv.CUmemorytype.CU_MEMORYTYPE_DEVICE)
    assert int(ok(ask("MEMORY_TYPE", int(host) + 1))) == int(drv.CUmemorytype.CU_MEMORYTYPE_HOST)
    assert ok(ask("DEVICE_ORDINAL", memory)) == 0
    ok(drv.cuMemFreeHost(host))
    ok(drv.cuMemFree(memory))
    assert code(ask("MEMORY_TYPE", memory)) == kit.INVALID_VALUE


def test_the_device_has_a_pointer_to_host_memory_and_to_no_other(drv: ModuleType, ctx: Any) -> None:
    host, memory = ok(drv.cuMemHostAlloc(SIZE, 0)), ok(drv.cuMemAlloc(SIZE))
    assert int(ok(drv.cuMemHostGetDevicePointer(host, 0))) == int(host)
    assert code(drv.cuMemHostGetDevicePointer(host, 1)) == kit.INVALID_VALUE
    own = ctypes.create_string_buffer(16)
    assert code(drv.cuMemHostGetDevicePointer(ctypes.addressof(own), 0)) == kit.INVALID_VALUE
    assert code(drv.cuMemHostAlloc(SIZE, 1 << 20)) == kit.INVALID_VALUE
    ok(drv.cuMemFreeHost(host))
    ok(drv.cuMemFree(memory))


def test_memory_that_is_opened_twice_has_one_address_and_is_closed_twice(
    drv: ModuleType, ctx: Any, partner: Peer
) -> None:
    handle = handle_from_bytes(drv.CUipcMemHandle, partner.call(actions.share_memory, "m", SIZE))
    first, second = ok(drv.cuIpcOpenMemHandle(handle, 1)), ok(drv.cuIpcOpenMemHandle(handle, 1))
    assert int(first) == int(second)
    assert code(drv.cuMemFree(first)) == kit.INVALID_VALUE
    assert code(drv.cuIpcGetMemHandle(drv.CUdeviceptr(8))) == kit.INVALID_VALUE
    ok(drv.cuIpcCloseMemHandle(first))
    ok(drv.cuMemsetD8(first, 1, SIZE))
    ok(drv.cuIpcCloseMemHandle(first))
    assert code(drv.cuIpcCloseMemHandle(first)) == kit.INVALID_VALUE


def test_a_memory_handle_is_64_bytes_and_is_not_opened_by_the_process_that_exports_it(
    drv: ModuleType, ctx: Any
) -> None:
    memory = ok(drv.cuMemAlloc(SIZE))
    handle = handle_bytes(ok(drv.cuIpcGetMemHandle(memory)))
    assert len(handle) == 64
    opened = drv.cuIpcOpenMemHandle(handle_from_bytes(drv.CUipcMemHandle, handle), 1)
    assert code(opened) == kit.INVALID_CONTEXT
    ok(drv.cuMemFree(memory))


def test_memory_of_one_process_is_read_and_written_by_another(drv: ModuleType, ctx: Any, partner: Peer) -> None:
    memory, target = ok(drv.cuMemAlloc(SIZE)), bytearray(SIZE)
    ok(drv.cuMemsetD8(memory, 1, SIZE))
    finish(drv.CUstream(kit.LEGACY))
    handle = handle_bytes(ok(drv.cuIpcGetMemHandle(memory)))
    assert partner.call(actions.open_memory, "m", handle) == kit.SUCCESS
    assert partner.call(actions.read_memory, "m", SIZE) == b"\1" * SIZE
    partner.call(actions.create_stream, "s")
    assert partner.call(actions.fill, "m", 2, SIZE // 2, "s") == kit.SUCCESS
    partner.call(actions.finish, "s")
    ok(drv.cuMemcpyDtoH(target, memory, SIZE))
    assert target == b"\2" * (SIZE // 2) + b"\1" * (SIZE // 2)
    assert partner.call(actions.close_memory, "m") == kit.SUCCESS
    ok(drv.cuMemFree(memory))


def test_an_event_orders_writes_of_one_process_before_reads_of_another(
    drv: ModuleType, stream: Any, ipc_event: Any, partner: Peer
) -> None:
    memory_handle = partner.call(actions.share_memory, "m", SIZE)
    host = int(ok(drv.cuMemAllocHost(SIZE)))
    ctypes.memset(host, 0, SIZE)
    opened = ok(drv.cuIpcOpenMemHandle(handle_from_bytes(drv.CUipcMemHandle, memory_handle), 1))
    assert partner.call(actions.open_event, "e", handle_bytes(ok(drv.cuIpcGetEventHandle(ipc_event)))) == kit.SUCCESS
    partner.call(actions.create_stream, "s")
    for value in range(1, 11):
        partner.call(actions.hold, "s")
        assert partner.call(actions.fill, "m", value, SIZE, "s") == kit.SUCCESS
        assert partner.call(actions.record, "e", "s") == kit.SUCCESS
        ok(drv.cuStreamWaitEvent(stream, ipc_event, 0))
        ok(drv.cuMemcpyDtoHAsync(host, opened, SIZE, stream))
        partner.call(actions.release, "s")
        finish(stream)
        assert ctypes.string_at(host, SIZE) == bytes([value]) * SIZE
    ok(drv.cuIpcCloseMemHandle(opened))
    ok(drv.cuMemFreeHost(host))
