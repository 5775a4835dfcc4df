"""Who looks at a coordinator needs no session of it, and sees each name in the width of a terminal."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest

import ipcsync
from ipcsync._rates import Tracks
from ipcsync._session.handshake import Reader
from ipcsync.cli import asking
from tests.unit.cli.test_cli import run, run_on_terminal

pytestmark = pytest.mark.process

_LOOKS = [("status",), ("status", "--json"), ("top", "--once"), ("top", "--once", "--json")]


def test_a_coordinator_whose_sessions_are_all_taken_shows_who_has_them(
    new_coordinator: Callable[..., ipcsync.Coordinator],
) -> None:
    endpoint = new_coordinator(max_sessions=2).endpoint
    with ipcsync.connect(endpoint, name="first") as first, ipcsync.connect(endpoint, name="second") as second:
        with pytest.raises(ipcsync.QuotaExceeded):
            ipcsync.connect(endpoint)
        for arguments in _LOOKS:
            done = run(*arguments, "--endpoint", endpoint)
            assert done.returncode == 0, done.stderr
            assert "first" in done.stdout
            assert "second" in done.stdout
            if "--json" in arguments:
                json.loads(done.stdout)
        assert run("doctor", IPCSYNC_ENDPOINT=endpoint).returncode == 0
        assert first.is_connected
        assert second.is_connected


def test_of_more_than_a_list_has_the_rest_is_counted(
    new_coordinator: Callable[..., ipcsync.Coordinator],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    endpoint = new_coordinator().endpoint
    with Reader(endpoint, 30.0) as reader, ipcsync.connect(endpoint) as client, ipcsync.connect(endpoint):
        client.events(["a", "b", "c"], recorder=True)
        for name in ("list_events", "list_sessions"):
            everything = getattr(reader, name)
            monkeypatch.setattr(reader, name, lambda all_=everything: all_()[:1])
        asking._print_sample(asking._look(reader, Tracks(1)))
    said = capsys.readouterr().out
    assert "sessions 2 " in said
    assert "1 more sessions\n2 more events\n" in said


_BLOCK = "a-rather-long/name/of-an-event/that-a-framework-makes/for-each-layer/kv_cache/block-{:06}"
_WORKER = "w{}-with-a-rather-long-name-of-a-worker-in-a-pod"


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("command", [("status",), ("top", "--once")])
def test_long_names_fit_a_terminal_beside_what_is_told_of_them(
    coordinator: ipcsync.Coordinator,
    new_client: Callable[..., ipcsync.Client],
    command: tuple[str, ...],
    columns: int,
) -> None:
    for number in range(2):
        client = new_client(_WORKER.format(number))
        client.event(_BLOCK.format(number), recorder=True, engine="event").record(ipcsync.Stream())
    written = run_on_terminal(*command, "--endpoint", coordinator.endpoint, COLUMNS=str(columns), NO_COLOR="1")
    lines = re.sub(r"\x1b\[[0-9;]*m", "", written).splitlines()
    tables = lines[next(place for place, line in enumerate(lines) if line.strip().startswith("session ")) :]
    assert max(map(len, lines if command[0] == "top" else tables)) <= columns
    for number in range(2):
        (session,) = (line for line in tables if line.strip().startswith(f"w{number}-"))
        assert session.split()[1].isdigit(), "the pid stands there"
        (event,) = (line for line in tables if f"{number:06} " in line)
        assert event.strip().startswith("a-r")
        assert {"open", "event", "1"} <= set(event.split())
        assert f" w{number}-" in event
