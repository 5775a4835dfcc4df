"""Python imports this as `sitecustomize` in processes of LMCache: what they record is held back on its stream.

A transfer that waits for such a record takes that much longer, and one that does not wait for it takes no longer.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODULE, _, CLASS = os.environ["HELD_BACK_BACKEND"].partition(":")
SECONDS = float(os.environ["HELD_BACK_S"])
HOLDING = Path(os.environ["HELD_BACK_FILE"])  # each process that holds a record back adds a line


def held_back(record_event: Callable[..., None]) -> Callable[..., None]:
    """`record_event`, behind a gate on the default stream that opens by itself."""

    def record_behind_a_gate(self: Any, event: Any, stream: Any) -> None:
        import ipcsync
        from ipcsync.testing import StreamGate

        gate = StreamGate(ipcsync.default_stream())
        record_event(self, event, stream)
        timer = threading.Timer(SECONDS, gate.open)
        timer.daemon = True
        timer.start()
        with HOLDING.open("a") as holding:
            holding.write(f"{os.getpid()}\n")

    return record_behind_a_gate


backend = getattr(importlib.import_module(MODULE), CLASS)
backend.record_event = held_back(backend.record_event)
