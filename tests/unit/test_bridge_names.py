"""What becomes of a name that was claimed in the fleet while the store does not answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("nats", reason="nats-py is not installed: pip install -e '.[fleet]'")

from ipcsync_bridge.nodes import Names
from ipcsync_bridge.transport import Unavailable


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
