"""The names of the fleet as one node claims, keeps and frees them, over stores and networks that fail."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("nats", reason="nats-py is not installed: pip install -e '.[fleet]'")

from ipcsync._wire.messages import Want
from ipcsync.errors import FleetUnavailable, NodeNameTaken, RecorderTaken
from ipcsync_bridge import store
from ipcsync_bridge.store import Identity, Names, Nodes
from ipcsync_bridge.transport import Conflict, Unavailable
from ipcsync_bridge.wire import Counters

_WANT = Want(1, "claim", 0, name="x", slot=3, incarnation=1)


class _Store:
    """The keys of a store that may be silent."""

    def __init__(self) -> None:
        self.held: dict[str, tuple[bytes, int]] = {}
        self.is_silent = False
        self._revision = 0

    async def read(self, key: str, _timeout: float) -> tuple[bytes, int]:
        return self.held.get(key, (b"", 0))

    async def keys(self, prefix: str, _timeout: float) -> list[str]:
        return [key for key in self.held if key.startswith(prefix)]

    async def cas(self, key: str, value: bytes | None, _revision: int, _timeout: float) -> int:
        if self.is_silent:
            raise Unavailable("the store is silent")
        self._revision += 1
        if value is None:
            self.held.pop(key, None)
        else:
            self.held[key] = value, self._revision
        return self._revision


async def _nobody(_node: str, _timeout: float) -> bytes | None:
    return None


def _nodes(store: Any, node: str, owner: bytes, epoch: bytes, ttl_s: float = 1.0, is_there: Any = _nobody) -> Nodes:
    return Nodes(store, Identity(node, owner, epoch), ttl_s, is_there)


def _names(store: Any, node: str, ttl_s: float, is_there: Any = _nobody, counters: Counters | None = None) -> Names:
    owner, epoch = {"a": (b"o", b"e"), "b": (b"p", b"f")}[node]
    nodes = _nodes(store, node, owner * 16, epoch * 16, ttl_s, is_there)
    return Names(store, nodes, counters or Counters())


async def _keeps(names: Names) -> bool:
    """As a bridge looks at its keys: whether the node's name is still its own."""
    is_own = await names.nodes.keeps()
    await names.keep()
    return is_own


def test_a_name_that_could_not_be_freed_is_freed_later_and_never_claimed_again() -> None:
    async def scenario() -> None:
        store: Any = _Store()
        names = _names(store, "a", 1.0)
        await names.nodes.take()
        store.held["names.eA"] = names._claim_of((3, 1)), 7
        names.claims[3, 1] = "names.eA", 7
        store.is_silent = True
        await names.release((3, 1))
        assert "names.eA" in store.held
        store.is_silent = False
        assert await _keeps(names)
        assert "names.eA" not in store.held
        assert names.claims == {}

    asyncio.run(scenario())


