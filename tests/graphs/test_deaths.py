"""Rows 64, 65 and 73: who dies, closes, forks or is refused amid a replay, and what the others see."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

import ipcsync
from ipcsync._engines import queued
from ipcsync._wire.codec import pack, unpack
from ipcsync.client.graphs import lane_of
from ipcsync.testing import Memory, StreamGate
from ipcsync.typing import EngineName
from tests.faults import actions
from tests.faults.fixtures import Blocked
from tests.graphs import actions as do
from tests.graphs.layers import call, captured, finish
from tests.graphs.stage import Stage
from tests.kit import remote
from tests.kit.driver_functions import held_up
from tests.kit.failing import Failing
from tests.kit.peer import Peer
from tests.kit.scripts import run
from tests.kit.until import DEADLINE_S, until

pytestmark = [pytest.mark.driver, pytest.mark.keeper]

NewPeer = Callable[..., Peer]
LAYERS = 2
CALLS: list[tuple[EngineName, int]] = [("event", n) for n in range(6)] + [("timeline", n) for n in range(4)]
"""The calls of the driver's batches that a replay of two layers has."""


class Pair:
    """A process that sends, one that replays, and one that is told."""

    def __init__(self, endpoint: str, new_peer: NewPeer, engine: EngineName, **env: str) -> None:
        self._endpoint, self._new_peer, self._engine, self._env = endpoint, new_peer, engine, env
        self._uses = 0
        self.third = new_peer()
        self.third.call(do.connect, endpoint, "third")
        self.renew_replaying()

    def renew_replaying(self) -> None:
        self._uses += 1
        self.replaying = self._new_peer(**self._env)
        self.replaying.call(do.connect, self._endpoint, "replaying")
        self._handles = self.replaying.call(do.build, LAYERS, f"done/{self._uses}", self._engine)
        self.renew_sending()

    def renew_sending(self) -> None:
        self._uses += 1
        self.sending = self._new_peer()
        self.sending.call(do.connect, self._endpoint, "sending")
        self.sending.call(do.open_sources, self._handles, f"layers/{self._uses}")

    def open_anew(self) -> None:
        self._uses += 1
        self.replaying.call(do.open_anew, f"done/{self._uses}", self._engine)

    def expect(self, value: int) -> None:
        """A replay is right from end to end."""
        points = self.replaying.call(do.replay, self.sending.call(do.send, value))
        assert [self.third.call(do.outcome, point)[0] for point in points] == ["complete"] * LAYERS
        assert self.replaying.call(do.found) == [value] * LAYERS


@pytest.fixture
def pair(coordinator: ipcsync.Coordinator, new_peer: NewPeer, engine: EngineName) -> Pair:
    return Pair(coordinator.endpoint, new_peer, engine)


def test_row_65_the_recorder_is_killed_and_the_graph_goes_on_with_all_behind_it_lost(pair: Pair) -> None:
    pair.expect(1)
    pair.sending.call(do.hold)
    points = pair.replaying.call(do.replay, pair.sending.call(do.send, 2))
    pid = pair.sending.pid
    pair.sending.kill()
    for peer in (pair.replaying, pair.third):
        assert {peer.call(do.outcome, point) for point in points} == {("RecorderLost", "behind", pid)}
    pair.replaying.call(do.found)  # the graph runs through
    assert pair.replaying.call(do.record_behind, "ordinary") == "behind"
    pair.renew_sending()
    pair.replaying.call(do.resume)
    assert pair.replaying.call(do.record_behind, "again") == "again"
    pair.open_anew()
    pair.expect(3)
    pair.expect(4)


def test_row_65_the_recorder_is_killed_between_two_layers_and_only_the_later_record_is_lost(pair: Pair) -> None:
    pair.expect(1)
    points = pair.sending.call(do.send, 2, 0)
    pair.sending.call(do.hold)
    points = pair.replaying.call(do.replay, points + pair.sending.call(do.send, 2, 1))
    for peer in (pair.replaying, pair.third):
        assert peer.call(do.outcome, points[0])[0] == "complete"
    until(lambda: pair.replaying.call(do.settle) != 3, "the first one is settled")
    pair.sending.kill()
    assert pair.third.call(do.outcome, points[1]) == ("RecorderLost", "behind", pair.sending.pid)


@pytest.mark.parametrize(("engine", "number"), CALLS)
def test_row_65_the_replaying_process_is_killed_at_each_step_and_no_word_of_it_counts(pair: Pair, number: int) -> None:
    pair.expect(1)
    pair.third.call(do.open_seen, "done/1")
    pair.sending.call(do.hold)
    points = pair.sending.call(do.send, 2)
    pair.replaying.begin(do.replay, points, number)
    until(lambda: pair.replaying.wait(0), "it dies")
    pair.sending.call(do.let_go)
    assert pair.third.call(do.outcome, points[1])[0] == "complete"
    assert pair.third.call(do.outcome_of, 2)[0] == "complete"
    for generation in (3, 4):
        assert pair.third.call(do.outcome_of, generation) == ("RecorderLost", "died", pair.replaying.pid)
    pair.renew_replaying()
    pair.expect(3)


