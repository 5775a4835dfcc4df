"""`Client.next`: what torch replays within a block, over a stand-in that has torch's hooks and calls the driver."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import ipcsync
from ipcsync.client import graphs as replays
from ipcsync.integrations import torch as integration
from ipcsync.testing import Memory, StreamGate
from tests.graphs.layers import begin_capture, captured, end_empty, finish
from tests.graphs.torch_stand_in import Stream, Torch
from tests.kit import remote
from tests.kit.peer import Peer
from tests.kit.until import DEADLINE_S

NewClient = Callable[..., ipcsync.Client]


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Torch:
    stand_in = Torch()
    monkeypatch.setitem(sys.modules, "torch", stand_in)
    monkeypatch.setattr(replays, "has_hooks", False)
    integration.install()
    return stand_in


class Engine:
    """A model of one layer, whose graph is captured and replayed on torch's current stream."""

    def __init__(self, torch: Torch, new_client: NewClient) -> None:
        self._torch = torch
        self.client, other = new_client(), new_client()
        self.kv, self.done_at = ipcsync.GraphWait(), ipcsync.GraphRecord()
        self.source, self.target = Memory(8), Memory(8)
        self.stream = stream = torch.stream._own
        self.graph = captured(
            stream,
            lambda: self.kv.capture(),  # noqa: PLW0108 - the stream is torch's current one when it is called
            lambda: self.target.copy_from(self.source, stream),
            lambda: self.done_at.capture(),  # noqa: PLW0108
        )
        self.done = self.client.event("done", recorder=True, engine="timeline")
        self.sending = ipcsync.Stream()
        self.sent = other.event("sent", recorder=True, engine="timeline")

    def send(self, value: int) -> ipcsync.Point:
        self.source.fill(value, self.sending)
        return self.sent.record(self.sending)

    def next(self, point: ipcsync.Point) -> ipcsync.Upcoming:
        return self.client.next({self.kv: point}, {self.done_at: self.done}, timeout=20)

    def step(self) -> None:
        self._torch.replay(self.graph)


@pytest.fixture
def engine(torch: Torch, new_client: NewClient) -> Engine:
    return Engine(torch, new_client)


def test_a_replay_deep_within_waits_and_records(engine: Engine) -> None:
    for value in (1, 2, 3):
        with StreamGate(engine.sending), engine.next(engine.send(value)) as replay:
            engine.step()
        assert replay.is_used
        replay[engine.done_at].synchronize(DEADLINE_S)
        assert engine.target.holds(value)


def test_a_block_without_a_replay_queues_and_records_nothing(engine: Engine) -> None:
    with engine.next(engine.send(1)) as replay:
        pass
    assert not replay.is_used
    with pytest.raises(ipcsync.CaptureError, match="nothing was replayed"):
        replay[engine.done_at]
    assert engine.done.generation == 0
    with engine.next(engine.send(2)) as replay:
        engine.step()
    replay[engine.done_at].synchronize(DEADLINE_S)
    assert engine.target.holds(2)


def test_several_replays_in_a_block_are_one_and_on_one_stream(engine: Engine, torch: Torch) -> None:
    with engine.next(engine.send(1)) as replay:
        engine.step()
        engine.step()
        first, torch.stream = torch.stream, Stream()
        with pytest.raises(ipcsync.CaptureError, match="another stream"):
            engine.step()
        torch.stream = first
    with pytest.raises(ipcsync.CaptureError, match="its block raised"):
        replay[engine.done_at]  # it may be of the launch that was refused
    assert engine.done.generation == 0
    with engine.next(engine.send(2)) as replay:
        engine.step()
        engine.step()
    replay[engine.done_at].synchronize(DEADLINE_S)


def test_a_launch_behind_the_end_of_the_blocks_replay_is_refused(engine: Engine) -> None:
    """The graph would wait for the next replay's points."""
    upcoming = engine.next(engine.send(1))
    upcoming.__enter__()
    engine.step()
    engine.client.close()
    with pytest.raises(ipcsync.CaptureError, match="was ended by another call"):
        engine.step()
    with pytest.raises(ipcsync.ClientClosed):
        upcoming.__exit__(None, None, None)
    finish(engine.stream)
    assert engine.target.holds(1)


def test_a_block_is_used_once(engine: Engine) -> None:
    for launches in (0, 1):
        block = engine.next(engine.send(1))
        with block:
            for _ in range(launches):
                engine.step()
        with pytest.raises(ipcsync.CaptureError, match="used once"), block:
            pass


def test_a_block_whose_end_an_exception_prevents_goes_with_its_object(engine: Engine) -> None:
    for launches in (0, 1):
        block = engine.next(engine.send(1))
        block.__enter__()
        for _ in range(launches):
            engine.step()
        del block
    with engine.next(engine.send(2)) as replay:
        engine.step()
    replay[engine.done_at].synchronize(DEADLINE_S)
    assert engine.target.holds(2)