class _Late(_Store):
    """Writes that time out are kept, for the test to apply them; a revision that is not the present one refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.late: tuple[str, bytes | None, int] | None = None
        self.last: dict[str, int] = {}  # a deletion has a revision too

    async def cas(self, key: str, value: bytes | None, revision: int, timeout: float) -> int:
        if self.is_silent:
            self.late = key, value, revision
            raise Unavailable("the store is silent")
        if revision != self.last.get(key, 0):
            raise Conflict("another revision")
        self.last[key] = await super().cas(key, value, revision, timeout)
        return self.last[key]

    async def apply(self) -> None:
        assert self.late is not None
        await self.cas(*self.late, 1.0)

    async def answer_again(self, is_applied: bool) -> None:
        """As after a pause; `is_applied`: the late write comes first."""
        self.is_silent = False
        if is_applied:
            await self.apply()

    def lose(self, key: str) -> None:
        """Forget a key as if it had never been written."""
        del self.held[key], self.last[key]


async def _assert_is_undone(names: Names, store: _Late) -> None:
    assert list(store.held) == ["nodes.a"]
    assert names.claims == {}
    with pytest.raises(Conflict):
        await store.apply()


@pytest.mark.parametrize("is_applied", [True, False])
def test_a_claim_that_timed_out_is_undone_and_cannot_be_applied_later(is_applied: bool) -> None:
    async def scenario() -> None:
        store: Any = _Late()
        names = _names(store, "a", 1.0)
        await names.nodes.take()
        store.is_silent = True
        with pytest.raises(FleetUnavailable):
            await names.claim(Want(1, "claim", 0, name="x", slot=3, incarnation=1), 1.0)
        await store.answer_again(is_applied)
        assert await _keeps(names)
        await _assert_is_undone(names, store)

    asyncio.run(scenario())


@pytest.mark.parametrize("is_applied", [True, False])
def test_a_takeover_that_timed_out_is_undone_and_cannot_be_applied_later(is_applied: bool) -> None:
    """The key holds the claim of a node whose coordinator has ended, so the write expects a revision that stays."""

    async def scenario() -> None:
        store: Any = _Late()
        names = _names(store, "a", 1.0)
        await names.nodes.take()
        await _of_b(store)
        del store.held["nodes.b"]
        store.is_silent = True
        with pytest.raises(FleetUnavailable):
            await names.claim(_WANT, 1.0)
        await store.answer_again(is_applied)
        assert await _keeps(names)
        await _assert_is_undone(names, store)

    asyncio.run(scenario())


def test_a_use_that_is_claimed_again_while_its_name_is_removed_keeps_it() -> None:
    async def scenario() -> None:
        store: Any = _Late()
        names = _names(store, "a", 1.0)
        await names.nodes.take()
        await names.claim(_WANT, 1.0)
        store.is_silent = True
        await names.release((3, 1))  # the removal is under way
        store.is_silent = False
        await names.claim(_WANT, 1.0)
        with pytest.raises(Conflict):
            await store.apply()
        assert await _keeps(names)
        assert "names.eA" in store.held

    asyncio.run(scenario())


def test_a_node_that_has_another_name_by_now_is_found_by_that() -> None:
    async def scenario() -> None:
        store: Any = _Late()
        for node in ("old", "new"):
            nodes = _nodes(store, node, (node.encode() * 16)[:16], b"e" * 16)
            await nodes.take()
            await nodes.forget_earlier_names()
        await _names(store, "b", 1.0).nodes.take()
        assert set(store.held) == {"nodes.new", "nodes.b"}
        assert await _nodes(store, "c", b"c" * 16, b"c" * 16).node_of(b"e" * 16, 1.0) == "new"

    asyncio.run(scenario())


def test_an_earlier_name_whose_key_may_not_be_removed_stays_and_the_others_go() -> None:
    """As where the server lets each node write the key of its present name only."""

    class Strict(_Late):
        async def cas(self, key: str, value: bytes | None, revision: int, timeout: float) -> int:
            if value is None and key == "nodes.kept":
                raise Unavailable("the store refused: no permission")
            return await super().cas(key, value, revision, timeout)

    async def scenario() -> None:
        store: Any = Strict()
        for node in ("kept", "old"):
            await _nodes(store, node, b"o" * 16, b"e" * 16).take()
        nodes = _nodes(store, "new", b"o" * 16, b"e" * 16)
        await nodes.take()
        await nodes.forget_earlier_names()
        assert set(store.held) == {"nodes.kept", "nodes.new"}

    asyncio.run(scenario())


def test_names_wait_for_a_store_that_is_away_for_a_moment() -> None:
    class Away(_Late):
        tries = 0

        async def read(self, key: str, timeout: float) -> tuple[bytes, int]:
            self.tries += 1
            if self.tries <= 3:
                raise Unavailable("the store is away")
            return await super().read(key, timeout)

    async def scenario() -> None:
        store: Any = Away()
        names = _names(store, "a", 1.0)
        await names.claim(_WANT, 10.0)
        store.tries = 0
        assert (await names.find("x", 10.0)).slot == 3

    asyncio.run(scenario())


@pytest.mark.parametrize("is_applied", [True, False])
def test_a_name_whose_keeping_timed_out_is_freed_with_its_event(is_applied: bool) -> None:
    async def scenario() -> None:
        store: Any = _Late()
        names = _names(store, "a", 1.0)
        await names.nodes.take()
        await names.claim(Want(1, "claim", 0, name="x", slot=3, incarnation=1), 1.0)
        store.lose("names.eA")
        store.is_silent = True
        with pytest.raises(Unavailable):
            await _keeps(names)
        await store.answer_again(is_applied)
        await names.release((3, 1))
        await _assert_is_undone(names, store)

    asyncio.run(scenario())


def test_a_name_that_another_node_has_by_now_is_given_up_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        store: Any = _Store()
        counters = Counters()
        names = _names(store, "a", 1.0, _nobody, counters)
        await names.nodes.take()
        want = Want(1, "claim", 0, name="w/1", slot=3, incarnation=1)
        await names.claim(want, 1.0)
        (key,) = set(store.held) - {"nodes.a"}
        del store.held[key]  # the store has lost it
        await _names(store, "b", 1.0).claim(want, 1.0)
        theirs = store.held[key]
        with caplog.at_level("WARNING", "ipcsync.bridge"):
            assert await _keeps(names)
        assert (names.claims, counters.names_lost, store.held[key]) == ({}, 1, theirs)
        (record,) = caplog.records
        assert record.message.startswith("name lost")
        assert vars(record)["fields"] == {"name": "w/1", "node": "b"}

    asyncio.run(scenario())


def test_a_node_whose_key_nobody_can_read_is_asked_for_before_its_name_is_taken() -> None:
    asked: list[str] = []

    async def somebody(node: str, _timeout: float) -> bytes | None:
        asked.append(node)
        return b"p" * 16

    async def scenario() -> None:
        store: Any = _Store()
        store.held["nodes.a"] = b'{"stream":"KV_ipcsync_main", "seq":2}', 7
        with pytest.raises(NodeNameTaken):
            await _names(store, "a", 1.0, somebody).nodes.take()
        assert asked == ["a"]

    asyncio.run(scenario())


def test_a_claim_that_timed_out_and_is_made_again_is_kept() -> None:
    async def scenario() -> None:
        store: Any = _Store()
        names = _names(store, "a", 1.0)
        want = Want(1, "claim", 0, name="x", slot=3, incarnation=1)
        store.is_silent = True
        with pytest.raises(FleetUnavailable):
            await names.claim(want, 1.0)
        store.is_silent = False
        await names.claim(want, 1.0)
        assert await _keeps(names)
        assert set(store.held) == {"nodes.a", "names.eA"}

    asyncio.run(scenario())


def test_a_claim_that_another_question_has_made_is_kept_when_the_first_one_times_out() -> None:
    """A request that the next coordinator is asked again is a question of its own; the write of the first is lost."""

    class Lossy(_Store):
        has_lost = False

        async def cas(self, key: str, value: bytes | None, revision: int, timeout: float) -> int:
            if key == "names.eA" and not self.has_lost:
                self.has_lost = True
                await names.claim(_WANT, 1.0)  # which is answered, and the session told
                raise Unavailable("no answer")
            return await super().cas(key, value, revision, timeout)

    async def scenario() -> None:
        with pytest.raises(FleetUnavailable):
            await names.claim(_WANT, 0.0)
        assert await _keeps(names)
        assert "names.eA" in store.held
        await names.release((3, 1))
        assert list(store.held) == ["nodes.a"]

    store: Any = Lossy()
    names = _names(store, "a", 1.0)
    asyncio.run(scenario())


def test_of_two_claims_that_time_out_the_one_on_the_later_revision_cannot_be_applied_either() -> None:
    class Silent(_Late):
        is_asked = False

        async def cas(self, key: str, value: bytes | None, revision: int, timeout: float) -> int:
            if self.is_silent and not self.is_asked:
                self.is_asked, self.is_silent = True, False
                await _of_b(self)
                del self.held["nodes.b"]
                self.is_silent = True
                with pytest.raises(FleetUnavailable):
                    await names.claim(_WANT, 0.0)  # behind the claim of b
                raise Unavailable("no answer")
            return await super().cas(key, value, revision, timeout)

    async def scenario() -> None:
        await names.nodes.take()
        store.is_silent = True
        with pytest.raises(FleetUnavailable):
            await names.claim(_WANT, 0.0)
        store.is_silent = False
        assert await _keeps(names)
        await _assert_is_undone(names, store)

    store: Any = Silent()
    names = _names(store, "a", 1.0)
    asyncio.run(scenario())


def test_a_name_that_is_freed_while_the_store_is_told_to_keep_it_stays_free() -> None:
    class Slow(_Store):
        """A store that lets a release happen at each step of the first write."""

        def __init__(self) -> None:
            super().__init__()
            self.during: list[Coroutine[Any, Any, None]] = []

        async def read(self, key: str, timeout: float) -> tuple[bytes, int]:
            found = await super().read(key, timeout)
            if self.during and key == "names.eA" and self.breaks == "read":
                await self.during.pop()
            return found

        async def cas(self, key: str, value: bytes | None, revision: int, timeout: float) -> int:
            if self.during and key == "names.eA" and value is not None and self.breaks == "write":
                await self.during.pop()
            return await super().cas(key, value, revision, timeout)

        breaks = ""

    async def scenario(breaks: str) -> None:
        store: Any = Slow()
        names = _names(store, "a", 1.0)
        await names.nodes.take()
        await names.claim(Want(1, "claim", 0, name="x", slot=3, incarnation=1), 1.0)
        del store.held["names.eA"]  # the store has lost it
        store.breaks = breaks
        store.during.append(names.release((3, 1)))
        assert await _keeps(names)
        assert store.during == []
        assert list(store.held) == ["nodes.a"]
        assert names.claims == {}

    for breaks in ("read", "write"):
        asyncio.run(scenario(breaks))


class _Clock:
    """The time, which passes while a node is silent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(store, "time", SimpleNamespace(monotonic=lambda: self.now))

    async def silence(self, _node: str, timeout: float) -> bytes | None:
        self.now += timeout
        return None


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    return _Clock(monkeypatch)


