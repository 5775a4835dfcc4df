"""Row 40: stream capture is refused before it does harm, and harmed by none of our looks. Row 35: a test that ends its
whole process under xdist takes nobody else down.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from cuda.bindings.driver import CUstreamCaptureMode

import ipcsync
from ipcsync._drivers import load, unwrap
from ipcsync.client import point as points
from ipcsync.testing import StreamGate
from ipcsync.typing import EngineName
from tests.kit import driver_functions, remote
from tests.kit.failing import Failing
from tests.kit.peer import Peer
from tests.kit.until import until

pytestmark = pytest.mark.driver

GLOBAL = CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL


def begin(stream: ipcsync.Stream) -> None:
    unwrap(load().cuStreamBeginCapture(stream.cuda_stream, GLOBAL), "cuStreamBeginCapture")


def end(stream: ipcsync.Stream) -> None:
    """End the capture, which raises if anything spoiled it."""
    graph = unwrap(load().cuStreamEndCapture(stream.cuda_stream), "cuStreamEndCapture")
    unwrap(load().cuGraphDestroy(graph), "cuGraphDestroy")


@pytest.fixture
def captured() -> Iterator[ipcsync.Stream]:
    """A stream that this thread captures in global mode, which is still whole at the end."""
    stream = ipcsync.Stream()
    begin(stream)
    yield stream
    end(stream)


def test_row_40_a_record_on_a_capturing_stream_is_refused_and_nothing_is_stored(
    event: ipcsync.SharedEvent, captured: ipcsync.Stream
) -> None:
    before = event.record(ipcsync.Stream())
    for _ in range(event.depth + 1):
        with pytest.raises(ipcsync.StreamCapturing):
            event.record(captured)
    assert (event.generation, event.latest) == (1, before)
    assert captured.is_capturing()
    assert event.record(ipcsync.Stream()).generation == 2


def test_row_40_a_wait_on_a_capturing_stream_is_refused_whatever_it_waits_for(
    client: ipcsync.Client, event: ipcsync.SharedEvent, captured: ipcsync.Stream, engine: EngineName
) -> None:
    done = event.record(ipcsync.Stream())
    done.synchronize(10)
    for point in (done, event.at(2)):
        with pytest.raises(ipcsync.StreamCapturing):
            point.wait(captured, timeout=0)
    if engine == "timeline":
        with client.event("nobody's", engine=engine) as ahead, pytest.raises(ipcsync.StreamCapturing):
            ahead.at(1).wait(captured, ahead=True)
    assert captured.is_capturing()


def test_row_40_the_clients_unnamed_event_refuses_too(client: ipcsync.Client, captured: ipcsync.Stream) -> None:
    with pytest.raises(ipcsync.StreamCapturing):
        client.record(captured)
    assert captured.is_capturing()


def test_row_40_a_stream_can_be_recorded_on_once_its_capture_has_ended(event: ipcsync.SharedEvent) -> None:
    stream = ipcsync.Stream()
    begin(stream)
    with pytest.raises(ipcsync.StreamCapturing):
        event.record(stream)
    end(stream)
    event.record(stream).synchronize(10)


class Capturing:
    """Another thread that captures a stream of its own in global mode, for as long as the block."""

    def __init__(self) -> None:
        self._began, self._ending = threading.Event(), threading.Event()
        self._problem: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            stream = ipcsync.Stream()
            begin(stream)
            self._began.set()
            self._ending.wait(60)
            end(stream)
        except BaseException as error:  # noqa: BLE001 - it is raised by __exit__
            self._problem = error
            self._began.set()

    def __enter__(self) -> None:
        self._thread.start()
        assert self._began.wait(30)

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join(30)
        assert self._problem is None, f"the capture was spoiled: {self._problem!r}"


def _look_at_all(client: ipcsync.Client, event: ipcsync.SharedEvent) -> None:
    """Every call that asks the driver something, of pending and of complete work."""
    stream, other = ipcsync.Stream(), ipcsync.Stream()
    with StreamGate(stream) as gate:
        point = event.record(stream)
        assert not point.query()
        with pytest.raises(ipcsync.WaitTimeout):
            point.synchronize(0.02)
        point.wait(other)
        again = client.point(bytes(point))
        assert not again.query()
        assert event.completed < point.generation
        gate.open()
        point.synchronize(10)
    assert again.query()
    for _ in range(event.depth + 1):  # round the ring, which is asked for its oldest
        event.record(stream)
    event.at(event.generation).synchronize(10)
    client._session.driving.look()


def test_row_40_no_look_of_ours_spoils_anothers_capture(client: ipcsync.Client, event: ipcsync.SharedEvent) -> None:
    with Capturing():
        _look_at_all(client, event)


def test_row_40_what_comes_first_spoils_no_capture_either(client: ipcsync.Client, engine: EngineName) -> None:
    """Opening handles, registering the board, making events: what happens once, happens during the capture."""
    with Capturing(), client.event(f"first-{engine}", recorder=True, engine=engine, depth=3) as event:
        _look_at_all(client, event)
    with Capturing():
        client.check()
        client.record().synchronize(10)
        ipcsync.ipc_collect()


def test_row_40_a_process_may_connect_and_close_amid_a_capture(client: ipcsync.Client) -> None:
    with Capturing(), ipcsync.connect(client.endpoint) as second:
        _look_at_all(second, second.event("second's", recorder=True))


def test_row_40_a_first_wait_ahead_breaks_no_capture(client: ipcsync.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(points, "_passing", set())
    stream = ipcsync.Stream()
    with Capturing(), client.event("nobody's", engine="timeline") as event:
        event.at(1).wait(stream, ahead=True)
        assert not stream.query()
    assert len(points._passing) == 1
    stream.synchronize()


def test_row_40_a_resume_of_a_capturing_stream_is_refused_and_forgets_nothing(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, peer: Peer
) -> None:
    stream = ipcsync.Stream()
    peer.call(remote.connect, coordinator.endpoint, "second")
    point = client.point(peer.call(remote.reserve, "r", {"engine": "timeline"}))
    point.wait(stream, ahead=True)
    peer.call(remote.close)
    until(point.exception, "it is lost")
    begin(stream)
    with pytest.raises(ipcsync.StreamCapturing):
        client.resume(stream, 15)
    end(stream)
    with pytest.raises(ipcsync.RecorderLost):
        client.record(stream)
    client.resume(stream, 15)
    client.record(stream).synchronize(15)


def _sleeps_until_recorded(thread: threading.Thread, event: ipcsync.SharedEvent) -> bool:
    word = event._engine.line.futex.address
    return f"{word:#x} " in Path(f"/proc/self/task/{thread.native_id}/syscall").read_text()


@pytest.mark.parametrize("timeout", [None, 15])
def test_row_40_a_wait_that_slept_until_the_record_is_not_put_into_a_graph(
    client: ipcsync.Client, event: ipcsync.SharedEvent, timeout: float | None
) -> None:
    stream, other = ipcsync.Stream(), ipcsync.Stream()
    with ipcsync.connect(client.endpoint) as second, second.event(event.name) as seen:
        event.record(other)
        seen.at(1).wait(stream)  # so that the next one may be a shortcut
        waiting = Failing(lambda: seen.at(2).wait(stream, timeout=timeout))
        until(lambda: _sleeps_until_recorded(waiting, seen), "it waits for the record")
        begin(stream)
        event.record(other)
        assert isinstance(waiting.raised(), ipcsync.StreamCapturing)
        end(stream)


def test_row_40_a_wait_that_another_threads_wait_held_up_is_not_put_into_a_graph(
    client: ipcsync.Client, event: ipcsync.SharedEvent, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, other, main = ipcsync.Stream(), ipcsync.Stream(), threading.get_ident()
    with ipcsync.connect(client.endpoint) as second, second.event(event.name) as seen, StreamGate(other):
        event.record(other)
        with driver_functions.held_up(*driver_functions.WAIT.values()) as held:
            first = threading.Thread(target=lambda: seen.at(1).wait(ipcsync.Stream()))
            first.start()
            held.wait()
            guard = seen._engine.guard
            check = guard.check_liveness

            def capture_and_let_go() -> None:
                if threading.get_ident() == main:  # it has waited for its turn by now
                    monkeypatch.undo()
                    begin(stream)
                    held.go_on.set()
                check()

            monkeypatch.setattr(guard, "check_liveness", capture_and_let_go)
            with pytest.raises(ipcsync.StreamCapturing):
                seen.at(1).wait(stream)
            end(stream)
            first.join()


def test_row_40_a_record_that_waited_for_room_is_not_put_into_a_graph(client: ipcsync.Client) -> None:
    stream, other = ipcsync.Stream(), ipcsync.Stream()
    with client.event("full", recorder=True, engine="event", depth=1) as event:
        with StreamGate(other) as gate:
            event.record(other)
            before = client.stats()["client"]["full_ring_waits"]
            recording = Failing(lambda: event.record(stream, timeout=15))
            until(lambda: client.stats()["client"]["full_ring_waits"] > before, "it waits for room")
            begin(stream)
            gate.open()
            assert isinstance(recording.raised(), ipcsync.StreamCapturing)
        end(stream)
        assert event.generation == 1
        assert event.record(stream).generation == 2


# --- row 35 -----------------------------------------------------------------------------------------------------------

_SUITE = """
    import os
    import pytest
    import ipcsync

    @pytest.fixture
    def event(request):
        with ipcsync.connect(name="doomed" if "ends" in request.node.name else "other") as client:
            with client.event(request.node.name, recorder=True) as event:
                point = event.record()
                point.synchronize(20)
                yield event

    def test_that_ends_its_process(event):
        os._exit(3)

    @pytest.mark.parametrize("number", range(6))
    def test_that_goes_on(event, number):
        event.record().synchronize(20)
        assert event.generation == 2
