"""A ring with no room: who waits, how long, and what the error says."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import ipcsync
from ipcsync.testing import StreamGate
from tests.events.stage import Stage
from tests.kit import driver_functions
from tests.kit.boards import store_bits
from tests.kit.failing import Failing
from tests.kit.until import until

pytestmark = pytest.mark.usefixtures("nothing_queued")


@pytest.mark.parametrize("engine", ["event"])
@pytest.mark.parametrize("is_default", [True, False])
def test_a_full_ring_has_room_for_nobody_in_no_time(stage: Stage, is_default: bool) -> None:
    made, _ = stage.open(depth=2)
    held = ipcsync.Stream()
    stream = None if is_default else ipcsync.Stream()
    with StreamGate(held):
        for _ in range(2):
            made.record(held)
        text = (
            f"^no room for a further record: all depth=2 are in flight, and generation 1 of {made.name!r}, the oldest, "
            "was not complete within 0.01 s$"
        )
        with pytest.raises(ipcsync.WaitTimeout, match=text) as caught:
            made.record(stream, timeout=0.01)
        assert (caught.value.event, caught.value.generation, caught.value.timeout) == (made.name, 1, 0.01)
    assert made.record(stream, timeout=30).generation == 3


@pytest.mark.parametrize("engine", ["event"])
def test_records_of_several_threads_wait_for_room_together(stage: Stage) -> None:
    made, _ = stage.open(depth=1)
    held = ipcsync.Stream()
    before = stage.recording.stats()["client"]["full_ring_waits"]
    with StreamGate(held):
        made.record(held)
        further = [Failing(lambda: made.record(held)) for _ in range(2)]
        until(lambda: stage.recording.stats()["client"]["full_ring_waits"] == before + 2, "they wait for room")
        for stream in (held, None):
            with pytest.raises(ipcsync.WaitTimeout, match=r"^no room for a further record: .* within 0.01 s$"):
                made.record(stream, timeout=0.01)
    assert [each.raised() for each in further] == [None, None]
    assert made.generation == 3
    assert made.record(held, timeout=float("inf")).generation == 4


def test_a_record_awaits_its_turn_behind_another_threads_and_says_so(stage: Stage) -> None:
    made, _ = stage.open()
    stream = ipcsync.Stream()
    made.record(stream)
    text = (
        rf"^generation 2 of {made.name!r} was not recorded \(another thread's record or wait is under way\) "
        "within 0.01 s$"
    )
    with driver_functions.held_up(*driver_functions.RECORD.values()) as held:
        further = Failing(lambda: made.record(stream))
        held.wait()
        for each in (stream, None):
            with pytest.raises(ipcsync.WaitTimeout, match=text) as caught:
                made.record(each, timeout=0.01)
            assert (caught.value.event, caught.value.generation, caught.value.timeout) == (made.name, 2, 0.01)
    assert further.raised() is None
    assert made.record(stream).generation == 3


@pytest.mark.parametrize("engine", ["event"])
def test_a_look_for_room_publishes_nothing_that_another_thread_has_not_judged(stage: Stage) -> None:
    """It waits for a thread that is amid a look of its own; by then a record stands behind something that is open."""
    made, _ = stage.open(depth=1)
    above = stage.waiting.event("above", recorder=True, engine="event")
    other, _ = stage.open(depth=1)
    engine: Any = made._engine
    stream, held, waiting = ipcsync.Stream(), ipcsync.Stream(), ipcsync.Stream()
    with StreamGate(held), StreamGate(stream) as gate:
        theirs: Any = stage.recording.point(bytes(above.record(held)))
        theirs._attached.engine.node = "elsewhere"  # so that only this session can judge what stands behind it
        theirs.wait(waiting)
        other.record(waiting)
        ((wait, entry),) = other._engine.chain.entries.items()
        point = made.record(stream)

        def record() -> None:
            with pytest.raises(ipcsync.WaitTimeout):
                made.record(stream, timeout=0.5)

        records = threading.Thread(target=record)

        def waits_for_a_lock() -> bool:
            call = Path(f"/proc/self/task/{records.native_id}/syscall").read_text().split()
            return call[2:4] == ["0x80", "0x2"]  # in a private FUTEX_WAIT, on a lock that is taken

        def look() -> None:  # with the slot's state
            records.start()
            until(waits_for_a_lock, "the record waits")
            gate.open()
            stream.synchronize()
            store_bits(engine.line, entry.bits)  # as a third thread's record does
            engine.chain.entries[wait] = entry
            engine.chain.is_needed = True

        with driver_functions.replaced(driver_functions.amid("cuEventQuery", look)):
            engine.publish_completed()
            records.join()
        assert not point.query()
