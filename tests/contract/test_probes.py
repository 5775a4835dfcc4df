"""Rows on which no public source says what CUDA does: each test asks, writes the answer down, and accepts what may be.

What is accepted is what ipcsync can live with; `tests.gpu.probe_report` makes a table of what was answered.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from ipcsync._drivers import handle_bytes, handle_from_bytes
from tests.contract import actions
from tests.contract.probes import say, write_down
from tests.kit import driver_kit as kit
from tests.kit.driver_kit import Latch, code, complete, ok
from tests.kit.peer import Peer

pytestmark = [pytest.mark.driver, pytest.mark.process]

New = Callable[..., Any]


def handle_of(drv: ModuleType, event: Any) -> bytes:
    return handle_bytes(ok(drv.cuIpcGetEventHandle(event)))


def test_opening_a_handle_twice_is_refused_or_gives_the_same_event(
    drv: ModuleType, stream: Any, ipc_event: Any, partner: Peer
) -> None:
    handle = handle_of(drv, ipc_event)
    assert partner.call(actions.open_event, "first", handle) == kit.SUCCESS
    again = partner.call(actions.open_event, "second", handle)
    if again != kit.SUCCESS:
        write_down("open twice in one process", say(again))
        return
    latch = Latch(stream)
    ok(drv.cuEventRecord(ipc_event, stream))
    both = [partner.call(actions.query, which) for which in ("first", "second")]
    latch.open()
    complete(ipc_event)
    assert both == [kit.NOT_READY] * 2
    assert partner.call(actions.destroy_event, "first") == kit.SUCCESS
    assert partner.call(actions.query, "second") == kit.SUCCESS
    write_down("open twice in one process", "succeeds; both are the same event, destroyed one by one")


def test_exporting_an_imported_event_gives_a_handle_or_a_typed_error(
    drv: ModuleType, ipc_event: Any, partner: Peer, third: Peer
) -> None:
    assert partner.call(actions.open_event, "e", handle_of(drv, ipc_event)) == kit.SUCCESS
    answer = partner.call(actions.export, "e")
    write_down("re-export of an imported event", say(answer))
    assert answer in (
        kit.SUCCESS,
        kit.INVALID_VALUE,
        kit.INVALID_CONTEXT,
        kit.MAP_FAILED,
        kit.INVALID_HANDLE,
    )


def test_exporting_twice_gives_handles_that_both_open(
    drv: ModuleType, ipc_event: Any, partner: Peer, third: Peer
) -> None:
    handles = [handle_of(drv, ipc_event), handle_of(drv, ipc_event)]
    write_down("two exports give the same bytes", "yes" if handles[0] == handles[1] else "no")
    for each, handle in zip((partner, third), handles, strict=True):
        assert each.call(actions.open_event, "e", handle) == kit.SUCCESS


def test_opening_after_the_exporter_destroyed_the_event_succeeds_or_is_refused(
    drv: ModuleType, ctx: Any, partner: Peer
) -> None:
    event = ok(drv.cuEventCreate(kit.SHAREABLE))
    handle = handle_of(drv, event)
    ok(drv.cuEventDestroy(event))
    answer = partner.call(actions.open_event, "e", handle)
    write_down("open after the exporter destroyed it", say(answer))
    assert answer in (kit.SUCCESS, kit.INVALID_VALUE, kit.INVALID_HANDLE)


def test_opening_an_event_of_a_dead_process_succeeds_or_is_refused(partner: Peer, third: Peer) -> None:
    handle = partner.call(actions.share_event, "e")
    partner.kill()
    answer = third.call(actions.open_event, "e", handle)
    write_down("open after the exporter died", say(answer))
    assert answer in (kit.SUCCESS, kit.INVALID_VALUE, kit.MAP_FAILED, kit.INVALID_HANDLE)


def test_opening_an_all_zero_handle_is_refused(drv: ModuleType, ctx: Any) -> None:
    answer = code(drv.cuIpcOpenEventHandle(handle_from_bytes(drv.CUipcEventHandle, bytes(64))))
    write_down("open an all-zero handle", say(answer))
    assert answer in (kit.INVALID_VALUE, kit.MAP_FAILED)


def test_a_capturing_stream_tells_its_id_or_refuses_as_unsupported(drv: ModuleType, stream: Any) -> None:
    ok(drv.cuStreamBeginCapture(stream, drv.CUstreamCaptureMode(kit.GLOBAL)))
    answer = code(drv.cuStreamGetId(stream))
    state = int(ok(drv.cuStreamIsCapturing(stream)))
    ended = drv.cuStreamEndCapture(stream)
    if code(ended) == kit.SUCCESS:
        ok(drv.cuGraphDestroy(ended[1]))
    effect = "the capture goes on" if state == kit.ACTIVE else "the capture is invalidated"
    write_down("cuStreamGetId of a capturing stream", f"{say(answer)}; {effect}")
    assert answer in (kit.SUCCESS, kit.CAPTURE_UNSUPPORTED)


def test_the_attribute_for_stream_memory_operations_is_zero_or_one(drv: ModuleType, ctx: Any) -> None:
    attribute = drv.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_MEM_OPS_V1
    answer = int(ok(drv.cuDeviceGetAttribute(attribute, ok(drv.cuDeviceGet(0)))))
    write_down("attribute CAN_USE_STREAM_MEM_OPS_V1 (the operations themselves work)", str(answer))
    assert answer in (0, 1)


def test_opening_with_another_device_current_succeeds_or_is_a_typed_error(two_devices: New) -> None:
    exporter, importer = two_devices(), two_devices()
    exporter.call(actions.start, 0)
    importer.call(actions.start, 1)
    answer = importer.call(actions.open_event, "e", exporter.call(actions.share_event, "e"))
    write_down("open with another device current", say(answer))
    assert answer in (
        kit.SUCCESS,
        kit.INVALID_VALUE,
        kit.INVALID_CONTEXT,
        kit.MAP_FAILED,
        kit.INVALID_HANDLE,
    )
