"""Two sessions' life over a coordinator that is killed at a step, and the one that goes on from its journal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from msgspec.structs import asdict

from ipcsync import _drivers
from ipcsync._board import BROKEN, CLOSED, EXPIRED, FREE, LIVE, OPEN
from ipcsync._wire import codec, messages
from ipcsync._wire.messages import Message
from ipcsync_coordinator import journal
from ipcsync_coordinator.effects import Effects
from ipcsync_coordinator.journal import Journal, Transactions
from ipcsync_coordinator.state import SessionTable
from tests.unit.coordinator.coordinator_world import SENDER, World

STATES = {"free": FREE, "open": OPEN, "broken": BROKEN, "closed": CLOSED, "kept": BROKEN}
_LINES = {"live": LIVE, "expired": EXPIRED, "closed": EXPIRED}


class Killed(BaseException):
    """The coordinator was killed here."""


class Steps:
    """Kills at the `at`-th step of a coordinator; afterwards nothing of it does anything any more."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.at = self.count = 0
        self.is_dead = False
        for kind, name, is_before in (
            (Transactions, "commit", True),
            (Journal, "_write", False),
            (Journal, "append", False),
            (Effects, "_store", True),
            (Effects, "_store", False),
            (Journal, "carried_out", True),
            (Journal, "_compact", True),
            (Journal, "carried_out", False),
            (SessionTable, "keep", False),
        ):
            patch.setattr(kind, name, self._counted(getattr(kind, name), is_before))
        patch.setattr(Journal, "end_request", self._unless_dead(Journal.end_request))

    def _counted(self, call: Callable[..., Any], is_before: bool) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            if is_before:
                self._step()
            result = call(*arguments, **named)
            if not is_before:
                self._step()
            return result

        return counted

    def _unless_dead(self, call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: None if self.is_dead else call(*arguments)

    def _step(self) -> None:
        self.count += 1
        if self.is_dead or self.count == self.at:
            self.is_dead = True
            raise Killed


class Scene:
    """Two sessions that do what sessions do, one request after the other, over coordinators that die meanwhile."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self.world = World()
        self.restarts = 0
        self.tokens: dict[str, bytes] = {}
        self.serials: dict[int, str] = {}
        self.replies: list[object] = []
        self._ids = iter(range(1, 1000))

    def ask(self, who: str, body: Message) -> Any:
        """One request, sent again to the next coordinator if this one dies of it."""
        frame = codec.encode_request(next(self._ids), body, self.tokens.get(who, b""), 0)

        def handle() -> bytes | None:
            return self.world.dispatcher.handle(frame, SENDER, time.monotonic_ns())

        reply = self._survive(handle)
        assert reply is not None
        _, answer = codec.decode_reply(reply)
        self.replies.append(self._plain(answer))
        assert self._survive(handle) == reply, "a request that comes again is not done again"
        return answer

    def _survive(self, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except Killed:
            self.restart()
            return act()

    def restart(self) -> None:
        self.restarts += 1
        self._steps.is_dead, self._steps.at = False, 0
        self.world.begin(self.world.events.held())
        assert self.world.differing == []
        self.check()

    def hello(self, who: str) -> None:
        welcome = self.ask(who, messages.Hello(who.encode().ljust(16), _drivers.name(), who))
        self.tokens[who], self.serials[welcome.serial] = welcome.token, who
        self.world.board.session(welcome.serial & 0xFFFF).shows_end(17)  # as a client does; here it has no lock

    def die(self, who: str) -> None:
        entry = self.world.sessions.find(self.tokens[who])
        if entry is not None:
            self._survive(lambda: self._lose(who))

    def _lose(self, who: str) -> None:
        entry = self.world.sessions.find(self.tokens[who])
        if entry is not None:
            self.world.handlers.lose(entry, "pidfd")
            self.world.handlers.bury(entry)

    def fall_silent(self, who: str) -> None:
        def expire() -> None:
            entry = self.world.sessions.find(self.tokens[who])
            assert entry is not None
            if entry.state == "live":
                entry.is_ready = True
                self.world.handlers.lose(entry, "ttl")

        self._survive(expire)

    def _plain(self, answer: Message) -> object:
        if isinstance(answer, messages.Attachment):
            return "attachment", answer.name, answer.incarnation, answer.base, answer.recorder, len(answer.handles)
        return "failure" if isinstance(answer, messages.Failure) else type(answer).__name__

    def state(self) -> object:
        """What sessions and slots are like, by names."""
        registry = self.world.registry
        slots = sorted(
            (
                slot.name,
                slot.state,
                slot.is_drained,
                slot.recorder.name if slot.recorder else "",
                sorted(self.serials[serial] for serial in slot.active),
                sorted(self.serials[serial] for serial in slot.draining),
            )
            for slot in registry.slots.values()
            if slot.state != "free"
        )
        sessions = sorted(
            (session.name, session.state, len(session.attached)) for session in registry.sessions.values()
        )
        return slots, sessions, registry.streams, self.replies

    def check(self) -> None:
        """Journal, registry, board and CUDA events agree."""
        world = self.world
        for slot in world.registry.slots.values():
            line = world.board.slot(slot.index)
            assert (line.state, line.incarnation) == (STATES[slot.state], slot.incarnation)
            assert slot.state != "broken" or line.watermark == slot.base, "nothing is ever complete here"
        for session in world.registry.sessions.values():
            assert world.board.session(session.line).state == _LINES[session.state]
        used = {serial for slot in world.registry.slots.values() for serial in slot.ring}
        spare = {serial for serials in world.pool._spare.values() for serial in serials}
        assert not used & spare
        probes = {shared.serial for shared in world.pool._probes.values()}
        assert used | spare | probes == {shared.serial for shared in world.events.held()}
        read, is_carried_out = Journal(world.files, journal.Record).read()
        assert is_carried_out
        held = {
            slot.index
            for slot in world.registry.slots.values()
            if slot.state != "free"
            and slot.engine == "timeline"
            and (slot.state in ("broken", "kept") or slot.is_drained)
        }
        assert set(world.effects.releaser._held) == held
        found = _folded(read)
        assert found == _folded([journal.whole(world.registry, world.sessions)])

    def close(self) -> None:
        self.world.close()


def _folded(read: list[journal.Record]) -> object:
    """What records come to, but for the replies: refusals are not in the journal."""
    slots: dict[int, object] = {}
    holders: dict[int, dict[int, str]] = {}
    sessions: dict[int, object] = {}
    for record in read:
        for slot in record.slots:
            row = asdict(slot) | {"recorder": slot.recorder and asdict(slot.recorder)}
            slots[slot.index] = {name: value for name, value in row.items() if name not in ("active", "draining")}
            holders[slot.index] = dict.fromkeys(slot.active, "active")
            holders[slot.index] |= dict.fromkeys(slot.draining, "draining")
        for each in record.attachments:
            holders[each.slot][each.serial] = each.state
        for one in record.sessions:
            sessions[one.serial] = asdict(one) | {"forgotten": 0}
            if one.state == "gone":
                del sessions[one.serial]
    there = {
        index: {serial: state for serial, state in states.items() if state and serial in sessions}
        for index, states in holders.items()
    }
    return slots, there, sessions, read[-1].count if read else 0


def _play(scene: Scene) -> None:
    """Everything that changes something, twice over: the slots are used again."""
    for turn in range(2):
        for who in ("writer", "reader"):
            scene.hello(who)
            scene.ask(who, messages.Ready())
        unnamed = scene.ask("writer", messages.Open("", recorder=True, engine="timeline"))
        scene.ask("writer", messages.Close(unnamed.slot, unnamed.incarnation))
        made = scene.ask("writer", messages.Open("made", recorder=True, engine="event", depth=2))
        scene.ask("reader", messages.Open("made"))
        scene.ask("reader", messages.Open("made", recorder=True))  # refused
        ahead = scene.ask("writer", messages.Open("ahead", recorder=True, engine="timeline"))
        scene.ask("reader", messages.Attach(ahead.slot, ahead.incarnation))
        scene.ask("reader", messages.OpenStream("decode", priority=-1))
        scene.ask("reader", messages.Close(made.slot, made.incarnation, released=False))
        scene.ask("reader", messages.Close(made.slot, made.incarnation))
        scene.ask("reader", messages.Close(made.slot, made.incarnation))  # twice is nothing
        scene.world.board.slot(ahead.slot).publish(ahead.base + 1)
        scene.ask("writer", messages.Break(ahead.slot, ahead.incarnation))
        if turn:
            scene.fall_silent("writer")
            scene.ask("writer", messages.Close(made.slot, made.incarnation))
        scene.die("writer")
        scene.ask("reader", messages.Bye())
        scene.check()


def count_and_state(steps: Steps) -> tuple[int, object]:
    scene = Scene(steps)
    try:
        _play(scene)
        return steps.count, scene.state()
    finally:
        scene.close()


def die_at_each(steps: Steps, ats: Iterable[int], undisturbed: object) -> None:
    for at in ats:
        steps.count, steps.at = 0, at
        scene = Scene(steps)
        try:
            _play(scene)
            assert scene.restarts == 1, f"killed at step {at}"
            assert scene.state() == undisturbed, f"killed at step {at}"
        finally:
            scene.close()
