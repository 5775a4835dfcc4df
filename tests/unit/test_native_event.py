"""Events: lazy creation, record, wait, time, and how they cross processes."""

from __future__ import annotations

import copy
import ctypes
import gc
import mmap
import multiprocessing
import os
import pickle
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest

import ipcsync
from ipcsync._drivers import load, unwrap
from ipcsync._native import release

pytestmark = pytest.mark.driver

SPAWN = multiprocessing.get_context("spawn")


class Gate:
    """Holds back the later work of a stream until `open()`, by a wait on a word of registered memory."""

    def __init__(self, stream: ipcsync.Stream) -> None:
        self._page = mmap.mmap(-1, mmap.PAGESIZE)
        self._word = ctypes.c_uint64.from_buffer(self._page)
        self._address = ctypes.addressof(self._word)
        self._stream = stream
        api = load()
        unwrap(api.cuMemHostRegister(self._address, mmap.PAGESIZE, 2), "cuMemHostRegister")
        pointer = unwrap(api.cuMemHostGetDevicePointer(self._address, 0), "cuMemHostGetDevicePointer")
        unwrap(api.cuStreamWaitValue64(stream.cuda_stream, pointer, 1, 0), "cuStreamWaitValue64")

    def open(self) -> None:
        self._word.value = 1

    def close(self) -> None:
        self.open()
        self._stream.synchronize()
        unwrap(load().cuMemHostUnregister(self._address), "cuMemHostUnregister")


@pytest.fixture
def held() -> Iterator[tuple[ipcsync.Stream, Gate]]:
    """A stream whose work waits, and the gate that lets it go."""
    stream = ipcsync.Stream()
    gate = Gate(stream)
    yield stream, gate
    gate.close()


def in_thread(body: Any) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(body()))
    thread.start()
    thread.join()
    return results[0]


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


def test_query_and_synchronize_follow_the_recorded_work(held: tuple[ipcsync.Stream, Gate]) -> None:
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


def test_a_wait_holds_the_other_stream_back(held: tuple[ipcsync.Stream, Gate]) -> None:
    stream, gate = held
    other = ipcsync.Stream()
    stream.record_event().wait(other)
    after = other.record_event()
    assert after.query() is False
    gate.open()
    after.synchronize()


def test_wait_stream_holds_the_stream_back(held: tuple[ipcsync.Stream, Gate]) -> None:
    stream, gate = held
    other = ipcsync.Stream()
    other.wait_stream(stream)
    assert other.query() is False
    gate.open()
    other.synchronize()


def test_a_wait_keeps_what_it_captured_when_the_event_is_recorded_again(held: tuple[ipcsync.Stream, Gate]) -> None:
    stream, _gate = held
    free, other, event = ipcsync.Stream(), ipcsync.Stream(), ipcsync.Event()
    event.record(free)
    event.wait(other)
    event.record(stream)
    other.synchronize()
    assert event.query() is False


def test_synchronize_lets_other_threads_run(held: tuple[ipcsync.Stream, Gate]) -> None:
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


def test_an_event_dropped_while_pending_does_no_harm(held: tuple[ipcsync.Stream, Gate]) -> None:
    stream, gate = held
    other = ipcsync.Stream()
    other.wait_event(stream.record_event())
    gc.collect()
    assert other.query() is False
    gate.open()
    other.synchronize()


def test_a_stream_dropped_while_pending_does_no_harm() -> None:
    stream = ipcsync.Stream()
    event = ipcsync.Event()
    gate = Gate(stream)
    other = ipcsync.Stream()
    event.record(stream)
    event.wait(other)
    keep = ipcsync.Stream()
    gate._stream = keep
    del stream
    assert event.query() is False
    gate.open()
    other.synchronize()
    event.synchronize()
    gate.close()


def test_elapsed_time_is_in_milliseconds() -> None:
    stream = ipcsync.Stream()
    start, end = ipcsync.Event(enable_timing=True), ipcsync.Event(enable_timing=True)
    start.record(stream)
    end.record(stream)
    stream.synchronize()
    elapsed = start.elapsed_time(end)
    assert isinstance(elapsed, float)
    assert 0 <= elapsed < 10_000


def test_elapsed_time_refuses_in_torchs_order_with_torchs_texts(held: tuple[ipcsync.Stream, Gate]) -> None:
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
        with pytest.raises(RuntimeError, match=r"^Both events must be completed before calculating elapsed time\.$"):
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


def test_a_handle_is_64_bytes_and_the_same_each_time() -> None:
    event = ipcsync.Event(interprocess=True)
    handle = event.ipc_handle()
    assert isinstance(handle, bytes)
    assert len(handle) == 64
    assert event.device == ipcsync.Device(ipcsync.current_device())
    event.record()
    assert event.ipc_handle() == handle
    assert ipcsync.Event(interprocess=True).ipc_handle() != handle


def test_a_handle_can_be_had_in_a_thread_without_a_context() -> None:
    event = ipcsync.Event(interprocess=True)
    event.record(ipcsync.Stream())
    assert len(in_thread(event.ipc_handle)) == 64
    assert len(in_thread(ipcsync.Event(interprocess=True).ipc_handle)) == 64


