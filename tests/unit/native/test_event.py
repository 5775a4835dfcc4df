"""Events in one process: lazy creation, record, wait, time, threads and devices."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

import ipcsync
from ipcsync.testing import StreamGate
from tests.kit.scripts import run_on_two

pytestmark = pytest.mark.driver


def test_nothing_is_created_before_the_first_record() -> None:
    event = ipcsync.Event()
    assert event.query() is True
    event.wait()
    event.wait(ipcsync.Stream())
    event.synchronize()
    assert event.device is None
    assert (event.cuda_event, event.event_id) == (0, 0)
    assert event._as_parameter_.value is None
    assert repr(event) == "<ipcsync.Event uninitialized>"
    assert not event.is_imported


def test_a_record_creates_it_on_the_streams_device() -> None:
    event = ipcsync.Event()
    assert event.record(ipcsync.Stream()) is None  # type: ignore[func-returns-value] # as in torch
    assert event.device == ipcsync.Device(0)
    assert event.cuda_event == event.event_id != 0
    assert event._as_parameter_.value == event.cuda_event
    assert repr(event) == f"<ipcsync.Event {event.cuda_event:#x}>"
    before = event.event_id
    event.record()
    assert event.event_id == before


def test_query_and_synchronize_follow_the_recorded_work(held: tuple[ipcsync.Stream, StreamGate]) -> None:
    stream, gate = held
    event = ipcsync.Event()
    event.record(stream)
    assert event.query() is False
    assert stream.query() is False
    gate.open()
    event.synchronize()
    assert event.query() is True
    stream.synchronize()
    assert stream.query() is True


def test_a_wait_holds_the_other_stream_back(held: tuple[ipcsync.Stream, StreamGate]) -> None:
    stream, gate = held
    other = ipcsync.Stream()
    stream.record_event().wait(other)
    after = other.record_event()
    assert after.query() is False
    gate.open()
    after.synchronize()


def test_wait_stream_holds_the_stream_back(held: tuple[ipcsync.Stream, StreamGate]) -> None:
    stream, gate = held
    other = ipcsync.Stream()
    other.wait_stream(stream)
    assert other.query() is False
    gate.open()
    other.synchronize()


def test_a_wait_keeps_what_it_captured_when_the_event_is_recorded_again(
    held: tuple[ipcsync.Stream, StreamGate],
) -> None:
    stream, _gate = held
    free, other, event = ipcsync.Stream(), ipcsync.Stream(), ipcsync.Event()
    event.record(free)
    event.wait(other)
    event.record(stream)
    other.synchronize()
    assert event.query() is False


_ALL = pytest.param("work of device 0", marks=pytest.mark.alone)  # others' streams too


@pytest.mark.parametrize("what", ["record of <ipcsync.Event", "work of <ipcsync.Stream", _ALL])
def test_synchronize_ends_by_its_timeout_or_by_ctrl_c_and_says_what_was_waited_for(
    held: tuple[ipcsync.Stream, StreamGate], what: str
) -> None:
    stream, gate = held
    event = stream.record_event()
    calls: dict[str, Callable[..., None]] = {"record": event.synchronize, "work": stream.synchronize}
    call = ipcsync.synchronize if "device" in what else calls[what.partition(" ")[0]]
    with pytest.raises(ipcsync.WaitTimeout, match=rf"^the {what}.* was not done within 0\.01 s$") as caught:
        call(timeout=0.01)
    assert caught.value.timeout == 0.01
    with pytest.raises(ipcsync.WaitTimeout):
        call(timeout=0)
    for invalid in (-1, float("nan")):
        with pytest.raises(ValueError, match="timeout is a number of seconds from 0 up"):
            call(timeout=invalid)

    def call_interrupted() -> None:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        call(timeout=30)

    with pytest.raises(KeyboardInterrupt):
        call_interrupted()
    gate.open()
    call(timeout=30)
    assert event.query()
    if "device" not in what:
        call(timeout=0)


def test_synchronize_lets_other_threads_run(held: tuple[ipcsync.Stream, StreamGate]) -> None:
    stream, gate = held
    event = stream.record_event()
    done = threading.Event()

    def body() -> None:
        event.synchronize()
        done.set()

    thread = threading.Thread(target=body)
    thread.start()
    assert not done.wait(0.05)
    gate.open()
    assert done.wait(30)
    thread.join()


def test_elapsed_time_is_in_milliseconds() -> None:
    stream = ipcsync.Stream()
    start, end = ipcsync.Event(enable_timing=True), ipcsync.Event(enable_timing=True)
    start.record(stream)
    end.record(stream)
    stream.synchronize()
    elapsed = start.elapsed_time(end)
    assert isinstance(elapsed, float)
    assert 0 <= elapsed < 10_000


def test_elapsed_time_refuses_in_torchs_order_with_torchs_texts(held: tuple[ipcsync.Stream, StreamGate]) -> None:
    timed, plain = ipcsync.Event(enable_timing=True), ipcsync.Event()
    other = ipcsync.Event(enable_timing=True)
    for a, b in ((timed, plain), (plain, timed)):
        with pytest.raises(ValueError, match=r"^Both events must be created with argument 'enable_timing=True'\.$"):
            a.elapsed_time(b)
    timed.record()
    for a, b in ((timed, other), (other, timed)):
        with pytest.raises(ValueError, match=r"^Both events must be recorded before calculating elapsed time\.$"):
            a.elapsed_time(b)
    stream, _gate = held
    other.record(stream)
    timed.synchronize()
    for a, b in ((timed, other), (other, timed)):
        with pytest.raises(
            ipcsync.NotComplete, match=r"^Both events must be completed before calculating elapsed time\.$"
        ):
            a.elapsed_time(b)


@pytest.mark.parametrize("wrong", [None, 5, "event", frozenset()], ids=repr)
def test_elapsed_time_to_what_is_no_event_is_a_type_error(wrong: Any) -> None:
    event = ipcsync.Event(enable_timing=True)
    event.record()
    with pytest.raises(TypeError):
        event.elapsed_time(wrong)


@pytest.mark.parametrize("wrong", [None, "event", 1.5, True, frozenset(), ipcsync.Event, b"x"], ids=repr)
def test_waiting_for_what_is_no_event_is_a_type_error(wrong: Any) -> None:
    with pytest.raises(TypeError):
        ipcsync.Stream().wait_event(wrong)


def test_an_interprocess_event_has_no_timing() -> None:
    with pytest.raises(ValueError, match="interprocess"):
        ipcsync.Event(enable_timing=True, interprocess=True)


def test_events_made_first_by_two_threads_at_once_are_one() -> None:
    stream = ipcsync.Stream()
    for _ in range(50):
        event = ipcsync.Event()
        barrier = threading.Barrier(2)
        seen: list[int] = []

        def body(event: ipcsync.Event = event, barrier: Any = barrier, seen: list[int] = seen) -> None:
            barrier.wait(30)
            event.record(stream)
            seen.append(event.event_id)

        threads = [threading.Thread(target=body) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert seen[0] == seen[1]


@pytest.mark.process
def test_events_and_streams_know_two_devices_apart() -> None:
    run_on_two(
        """
        a, b = ipcsync.Stream(0), ipcsync.Stream(1)
        assert (a.device_index, b.device_index, ipcsync.current_device()) == (0, 1, 0)
        event = a.record_event()
        try:
            event.record(b)
        except ipcsync.DeviceMismatch as error:
            assert str(error) == "Event device 0 does not match recording stream's device 1.", error
        else:
            raise AssertionError
        event.wait(b)
        b.wait_stream(a)
        far = b.record_event()
        far.synchronize()
        assert far.device == ipcsync.Device(1) and far.query()
        assert ipcsync.ExternalStream(b.cuda_stream).device_index == 1
        assert ipcsync.default_stream(1) != ipcsync.default_stream(0)
        at_default = ipcsync.default_stream(1).record_event()
        assert at_default.device == ipcsync.Device(1) and ipcsync.current_device() == 0
        ipcsync.default_stream(1).wait_event(event)
        ipcsync.default_stream(1).synchronize()
        assert ipcsync.default_stream(1).query()
        with ipcsync.stream(b):
            assert ipcsync.current_device() == 1 and ipcsync.current_stream() == b
            assert ipcsync.current_stream(0) == ipcsync.default_stream(0)
            here = ipcsync.Event(); here.record()
            assert here.device == ipcsync.Device(1)
            exported = ipcsync.Event(interprocess=True); exported.ipc_handle()
            assert exported.device == ipcsync.Device(1)
        assert ipcsync.current_device() == 0
        ipcsync.set_stream(b)
        assert ipcsync.current_device() == 1
        t0, t1 = ipcsync.Event(True), ipcsync.Event(True)
        t0.record(a); t1.record(b); t0.synchronize(); t1.synchronize()
        try:
            t0.elapsed_time(t1)
        except ipcsync.DriverError as error:
            assert error.code == 400
        else:
            raise AssertionError
        ipcsync.synchronize(0); ipcsync.synchronize(1)
        """
    )