def test_a_block_is_not_entered_within_itself(engine: Engine, coordinator: ipcsync.Coordinator) -> None:
    block = engine.next(engine.send(1))
    with block, pytest.raises(ipcsync.CaptureError, match="used once"), block:
        pass

    async def main() -> None:
        async with ipcsync.aconnect(coordinator.endpoint) as client:
            mine = client.next({}, {})
            async with mine:
                with pytest.raises(ipcsync.CaptureError, match="used once"):
                    await mine.__aenter__()

    asyncio.run(main())
    with engine.next(engine.send(2)) as replay:
        engine.step()
    replay[engine.done_at].synchronize(DEADLINE_S)


def test_a_launch_that_fails_makes_no_record(engine: Engine) -> None:
    graph, engine.graph = engine.graph, 0
    with pytest.raises(ipcsync.DriverError), engine.next(engine.send(1)):
        engine.step()
    try:
        with engine.next(engine.send(1)):
            engine.step()
    except ipcsync.DriverError:
        engine.graph = graph
        with engine.next(engine.send(2)) as replay:
            engine.step()  # while another exception is handled
    replay[engine.done_at].synchronize(DEADLINE_S)
    assert engine.done.generation == 1
    assert engine.target.holds(2)


def test_a_launch_whose_failure_is_caught_within_makes_no_record(engine: Engine) -> None:
    graph, engine.graph = engine.graph, 0
    with engine.next(engine.send(1)) as replay, pytest.raises(ipcsync.DriverError):
        engine.step()
    with pytest.raises(ipcsync.CaptureError, match="its block raised"):
        replay[engine.done_at]
    engine.graph = graph
    finish(engine._torch.stream._own)
    assert engine.done.generation == 0


def test_an_exception_that_counts_as_false_is_one(engine: Engine) -> None:
    class NothingFound(Exception):  # noqa: N818
        def __len__(self) -> int:
            return 0

    block = engine.next(engine.send(1))
    replay = block.__enter__()
    engine.step()
    block.__exit__(NothingFound, NothingFound(), None)
    with pytest.raises(ipcsync.CaptureError, match="its block raised"):
        replay[engine.done_at]
    finish(engine._torch.stream._own)
    assert engine.done.generation == 0


def test_a_point_that_is_not_recorded_in_time_prevents_the_launch(engine: Engine) -> None:
    late = engine.client.next({engine.kv: engine.sent.at(9)}, timeout=0)
    with pytest.raises(ipcsync.WaitTimeout), late:
        engine.step()
    finish(engine._torch.stream._own)  # nothing waits
    assert engine.target.holds(0)


def test_a_replay_on_another_stream_than_torchs_is_refused(engine: Engine, torch: Torch) -> None:
    with pytest.raises(ipcsync.CaptureError, match="torch's current one"):
        engine.client.replay({engine.kv: engine.send(1)}, stream=ipcsync.Stream()).__enter__()
    mine = torch.stream
    replaying = engine.client.replay({engine.kv: engine.send(1)}, {engine.done_at: engine.done}, stream=mine._own)
    replaying.__enter__()
    torch.stream = Stream()
    with pytest.raises(ipcsync.CaptureError, match="torch's current one"):
        replaying.__exit__(None, None, None)
    torch.stream = mine
    replaying = engine.client.replay({engine.kv: engine.send(1)}, {engine.done_at: engine.done})  # the current one
    replaying.__enter__()
    torch.stream = Stream()
    with pytest.raises(ipcsync.CaptureError, match="torch's current one"):
        replaying.__exit__(None, None, None)
    torch.stream = mine
    assert engine.done.generation == 0
    finish(mine._own)


def test_the_legacy_stream_is_torchs_current_one_by_either_number(engine: Engine, torch: Torch) -> None:
    torch.stream.cuda_stream = 0
    with engine.client.replay({}, {engine.done_at: engine.done}, stream=1):
        pass


def test_a_block_that_could_not_be_ended_is_ended_by_the_next_while_its_error_is_kept(
    engine: Engine, torch: Torch
) -> None:
    def leave() -> None:
        with engine.next(engine.send(1)):
            engine.step()
            begin_capture(torch.stream._own)

    with pytest.raises(ipcsync.StreamCapturing, match="cannot end a replay") as kept:
        leave()
    end_empty(torch.stream._own)
    with engine.next(engine.send(2)) as replay:
        engine.step()
    replay[engine.done_at].synchronize(DEADLINE_S)
    assert engine.target.holds(2)
    assert kept.tb is not None, "whose frames have the block"


def test_torchs_streams_wait_for_points(engine: Engine, torch: Torch) -> None:
    with StreamGate(engine.sending):
        torch.stream.wait_event(engine.send(1))
        assert not torch.stream._own.query()
    finish(torch.stream._own)


class VllmBase:
    """What the page's connector needs of vLLM's KVConnectorBase_V1."""

    metadata: object = None

    def has_connector_metadata(self) -> bool:
        return self.metadata is not None


