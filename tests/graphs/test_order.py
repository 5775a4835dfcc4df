"""What is queued around a launch, operation by operation, is what `tests/models/graph_model.py` walks."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_uint64

import pytest

import ipcsync
from ipcsync._engines.core import Lane
from ipcsync.client.graphs import lane_of
from ipcsync.testing import StreamGate
from tests.graphs.layers import Layers, Sender
from tests.kit.driver_functions import REFUSED, Call, replaced
from tests.kit.until import DEADLINE_S
from tests.models import graph_model as model

NewClient = Callable[..., ipcsync.Client]
_WAITS, _WIDE, _FIELDS = (1, 4), (4, 5), 6  # CUstreamBatchMemOpType, CUstreamBatchMemOpParams


class Log:
    """The calls that put something on L, F or D, as in the model. The driver refuses one of them, done or not."""

    def __init__(self, lane: Lane, layers: Layers, base: int, done: ipcsync.SharedEvent) -> None:
        self.calls: list[tuple[str, list[model.Op]]] = []
        self.fails_at = -1
        self.is_made = True
        self._made = 0
        self._base = base
        self._brackets: int | None = None  # of an earlier stream that had this one's address
        self._done = done._engine
        self._streams = {
            int(layers.stream._handle): "L",
            lane.feeder.cuda_stream: "F",
            lane.drainer.cuda_stream: "D",
        }
        self._names = {address: (name, 0) for name, (_, address) in lane.words.items()}
        for number, (wait, record) in enumerate(zip(layers.waits, layers.records, strict=True)):
            self._names |= {wait._address: ("gate", number), record._address: ("tap", number)}

    def call(self, real: Call, stream: int, count: int, address: int, flags: int) -> int:
        """In place of cuStreamBatchMemOp."""
        self._made += 1
        is_refused = self._made == self.fails_at
        if self.is_made or not is_refused:
            real(stream, count, address, flags)
            fields = list((c_uint64 * (_FIELDS * count)).from_address(address))
            rows = [fields[at : at + 3] for at in range(0, len(fields), _FIELDS)]
            self._note(self._streams[stream], [op for row in rows for op in self._ops(*row)])
        return REFUSED if is_refused else 0

    def _ops(self, kind: int, word: int, value: int) -> list[model.Op]:
        if word == self._done._address:
            generation = value - self._done.base
            number, r = (generation - 1) % 2, (generation + 1) // 2
            return [("record", number, r, (number, r))]
        if word not in self._names:
            generation = value - self._base  # of the sender's event
            return [("ge", ("word", (generation - 1) % 2), (generation + 1) // 2)]
        what = "ge" if kind in _WAITS else "set"
        if kind in _WIDE and self._names[word][0] in ("gate", "tap"):  # two words
            return [(what, self._names[word], value & 0xFFFFFFFF), (what, self._names[word + 4], value >> 32)]
        if self._names[word][0] in ("gate", "tap"):
            return [(what, self._names[word], value)]
        if self._brackets is None:  # the first bracket is behind the last one of before
            self._brackets = value
        return [(what, self._names[word], value - self._brackets)]

    def _note(self, name: str, ops: list[model.Op]) -> None:
        if self.calls and self.calls[-1][0] == name:
            self.calls[-1][1].extend(ops)
        else:
            self.calls.append((name, ops))

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

    def __init__(self, new_client: NewClient) -> None:
        self.client, self.layers = new_client(), Layers(2)
        self.sender = Sender(new_client(), self.layers)
        self.done = self.client.event("done", recorder=True, engine="timeline")
        self.gate = StreamGate(self.sender.stream)
        lane, _ = lane_of(self.layers.stream._handle, 0)
        self.log = Log(lane, self.layers, self.sender.event._engine.base, self.done)
        self.step = 1

    def run(self, r: int) -> None:
        self.replay(r, self.sender.send(r))

    def replay(self, r: int, points: list[ipcsync.Point]) -> None:
        waits = dict(list(zip(self.layers.waits, points, strict=True))[:: self.step])
        records = dict.fromkeys(self.layers.records[:: self.step], self.done)
        replaying = self.client.replay(waits, records, stream=self.layers.stream, timeout=20)
        with replaced({"cuStreamBatchMemOp": self.log.call}), replaying:
            self.layers.launch()
            self.log.launches(r)


@pytest.fixture
def stage(new_client: NewClient) -> Stage:
    return Stage(new_client)


@pytest.mark.parametrize("step", [1, -1])
def test_the_order_is_the_models_however_the_layers_are_named(stage: Stage, step: int) -> None:
    stage.step = step
    for r in (1, 2, 3):
        stage.run(r)
    expected = [call for r in (1, 2, 3) for call in model.bracket(r, model.BOTH, model.BOTH)]
    assert stage.log.calls == _joined(expected)
    stage.gate.open()
    stage.done.at(6).synchronize(DEADLINE_S)


def test_gates_of_one_point_are_opened_behind_one_wait(stage: Stage) -> None:
    point = stage.sender.send(1)[1]
    stage.replay(1, [point, point])
    opened = [("set", ("gate", gate), 1) for gate in model.BOTH]
    over, waited = ("ge", *model.OVER, 0), ("ge", ("word", 1), 1)
    assert stage.log.calls[1] == ("F", [over, waited, *opened, ("set", *model.FED, 1)])
    stage.gate.open()
    stage.done.at(2).synchronize(DEADLINE_S)


def test_who_has_the_words_next_waits_for_the_number_under_which_they_were_given_back(stage: Stage) -> None:
    over, awaited = lane_of(stage.layers.stream._handle, 0)[0].words["over"][1], list[int]()

    def note(real: Call, stream: int, count: int, address: int, flags: int) -> int:
        fields = list((c_uint64 * (_FIELDS * count)).from_address(address))
        awaited.extend(fields[at + 2] for at in range(0, len(fields), _FIELDS) if fields[at + 1] == over)
        return int(real(stream, count, address, flags))

    stage.log.fails_at = 3  # the end, which is repeated under the next number
    with pytest.raises(ipcsync.DriverError):
        stage.run(1)
    records, other = dict.fromkeys(stage.layers.records, stage.done), ipcsync.Stream()
    with replaced({"cuStreamBatchMemOp": note}), stage.client.replay({}, records, stream=other, timeout=20) as replay:
        stage.layers.launch(stage.layers.capture(0, 1, waits=False), other)
    stage.gate.open()
    replay[stage.layers.records[1]].synchronize(DEADLINE_S)
    assert stage.log._brackets is not None
    assert set(awaited) == {stage.log._brackets + 2}


_FEED = model.feed(1, model.BOTH)[1]
_GIVEN_UP = [model.end(1, model.BOTH, model.BOTH), model.drain(1, records=False)]
_PREPARED = model.prepare(1, model.BOTH)
_OPENED = model.bracket(1, model.BOTH, model.BOTH)[:3]
_ENDED = [*_OPENED, model.end(1, model.BOTH, model.BOTH)]
_ENDED_ANEW = [
    model.end(2, model.BOTH, model.BOTH, fed=1),
    model.drain(2, records=False),
]
_BY_REFUSED: dict[tuple[int, bool], model.Host] = {
    (1, False): [_PREPARED, model.CLOSE_F, *_GIVEN_UP],
    (1, True): [_PREPARED, _PREPARED, model.CLOSE_F, *_GIVEN_UP],
    (2, False): [_PREPARED, model.CLOSE_F, *_GIVEN_UP],
    (2, True): [_PREPARED, ("F", _FEED), model.CLOSE_F, *_GIVEN_UP],
    (3, False): [*_OPENED, *_ENDED_ANEW],
    (3, True): [*_ENDED, *_ENDED_ANEW],
    (4, False): [*_ENDED, model.drain(1, records=False)],
    (4, True): [*_ENDED, model.drain(1, model.BOTH), model.drain(1, records=False)],
}
"""By the call that the driver refuses, and whether it does it all the same: what is queued in all."""


@pytest.mark.parametrize(("number", "is_made"), _BY_REFUSED)
def test_the_order_behind_a_refused_call_is_the_models(stage: Stage, number: int, is_made: bool) -> None:
    stage.log.fails_at, stage.log.is_made = number, is_made
    with pytest.raises(ipcsync.DriverError):
        stage.run(1)
    assert stage.log.calls == _joined(_BY_REFUSED[number, is_made])
    stage.log.fails_at = -1
    stage.gate.open()
    stage.run(2)
    stage.done.latest.synchronize(DEADLINE_S)  # type: ignore[union-attr] # there is one


@pytest.mark.parametrize("number", [3, 4])  # the end, and the drain behind it
def test_an_end_that_another_call_could_not_make_sure_of_has_the_next_number(stage: Stage, number: int) -> None:
    stage.log.fails_at, stage.log.is_made = number, True
    waits = dict(zip(stage.layers.waits, stage.sender.send(1), strict=True))
    replaying = stage.client.replay(waits, dict.fromkeys(stage.layers.records, stage.done), stream=stage.layers.stream)
    with replaced({"cuStreamBatchMemOp": stage.log.call}), replaying:
        stage.layers.launch()
        stage.log.launches(1)
        with pytest.raises(ipcsync.DriverError):
            replaying._end_from_outside()
    drained = [*model.drain(1, model.BOTH)[1][:-1], ("set", *model.DRAINED, 2)]
    dropped = [model.drain(1, records=False)] * (number == 4)
    assert stage.log.calls == _joined([*_ENDED, *dropped, _ENDED_ANEW[0], ("D", drained)])
    stage.gate.open()
    stage.done.at(2).synchronize(DEADLINE_S)