@pytest.mark.parametrize("queues", ["1", "8", "32"])
def test_replays_are_right_over_few_hardware_queues(
    coordinator: ipcsync.Coordinator, new_peer: NewPeer, engine: EngineName, queues: str
) -> None:
    env = {"IPCSYNC_HOST_QUEUES": queues, "CUDA_DEVICE_MAX_CONNECTIONS": queues}
    pair = Pair(coordinator.endpoint, new_peer, engine, **env)
    pair.expect(1)
    for value in (2, 3):
        pair.sending.call(do.hold)
        points = [pair.replaying.call(do.replay, pair.sending.call(do.send, value)) for _ in range(3)][-1]
        pair.sending.call(do.let_go)
        assert [pair.third.call(do.outcome, point)[0] for point in points] == ["complete"] * LAYERS
        assert pair.replaying.call(do.found) == [value] * LAYERS


def test_row_64_a_replay_whose_records_are_refused_and_the_next_is_right(pair: Pair) -> None:
    pair.expect(1)
    points = pair.sending.call(do.send, 2)
    assert pair.replaying.call(do.replay_and_close, points) == "ClientClosed"
    assert pair.replaying.call(do.found) == [2, 2]
    pair.replaying.call(do.connect, pair._endpoint, "again")
    pair.open_anew()
    pair.expect(3)


def test_a_child_that_is_forked_within_the_block_is_refused_and_the_parents_replay_is_right(pair: Pair) -> None:
    pair.expect(1)
    points = pair.sending.call(do.send, 2)
    assert pair.replaying.call(do.replay_and_fork, points) == "ForkedProcessError"
    assert pair.replaying.call(do.found) == [2, 2]
    pair.expect(3)


def test_a_child_that_is_forked_within_the_block_may_end_there(pair: Pair) -> None:
    assert pair.replaying.call(do.replay_and_exit, pair.sending.call(do.send, 2)) == 7
    pair.expect(3)


def test_row_73_a_lost_coordinator_frees_the_graph(
    new_coordinator: Callable[..., ipcsync.Coordinator], new_peer: NewPeer, engine: EngineName
) -> None:
    first, second = new_coordinator(keeper=False), new_coordinator()
    pair = Pair(first.endpoint, new_peer, engine)
    pair.expect(1)
    pair.sending.call(do.hold)
    pair.replaying.call(do.replay, pair.sending.call(do.send, 2))
    os.kill(first.pid, signal.SIGKILL)
    pair.replaying.call(do.found)
    pair._endpoint = second.endpoint
    pair.third.call(do.connect, second.endpoint, "third")
    pair.replaying.call(do.connect, second.endpoint, "again")
    pair.renew_sending()
    pair.replaying.call(do.resume)
    pair.open_anew()
    pair.expect(3)


def test_row_73_a_lane_is_past_a_point_of_a_lost_coordinator_once_it_is_past_what_comes_before(
    one: Stage, new_coordinator: Callable[..., ipcsync.Coordinator]
) -> None:
    other = new_coordinator(keeper=False)
    with (
        ipcsync.connect(other.endpoint) as theirs,
        ipcsync.connect(other.endpoint) as client,
        StreamGate(stream := ipcsync.Stream()),
        StreamGate(one.sender.stream) as gate,
    ):
        theirs.event("e", recorder=True, engine="timeline").record(stream)
        seen = client.event("e")
        core = seen._engine
        one.run(1)
        with one.replay([seen.at(1)]):
            one.layers.launch()
        os.kill(other.pid, signal.SIGKILL)
        until(lambda: not core.guard.coordinator_is_alive(), "its death is known")
        until(core.try_release, "nothing of it is used any more")
        feeder = lane_of(one.layers.stream._handle, 0)[0].feeder_id
        (wait,) = [each for each in queued.of(None) if each.stream == feeder and "'e'" in each.label]
        for _ in range(300):
            assert not wait.view.has_passed(wait.stream)
        gate.open()
        until(lambda: wait.view.has_passed(wait.stream), "the lane is past it")


def test_a_coordinator_that_its_keeper_replaces_amid_a_replay_is_not_seen(
    new_coordinator: Callable[..., ipcsync.Coordinator], new_peer: NewPeer, engine: EngineName
) -> None:
    coordinator = new_coordinator(keeper=True)
    pair = Pair(coordinator.endpoint, new_peer, engine)
    pair.expect(1)
    pair.sending.call(do.hold)
    points = pair.replaying.call(do.replay, pair.sending.call(do.send, 2))
    with ipcsync.connect(coordinator.endpoint) as client:
        starts, pid = client.stats()["starts"], client.stats()["pid"]
        os.kill(pid, signal.SIGKILL)
        until(lambda: client.stats(timeout=DEADLINE_S)["starts"] > starts, "another one serves")
    pair.sending.call(do.let_go)
    assert [pair.third.call(do.outcome, point)[0] for point in points] == ["complete"] * LAYERS
    pair.expect(3)


