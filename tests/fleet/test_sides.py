"""A wait of `sides` that goes on, one that ends by what no wait raises, and one without an end are each found."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

import ipcsync
from tests.fleet import sides
from tests.fleet.sides import End, Sides, learn

pytestmark = pytest.mark.process


def _begun(
    client: ipcsync.Client, monkeypatch: pytest.MonkeyPatch, end: Callable[[Callable[[], object]], End]
) -> Sides:
    """Waits of which "query" ends by `end`, and "host" as it should."""
    real, event = sides.end_of, client.event("sides", recorder=True)
    event.record(ipcsync.Stream())

    def end_of(wait: Callable[[], object]) -> End:
        return end(wait) if threading.current_thread().name == "query" else real(wait)

    monkeypatch.setattr(sides, "end_of", end_of)
    return Sides(client, event, 1, ("host", "query"))


def test_a_wait_that_raises_what_no_wait_raises_is_found(
    client: ipcsync.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Callable[[], object]) -> End:
        raise SystemExit(7)

    with pytest.raises(AssertionError, match=r"no wait raises: \{'query': 'SystemExit\(7\)'\}"):
        _begun(client, monkeypatch, fail).ends()


def test_a_wait_that_goes_on_is_found(client: ipcsync.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()

    def hang(_: Callable[[], object]) -> End:
        gate.wait()
        return End("complete", "", 0.0)

    begun = _begun(client, monkeypatch, hang)
    monkeypatch.setattr(sides, "DEADLINE_S", 0.05)
    with pytest.raises(AssertionError, match=r"do not end: .*'query'"):
        begun.ends()
    gate.set()
    monkeypatch.undo()
    assert begun.ends()["query"].what == "complete"


def test_no_end_is_no_end_as_it_should_be() -> None:
    with pytest.raises(AssertionError):
        learn({}, "complete")
