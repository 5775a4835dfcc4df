"""What becomes of a name that was claimed in the fleet while the store does not answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("nats", reason="nats-py is not installed: pip install -e '.[fleet]'")

from ipcsync._wire.messages import Want
from ipcsync.errors import FleetUnavailable
from ipcsync_bridge.nodes import Names
from ipcsync_bridge.transport import Conflict, Unavailable


class _Store:
    """The keys of a store that may be silent."""

    def __init__(self) -> None:
        self.keys: dict[str, tuple[bytes, int]] = {}
        self.is_silent = False
        self._revision = 0

    async def read(self, prefix: str, _timeout: float) -> dict[str, tuple[bytes, int]]:
        return {key: found for key, found in self.keys.items() if key.startswith(prefix)}

    async def cas(self, key: str, value: bytes | None, _revision: int, _timeout: float) -> int:
        if self.is_silent:
            raise Unavailable("the store is silent")
        self._revision += 1
        if value is None:
            self.keys.pop(key, None)
        else:
            self.keys[key] = value, self._revision
        return self._revision


def test_a_name_that_could_not_be_freed_is_freed_later_and_never_claimed_again() -> None:
    async def nobody(_node: str, _timeout: float) -> bytes | None:
        return None

    async def scenario() -> None:
        store: Any = _Store()
        nodes = Names(store, "a", b"o" * 16, b"e" * 16, 1.0, nobody)
        await nodes.take()
        store.keys["names.x"] = b"mine", 7
        nodes.claims[3, 1] = "names.x", 7
        store.is_silent = True
        await nodes.release((3, 1))
        assert "names.x" in store.keys
        store.is_silent = False
        assert await nodes.keeps()
        assert "names.x" not in store.keys
        assert nodes.claims == {}

    asyncio.run(scenario())


@pytest.mark.parametrize("is_applied", [True, False])
def test_a_claim_that_timed_out_is_undone_and_cannot_be_applied_later(is_applied: bool) -> None:
    async def nobody(_node: str, _timeout: float) -> bytes | None:
        return None

    class Late(_Store):
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

    async def scenario() -> None:
        store: Any = Late()
        nodes = Names(store, "a", b"o" * 16, b"e" * 16, 1.0, nobody)
        await nodes.take()
        store.is_silent = True
        with pytest.raises(FleetUnavailable):
            await nodes.claim(Want(1, "claim", 0, name="x", slot=3, incarnation=1), 1.0)
        store.is_silent = False
        if is_applied:
            await store.apply()
        assert await nodes.keeps()
        assert list(store.keys) == ["nodes.a"]
        assert nodes.claims == {}
        with pytest.raises(Conflict):
            await store.apply()

    asyncio.run(scenario())


def test_a_claim_that_timed_out_and_is_made_again_is_kept() -> None:
    async def nobody(_node: str, _timeout: float) -> bytes | None:
        return None

    async def scenario() -> None:
        store: Any = _Store()
        nodes = Names(store, "a", b"o" * 16, b"e" * 16, 1.0, nobody)
        want = Want(1, "claim", 0, name="x", slot=3, incarnation=1)
        store.is_silent = True
        with pytest.raises(FleetUnavailable):
            await nodes.claim(want, 1.0)
        store.is_silent = False
        await nodes.claim(want, 1.0)
        assert await nodes.keeps()
        assert set(store.keys) == {"nodes.a", "names.eA"}

    asyncio.run(scenario())
