"""Exporting and opening event handles, and everything that is refused."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from ipcsync._drivers import handle_bytes, handle_from_bytes
from ipcsync.errors import HandleError
from tests.contract import actions
from tests.kit import driver_kit as kit
from tests.kit.driver_kit import Latch, code, complete, finish, in_thread, ok
from tests.kit.peer import Peer

pytestmark = [pytest.mark.driver, pytest.mark.process]

New = Callable[..., Any]


def handle_of(drv: ModuleType, event: Any) -> bytes:
    return handle_bytes(ok(drv.cuIpcGetEventHandle(event)))


def open_code(drv: ModuleType, handle: bytes) -> int:
    return code(drv.cuIpcOpenEventHandle(handle_from_bytes(drv.CUipcEventHandle, handle)))


def test_a_handle_is_64_bytes_and_opens_in_another_process(drv: ModuleType, ipc_event: Any, partner: Peer) -> None:
    handle = handle_of(drv, ipc_event)
    assert len(handle) == 64
    assert partner.call(actions.open_event, "e", handle) == kit.SUCCESS


def test_handles_of_different_events_differ(drv: ModuleType, new_event: New) -> None:
    assert len({handle_of(drv, new_event()) for _ in range(50)}) == 50


def test_a_handle_opens_in_several_processes(drv: ModuleType, ipc_event: Any, partner: Peer, third: Peer) -> None:
    handle = handle_of(drv, ipc_event)
    assert [each.call(actions.open_event, "e", handle) for each in (partner, third)] == [kit.SUCCESS] * 2


@pytest.mark.parametrize("flags", [0, kit.BLOCKING_SYNC, kit.DISABLE_TIMING])
def test_exporting_an_event_made_without_interprocess_is_an_invalid_handle(
    drv: ModuleType, new_event: New, flags: int
) -> None:
    assert code(drv.cuIpcGetEventHandle(new_event(flags))) == kit.INVALID_HANDLE


def test_exporting_without_a_current_context_is_an_invalid_context(drv: ModuleType, ipc_event: Any) -> None:
    answer = in_thread(lambda: code(drv.cuIpcGetEventHandle(ipc_event)))
    assert answer == kit.INVALID_CONTEXT


def test_opening_in_the_process_that_created_the_event_is_an_invalid_context(drv: ModuleType, ipc_event: Any) -> None:
    assert open_code(drv, handle_of(drv, ipc_event)) == kit.INVALID_CONTEXT


@pytest.mark.parametrize("noise", [b"\xff" * 64, bytes(range(64)), b"ipcsync!" * 8])
def test_opening_noise_is_refused(drv: ModuleType, ctx: Any, noise: bytes) -> None:
    assert open_code(drv, noise) in (kit.INVALID_VALUE, kit.MAP_FAILED)


def test_a_handle_with_another_process_or_file_fails_to_map_and_what_is_between_them_is_not_read(
    drv: ModuleType, ipc_event: Any, partner: Peer
) -> None:
    handle = handle_of(drv, ipc_event)
    odd = {
        "noise": bytes((37 * each + 11) % 256 for each in range(64)),
        "process": b"\xff\xff\x3f\x00" + handle[4:],
        "between": handle[:4] + bytes([handle[4] ^ 0x55]) + handle[5:],
        "file": handle[:8] + b"\xff\xff\x00\x00" + handle[12:],
    }
    answers = {what: partner.call(actions.open_event, what, data) for what, data in odd.items()}
    assert answers == {**dict.fromkeys(odd, kit.MAP_FAILED), "between": kit.SUCCESS}


@pytest.mark.parametrize("length", [0, 63, 65])
def test_bytes_of_another_length_are_no_handle(drv: ModuleType, length: int) -> None:
    with pytest.raises(HandleError, match=f"size 64, but got {length}"):
        handle_from_bytes(drv.CUipcEventHandle, bytes(length))


def test_the_handle_of_a_destroyed_event_comes_again_and_opens_the_event_that_has_it_now(
    drv: ModuleType, stream: Any, new_event: New, partner: Peer
) -> None:
    destroyed = ok(drv.cuEventCreate(kit.SHAREABLE))
    handle = handle_of(drv, destroyed)
    ok(drv.cuEventDestroy(destroyed))
    later: dict[bytes, Any] = {}
    while handle not in later:
        assert len(later) < 200
        event = new_event()
        later[handle_of(drv, event)] = event
    latch = Latch(stream)
    ok(drv.cuEventRecord(later[handle], stream))
    assert partner.call(actions.open_event, "e", handle) == kit.SUCCESS
    assert partner.call(actions.query, "e") == kit.NOT_READY
    latch.open()
    partner.call(actions.complete, "e")


def test_the_handle_of_an_event_comes_again_only_when_its_record_is_over(
    drv: ModuleType, stream: Any, new_event: New
) -> None:
    destroyed = ok(drv.cuEventCreate(kit.SHAREABLE))
    handle = handle_of(drv, destroyed)
    latch = Latch(stream)
    ok(drv.cuEventRecord(destroyed, stream))
    ok(drv.cuEventDestroy(destroyed))
    others = [new_event() for _ in range(64)]
    assert handle not in [handle_of(drv, each) for each in others]
    assert {code(drv.cuEventQuery(each)) for each in others} == {kit.SUCCESS}
    latch.open()
    finish(stream)


def test_an_imported_event_has_no_timing(drv: ModuleType, ipc_event: Any, partner: Peer) -> None:
    assert partner.call(actions.open_event, "e", handle_of(drv, ipc_event)) == kit.SUCCESS
    partner.call(actions.create_stream, "s")
    assert partner.call(actions.record, "e", "s") == kit.SUCCESS
    partner.call(actions.complete, "e")
    assert partner.call(actions.elapsed, "e", "e") == kit.INVALID_HANDLE


def test_the_importer_destroys_its_own_and_the_export_stays(
    drv: ModuleType, stream: Any, ipc_event: Any, partner: Peer, third: Peer
) -> None:
    handle = handle_of(drv, ipc_event)
    for each in (partner, third):
        assert each.call(actions.open_event, "e", handle) == kit.SUCCESS
    assert partner.call(actions.destroy_event, "e") == kit.SUCCESS
    latch = Latch(stream)
    ok(drv.cuEventRecord(ipc_event, stream))
    assert third.call(actions.query, "e") == kit.NOT_READY
    assert partner.call(actions.open_event, "again", handle) == kit.SUCCESS
    assert partner.call(actions.query, "again") == kit.NOT_READY
    latch.open()
    complete(ipc_event)
    assert [partner.call(actions.query, "again"), third.call(actions.query, "e")] == [kit.SUCCESS] * 2


def test_an_event_recorded_before_the_open_is_seen_by_the_importer(
    drv: ModuleType, stream: Any, ipc_event: Any, partner: Peer
) -> None:
    latch = Latch(stream)
    ok(drv.cuEventRecord(ipc_event, stream))
    assert partner.call(actions.open_event, "e", handle_of(drv, ipc_event)) == kit.SUCCESS
    assert partner.call(actions.query, "e") == kit.NOT_READY
    latch.open()
    partner.call(actions.complete, "e")


@pytest.mark.parametrize("use", ["query", "synchronize", "record", "wait"])
def test_using_an_import_after_its_export_was_destroyed_is_an_invalid_handle(
    drv: ModuleType, ctx: Any, new_peer: New, kind: str, use: str
) -> None:
    if kind == "gpu":
        pytest.skip("undefined in CUDA: only the software driver with IPCSYNC_HOST_STRICT=1 answers it")
    importer = new_peer(IPCSYNC_HOST_STRICT="1")
    importer.call(actions.start)
    event = ok(drv.cuEventCreate(kit.SHAREABLE))
    assert importer.call(actions.open_event, "e", handle_of(drv, event)) == kit.SUCCESS
    importer.call(actions.create_stream, "s")
    ok(drv.cuEventDestroy(event))
    arguments = {"record": ("e", "s"), "wait": ("s", "e")}.get(use, ("e",))
    assert importer.call(getattr(actions, use), *arguments) == kit.INVALID_HANDLE
