"""Points behind everything: whose work they cover, on both engines, and what they do to captures and along chains."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from cuda.bindings.driver import CUstreamCaptureMode

import ipcsync
from ipcsync._drivers import load, unwrap
from ipcsync._native import event as native
from ipcsync._native.context import OnDevice
from ipcsync._native.stream import made_here
from ipcsync.client import unnamed
from ipcsync.testing import StreamGate
from ipcsync.typing import EngineName
from tests.kit import remote
from tests.kit.peer import Peer
from tests.kit.until import DEADLINE_S, until

pytestmark = [pytest.mark.alone, pytest.mark.driver, pytest.mark.usefixtures("nothing_queued")]

Point = ipcsync.Point
RecordAll = Callable[..., Point]


@pytest.fixture
def waiter(peer: Peer, coordinator: ipcsync.Coordinator) -> Peer:
    """A process that waits for points."""
    peer.call(remote.connect, coordinator.endpoint, "waiter")
    return peer


@pytest.fixture
def older_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a driver before CUDA 12.5; and no stream is kept of an earlier record."""
    monkeypatch.setattr(native, "_records_contexts", lambda: False)
    monkeypatch.setattr(unnamed.UnnamedEvents, "_kept", {})


def _made(flags: int) -> ipcsync.Stream:
    """A stream of another library's, as it were."""
    with OnDevice(0):
        return ipcsync.ExternalStream(int(unwrap(load().cuStreamCreate(flags), "cuStreamCreate")))


def _destroy(stream: ipcsync.Stream) -> None:
    unwrap(load().cuStreamDestroy(stream.cuda_stream), "cuStreamDestroy")


def _per_thread() -> ipcsync.Stream:
    return ipcsync.ExternalStream(2, 0)


STREAMS: dict[str, Callable[[], ipcsync.Stream]] = {
    "ours": ipcsync.Stream,
    "the default": ipcsync.default_stream,
    "the thread's": _per_thread,
    "another library's, blocking": lambda: _made(0),
    "another library's": lambda: _made(1),
}
_TO_DESTROY = {"another library's, blocking", "another library's"}


@pytest.fixture
def held(request: pytest.FixtureRequest) -> Iterator[StreamGate]:
    """A gate on a stream of the kind that the test is about; all else is idle."""
    stream = STREAMS[request.param]()
    gate = StreamGate(stream)
    yield gate
    gate.open()
    if request.param in _TO_DESTROY:
        _destroy(stream)


def _is_behind(point: Point, gate: StreamGate, waiter: Peer) -> None:
    """The point is complete only once the gate is open, for another process too."""
    assert waiter.call(remote.error_of, remote.synchronize, bytes(point), 0.05) is not None
    assert not point.query()
    gate.open()
    point.synchronize(DEADLINE_S)
    waiter.call(remote.synchronize, bytes(point))


@pytest.mark.parametrize("held", STREAMS, indirect=True)
def test_it_is_behind_the_work_of_every_stream(
    client: ipcsync.Client, waiter: Peer, held: StreamGate, engine: EngineName
) -> None:
    idle = ipcsync.Stream()
    point = client.record_all(engine=engine)
    assert idle.query()
    _is_behind(point, held, waiter)


def test_it_is_behind_a_stream_that_is_dropped_already(
    client: ipcsync.Client, waiter: Peer, engine: EngineName
) -> None:
    stream = ipcsync.Stream()
    address = stream.cuda_stream
    gate = StreamGate(ipcsync.ExternalStream(address))
    stream.record_event()
    del stream
    assert address not in [made.cuda_stream for made in made_here()]
    _is_behind(client.record_all(engine=engine), gate, waiter)


def test_it_is_behind_what_another_thread_submitted(client: ipcsync.Client, waiter: Peer, engine: EngineName) -> None:
    gates: list[StreamGate] = []
    thread = threading.Thread(target=lambda: gates.append(StreamGate(_per_thread())))
    thread.start()
    thread.join()
    _is_behind(client.record_all(engine=engine), gates[0], waiter)


def test_it_is_not_behind_what_comes_later(client: ipcsync.Client, engine: EngineName) -> None:
    point = client.record_all(engine=engine)
    with StreamGate(ipcsync.Stream()):
        point.synchronize(DEADLINE_S)


def test_each_is_behind_the_one_before(client: ipcsync.Client, engine: EngineName) -> None:
    with StreamGate(ipcsync.Stream()) as gate:
        points = [client.record_all(engine=engine) for _ in range(12)]
        assert not any(point.query() for point in points)
        gate.open()
        for point in points:
            point.synchronize(DEADLINE_S)


