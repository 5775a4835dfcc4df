"""The gate that refuses connections while descriptors are short."""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq

from ipcsync_coordinator import limits
from tests.kit.until import until


class _Place:
    """A place whose sockets keep their names, so that connections go on to arrive at a shut gate."""

    def shut(self) -> None: ...

    def reopen(self) -> None: ...


def test_a_shut_gate_counts_now_and_then_and_not_for_each_connection(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    crowd = 300
    counts: list[float] = []
    events: list[float] = []

    def count() -> int:
        counts.append(time.monotonic())
        return 1000

    def usable() -> int:
        events.append(time.monotonic())
        return 10

    monkeypatch.setattr(limits, "count", count)
    path = str(tmp_path / "s")
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        router = stack.enter_context(context.socket(zmq.ROUTER))
        router.bind(f"ipc://{path}")
        gate = limits.Gate([router], _Place(), usable, lambda _reason: None)  # type: ignore[arg-type]
        stack.callback(gate.stop)
        began = time.monotonic()
        for _ in range(crowd):
            one = stack.enter_context(socket.socket(socket.AF_UNIX))
            one.connect(path)
        until(lambda: len(events) >= crowd, "all of them were told of")
        periods = (time.monotonic() - began) / 0.1
    assert len(counts) <= 3 + periods  # at the beginning, as it shuts, and at each recount