def test_an_event_made_without_interprocess_gives_no_handle() -> None:
    event = ipcsync.Event()
    with pytest.raises(ipcsync.DriverError) as caught:
        event.ipc_handle()
    assert caught.value.code == 400
    assert caught.value.call == "cuIpcGetEventHandle"


@pytest.mark.parametrize("length", [0, 1, 63, 65, 128])
def test_a_handle_of_another_length_is_a_handle_error_in_torchs_words(length: int) -> None:
    text = f"^cudaIpcEventHandle_t expects byte-like object of size 64, but got {length}$"
    for data in (bytes(length), bytearray(length), memoryview(bytes(length))):
        with pytest.raises(ipcsync.HandleError, match=text):
            ipcsync.Event.from_ipc_handle(0, data)


@pytest.mark.parametrize("wrong", [None, 64, "x" * 64, [0] * 64, frozenset()], ids=repr)
def test_a_handle_that_is_no_bytes_is_a_type_error(wrong: Any) -> None:
    with pytest.raises(TypeError):
        ipcsync.Event.from_ipc_handle(0, wrong)


@pytest.mark.parametrize("handle", [bytes(64), b"\xff" * 64, bytes(range(64)), b"noise..." * 8])
def test_zeros_and_noise_are_a_handle_error(handle: bytes) -> None:
    with pytest.raises(ipcsync.HandleError) as caught:
        ipcsync.Event.from_ipc_handle(0, handle)
    assert caught.value.call == "cuIpcOpenEventHandle"
    assert caught.value.code in (1, 205, 400, 201)


def test_a_process_cannot_open_what_it_exported() -> None:
    event = ipcsync.Event(interprocess=True)
    with pytest.raises(ipcsync.HandleError, match="this process exported the handle itself") as caught:
        ipcsync.Event.from_ipc_handle(0, event.ipc_handle())
    assert caught.value.code == 201


def test_an_event_can_only_be_opened_on_a_cuda_device() -> None:
    class OnCpu:
        type = "cpu"
        index = None

    for device in ("cpu", "cpu:0", OnCpu()):
        with pytest.raises(
            ipcsync.InvalidDevice, match=r"^Event can only be created on CUDA devices, but got device type cpu$"
        ):
            ipcsync.Event.from_ipc_handle(device, bytes(64))
    with pytest.raises(ipcsync.InvalidDevice):
        ipcsync.Event.from_ipc_handle(99, bytes(64))


def test_an_event_without_interprocess_does_not_pickle_or_copy() -> None:
    for leave in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="interprocess=True"):
            leave(ipcsync.Event())


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


def test_events_can_be_made_and_dropped_by_the_thousand() -> None:
    stream = ipcsync.Stream()
    for _ in range(5000):
        stream.record_event(ipcsync.Event(interprocess=True))


def peer(pipe: Connection) -> None:
    """The other process: does with the events it gets what it is told."""
    events: dict[str, Any] = {}
    stream = ipcsync.Stream()
    while True:
        try:
            what, name, value = pipe.recv()
        except EOFError:
            return
        answer: Any = None
        try:
            if what == "open":
                events[name] = ipcsync.Event.from_ipc_handle(*value)
            elif what == "take":
                events[name] = value
            elif what == "drop":
                del events[name]
                gc.collect()
            elif what == "wait":
                events[name].wait(stream)
            elif what == "record":
                events[name].record(stream)
            elif what == "stream":
                answer = stream.query()
            elif what == "export":
                events[name] = ipcsync.Event(interprocess=True)
                events[name].record(stream)
                answer = events[name].ipc_handle()
            else:
                answer = getattr(events[name], what)
                answer = answer() if callable(answer) else answer
        except Exception as error:  # noqa: BLE001 - whatever it is, the test is told
            answer = error
        pipe.send(answer)


class Peer:
    """The process above, asked by calls."""

    def __init__(self) -> None:
        self._pipe, theirs = SPAWN.Pipe()
        self.process = SPAWN.Process(target=peer, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, what: str, name: str = "", value: Any = None) -> Any:
        self._pipe.send((what, name, value))
        assert self._pipe.poll(30), "the peer does not answer"
        return self._pipe.recv()

    def close(self) -> None:
        self._pipe.close()
        self.process.join(30)
        assert self.process.exitcode == 0


@pytest.fixture
def other() -> Iterator[Peer]:
    made = Peer()
    yield made
    made.close()


@pytest.mark.process
def test_another_process_sees_the_records_and_makes_its_own(other: Peer, held: tuple[ipcsync.Stream, Gate]) -> None:
    stream, gate = held
    event = ipcsync.Event(interprocess=True)
    uuid = ipcsync.get_device_properties(0).uuid
    assert other.ask("open", "e", (uuid, event.ipc_handle())) is None
    assert other.ask("query", "e") is True
    assert other.ask("is_imported", "e") is True
    assert other.ask("device", "e") == ipcsync.Device(0)
    assert other.ask("ipc_handle", "e") == event.ipc_handle()
    event.record(stream)
    assert other.ask("query", "e") is False
    other.ask("wait", "e")
    assert other.ask("stream") is False
    gate.open()
    assert other.ask("synchronize", "e") is None
    assert other.ask("query", "e") is True
    assert other.ask("record", "e") is None
    event.synchronize()
    assert event.query()


