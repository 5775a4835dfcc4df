"""The pytest plugin's fixtures: processes that a test spawns, and names of its own."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import ipcsync
from ipcsync._linux.process import is_running, start_time
from ipcsync.pytest_plugin.spawned import Child, ChildError
from tests.kit.until import DEADLINE_S, until

pytestmark = pytest.mark.process


def _whoami(client: ipcsync.Client) -> tuple[int, str]:
    return os.getpid(), client.name


def _raise(client: ipcsync.Client) -> None:
    raise ipcsync.QuotaExceeded("enough", limit=7)


def _exit(client: ipcsync.Client, status: int) -> None:
    os._exit(status)


def _segfault(client: ipcsync.Client) -> None:
    import faulthandler

    faulthandler._sigsegv()  # type: ignore[attr-defined] # for tests like this one


def _hold_the_gil(client: ipcsync.Client) -> None:
    import ctypes

    ctypes.PyDLL(None).sleep(600)


def _hold_the_gil_unwatched(client: ipcsync.Client) -> None:
    faulthandler.cancel_dump_traceback_later()
    _hold_the_gil(client)


def _start_another(client: ipcsync.Client) -> int:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid


def _start_another_and_exit(client: ipcsync.Client, path: Path) -> None:
    path.write_text(str(_start_another(client)))
    os._exit(5)


def _give(client: ipcsync.Client, value: object) -> object:
    return value


def _give_a_lambda(client: ipcsync.Client) -> object:
    return lambda: None


def _sleep(client: ipcsync.Client) -> None:
    time.sleep(600)


class Things:
    """What a test module defines travels there and back."""

    def __init__(self, value: int) -> None:
        self.value = value

    @staticmethod
    def double(client: ipcsync.Client, things: Things) -> Things:
        return Things(2 * things.value)


def test_a_child_runs_the_function_in_a_process_of_its_own(ipcsync_spawn: Callable[..., Child]) -> None:
    children = [ipcsync_spawn(_whoami) for _ in range(2)]
    answers = [child.result() for child in children]
    assert [pid for pid, _ in answers] == [child.pid for child in children]
    assert len({name for _, name in answers}) == 2
    assert children[0].result() == answers[0]  # asked twice, told twice
    assert ipcsync_spawn(Things.double, Things(4)).result().value == 8
    assert len(ipcsync_spawn(_give, b"x" * 10_000_000).result()) == 10_000_000


def test_a_child_raises_here_what_it_raised_there(ipcsync_spawn: Callable[..., Child]) -> None:
    child = ipcsync_spawn(_raise)
    for _ in range(2):
        with pytest.raises(ipcsync.QuotaExceeded, match=r"in _raise\n") as caught:
            child.result()
        assert caught.value.limit == 7


@pytest.mark.parametrize(
    ("fn", "args", "message", "status"),
    [
        (_exit, (5,), "ended without a result: exit status 5", 5),
        (_segfault, (), r"killed by SIGSEGV; its traceback:\n(.|\n)*_segfault", -signal.SIGSEGV),
        (_give_a_lambda, (), r"_give_a_lambda-1 \(pid \d+\) raised|[Cc]an't (pickle|get)", None),
    ],
)
def test_a_child_without_a_result_says_why(
    ipcsync_spawn: Callable[..., Child], fn: Callable[..., Any], args: tuple[Any, ...], message: str, status: int | None
) -> None:
    with pytest.raises(Exception, match=message) as caught:
        ipcsync_spawn(fn, *args).result()
    assert status is None or (isinstance(caught.value, ChildError) and caught.value.status == status)


def test_a_child_that_is_killed_says_so(ipcsync_spawn: Callable[..., Child]) -> None:
    child = ipcsync_spawn(_sleep)
    with pytest.raises(ChildError, match="runs on"):
        child.result(timeout=0.01)
    child.kill()
    child.kill()
    with pytest.raises(ChildError, match="killed by SIGKILL") as caught:
        child.result()
    assert caught.value.status == -signal.SIGKILL


@pytest.fixture
def after_the_children() -> Iterator[list[tuple[int, int]]]:
    """Looks, after `ipcsync_spawn` has ended, whether the processes that the test names are gone."""
    processes: list[tuple[int, int]] = []
    yield processes
    for pid, started in processes:
        until(lambda pid=pid, started=started: not is_running(pid, started), "it to be gone")  # type: ignore[misc]


def test_no_child_outlives_its_test_nor_what_it_started(
    after_the_children: list[tuple[int, int]], ipcsync_spawn: Callable[..., Child]
) -> None:
    sleeping, parent = ipcsync_spawn(_sleep), ipcsync_spawn(_start_another)
    pids = (sleeping.pid, parent.pid, parent.result())
    after_the_children.extend((pid, start_time(pid) or 0) for pid in pids)


@pytest.mark.parametrize("ask", [Child.result, Child.raise_unasked])
def test_what_a_child_started_does_not_outlive_it_if_it_crashes(
    after_the_children: list[tuple[int, int]],
    ipcsync_spawn: Callable[..., Child],
    tmp_path: Path,
    ask: Callable[[Child], object],
) -> None:
    child = ipcsync_spawn(_start_another_and_exit, tmp_path / "pid")
    started = int(until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "its process"))
    after_the_children.append((started, start_time(started) or 0))
    with pytest.raises(ChildError, match="exit status 5"):
        ask(child)


def test_a_child_that_is_killed_amid_its_answer_says_so(ipcsync_spawn: Callable[..., Child]) -> None:
    child = ipcsync_spawn(_give, b"x" * 10_000_000)  # more than the pipe holds
    child._hear(time.monotonic() + DEADLINE_S)
    until(lambda: child._child.connection.poll(0), "its answer's begin")
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(ChildError, match="killed by SIGKILL"):
        child.result()


def test_a_client_sees_its_own_namespace_only(
    ipcsync_coordinator: Any,
    ipcsync_client: ipcsync.Client,
    ipcsync_namespace: str,
    ipcsync_spawn: Callable[..., Child],
) -> None:
    with ipcsync.connect(ipcsync_coordinator.endpoint, name="stranger") as stranger:
        notices = ipcsync_client.watch(timeout=DEADLINE_S)
        assert next(notices).name == f"{ipcsync_namespace}/test"
        foreign, mine = stranger.event("e"), ipcsync_client.event("e")
        assert (foreign.name, mine.name) == ("e", f"{ipcsync_namespace}/e")
        assert ipcsync_client.event(mine.name).name == mine.name
        assert [info.name for info in ipcsync_client.list_events("e")] == [mine.name]
        assert [info.event for info in ipcsync_client.list_attachments("e")] == [mine.name]
        assert [session.name for session in ipcsync_client.list_sessions()] == [f"{ipcsync_namespace}/test"]
        ipcsync_spawn(_whoami).result()
        told = [(notice.kind, notice.name.removeprefix(ipcsync_namespace)) for notice in islice(notices, 3)]
        assert told == [("opened", "/e"), ("session_opened", "/_whoami-1"), ("session_closed", "/_whoami-1")]
        least, greatest = ipcsync.Stream.priority_range()
        stranger.stream("s", priority=greatest)
        assert ipcsync_client.stream("s", priority=least).priority == least
        with pytest.raises(ipcsync.ProtocolError):
            ipcsync_client.event("")
        with pytest.raises(TypeError):
            ipcsync_client.event(7)  # type: ignore[arg-type] # wrong on purpose
        foreign.close()


def test_every_call_that_takes_names_takes_them_in_the_namespace(
    ipcsync_coordinator: Any, ipcsync_client: ipcsync.Client, ipcsync_namespace: str
) -> None:
    """Whatever a method is called: the other client has names of its own, and sees those of this one whole."""
    inside = f"{ipcsync_namespace}/"
    with ipcsync.connect(ipcsync_coordinator.endpoint, name="stranger") as stranger:
        theirs, mine = stranger.events(["a", "b"]), ipcsync_client.events(["a", f"{inside}b"])
        assert [event.name for event in theirs] == ["a", "b"]
        assert [event.name for event in mine] == [f"{inside}a", f"{inside}b"]
        assert {row.name for row in stranger.list_events(inside)} == {f"{inside}a", f"{inside}b"}
        assert ipcsync_client.event("a", recorder=True).name == f"{inside}a"
        assert ipcsync_client.prefix == inside
        with pytest.raises(ipcsync.WaitTimeout, match=f"'{inside}b'") as late:
            mine[1].at(1).synchronize(0)
        assert late.value.event == f"{inside}b"
        with pytest.raises(ipcsync.RecorderTaken) as taken:
            stranger.event(f"{inside}a", recorder=True)
        assert taken.value.event == f"{inside}a"
        with pytest.raises(ipcsync.NoBridge):
            ipcsync_client.event("a", node="elsewhere")
        assert {row.event for row in ipcsync_client.list_attachments()} == {f"{inside}a", f"{inside}b"}
        with ipcsync_client.reserve() as reserved:
            reserved.record()
            assert reserved.point.event_name == ""