"""


@pytest.mark.program
def test_row_35_a_test_that_ends_its_process_under_xdist_frees_its_leases_and_the_run_goes_on(
    tmp_path: Path, coordinator: ipcsync.Coordinator
) -> None:
    (tmp_path / "test_suite.py").write_text(textwrap.dedent(_SUITE))
    with ipcsync.connect(coordinator.endpoint, name="outside") as client:
        command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", "-p", "xdist"]
        environment = {
            key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "IPCSYNC_TEST"))
        }
        done = subprocess.run(
            [*command, "--rootdir", str(tmp_path), str(tmp_path)],
            env={**environment, "IPCSYNC_ENDPOINT": coordinator.endpoint, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )
        assert done.returncode == 1, done.stdout + done.stderr
        assert "6 passed" in done.stdout, done.stdout + done.stderr
        assert "1 failed" in done.stdout
        assert "crashed while running 'test_suite.py::test_that_ends_its_process'" in done.stdout
        until(lambda: [each.name for each in client.list_sessions()] == ["outside"], "the others have gone")
        until(lambda: client.list_events() == [], "nothing is left")
        stats = client.stats()
        assert stats["deaths"] == {"pidfd": 1, "ttl": 0}
        assert stats["quarantined"] == stats["pool_in_use"] == 0
        with client.event("test_that_ends_its_process", recorder=True) as event:
            event.record().synchronize(10)