def test_nothing_is_left_behind_by_many(
    client: ipcsync.Client, engine: EngineName, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unnamed.UnnamedEvents, "_kept", {})
    for _ in range(100):
        client.record_all(engine=engine).synchronize(DEADLINE_S)
    assert len(client._unnamed.events) == 1


def test_a_device_is_asked_for_by_any_name(client: ipcsync.Client) -> None:
    assert client.record_all("cuda:0").device == ipcsync.Device(0)
    with pytest.raises(ipcsync.InvalidDevice):
        client.record_all("cuda:7")


def test_a_task_records_everything_too(coordinator: ipcsync.Coordinator, engine: EngineName) -> None:
    import asyncio

    async def scenario() -> None:
        async with ipcsync.aconnect(coordinator.endpoint) as client:
            for streams in (None, [_per_thread()]):
                with StreamGate(_per_thread()) as gate:
                    point = await client.record_all(engine=engine, streams=streams)
                    assert not await point.query()
                    gate.open()
                    await point.synchronize(DEADLINE_S)

    asyncio.run(scenario())


# --- named streams ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("left_out", range(3))
def test_named_streams_are_waited_for_each_and_no_other(
    client: ipcsync.Client, waiter: Peer, engine: EngineName, left_out: int
) -> None:
    streams = [ipcsync.Stream() for _ in range(3)]
    gate = StreamGate(streams[left_out])
    point = client.record_all(streams=streams, engine=engine)
    others = [stream for stream in streams if stream is not streams[left_out]]
    client.record_all(streams=others, engine=engine).synchronize(DEADLINE_S)
    assert all(stream.query() for stream in others)  # nobody was made to wait
    _is_behind(point, gate, waiter)


def test_no_stream_at_all_is_no_point(client: ipcsync.Client) -> None:
    with pytest.raises(ValueError, match="streams is empty"):
        client.record_all(streams=[])
    several: Any = 3
    with pytest.raises(TypeError, match="streams takes streams, in a list or another iterable, but got int"):
        client.record_all(streams=several)
    for wrong in ("cuda", 5):
        named: Any = [wrong]
        with pytest.raises(TypeError):
            client.record_all(streams=named)


# --- captures ---------------------------------------------------------------------------------------------------------


def _begin(stream: ipcsync.Stream) -> None:
    mode = CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
    unwrap(load().cuStreamBeginCapture(stream.cuda_stream, mode), "cuStreamBeginCapture")


def _end(stream: ipcsync.Stream) -> int:
    result = load().cuStreamEndCapture(stream.cuda_stream)
    if int(result[0]) == 0:
        unwrap(load().cuGraphDestroy(result[1]), "cuGraphDestroy")
    return int(result[0])


@pytest.mark.parametrize("kind", ["ours", "another library's, blocking", "current"])
def test_a_capture_that_is_seen_refuses_it_and_is_unharmed(client: ipcsync.Client, kind: str) -> None:
    stream = _made(1) if kind == "current" else STREAMS[kind]()
    _begin(stream)
    with ipcsync.stream(stream if kind == "current" else None), pytest.raises(ipcsync.StreamCapturing):
        client.record_all()
    assert _end(stream) == 0
    client.record_all().synchronize(DEADLINE_S)
    if kind != "ours":
        _destroy(stream)


def test_a_capture_that_is_not_seen_refuses_it_and_the_error_says_that_it_is_invalid(client: ipcsync.Client) -> None:
    stream = _made(1)
    _begin(stream)
    with pytest.raises(ipcsync.StreamCapturing, match="the driver has invalidated its capture"):
        client.record_all()
    assert _end(stream) == 901
    client.record_all().synchronize(DEADLINE_S)
    _destroy(stream)


def test_named_streams_harm_no_capture_of_another(client: ipcsync.Client, engine: EngineName) -> None:
    captured, named = ipcsync.Stream(), ipcsync.Stream()
    _begin(captured)
    client.record_all(streams=[named], engine=engine)
    with pytest.raises(ipcsync.StreamCapturing):
        client.record_all(streams=[named, captured], engine=engine)
    assert _end(captured) == 0


# --- drivers that cannot record a context -----------------------------------------------------------------------------


@pytest.mark.usefixtures("older_driver")
@pytest.mark.parametrize("held", sorted(set(STREAMS) - {"another library's"}), indirect=True)
def test_an_older_driver_joins_what_is_known_and_warns(client: ipcsync.Client, waiter: Peer, held: StreamGate) -> None:
    with pytest.warns(RuntimeWarning, match="cannot record all of a context"):
        point = client.record_all()
    _is_behind(point, held, waiter)


def _warned_others(client: ipcsync.Client) -> int:
    with pytest.warns(RuntimeWarning, match="cannot record all of a context") as told:
        client.record_all()
    return int(str(told[0].message).split(" others that ipcsync knows")[0].rsplit(" ", 1)[1])


