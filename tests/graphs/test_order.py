"""What is queued around a launch, operation by operation, is what `tests/faults/graph_model.py` walks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import ipcsync
from ipcsync.client.graphs._lane import Lane, lane_of
from ipcsync.client.graphs._words import Batch
from ipcsync.testing import StreamGate
from tests.faults import graph_model as model
from tests.graphs.layers import Layers, Sender
from tests.kit.until import DEADLINE_S

NewClient = Callable[..., ipcsync.Client]
_WAIT, _FIELDS = 4, 6


class Log:
    """The calls that put something on L, F or D, as in the model. An exception is raised at one of them."""

    def __init__(self, patch: pytest.MonkeyPatch, lane: Lane, layers: Layers, base: int) -> None:
        self.calls: list[tuple[str, list[model.Op]]] = []
        self.fails_at = -1
        self._made = 0
        self._base = base
        self._streams = {
            int(layers.stream._handle): "L",
            lane.feeder.cuda_stream: "F",
            lane.drainer.cuda_stream: "D",
        }
        named = {"over": lane.over, "drained": lane.drained, "armed": lane.armed, "fed": lane.fed}
        self._names = {word.address: (name, 0) for name, word in named.items()}
        for number, (wait, record) in enumerate(zip(layers.waits, layers.records, strict=True)):
            self._names |= {wait._word.address: ("gate", number), record._word.address: ("tap", number)}
        put, record_on = Batch.put, ipcsync.SharedEvent.record
        log = self

        def noting_put(batch: Batch, stream: Any, ordinal: int, number: int) -> None:
            put(batch, stream, ordinal, number)
            fields = list(batch._fields)
            rows = [fields[at : at + 3] for at in range(0, len(fields), _FIELDS)]
            log._note(int(stream), [log._op(kind == _WAIT, word, value) for kind, word, value in rows])

        def noting_record(event: ipcsync.SharedEvent, stream: Any, **options: Any) -> ipcsync.Point:
            point = record_on(event, stream, **options)
            if event.name == "done":
                number, r = (point.generation - 1) % 2, (point.generation + 1) // 2
                log._note(stream.cuda_stream, [("record", number, r, (number, r))])
            return point

        patch.setattr(Batch, "put", noting_put)
        patch.setattr(ipcsync.SharedEvent, "record", noting_record)

    def _op(self, waits: bool, word: int, value: int) -> model.Op:
        if word in self._names:
            return "ge" if waits else "set", self._names[word], value
        generation = value - self._base  # of the sender's event
        return "ge", ("word", (generation - 1) % 2), (generation + 1) // 2

    def _note(self, stream: int, ops: list[model.Op]) -> None:
        if stream not in self._streams:
            return
        name = self._streams[stream]
        if self.calls and self.calls[-1][0] == name:
            self.calls[-1][1].extend(ops)
        else:
            self.calls.append((name, ops))
        self._made += 1
        if self._made == self.fails_at:
            raise KeyboardInterrupt

    def launches(self, r: int) -> None:
        """The graph of both layers is launched."""
        assert self.calls[-1][0] == "F"
        self.calls.append(("L", model.launch(r, model.BOTH, model.BOTH)[1]))


def _joined(host: model.Host) -> list[tuple[str, list[model.Op]]]:
    """The calls of a host, those in turn on one stream as one."""
    joined: list[tuple[str, list[model.Op]]] = []
    for stream, ops in host:
        if joined and joined[-1][0] == stream:
            joined[-1][1].extend(ops)
        else:
            joined.append((stream, list(ops)))
    return joined


class Stage:
    """Two layers, a sender held back so that each point is waited for, and the log."""

    def __init__(self, new_client: NewClient, patch: pytest.MonkeyPatch) -> None:
        self.client, self.layers = new_client(), Layers(2)
        self.sender = Sender(new_client(), self.layers)
        self.done = self.client.event("done", recorder=True, engine="timeline")
        self.gate = StreamGate(self.sender.stream)
        self.log = Log(patch, lane_of(self.layers.stream._handle, 0)[0], self.layers, self.sender.event._engine.base)

    def run(self, r: int, *, launches: bool = True) -> None:
        points = dict(zip(self.layers.waits, self.sender.send(r), strict=True))
        records = dict.fromkeys(self.layers.records, self.done)
        with self.client.replay(points, records, stream=self.layers.stream, timeout=20):
            if launches:
                self.layers.launch()
                self.log.launches(r)


@pytest.fixture
def stage(new_client: NewClient, monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(new_client, monkeypatch)


def test_the_order_is_the_models(stage: Stage) -> None:
    for r in (1, 2, 3):
        stage.run(r)
    expected = [call for r in (1, 2, 3) for call in model.bracket(r, model.BOTH, model.BOTH)]
    assert stage.log.calls == _joined(expected)
    stage.gate.open()
    stage.done.at(6).synchronize(DEADLINE_S)


_FEED = model.feed(1, model.BOTH)[1]
_GIVEN_UP = [model.end(1, model.BOTH, model.BOTH), model.drain(1, model.BOTH, records=False)]
_PREPARED = model.prepare(1, model.BOTH)
_OPENED = model.bracket(1, model.BOTH, model.BOTH)[:3]
_ENDED = [*_OPENED, model.end(1, model.BOTH, model.BOTH)]
_DRAIN = model.drain(1, model.BOTH)[1]
_FAILS: dict[int, model.Host] = {
    1: [_PREPARED, _PREPARED, model.CLOSE_F, *_GIVEN_UP],
    2: [_PREPARED, ("F", _FEED), model.CLOSE_F, *_GIVEN_UP],
    3: [
        *_ENDED,
        model.end(2, model.BOTH, model.BOTH, fed=1),
        ("D", [*model.drain(1, model.BOTH, records=False)[1][:-1], ("set", *model.DRAINED, 2)]),
    ],
    4: [*_ENDED, ("D", _DRAIN[:2]), model.drain(1, model.BOTH, records=False)],
    8: [*_ENDED, ("D", _DRAIN), model.drain(1, model.BOTH, records=False)],
}
"""By the call at which an exception comes, once it is made: what is queued in all."""


@pytest.mark.parametrize("number", _FAILS)
def test_the_order_behind_an_exception_is_the_models(stage: Stage, number: int) -> None:
    stage.log.fails_at = number
    with pytest.raises(KeyboardInterrupt):
        stage.run(1)
    assert stage.log.calls == _joined(_FAILS[number])
    stage.gate.open()
    stage.run(2)
    stage.done.latest.synchronize(DEADLINE_S)  # type: ignore[union-attr] # there is one