@pytest.mark.process
def test_an_event_pickles_as_its_device_and_handle(other: Peer, held: tuple[ipcsync.Stream, Gate]) -> None:
    stream, gate = held
    event = ipcsync.Event(interprocess=True)
    event.record(stream)
    assert other.ask("take", "e", event) is None
    assert other.ask("is_imported", "e") is True
    assert other.ask("query", "e") is False
    gate.open()
    assert other.ask("synchronize", "e") is None


def start_with(event: ipcsync.Event, pipe: Connection) -> None:
    event.synchronize()
    pipe.send((event.is_imported, event.query()))


@pytest.mark.process
def test_an_event_can_be_an_argument_of_a_spawned_process() -> None:
    event = ipcsync.Event(interprocess=True)
    event.record()
    ours, theirs = SPAWN.Pipe()
    child = SPAWN.Process(target=start_with, args=(event, theirs))
    child.start()
    assert ours.poll(30)
    assert ours.recv() == (True, True)
    child.join(30)
    assert child.exitcode == 0


def test_an_unpickled_event_of_this_very_process_is_a_handle_error() -> None:
    data = pickle.dumps(ipcsync.Event(interprocess=True))
    with pytest.raises(ipcsync.HandleError):
        pickle.loads(data)


@pytest.mark.process
def test_a_handle_whose_exporter_dropped_the_event_is_a_handle_error(other: Peer) -> None:
    handle = other.ask("export", "e")
    opened = ipcsync.Event.from_ipc_handle(0, handle)
    opened.synchronize()
    del opened
    other.ask("drop", "e")
    with pytest.raises(ipcsync.HandleError):
        ipcsync.Event.from_ipc_handle(0, handle)


@pytest.mark.process
def test_a_handle_whose_exporter_is_dead_is_a_handle_error() -> None:
    doomed = Peer()
    handle = doomed.ask("export", "e")
    doomed.process.kill()
    doomed.process.join(30)
    with pytest.raises(ipcsync.HandleError):
        ipcsync.Event.from_ipc_handle(0, handle)


@pytest.mark.process
def test_an_imported_event_is_recorded_on_its_own_device_and_has_no_timing(other: Peer) -> None:
    event = ipcsync.Event.from_ipc_handle(0, other.ask("export", "e"))
    event.record(ipcsync.Stream())
    event.synchronize()
    with pytest.raises(ValueError, match="enable_timing"):
        event.elapsed_time(event)
    del event


def run(script: str, **env: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, **env},
    )
    if done.returncode == 77:
        pytest.skip("needs two devices")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Exception ignored" not in done.stderr, done.stderr


@pytest.mark.process
def test_events_and_streams_know_two_devices_apart() -> None:
    segment = f"two-devices-{os.getpid()}"
    run(
        """
        import sys, ipcsync
        if ipcsync.device_count() < 2: sys.exit(77)
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
        """,
        IPCSYNC_HOST_DEVICES="2",
        SIMCUDA_DEVICES="2",
        IPCSYNC_HOST_SEGMENT=segment,
        SIMCUDA_SEGMENT=segment,
    )


@pytest.mark.process
def test_objects_in_cycles_may_be_collected_in_the_middle_of_any_call() -> None:
    run(
        """
        import faulthandler, gc, ipcsync
        faulthandler.dump_traceback_later(60, exit=True)
        class Node:
            pass
        def leak():
            node = Node()
            node.me, node.stream = node, ipcsync.Stream()
            node.event = node.stream.record_event(ipcsync.Event(interprocess=True))
        gc.set_threshold(7, 2, 2)
        for _ in range(1500):
            leak()
        """
    )


def test_what_the_collector_finalizes_is_given_back_at_the_next_use() -> None:
    def cycle() -> None:
        event = ipcsync.Event()
        event.record()
        around: list[Any] = [event]
        around.append(around)

    gc.collect()
    release.destroy_postponed()
    gc.disable()
    try:
        cycle()
        gc.collect()
        assert [call for call, _ in release.postponed] == ["cuEventDestroy"]
        ipcsync.Stream()
        assert not release.postponed
    finally:
        gc.enable()


@pytest.mark.process
def test_objects_alive_at_exit_do_not_disturb_it() -> None:
    run(
        """
        import faulthandler, ipcsync
        faulthandler.dump_traceback_later(60, exit=True)
        stream = ipcsync.Stream()
        events = [stream.record_event() for _ in range(10)]
        cycle = [events, stream]
        cycle.append(cycle)
        class Late:
            held = ipcsync.Event(interprocess=True)
        Late.held.record(stream)
        ipcsync.set_stream(stream)
        """
    )