@pytest.mark.usefixtures("older_driver")
def test_an_older_driver_counts_the_streams_that_a_record_joins_and_not_the_joining_one(
    client: ipcsync.Client,
) -> None:
    gc.collect()  # an earlier test's streams
    known = len(native._known(0)) - 1
    assert _warned_others(client) == known
    mine = [ipcsync.Stream() for _ in range(3)]
    assert _warned_others(client) == known + len(mine)


@pytest.mark.usefixtures("older_driver")
def test_an_older_driver_joins_this_threads_current_stream(client: ipcsync.Client, waiter: Peer) -> None:
    stream = _made(1)
    gate = StreamGate(stream)
    with ipcsync.stream(stream), pytest.warns(RuntimeWarning):
        point = client.record_all()
    _is_behind(point, gate, waiter)
    _destroy(stream)


@pytest.mark.usefixtures("older_driver")
def test_an_older_driver_is_told_of_no_lack_where_streams_are_named(client: ipcsync.Client) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        client.record_all(streams=[None]).synchronize(DEADLINE_S)


def _warnings_of_one(endpoint: str) -> list[str]:
    """In the peer: what is warned of by a record behind a held stream, which it waits for."""
    stream = ipcsync.Stream()
    with ipcsync.connect(endpoint) as client, StreamGate(stream) as gate, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        point = client.record_all()
        assert not point.query()
        gate.open()
        point.synchronize(DEADLINE_S)
        return [str(each.message) for each in told]


@pytest.mark.parametrize(("version", "joins"), [("12040", True), ("12050", False)])
def test_a_driver_before_12_5_is_known_by_its_version(
    coordinator: ipcsync.Coordinator, new_peer: Callable[..., Peer], version: str, joins: bool
) -> None:
    if ipcsync.driver_name() != "host":
        pytest.skip("only the software driver speaks another version when told to")
    told = new_peer(IPCSYNC_HOST_DRIVER_VERSION=version).call(_warnings_of_one, coordinator.endpoint)
    assert [text[:35] for text in told] == ["this driver is older than CUDA 12.5"] * joins


def test_what_joins_waits_for_nothing_older(client: ipcsync.Client, engine: EngineName) -> None:
    """A stream that may be stuck for ever is not used for other streams' records."""
    held = ipcsync.Stream()
    with StreamGate(held):
        stuck = [client.record_all(streams=[held], engine=engine) for _ in range(2 * unnamed._KEPT)]
        client.record_all(streams=[ipcsync.Stream()], engine=engine).synchronize(DEADLINE_S)
        assert not any(point.query() for point in stuck)


# --- along chains -----------------------------------------------------------------------------------------------------
# In a process of their own: what a dead process never did stays with the streams that wait for it.


@pytest.fixture
def theirs(new_peer: Callable[..., Peer], coordinator: ipcsync.Coordinator, engine: EngineName) -> tuple[Peer, bytes]:
    """A process and the point of a record of its that is held back."""
    peer = new_peer()
    peer.call(remote.connect, coordinator.endpoint, "recorder")
    peer.call(remote.open_event, "theirs", {"recorder": True, "engine": engine})
    peer.call(remote.hold)
    (data,) = peer.call(remote.record, "theirs")
    return peer, data


@pytest.fixture
def worker(new_peer: Callable[..., Peer], coordinator: ipcsync.Coordinator) -> Peer:
    """A process that records everything, or streams of its that have names."""
    peer = new_peer()
    peer.call(remote.connect, coordinator.endpoint, "worker")
    return peer


def _assert_behind(end: tuple[str, str] | None, recorder: Peer) -> None:
    assert end is not None, "a silent pass"
    name, text = end
    assert name == "RecorderLost"
    assert f"recorder 'recorder' (pid {recorder.pid}) died" in text or "stands behind work of the session" in text


def _end_of(worker: Peer, data: bytes) -> str:
    return (worker.call(remote.error_of, remote.synchronize, data, 0.0) or ("",))[0]


@pytest.mark.parametrize("named", [None, ["other", "main"]], ids=["everything", "named"])
def test_it_is_lost_with_what_any_stream_waits_for(
    waiter: Peer, worker: Peer, theirs: tuple[Peer, bytes], engine: EngineName, named: list[str] | None
) -> None:
    recorder, data = theirs
    worker.call(remote.wait, data)
    point = worker.call(remote.record_all, named, {"engine": engine})
    recorder.kill()
    _assert_behind(waiter.call(remote.error_of, remote.synchronize, point), recorder)
    _assert_behind(worker.call(remote.error_of, remote.synchronize, point), recorder)


