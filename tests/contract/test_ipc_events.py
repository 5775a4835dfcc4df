"""One event in several processes: all record, wait, query and synchronize, and see the same latest record."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from ipcsync._drivers import handle_bytes
from tests.contract import actions
from tests.contract.sharing import share
from tests.kit import driver_kit as kit
from tests.kit.driver_kit import Latch, code, complete, finish, ok
from tests.kit.peer import Peer

pytestmark = [pytest.mark.driver, pytest.mark.process]

New = Callable[..., Any]


def test_a_never_recorded_event_counts_as_complete_in_the_importer(
    drv: ModuleType, ipc_event: Any, partner: Peer
) -> None:
    share(drv, ipc_event, partner)
    assert partner.call(actions.query, "e") == kit.SUCCESS
    assert partner.call(actions.synchronize, "e") == kit.SUCCESS
    assert partner.call(actions.wait, "s", "e") == kit.SUCCESS
    partner.call(actions.finish, "s")


def test_the_importer_sees_the_exporters_record_pending_then_complete(
    drv: ModuleType, stream: Any, ipc_event: Any, partner: Peer
) -> None:
    share(drv, ipc_event, partner)
    latch = Latch(stream)
    ok(drv.cuEventRecord(ipc_event, stream))
    assert partner.call(actions.query, "e") == kit.NOT_READY
    latch.open()
    partner.call(actions.complete, "e")
    assert code(drv.cuEventQuery(ipc_event)) == kit.SUCCESS


def test_the_exporter_sees_the_importers_record_pending_then_complete(
    drv: ModuleType, stream: Any, ipc_event: Any, partner: Peer
) -> None:
    share(drv, ipc_event, partner)
    partner.call(actions.hold, "s")
    assert partner.call(actions.record, "e", "s") == kit.SUCCESS
    assert code(drv.cuEventQuery(ipc_event)) == kit.NOT_READY
    ok(drv.cuStreamWaitEvent(stream, ipc_event, 0))
    assert code(drv.cuStreamQuery(stream)) == kit.NOT_READY
    partner.call(actions.release, "s")
    finish(stream)
    complete(ipc_event)


def test_an_importer_sees_another_importers_record(drv: ModuleType, ipc_event: Any, partner: Peer, third: Peer) -> None:
    share(drv, ipc_event, partner, third)
    partner.call(actions.hold, "s")
    assert partner.call(actions.record, "e", "s") == kit.SUCCESS
    assert third.call(actions.query, "e") == kit.NOT_READY
    assert third.call(actions.wait, "s", "e") == kit.SUCCESS
    assert third.call(actions.query_stream, "s") == kit.NOT_READY
    partner.call(actions.release, "s")
    third.call(actions.finish, "s")
    third.call(actions.complete, "e")


def test_a_stream_of_the_importer_waits_for_the_exporters_record(
    drv: ModuleType, stream: Any, ipc_event: Any, partner: Peer
) -> None:
    share(drv, ipc_event, partner)
    latch = Latch(stream)
    ok(drv.cuEventRecord(ipc_event, stream))
    assert partner.call(actions.wait, "s", "e") == kit.SUCCESS
    assert partner.call(actions.query_stream, "s") == kit.NOT_READY
    latch.open()
    partner.call(actions.finish, "s")


def test_a_re_record_by_another_process_replaces_what_the_event_captures(
    drv: ModuleType, stream: Any, ipc_event: Any, partner: Peer, third: Peer
) -> None:
    share(drv, ipc_event, partner, third)
    latch = Latch(stream)
    ok(drv.cuEventRecord(ipc_event, stream))
    partner.call(actions.hold, "s")
    assert partner.call(actions.record, "e", "s") == kit.SUCCESS
    latch.open()
    finish(stream)
    assert third.call(actions.query, "e") == kit.NOT_READY
    assert code(drv.cuEventQuery(ipc_event)) == kit.NOT_READY
    partner.call(actions.release, "s")
    third.call(actions.complete, "e")
    complete(ipc_event)


@pytest.mark.parametrize("recorders", ["the exporter and an importer", "two importers", "one process"])
def test_a_record_and_its_stream_wait_for_the_events_earlier_record(
    drv: ModuleType, new_stream: New, ipc_event: Any, partner: Peer, third: Peer, recorders: str
) -> None:
    share(drv, ipc_event, partner, third)
    partner.call(actions.create_stream, "held")
    partner.call(actions.hold, "held")
    assert partner.call(actions.record, "e", "held") == kit.SUCCESS
    mine, later = new_stream(), new_stream()
    if recorders == "the exporter and an importer":
        ok(drv.cuEventRecord(ipc_event, mine))
        assert code(drv.cuStreamQuery(mine)) == kit.NOT_READY
    else:
        recorder = partner if recorders == "one process" else third
        assert recorder.call(actions.record, "e", "s") == kit.SUCCESS
        assert recorder.call(actions.query_stream, "s") == kit.NOT_READY
    ok(drv.cuEventRecord(ipc_event, later))  # the chain grows
    others = [new_stream() for _ in range(8)]
    for other in others:  # what has nothing to do with it goes on meanwhile
        ok(drv.cuEventRecord(ok(drv.cuEventCreate(kit.SHAREABLE)), other))
        finish(other)
    assert [code(drv.cuEventQuery(ipc_event)), code(drv.cuStreamQuery(later))] == [kit.NOT_READY] * 2
    partner.call(actions.release, "held")
    finish(later)
    complete(ipc_event)


def test_records_of_one_event_by_two_processes_at_the_same_time_all_complete(
    drv: ModuleType, new_stream: New, ipc_event: Any, partner: Peer, third: Peer
) -> None:
    share(drv, ipc_event, partner, third)
    for each in (partner, third):
        each.begin(actions.record_many, "e", "s", 300)
    stream = new_stream()
    for _ in range(300):
        ok(drv.cuEventRecord(ipc_event, stream))
    for each in (partner, third):
        assert each.result() == 300
        each.call(actions.finish, "s")
    finish(stream)
    complete(ipc_event)


def test_a_wait_of_one_process_keeps_its_record_when_another_process_records_anew(
    drv: ModuleType, stream: Any, ipc_event: Any, partner: Peer, third: Peer
) -> None:
    share(drv, ipc_event, partner, third)
    latch = Latch(stream)
    ok(drv.cuEventRecord(ipc_event, stream))
    third.call(actions.hold, "s")  # so that its wait is looked at only after the second record
    assert third.call(actions.wait, "s", "e") == kit.SUCCESS
    partner.call(actions.hold, "s")
    assert partner.call(actions.record, "e", "s") == kit.SUCCESS
    third.call(actions.release, "s")
    assert third.call(actions.query_stream, "s") == kit.NOT_READY
    latch.open()
    third.call(actions.finish, "s")
    assert third.call(actions.query, "e") == kit.NOT_READY
    partner.call(actions.release, "s")
    third.call(actions.complete, "e")


def test_a_wait_keeps_its_record_when_its_own_process_records_anew(
    drv: ModuleType, stream: Any, ipc_event: Any, partner: Peer
) -> None:
    share(drv, ipc_event, partner)
    partner.call(actions.create_stream, "other")
    latch = Latch(stream)
    ok(drv.cuEventRecord(ipc_event, stream))
    assert partner.call(actions.wait, "s", "e") == kit.SUCCESS
    partner.call(actions.hold, "other")
    assert partner.call(actions.record, "e", "other") == kit.SUCCESS
    assert partner.call(actions.query_stream, "s") == kit.NOT_READY
    latch.open()
    partner.call(actions.finish, "s")
    assert code(drv.cuEventQuery(ipc_event)) == kit.NOT_READY
    partner.call(actions.release, "other")
    complete(ipc_event)


def test_synchronize_in_the_importer_returns_only_after_the_record_is_complete(
    drv: ModuleType, stream: Any, ipc_event: Any, partner: Peer, page_path: str, page: kit.Page
) -> None:
    share(drv, ipc_event, partner)
    partner.call(actions.map_page, "page", page_path)
    latch = Latch(stream)
    ok(drv.cuEventRecord(ipc_event, stream))
    partner.begin(actions.synchronize_then_load, "e", "page", 0)
    assert not partner.has_result
    page.words[0] = 1
    latch.open()
    assert partner.result() == (kit.SUCCESS, 1)


def test_synchronize_racing_a_re_record_returns_once_the_found_or_a_later_record_is_complete(
    drv: ModuleType, new_stream: New, ipc_event: Any, partner: Peer, page_path: str, page: kit.Page
) -> None:
    share(drv, ipc_event, partner)
    partner.call(actions.map_page, "page", page_path)
    first, second = new_stream(), new_stream()
    early, late = Latch(first), Latch(second)
    ok(drv.cuEventRecord(ipc_event, first))
    partner.begin(actions.synchronize_then_load, "e", "page", 0)
    ok(drv.cuEventRecord(ipc_event, second))
    assert not partner.has_result
    page.words[0] = 1
    early.open()
    finish(first)
    late.open()
    assert partner.result() == (kit.SUCCESS, 1)
    assert partner.call(actions.synchronize, "e") == kit.SUCCESS


@pytest.mark.parametrize("destroyer", ["exporter", "importer"])
def test_destroying_while_a_wait_of_another_process_is_pending_neither_blocks_nor_loses_the_wait(
    drv: ModuleType, stream: Any, partner: Peer, destroyer: str
) -> None:
    event = ok(drv.cuEventCreate(kit.SHAREABLE))
    share(drv, event, partner)
    latch = Latch(stream)
    ok(drv.cuEventRecord(event, stream))
    assert partner.call(actions.wait, "s", "e") == kit.SUCCESS
    if destroyer == "importer":
        assert partner.call(actions.destroy_event, "e") == kit.SUCCESS
    else:
        assert code(drv.cuEventDestroy(event)) == kit.SUCCESS
    assert partner.call(actions.query_stream, "s") == kit.NOT_READY
    latch.open()
    partner.call(actions.finish, "s")
    if destroyer == "importer":
        ok(drv.cuEventDestroy(event))


def test_waits_chain_through_three_processes_and_back(
    drv: ModuleType, new_stream: New, new_event: New, partner: Peer, third: Peer
) -> None:
    mine, waiter, events = new_stream(), new_stream(), [new_event() for _ in range(3)]
    handles = [handle_bytes(ok(drv.cuIpcGetEventHandle(event))) for event in events]
    for position, each in enumerate((partner, third)):
        each.call(actions.create_stream, "s")
        assert each.call(actions.open_event, "before", handles[position]) == kit.SUCCESS
        assert each.call(actions.open_event, "after", handles[position + 1]) == kit.SUCCESS
    latch = Latch(mine)
    ok(drv.cuEventRecord(events[0], mine))
    for each in (partner, third):
        assert each.call(actions.wait, "s", "before") == kit.SUCCESS
        assert each.call(actions.record, "after", "s") == kit.SUCCESS
    ok(drv.cuStreamWaitEvent(waiter, events[2], 0))
    assert [code(drv.cuEventQuery(event)) for event in events] == [kit.NOT_READY] * 3
    assert code(drv.cuStreamQuery(waiter)) == kit.NOT_READY
    latch.open()
    finish(waiter)
    assert [code(drv.cuEventQuery(event)) for event in events] == [kit.SUCCESS] * 3


def test_two_processes_hand_work_back_and_forth_many_times(
    drv: ModuleType, stream: Any, new_event: New, partner: Peer
) -> None:
    ping, pong = new_event(), new_event()
    for name, event in (("ping", ping), ("pong", pong)):
        assert partner.call(actions.open_event, name, handle_bytes(ok(drv.cuIpcGetEventHandle(event)))) == kit.SUCCESS
    partner.call(actions.create_stream, "s")
    for _ in range(50):
        latch = Latch(stream)
        ok(drv.cuEventRecord(ping, stream))
        assert partner.call(actions.wait, "s", "ping") == kit.SUCCESS
        assert partner.call(actions.record, "pong", "s") == kit.SUCCESS
        assert code(drv.cuEventQuery(pong)) == kit.NOT_READY
        ok(drv.cuStreamWaitEvent(stream, pong, 0))
        latch.open()
        finish(stream)
        assert code(drv.cuEventQuery(pong)) == kit.SUCCESS
