"""What the peer of a replay that goes to and fro does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import ipcsync
from ipcsync.client import point
from ipcsync.testing import Memory
from tests.graphs.layers import captured, finish

_kept: dict[str, Any] = {}


def connect(endpoint: str, there: bytes, back: bytes) -> None:
    """Connect, and open both cells."""
    client = _kept["client"] = ipcsync.connect(endpoint, name="peer")
    _kept["event"] = client.event("made", recorder=True, engine="timeline")
    _kept["there"], _kept["back"] = Memory(8, handle=there), Memory(8, handle=back)
    _kept["stream"] = ipcsync.Stream()


def answer(data: bytes) -> None:
    """Behind the point, which the host waits for too, write a cell that is 100 more than the other."""
    point, stream = _kept["client"].point(data), _kept["stream"]
    point.wait(stream, timeout=20)
    point.synchronize(20)
    _kept["back"].fill(_kept["there"].read()[0] + 100, stream)
    _kept["event"].record(stream)


def try_ahead(endpoint: str) -> str:
    """Enter a replay ahead of the record of another process: the error's text."""
    with ipcsync.connect(endpoint) as client:
        stream, wait = ipcsync.Stream(), ipcsync.GraphWait()
        captured(stream, lambda: wait.capture(stream))
        try:
            with client.replay({wait: client.event("theirs").at(1)}, stream=stream, ahead=True):
                pass
        except ipcsync.EngineMismatch as error:
            return str(error)
    return ""


def interrupt_ahead(endpoint: str) -> None:
    """An exception of a signal's handler comes while streams are asked whether they pass each other. Others go on."""

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(point, "time", SimpleNamespace(sleep=interrupt))
        with pytest.raises(KeyboardInterrupt):
            try_ahead(endpoint)
    finish(ipcsync.Stream())


def open_recorders(endpoint: str, *names: str) -> None:
    """Record events that nothing is ever recorded on."""
    client = _kept["client"] = ipcsync.connect(endpoint, name="peer")
    _kept["events"] = [client.event(name, recorder=True, engine="timeline") for name in names]


def close_recorders() -> None:
    """Close them."""
    for event in _kept["events"]:
        event.close()