def test_a_loss_that_is_known_refuses_it_but_not_named_streams(
    waiter: Peer, worker: Peer, theirs: tuple[Peer, bytes], engine: EngineName
) -> None:
    recorder, data = theirs
    worker.call(remote.wait, data)
    recorder.kill()
    until(lambda: _end_of(worker, data) == "RecorderLost", "the death is seen")
    for named in (None, ["main"]):
        _assert_behind(worker.call(remote.error_of, remote.record_all, named, {"engine": engine}), recorder)
    point = worker.call(remote.record_all, ["other"], {"engine": engine})
    waiter.call(remote.synchronize, point)


def test_it_is_good_again_once_the_stream_was_resumed(
    waiter: Peer, worker: Peer, theirs: tuple[Peer, bytes], engine: EngineName
) -> None:
    if engine == "event":
        pytest.skip("a driver may never let a stream pass what a dead process has not done")
    recorder, data = theirs
    worker.call(remote.wait, data)
    lost = worker.call(remote.record_all, None, {"engine": engine})
    recorder.kill()
    _assert_behind(worker.call(remote.error_of, remote.synchronize, lost), recorder)
    worker.call(remote.resume)
    waiter.call(remote.synchronize, worker.call(remote.record_all, None, {"engine": engine}))


def test_points_given_as_after_count(
    waiter: Peer, worker: Peer, theirs: tuple[Peer, bytes], engine: EngineName
) -> None:
    recorder, data = theirs
    point = worker.call(remote.record_all, ["other"], {"engine": engine}, [data])
    recorder.kill()
    _assert_behind(waiter.call(remote.error_of, remote.synchronize, point), recorder)


@pytest.mark.parametrize("how", ["goes on", "connects again"])
def test_what_one_was_to_be_behind_and_is_lost_refuses_none_of_the_later(
    coordinator: ipcsync.Coordinator,
    waiter: Peer,
    worker: Peer,
    theirs: tuple[Peer, bytes],
    engine: EngineName,
    how: str,
) -> None:
    """Its wait is on a stream of the library's own, which no user can resume."""
    if engine == "event":
        pytest.skip("a driver may never let a stream pass what a dead process has not done")
    recorder, data = theirs
    points = [worker.call(remote.record_all, ["other"], {"engine": engine}, [data]) for _ in range(unnamed._KEPT + 1)]
    recorder.kill()
    for point in points:
        _assert_behind(worker.call(remote.error_of, remote.synchronize, point), recorder)
    if how == "connects again":
        worker.call(remote.close_client)
        worker.call(remote.connect, coordinator.endpoint, "worker")
    for named in (None, ["other"]):
        options = {"engine": engine}
        until(lambda: worker.call(remote.error_of, remote.record_all, named, options) is None, "it is good again")  # noqa: B023
        waiter.call(remote.synchronize, worker.call(remote.record_all, named, options))


def test_a_record_that_depends_on_all_waits_is_good_again_once_a_stream_was_resumed(
    coordinator: ipcsync.Coordinator, worker: Peer, theirs: tuple[Peer, bytes], engine: EngineName
) -> None:
    if engine == "event":
        pytest.skip("a driver may never let a stream pass what a dead process has not done")
    recorder, data = theirs
    worker.call(remote.close_client)
    worker.call(remote.connect, coordinator.endpoint, "worker", {"chains": "session"})
    worker.call(remote.open_event, "ours", {"recorder": True, "engine": engine})
    lost = worker.call(remote.record_all, ["other"], {"engine": engine}, [data])
    recorder.kill()
    for call in ((remote.synchronize, lost), (remote.record, "ours")):
        _assert_behind(worker.call(remote.error_of, *call), recorder)

    def record() -> bool:
        worker.call(remote.resume)
        return worker.call(remote.error_of, remote.record, "ours") is None

    until(record, "it is good again")


def test_what_is_no_point_is_refused(client: ipcsync.Client) -> None:
    wrong: Any = ["p"]
    with pytest.raises(TypeError):
        client.record_all(after=wrong)


def test_two_that_record_at_a_time_share_no_stream(
    client: ipcsync.Client, engine: EngineName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one of them waits for may never be complete, and the other one named the streams that will be."""
    monkeypatch.setattr(unnamed.UnnamedEvents, "_kept", {})
    both, stream = client._unnamed, ipcsync.Stream()
    for _ in range(3):  # the first leaves an idle stream, which only one of the next two can have
        some, all_ = both.join(0, [stream]), both.join(0, None)
        assert some[0] != all_[0]
        for joined in (some, all_):
            both.record_behind(joined, engine, 10, ()).synchronize(10)
    assert [len(kept) for kept in both._kept.values()] == [2]
