"""The engine of all that a client creates: by `connect`, by the environment; a call's own comes first."""

from __future__ import annotations

import asyncio

import pytest

import ipcsync
from ipcsync.client import _connecting
from ipcsync.typing import EngineChoice, EngineName

pytestmark = [pytest.mark.driver, pytest.mark.usefixtures("nothing_queued")]

ENGINES: list[EngineName] = ["event", "timeline"]


def _engines_of(client: ipcsync.Client) -> set[str]:
    """The engines of an event of each kind that this client creates."""
    stream = ipcsync.Stream()
    with client.reserve() as reservation:
        points = [client.record(stream), client.record_all(), reservation.point]
    named = [client.event("named", recorder=True), *client.events(["a", "b"])]
    return {point._bound().engine.kind for point in points} | {event.engine for event in named}


@pytest.mark.parametrize("engine", ENGINES)
def test_connect_sets_it_for_all_that_the_client_creates(coordinator: ipcsync.Coordinator, engine: EngineName) -> None:
    with ipcsync.connect(coordinator.endpoint, engine=engine) as client:
        assert _engines_of(client) == {engine}


@pytest.mark.parametrize("engine", ENGINES)
def test_the_environment_sets_it_where_connect_does_not(
    coordinator: ipcsync.Coordinator, monkeypatch: pytest.MonkeyPatch, engine: EngineName
) -> None:
    monkeypatch.setenv("IPCSYNC_ENGINE", engine)
    monkeypatch.setenv("IPCSYNC_ENDPOINT", coordinator.endpoint)
    other: EngineName = "event" if engine == "timeline" else "timeline"
    with ipcsync.connect() as client, ipcsync.connect(engine=other) as told:
        assert _engines_of(client) == {engine}
        assert told.event("e").engine == other
    with ipcsync.default_client() as client:
        assert client.event("e").engine == engine
    assert _connecting._present() is None

    async def opened() -> set[str]:
        async with ipcsync.aconnect() as client, ipcsync.aconnect(engine=other) as told:
            return {(await client.event("f")).engine, (await told.event("g")).engine}

    assert asyncio.run(opened()) == {engine, other}


@pytest.mark.parametrize("engine", ENGINES)
def test_a_calls_own_engine_comes_first(coordinator: ipcsync.Coordinator, engine: EngineName) -> None:
    other: EngineName = "event" if engine == "timeline" else "timeline"
    with ipcsync.connect(coordinator.endpoint, engine=engine) as client:
        assert client.event("e", engine=other).engine == other
        assert client.record(ipcsync.Stream(), engine=other)._bound().engine.kind == other


def test_an_event_that_exists_keeps_its_engine(coordinator: ipcsync.Coordinator) -> None:
    with (
        ipcsync.connect(coordinator.endpoint, engine="event") as first,
        ipcsync.connect(coordinator.endpoint, engine="timeline") as second,
    ):
        point = first.event("e", recorder=True).record(ipcsync.Stream())
        assert second.event("e").engine == "event"
        second.point(bytes(point)).wait(ipcsync.Stream())
        with pytest.raises(ipcsync.EngineMismatch):
            second.event("e", engine="timeline")


@pytest.mark.parametrize("wrong", ["cuda", "Event"])
def test_another_engine_is_refused_by_name(
    coordinator: ipcsync.Coordinator, monkeypatch: pytest.MonkeyPatch, wrong: EngineChoice
) -> None:
    with pytest.raises(ValueError, match=f"^engine is 'auto', 'event' or 'timeline', but got '{wrong}'$"):
        ipcsync.connect(coordinator.endpoint, engine=wrong)
    monkeypatch.setenv("IPCSYNC_ENGINE", wrong)
    with pytest.raises(ValueError, match=f"^IPCSYNC_ENGINE is 'auto', 'event' or 'timeline', but got '{wrong}'$"):
        ipcsync.connect(coordinator.endpoint)


# --- and the depth ----------------------------------------------------------------------------------------------------


def _depths_of(client: ipcsync.Client, depth: int | None = None) -> set[int]:
    """The depths of an event of each kind that this client creates, except for what has one record only."""
    points = [client.record(ipcsync.Stream(), depth=depth)]
    if depth is None:
        points.append(client.record_all())
    named = [client.event(f"named {depth}", recorder=True, depth=depth), *client.events([f"a {depth}"], depth=depth)]
    return {point._bound().engine.depth for point in points} | {event.depth for event in named}


@pytest.mark.parametrize("by", ["connect", "the environment"])
def test_connect_or_the_environment_sets_the_depth_and_a_calls_own_comes_first(
    coordinator: ipcsync.Coordinator, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    monkeypatch.setenv("IPCSYNC_ENGINE", "event")
    monkeypatch.setenv("IPCSYNC_DEPTH", "9" if by == "connect" else "5")
    with ipcsync.connect(coordinator.endpoint, depth=5 if by == "connect" else None) as client:
        assert _depths_of(client) == {5}
        assert _depths_of(client, depth=3) == {3}

    async def opened() -> set[int]:
        async with ipcsync.aconnect(coordinator.endpoint, depth=7) as client:
            return {
                (await client.event("f")).depth,
                (await client.record(ipcsync.Stream()))._point._bound().engine.depth,
            }

    assert asyncio.run(opened()) == {7}


@pytest.mark.parametrize("wrong", ["0", "1025", "-1", "many", "1.5", "٣", "99999"])
def test_another_depth_is_refused_by_name(
    coordinator: ipcsync.Coordinator, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    monkeypatch.setenv("IPCSYNC_DEPTH", wrong)
    with pytest.raises(ValueError, match=f"^IPCSYNC_DEPTH is from 1 to 1024, but got '{wrong}'$"):
        ipcsync.connect(coordinator.endpoint)
    with pytest.raises(ValueError, match=r"^depth is from 1 to 1024, but got 1025$"):
        ipcsync.connect(coordinator.endpoint, depth=1025)
    with pytest.raises(TypeError, match=r"^depth is an int, but got str$"):
        ipcsync.connect(coordinator.endpoint, depth=wrong)  # type: ignore[arg-type]
    monkeypatch.setenv("IPCSYNC_DEPTH", "")
    ipcsync.connect(coordinator.endpoint).close()


@pytest.mark.parametrize("engine", ["event", "timeline"])
def test_another_depth_is_refused_for_a_stream_that_has_its_event_too(
    client: ipcsync.Client, engine: EngineChoice
) -> None:
    stream = ipcsync.Stream()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^depth is from 1 to 1024, but got 0$"):
            client.record(stream, engine=engine, depth=0)
        with pytest.raises(TypeError, match=r"^depth is an int, but got str$"):
            client.record(stream, engine=engine, depth="8")  # type: ignore[arg-type]
        client.record(stream, engine=engine)
