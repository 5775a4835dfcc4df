"""A ring with no room: who waits, how long, and what the error says."""

from __future__ import annotations

import threading
import time

import pytest

import ipcsync
from ipcsync.testing import StreamGate
from tests.events.stage import Stage
from tests.kit.failing import Failing
from tests.kit.until import DEADLINE_S, until

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
def test_a_record_awaits_its_turn_behind_another_threads_and_says_so(stage: Stage) -> None:
    made, _ = stage.open(depth=1)
    held = ipcsync.Stream()
    before = stage.recording.stats()["client"]["full_ring_waits"]
    with StreamGate(held):
        made.record(held)
        further = Failing(lambda: made.record(held))
        until(lambda: stage.recording.stats()["client"]["full_ring_waits"] == before + 1, "it waits for room")
        text = (
            f"^generation 2 of {made.name!r} was not recorded (another thread's record waits for room) within 0.01 s$"
        )
        for stream in (held, None):
            with pytest.raises(ipcsync.WaitTimeout, match=text.replace("(", r"\(").replace(")", r"\)")) as caught:
                made.record(stream, timeout=0.01)
            assert (caught.value.event, caught.value.generation, caught.value.timeout) == (made.name, 2, 0.01)
        last = Failing(lambda: made.record(held))
    assert (further.raised(), last.raised()) == (None, None)
    assert made.generation == 3
    assert made.record(held, timeout=float("inf")).generation == 4


@pytest.mark.parametrize("engine", ["event"])
def test_what_its_turn_took_is_not_waited_for_again(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = stage.open(depth=1)
    held, seconds = ipcsync.Stream(), 0.05
    await_turn, in_driver, waits = made._engine._await_turn, [], threading.Event()

    def await_turn_until_the_end(timeout: float | None) -> None:
        began = time.monotonic()
        waits.set()
        await_turn(None)
        until(lambda: time.monotonic() > began + seconds, "all of the time is over")
        assert timeout == seconds

    monkeypatch.setattr(made._engine, "_await_turn", await_turn_until_the_end)
    with StreamGate(held):
        made.record(held)
        monkeypatch.setattr(made._engine, "_wait_in_driver", lambda *_: in_driver.append(1))
        with made._engine._record_lock:
            last = Failing(lambda: made.record(held, timeout=seconds))
            assert waits.wait(DEADLINE_S)
        assert isinstance(last.raised(), ipcsync.WaitTimeout)
        assert in_driver == []
