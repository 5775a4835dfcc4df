"""A client's prefix: what it opens, lists and watches, and what it shows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import ipcsync
from ipcsync.typing import EngineName

NewClient = Callable[..., ipcsync.Client]


@pytest.fixture
def job(new_client: NewClient) -> ipcsync.Client:
    """A client of a job, beside `client`, which has no prefix."""
    return new_client("of-a-job", prefix="job-7/")


def test_two_prefixes_never_meet(new_client: NewClient, job: ipcsync.Client, client: ipcsync.Client) -> None:
    other = new_client(prefix="job-8/")
    first, second = (one.event("kv", recorder=True) for one in (job, other))
    assert (first.name, second.name) == ("kv", "kv")
    assert sorted(row.name for row in client.list_events()) == ["job-7/kv", "job-8/kv"]
    first.record().synchronize(10)
    assert (first.generation, second.generation) == (1, 0)


def test_sessions_of_one_prefix_meet_and_so_does_who_says_all_of_the_name(
    new_client: NewClient, job: ipcsync.Client, client: ipcsync.Client, engine: EngineName
) -> None:
    point = job.event("kv", recorder=True, engine=engine).record()
    new_client(prefix="job-7/").event("kv").at(1).synchronize(10)
    client.event("job-7/kv").at(1).synchronize(10)
    assert [event.name for event in job.events(["a", "b"])] == ["a", "b"]
    assert (point.event_name, repr(point)) == ("kv", "<ipcsync.Point kv generation=1>")
    assert client.point(bytes(point)).event_name == "job-7/kv"


def test_lists_tell_of_what_has_the_prefix_and_without_it(job: ipcsync.Client, client: ipcsync.Client) -> None:
    for one, names in ((job, ["a", "ab", "b"]), (client, ["a", "job-7"])):
        one.events(names)
    assert [row.name for row in job.list_events()] == ["a", "ab", "b"]
    assert [row.name for row in job.list_events("a")] == ["a", "ab"]
    assert [row.event for row in job.list_attachments("a")] == ["a", "ab"]
    assert {row.name for row in job.list_sessions()} == {"main", "of-a-job"}  # a session's name is its own


def test_a_watch_tells_of_what_has_the_prefix_and_without_it(job: ipcsync.Client, client: ipcsync.Client) -> None:
    held = job.event("before")
    told = (notice for notice in job.watch(timeout=20) if not notice.kind.startswith("session_"))
    seen = [next(told)]
    client.event("job-8/x").close()
    with job.event("x"):
        pass
    held.close()
    seen += [next(told) for _ in range(3)]
    assert [(notice.kind, notice.name) for notice in seen] == [
        ("opened", "before"),
        ("opened", "x"),
        ("closed", "x"),
        ("closed", "before"),
    ]


def test_streams_of_two_prefixes_are_two_specifications(job: ipcsync.Client, client: ipcsync.Client) -> None:
    least, greatest = ipcsync.Stream.priority_range()
    assert job.stream("decode", priority=greatest).priority == greatest
    assert client.stream("decode", priority=least).priority == least
    assert client.stream("job-7/decode").priority == greatest


def test_errors_name_the_event_as_the_client_has_it(new_client: NewClient, job: ipcsync.Client) -> None:
    job.event("kv", recorder=True)
    second = new_client(prefix="job-7/")
    with pytest.raises(ipcsync.RecorderTaken) as taken:
        second.event("kv", recorder=True)
    with pytest.raises(ipcsync.WaitTimeout, match="'kv'") as late:
        second.event("kv").at(1).synchronize(0)
    assert (taken.value.event, late.value.event) == ("kv", "kv")


def test_an_event_of_another_prefix_is_shown_whole(job: ipcsync.Client, client: ipcsync.Client) -> None:
    point = client.event("elsewhere", recorder=True).record()
    assert job.point(bytes(point)).event_name == "elsewhere"


@pytest.mark.parametrize("prefix", ["/", "../", "a//", "x" * 255, "\0"])
def test_a_prefix_that_no_name_can_begin_with_is_refused(coordinator: ipcsync.Coordinator, prefix: str) -> None:
    with pytest.raises(ipcsync.ProtocolError, match=r"^the prefix .*, with a name of one byte behind it, has "):
        ipcsync.connect(coordinator.endpoint, prefix=prefix)


@pytest.mark.parametrize("prefix", [None, 7, b"a/"])
def test_what_is_no_text_is_no_prefix(coordinator: ipcsync.Coordinator, prefix: Any) -> None:
    with pytest.raises(TypeError, match="a prefix is a str"):
        ipcsync.connect(coordinator.endpoint, prefix=prefix)


@pytest.mark.parametrize("name", ["", "/a", "..", "x" * 250])
def test_a_name_must_be_one_with_and_without_the_prefix(job: ipcsync.Client, name: str) -> None:
    with pytest.raises(ipcsync.ProtocolError) as caught:
        job.event(name)
    assert caught.value.code == "name"


def test_a_prefix_need_not_end_with_a_slash(new_client: NewClient, client: ipcsync.Client) -> None:
    dashed = new_client(prefix="run-")
    assert (dashed.prefix, client.prefix) == ("run-", "")
    dashed.event("1")
    assert [row.name for row in client.list_events()] == ["run-1"]


def test_it_is_the_same_for_asyncio(coordinator: ipcsync.Coordinator, client: ipcsync.Client) -> None:
    async def scenario() -> None:
        async with ipcsync.aconnect(coordinator.endpoint, prefix="job-7/") as job:
            event = await job.event("kv")
            assert (job.prefix, event.name) == ("job-7/", "kv")
            assert [row.name for row in await job.list_events()] == ["kv"]
            assert [row.name for row in client.list_events()] == ["job-7/kv"]
            async for notice in job.watch():
                if notice.kind == "opened":
                    assert notice.name == "kv"
                    break

    asyncio.run(scenario())
