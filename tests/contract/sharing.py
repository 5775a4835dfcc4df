"""One event in several processes."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ipcsync._drivers import handle_bytes
from tests.contract import actions
from tests.kit import driver_kit as kit
from tests.kit.driver_kit import ok
from tests.kit.peer import Peer


def share(drv: ModuleType, event: Any, *peers: Peer) -> None:
    """Open the event as "e" in each peer, which also gets a stream "s"."""
    handle = handle_bytes(ok(drv.cuIpcGetEventHandle(event)))
    for each in peers:
        assert each.call(actions.open_event, "e", handle) == kit.SUCCESS
        each.call(actions.create_stream, "s")