async def _of_b(store: Any) -> None:
    """Claim the name for another node."""
    theirs = _names(store, "b", 5.0)
    await theirs.nodes.take()
    await theirs.claim(_WANT, 1.0)


def test_a_name_is_taken_over_after_a_whole_ttl_of_silence_and_no_sooner(clock: _Clock) -> None:
    async def scenario() -> None:
        store: Any = _Store()
        await _of_b(store)
        names = _names(store, "a", 5.0, clock.silence)
        began = clock.now
        with pytest.raises(FleetUnavailable, match="node 'b', which has this name, has not answered"):
            await names.claim(_WANT, 4.0)
        assert clock.now - began == pytest.approx(4.0)
        await names.claim(_WANT, 4.0)  # the rest of the TTL
        assert clock.now - began == pytest.approx(5.0)

    asyncio.run(scenario())


def test_a_node_that_was_heard_between_two_tries_has_not_been_silent(clock: _Clock) -> None:
    async def scenario() -> None:
        store: Any = _Store()
        await _of_b(store)
        names = _names(store, "a", 5.0, clock.silence)
        names.last_received = lambda _node: clock.now - 1.0
        with pytest.raises(FleetUnavailable):
            await names.claim(_WANT, 3.0)
        clock.now += 1.9
        with pytest.raises(FleetUnavailable):
            await names.claim(_WANT, 3.0)

    asyncio.run(scenario())