def _connector() -> Any:
    """That of docs/graphs.md, over vLLM's base."""
    page = (Path(__file__).parents[2] / "docs" / "graphs.md").read_text()
    (block,) = re.findall(r"^```python\n(class Layers:.*?)^```$", page, re.MULTILINE | re.DOTALL)
    scope: dict[str, Any] = {"ipcsync": ipcsync}
    exec(block, scope)
    return type("Connector", (scope["Layers"], VllmBase), {})()


def _attend(connector: Any, layer_name: str, attend: Callable[[], object]) -> None:
    """A layer of attention, as vLLM's `maybe_transfer_kv_layer` makes one of it."""
    if not connector.has_connector_metadata():
        attend()
        return
    connector.wait_for_layer_load(layer_name)
    attend()
    connector.save_kv_layer(layer_name, None, object())


def test_the_pages_connector_waits_and_records_in_replays_and_where_no_graph_is(
    torch: Torch, new_client: NewClient
) -> None:
    client, other, sending = new_client(), new_client(), ipcsync.Stream()
    sent = other.event("sent", recorder=True, engine="timeline")
    done = client.event("done", recorder=True, engine="timeline")
    stream, names = torch.stream._own, ("first", "second")
    source, target = ({name: Memory(8) for name in names} for _ in range(2))
    connector = _connector()
    connector.prepare(names, done)

    def forward() -> None:
        for name in names:
            _attend(connector, name, partial(target[name].copy_from, source[name], stream))

    forward()  # a dummy run
    graph = captured(stream, forward)
    for value, has_graph in enumerate([True, False, True], 1):
        points = {}
        with StreamGate(sending):
            for name in names:
                source[name].fill(value, sending)
                points[name] = sent.record(sending)
            connector.metadata = object()
            with connector.around(client, points) as replay:
                if has_graph:
                    torch.replay(graph)
                else:
                    forward()
            connector.metadata = None
            assert replay.is_used == has_graph
            assert not stream.query()
        done.at(2 * value).synchronize(DEADLINE_S)
        assert all(memory.holds(value) for memory in target.values())
        assert done.generation == 2 * value


async def _enter_next(coordinator: ipcsync.Coordinator) -> None:
    """Enter a block for a point that nobody records."""
    async with ipcsync.aconnect(coordinator.endpoint) as client:
        point = (await client.event("never")).at(1)
        async with client.next({ipcsync.GraphWait(): point}):
            pass


def test_it_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, client: ipcsync.Client, coordinator: ipcsync.Coordinator
) -> None:
    monkeypatch.setattr(replays, "has_hooks", False)
    with pytest.raises(ipcsync.IpcSyncError, match=r"integrations\.torch\.install"):
        client.next({}).__enter__()
    with pytest.raises(ipcsync.IpcSyncError, match=r"integrations\.torch\.install"):
        asyncio.run(_enter_next(coordinator))
    monkeypatch.setitem(sys.modules, "torch", Torch(has_hooks=False))
    with pytest.raises(ipcsync.IpcSyncError, match=r"after 2\.13"):
        integration.install()
    monkeypatch.setitem(sys.modules, "torch", torch := Torch())
    with monkeypatch.context() as without:
        without.delattr(torch.cuda.graphs.CUDAGraph, "register_replay_start_hook")
        with pytest.raises(ipcsync.IpcSyncError, match=r"no register_replay_start_hook"):
            integration.install()
    monkeypatch.delitem(sys.modules, "torch")
    with pytest.raises(ipcsync.IpcSyncError, match="import it first"):
        integration.install()


def test_the_same_for_asyncio(engine: Engine, coordinator: ipcsync.Coordinator) -> None:
    async def main() -> None:
        async with ipcsync.aconnect(coordinator.endpoint) as client:
            done = await client.event("async", recorder=True, engine="timeline")
            seen = await client.event("sent")
            engine.send(7)
            async with client.next({engine.kv: seen.at(1)}, {engine.done_at: done}, timeout=20) as replay:
                engine.step()
            assert replay.is_used
            await replay[engine.done_at].synchronize(DEADLINE_S)
            assert engine.target.holds(7)

    asyncio.run(main())


@pytest.mark.process
@pytest.mark.parametrize("has_records", [False, True])
def test_for_asyncio_a_point_that_is_lost_prevents_the_block_though_another_is_not_recorded_yet(
    engine: Engine, coordinator: ipcsync.Coordinator, peer: Peer, has_records: bool
) -> None:
    """Within it the launch would wait for that one, and the loop with it."""
    data = peer.call(remote.record_unfinished, coordinator.endpoint, "dying")

    async def main() -> None:
        async with ipcsync.aconnect(coordinator.endpoint) as client:
            done = await client.event("async", recorder=True, engine="timeline")
            waits = {ipcsync.GraphWait(): await client.point(data), engine.kv: (await client.event("sent")).at(1)}
            peer.kill()
            with pytest.raises(ipcsync.RecorderLost, match="'dying'"):
                async with client.next(waits, {engine.done_at: done} if has_records else {}, timeout=20):
                    pytest.fail("it is entered")
            assert done.generation == 0

    asyncio.run(main())
