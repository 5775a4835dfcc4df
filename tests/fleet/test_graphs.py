"""Replays of graphs that wait for points of another node, and whose records another node waits for."""

from __future__ import annotations

import signal

import pytest

import ipcsync
from ipcsync.testing import StreamGate
from tests.fleet.nodes import Node
from tests.graphs.layers import Layers, finish
from tests.kit.until import DEADLINE_S

pytestmark = [pytest.mark.process, pytest.mark.driver]


def test_a_replay_waits_for_points_of_another_node_which_waits_for_its_records(pair: tuple[Node, Node]) -> None:
    a, b = pair[0].client(), pair[1].client()
    layers, sending = Layers(2), ipcsync.Stream()
    sent, done = a.event("sent", recorder=True, engine="timeline"), b.event("done", recorder=True, engine="timeline")
    for value in (1, 2, 3):
        with StreamGate(sending):
            points = []
            for source in layers.source:
                source.fill(value, sending)
                points.append(b.point(bytes(sent.record(sending))))
            waits, records = dict(zip(layers.waits, points, strict=True)), dict.fromkeys(layers.records, done)
            with b.replay(waits, records, stream=layers.stream, timeout=DEADLINE_S) as replay:
                layers.launch()
            assert not replay[layers.records[0]].query()
        there = a.point(bytes(replay[layers.records[1]]))
        assert there.node == "b"
        there.synchronize(DEADLINE_S)
        assert layers.found() == [value, value]


def test_the_bridge_to_the_other_node_dies_and_the_graph_goes_on(pair: tuple[Node, Node]) -> None:
    b = pair[1].client()
    layers, sending = Layers(1), ipcsync.Stream()
    theirs = pair[0].client()
    sent, done = (
        theirs.event("sent", recorder=True, engine="timeline"),
        b.event("done", recorder=True, engine="timeline"),
    )
    with StreamGate(sending):
        point = b.point(bytes(sent.record(sending)))
        waits, records = {layers.waits[0]: point}, {layers.records[0]: done}
        with b.replay(waits, records, stream=layers.stream, timeout=DEADLINE_S) as replay:
            layers.launch()
        pair[1].end_bridge(signal.SIGKILL)
        finish(layers.stream)  # the graph runs through
    with pytest.raises(ipcsync.RecorderLost) as lost:
        replay[layers.records[0]].synchronize(DEADLINE_S)
    assert lost.value.cause == "behind"