def test_however_long_it_was_silent_a_node_is_asked_again_for_a_while_before_its_name_is_taken(clock: _Clock) -> None:
    async def scenario() -> None:
        store: Any = _Store()
        await _of_b(store)
        names = _names(store, "a", 5.0, clock.silence)
        with pytest.raises(FleetUnavailable):
            await names.claim(_WANT, 4.5)
        clock.now += 1.0  # the rest of the TTL passes while nobody asks
        began = clock.now
        await names.claim(_WANT, 5.0)
        assert clock.now - began == pytest.approx(1.0)

    asyncio.run(scenario())


def test_a_node_that_this_one_could_not_hear_has_not_been_silent(clock: _Clock) -> None:
    answers: list[Any] = [None, Unavailable("cut off"), None]

    async def cut_off(node: str, timeout: float) -> bytes | None:
        await clock.silence(node, timeout)
        answer = answers.pop(0)
        if answer is not None:
            raise answer
        return None

    async def scenario() -> None:
        store: Any = _Store()
        await _of_b(store)
        names = _names(store, "a", 5.0, cut_off)
        for left in (2, 0):  # the second one asks again within its time
            with pytest.raises(FleetUnavailable):
                await names.claim(_WANT, 3.0)
            assert len(answers) == left

    asyncio.run(scenario())


def test_an_answer_begins_the_silence_anew(clock: _Clock) -> None:
    answers: list[bytes | None] = [None, b"p" * 16, None, None]

    async def now_and_then(node: str, timeout: float) -> bytes | None:
        return answers.pop(0) or await clock.silence(node, timeout)

    async def scenario() -> None:
        store: Any = _Store()
        await _of_b(store)
        names = _names(store, "a", 5.0, now_and_then)
        with pytest.raises(FleetUnavailable):
            await names.claim(_WANT, 4.0)
        with pytest.raises(RecorderTaken):
            await names.claim(_WANT, 4.0)
        with pytest.raises(FleetUnavailable):
            await names.claim(_WANT, 4.0)
        clock.now += 6.0  # nobody asked for longer than a TTL: that was no silence
        with pytest.raises(FleetUnavailable):
            await names.claim(_WANT, 4.0)

    asyncio.run(scenario())