@pytest.mark.skipif(ipcsync.driver_name() == "cuda", reason="a GPU's driver may crash at a handle that is gone")
def test_a_process_whose_context_is_reset_behind_a_replay_closes_its_clients_and_ends(
    coordinator: ipcsync.Coordinator, engine: EngineName
) -> None:
    run(
        """
        import os, ipcsync
        from ipcsync.testing import StreamGate
        from tests.graphs.layers import call, finish
        from tests.graphs.stage import Stage

        clients = []

        def connect(name):
            clients.append(ipcsync.connect(os.environ["ENDPOINT"], name=name))
            return clients[-1]

        stage = Stage(connect, os.environ["ENGINE"])
        with StreamGate(stage.sender.stream):
            stage.run(1)
        finish(stage.layers.stream)
        call("cuDevicePrimaryCtxReset", call("cuDeviceGet", 0))
        for client in clients:
            client.close()
        """,
        ENDPOINT=coordinator.endpoint,
        ENGINE=engine,
    )


def test_a_point_of_a_use_that_was_over_before_is_complete_or_lost_for_a_replay_too(
    client: ipcsync.Client, coordinator: ipcsync.Coordinator, peer: Peer, engine: EngineName
) -> None:
    peer.call(actions.open_recorder, coordinator.endpoint, "ckpt", engine)
    data = peer.call(actions.record_complete, "ckpt")
    peer.kill()
    until(lambda: client.stats()["pool_in_use"] == 0, "no session has the slot any more")
    stream, wait, source, target = ipcsync.Stream(), ipcsync.GraphWait(), Memory(8), Memory(8)
    graph = captured(stream, lambda: wait.capture(stream), lambda: target.copy_from(source, stream))
    source.write(bytes([5]) * 8)
    point = client.point(data)
    with client.replay({wait: point}, stream=stream, timeout=20):
        call("cuGraphLaunch", graph, stream._handle)
    finish(stream)
    assert target.holds(5)
    lost = client.point(pack(unpack(data)._replace(generation=2)))
    with pytest.raises(ipcsync.RecorderLost), client.replay({wait: lost}, stream=stream, timeout=20):
        pass


def test_a_replay_may_come_before_all_events_of_its_process(coordinator: ipcsync.Coordinator, peer: Peer) -> None:
    peer.call(do.connect, coordinator.endpoint, "first")
    peer.call(do.build_layers, LAYERS)
    assert peer.call(do.replay_without_points) == [0] * LAYERS


def test_a_replay_that_waits_for_the_turn_of_a_points_event_ends_with_the_recorder(
    client: ipcsync.Client, coordinator: ipcsync.Coordinator, peer: Peer
) -> None:
    stream, wait = ipcsync.Stream(), ipcsync.GraphWait()
    captured(stream, lambda: wait.capture(stream))
    peer.call(actions.open_recorder, coordinator.endpoint, "e", "timeline")
    peer.call(actions.record_complete, "e")
    peer.call(remote.hold)
    point = client.point(peer.call(actions.record, "e"))
    client.event("e").at(1).synchronize(10)  # only the second one is lost
    with held_up("cuStreamWaitValue64") as held:
        holds = Failing(lambda: point.wait(ipcsync.Stream()))
        held.wait()
        entering = Blocked(client.replay({wait: point}, stream=stream).__enter__)
        peer.call(actions.be_marked_as_dead)
        assert isinstance(entering.outcome(), ipcsync.RecorderLost)
    assert isinstance(holds.raised(), ipcsync.RecorderLost)
    peer.call(remote.let_go)
    finish(stream)


def test_a_replay_that_waits_for_the_turn_of_a_good_points_event_is_not_behind_a_later_lost_one(
    client: ipcsync.Client, new_client: Callable[[], ipcsync.Client]
) -> None:
    theirs, event = new_client(), client.event("e", recorder=True, engine="timeline")
    first, second, launch, wait = ipcsync.Stream(), ipcsync.Stream(), ipcsync.Stream(), ipcsync.GraphWait()
    captured(launch, lambda: wait.capture(launch))
    theirs.event("theirs", recorder=True, engine="timeline")
    client.event("theirs")._engine.wait(1, second, None, True)
    with StreamGate(first):
        good, lost = event.record(first), event.record(second)
        theirs.close()
        with pytest.raises(ipcsync.RecorderLost):
            lost.synchronize(10)
        with held_up("cuStreamWaitValue64") as held:
            holds = Failing(lambda: good.wait(ipcsync.Stream()))
            held.wait()
            with pytest.raises(ipcsync.WaitTimeout, match="another thread's call"):
                client.replay({wait: good}, stream=launch, timeout=0.2).__enter__()
        assert holds.raised() is None
        with client.replay({wait: good}, stream=launch, timeout=10):
            pass
    finish(launch)
    client.resume(second, 10)
