"""The code takes the steps of the model of journal, effects and replies, in its order (restart_model)."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from ipcsync import _drivers
from ipcsync._wire import codec, messages
from ipcsync_coordinator.effects import Effects
from ipcsync_coordinator.journal import Journal, Transactions
from tests.models.restart_model import Model
from tests.models.restart_world import Scenario
from tests.unit.coordinator.coordinator_world import SENDER, World


@pytest.fixture
def world() -> Iterator[World]:
    one = World()
    yield one
    one.close()


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The stages of the model, as the code comes to them: A append, E an effect, D done."""
    found: list[str] = []
    for kind, name, stage in ((Journal, "append", "A"), (Effects, "_store", "E"), (Journal, "carried_out", "D")):
        call = getattr(kind, name)

        def noted(self: object, *arguments: object, call: object = call, stage: str = stage) -> object:
            result = call(self, *arguments)  # type: ignore[operator] # the method
            if stage != "E" or found[-1:] != ["E"]:
                found.append(stage)
            return result

        monkeypatch.setattr(kind, name, noted)
    return found


def _stages(*, is_request: bool) -> str:
    return Model(Scenario()).stages(is_request)


def test_a_request_takes_the_models_steps_in_its_order(world: World, steps: list[str]) -> None:
    def ask(number: int, body: messages.Message, token: bytes = b"") -> messages.Message:
        steps.clear()
        reply = world.dispatcher.handle(codec.encode_request(number, body, token, 0), SENDER, time.monotonic_ns())
        assert reply is not None
        steps.append("R")
        return codec.decode_reply(reply)[1]

    welcome = ask(1, messages.Hello(bytes(16), _drivers.name()))
    assert isinstance(welcome, messages.Welcome)
    assert "".join(steps) == _stages(is_request=True)
    opened = ask(2, messages.Open("one", recorder=True), welcome.token)
    assert isinstance(opened, messages.Attachment)
    assert "".join(steps) == _stages(is_request=True)
    ask(3, messages.Open("one"), welcome.token)  # changes nothing, and its reply is kept
    assert "".join(steps) == "ADR"
    ask(4, messages.ListEvents(), welcome.token)
    assert "".join(steps) == "R"
    ask(5, messages.Close(opened.slot, opened.incarnation + 1), welcome.token)  # refused
    assert "".join(steps) == "R"
    ask(6, messages.Close(opened.slot, opened.incarnation), welcome.token)
    assert "".join(steps) == _stages(is_request=True)
    ask(7, messages.Bye(), welcome.token)
    assert "".join(steps) == _stages(is_request=True)


def test_a_death_takes_the_models_steps_in_its_order(world: World, steps: list[str]) -> None:
    token = world.hello().token
    world.ask(messages.Open("one", recorder=True), token)
    entry = world.sessions.find(token)
    assert entry is not None
    steps.clear()
    world.handlers.lose(entry, "pidfd")
    assert "".join(steps) == _stages(is_request=False)


def test_what_a_slot_begins_with_is_read_before_the_record_and_stands_in_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = world.hello().token
    world.board.slot(0).publish(7)
    world.ask(messages.Open("one", recorder=True), token)
    record = world.transactions.journal.read()[0][-1]
    assert [(slot.index, slot.base) for slot in record.slots] == [(0, 7)]
    assert isinstance(world.transactions, Transactions)
