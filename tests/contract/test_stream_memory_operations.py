"""Streams that write and wait for values in memory, also in a page of tmpfs that several processes registered."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from tests.contract import actions
from tests.kit import driver_kit as kit
from tests.kit.driver_kit import Latch, code, complete, finish, ok
from tests.kit.peer import Peer

pytestmark = [pytest.mark.driver, pytest.mark.process]

New = Callable[..., Any]
INT64_MAX, UINT64_MAX = 2**63 - 1, 2**64 - 1
NO_MEMORY_BARRIER = 1  # CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER


class Word:
    """A word of pinned memory that a stream and plain stores both reach."""

    def __init__(self, drv: ModuleType, bits: int) -> None:
        self._memory = ok(drv.cuMemAllocHost(8))
        address = int(self._memory)
        self._view = (ctypes.c_uint64 if bits == 64 else ctypes.c_uint32).from_address(address)
        self.pointer = drv.CUdeviceptr(address)
        self.value = 0

    @property
    def value(self) -> int:
        return int(self._view.value)

    @value.setter
    def value(self, value: int) -> None:
        self._view.value = value

    def free(self, drv: ModuleType) -> None:
        ok(drv.cuMemFreeHost(self._memory))


@pytest.fixture
def word64(drv: ModuleType, ctx: Any) -> Any:
    return Word(drv, 64)  # not freed: a failed test may leave a stream that looks at it


@pytest.fixture
def word32(drv: ModuleType, ctx: Any) -> Any:
    return Word(drv, 32)


@pytest.mark.parametrize("value", [1, 2**32 - 1])
def test_a_stream_writes_32_bits_in_order(drv: ModuleType, stream: Any, word32: Word, value: int) -> None:
    latch = Latch(stream)
    ok(drv.cuStreamWriteValue32(stream, word32.pointer, value, 0))
    assert word32.value == 0
    latch.open()
    finish(stream)
    assert word32.value == value


@pytest.mark.parametrize("value", [1, 2**32, INT64_MAX, UINT64_MAX])
def test_a_stream_writes_64_bits_in_order(drv: ModuleType, stream: Any, word64: Word, value: int) -> None:
    latch = Latch(stream)
    ok(drv.cuStreamWriteValue64(stream, word64.pointer, value, 0))
    assert word64.value == 0
    latch.open()
    finish(stream)
    assert word64.value == value


def test_later_writes_of_a_stream_win(drv: ModuleType, stream: Any, word64: Word) -> None:
    for value in range(1, 101):
        ok(drv.cuStreamWriteValue64(stream, word64.pointer, value, 0))
    finish(stream)
    assert word64.value == 100


def test_a_write_is_seen_when_the_record_after_it_is_complete(
    drv: ModuleType, stream: Any, ipc_event: Any, word64: Word
) -> None:
    ok(drv.cuStreamWriteValue64(stream, word64.pointer, 9, 0))
    ok(drv.cuEventRecord(ipc_event, stream))
    complete(ipc_event)
    assert word64.value == 9


@pytest.mark.parametrize("bits", [32, 64])
def test_a_misaligned_or_unknown_word_and_an_unknown_comparison_are_invalid_values(
    drv: ModuleType, stream: Any, word64: Word, bits: int
) -> None:
    write, wait = getattr(drv, f"cuStreamWriteValue{bits}"), getattr(drv, f"cuStreamWaitValue{bits}")
    for address in (int(word64.pointer) + 1, 8):
        misplaced = drv.CUdeviceptr(address)
        assert code(write(stream, misplaced, 1, 0)) == kit.INVALID_VALUE
        assert code(wait(stream, misplaced, 1, kit.GEQ)) == kit.INVALID_VALUE
    assert code(wait(stream, word64.pointer, 1, 1 << 20)) == kit.INVALID_VALUE
    assert code(write(stream, word64.pointer, 1, 1 << 20)) == kit.INVALID_VALUE
    assert code(write(stream, word64.pointer, 1, NO_MEMORY_BARRIER)) == kit.INVALID_VALUE
    finish(stream)
    assert word64.value == 0


def test_captured_writes_and_waits_are_not_executed(drv: ModuleType, stream: Any, word64: Word) -> None:
    ok(drv.cuStreamBeginCapture(stream, drv.CUstreamCaptureMode(kit.RELAXED)))
    ok(drv.cuStreamWriteValue64(stream, word64.pointer, 5, 0))
    ok(drv.cuStreamWaitValue64(stream, word64.pointer, 7, kit.EQ))
    ok(drv.cuGraphDestroy(ok(drv.cuStreamEndCapture(stream))))
    finish(stream)
    assert word64.value == 0


# What the word holds, what is waited for, and a value that lets the wait pass.
CYCLIC = [
    (0, 1, 1),
    (0, 5, 7),
    (UINT64_MAX, 1, INT64_MAX),  # UINT64_MAX counts as -1: it releases nobody
    (5, INT64_MAX, INT64_MAX),
    (UINT64_MAX - 1, UINT64_MAX, 3),  # 3 comes after UINT64_MAX: 3 - (2**64 - 1) is 4
]


@pytest.mark.parametrize(("held", "wanted", "passing"), CYCLIC)
def test_waiting_for_greater_or_equal_compares_64_bits_cyclically(
    drv: ModuleType, stream: Any, new_stream: New, word64: Word, held: int, wanted: int, passing: int
) -> None:
    other = new_stream()
    word64.value = held
    ok(drv.cuStreamWaitValue64(stream, word64.pointer, wanted, kit.GEQ))
    finish(other)
    assert code(drv.cuStreamQuery(stream)) == kit.NOT_READY
    word64.value = passing
    finish(stream)


@pytest.mark.parametrize(
    ("held", "wanted"), [(1, 1), (7, 5), (3, UINT64_MAX), (INT64_MAX, 1), (INT64_MAX, 2**62), (0, 2**63 + 1)]
)
def test_what_is_cyclically_greater_or_equal_does_not_hold_the_stream(
    drv: ModuleType, stream: Any, word64: Word, held: int, wanted: int
) -> None:
    word64.value = held
    ok(drv.cuStreamWaitValue64(stream, word64.pointer, wanted, kit.GEQ))
    finish(stream)


@pytest.mark.parametrize(
    ("held", "wanted", "passing"), [(0, 1, 1), (2**32 - 1, 1, 2**31 - 1), (2**32 - 2, 2**32 - 1, 3)]
)
def test_waiting_for_greater_or_equal_compares_32_bits_cyclically(
    drv: ModuleType, stream: Any, new_stream: New, word32: Word, held: int, wanted: int, passing: int
) -> None:
    other = new_stream()
    word32.value = held
    ok(drv.cuStreamWaitValue32(stream, word32.pointer, wanted, kit.GEQ))
    finish(other)
    assert code(drv.cuStreamQuery(stream)) == kit.NOT_READY
    word32.value = passing
    finish(stream)


def test_waiting_for_equality_holds_for_greater_values(drv: ModuleType, stream: Any, word64: Word) -> None:
    word64.value = 6
    ok(drv.cuStreamWaitValue64(stream, word64.pointer, 5, kit.EQ))
    assert code(drv.cuStreamQuery(stream)) == kit.NOT_READY
    word64.value = 5
    finish(stream)


def test_waiting_for_bits_holds_until_one_is_set(drv: ModuleType, stream: Any, word64: Word) -> None:
    word64.value = 0b1000
    ok(drv.cuStreamWaitValue64(stream, word64.pointer, 0b0110, kit.AND))
    assert code(drv.cuStreamQuery(stream)) == kit.NOT_READY
    word64.value = 0b1100
    finish(stream)


def test_a_write_of_one_stream_lets_another_go_on(drv: ModuleType, new_stream: New, word64: Word) -> None:
    writer, waiter = new_stream(), new_stream()
    latch = Latch(writer)
    ok(drv.cuStreamWriteValue64(writer, word64.pointer, 3, 0))
    ok(drv.cuStreamWaitValue64(waiter, word64.pointer, 3, kit.GEQ))
    assert code(drv.cuStreamQuery(waiter)) == kit.NOT_READY
    latch.open()
    finish(waiter)


def test_a_write_into_device_memory_lets_another_stream_go_on(drv: ModuleType, new_stream: New) -> None:
    writer, waiter = new_stream(), new_stream()
    memory = ok(drv.cuMemAlloc(8))
    ok(drv.cuMemsetD8(memory, 0, 8))
    finish(drv.CUstream(kit.LEGACY))
    latch = Latch(writer)
    ok(drv.cuStreamWriteValue64(writer, memory, 2**40, 0))
    ok(drv.cuStreamWaitValue64(waiter, memory, 2**40, kit.GEQ))
    assert code(drv.cuStreamQuery(waiter)) == kit.NOT_READY
    latch.open()
    finish(waiter)
    ok(drv.cuMemFree(memory))


def test_a_stream_held_by_a_value_can_be_destroyed_without_blocking(
    drv: ModuleType, ctx: Any, ipc_event: Any, word64: Word
) -> None:
    doomed = ok(drv.cuStreamCreate(kit.NON_BLOCKING))
    ok(drv.cuStreamWaitValue64(doomed, word64.pointer, 1, kit.GEQ))
    ok(drv.cuEventRecord(ipc_event, doomed))
    assert code(drv.cuStreamDestroy(doomed)) == kit.SUCCESS
    assert code(drv.cuEventQuery(ipc_event)) == kit.NOT_READY
    word64.value = 1
    complete(ipc_event)


# ---- a page of tmpfs


@pytest.fixture
def registered(drv: ModuleType, page: kit.Page, ctx: Any) -> Iterator[tuple[kit.Page, int]]:
    """The page and the device address of its first word; taken back afterwards."""
    address = page.register()
    yield page, address
    kit.open_all_latches()
    ok(drv.cuCtxSynchronize())
    assert page.unregister() == kit.SUCCESS


@pytest.mark.alone
def test_a_stream_writes_a_registered_page_of_tmpfs(drv: ModuleType, stream: Any, registered: Any) -> None:
    page, address = registered
    latch = Latch(stream)
    ok(drv.cuStreamWriteValue64(stream, drv.CUdeviceptr(address + 8 * 511), INT64_MAX, 0))
    assert page.words[511] == 0
    latch.open()
    finish(stream)
    assert page.words[511] == INT64_MAX


@pytest.mark.alone
def test_two_processes_order_their_streams_by_a_word_of_one_page(
    drv: ModuleType, stream: Any, registered: Any, page_path: str, partner: Peer
) -> None:
    _, address = registered
    partner.call(actions.register_page, "page", page_path)
    partner.call(actions.create_stream, "s")
    pointer = drv.CUdeviceptr(address + 16)
    for value in range(1, 21):
        latch = Latch(stream)
        ok(drv.cuStreamWriteValue64(stream, pointer, value, 0))
        assert partner.call(actions.wait_word, "s", "page", 2, value) == kit.SUCCESS
        assert partner.call(actions.query_stream, "s") == kit.NOT_READY
        assert partner.call(actions.load_word, "page", 2) == value - 1
        latch.open()
        partner.call(actions.finish, "s")
        assert partner.call(actions.load_word, "page", 2) == value
    assert partner.call(actions.unregister_page, "page") == kit.SUCCESS


@pytest.mark.alone
def test_a_stream_of_another_process_writes_and_ours_goes_on(
    drv: ModuleType, stream: Any, registered: Any, page_path: str, partner: Peer
) -> None:
    page, address = registered
    partner.call(actions.register_page, "page", page_path)
    partner.call(actions.create_stream, "s")
    ok(drv.cuStreamWaitValue64(stream, drv.CUdeviceptr(address + 8), 4, kit.GEQ))
    partner.call(actions.hold, "s")
    assert partner.call(actions.write_word, "s", "page", 1, 4) == kit.SUCCESS
    assert code(drv.cuStreamQuery(stream)) == kit.NOT_READY
    partner.call(actions.release, "s")
    finish(stream)
    assert page.words[1] == 4


@pytest.mark.alone
def test_a_plain_store_of_another_process_into_the_page_lets_a_waiting_stream_go_on(
    drv: ModuleType, stream: Any, registered: Any, page_path: str, partner: Peer
) -> None:
    _, address = registered
    partner.call(actions.map_page, "page", page_path)
    ok(drv.cuStreamWaitValue64(stream, drv.CUdeviceptr(address + 24), 1, kit.GEQ))
    assert code(drv.cuStreamQuery(stream)) == kit.NOT_READY
    partner.call(actions.store_word, "page", 3, INT64_MAX)
    finish(stream)


@pytest.mark.alone
def test_registering_twice_and_unregistering_what_is_not_registered_are_refused(
    drv: ModuleType, registered: Any, page: kit.Page
) -> None:
    assert code(drv.cuMemHostRegister(page.address, 4096, 3)) == kit.ALREADY_REGISTERED
    assert page.unregister() == kit.SUCCESS
    assert page.unregister() == kit.NOT_REGISTERED
    page.register()  # the fixture takes it back
