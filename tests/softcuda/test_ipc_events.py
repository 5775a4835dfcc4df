"""Events that several processes share."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.softcuda.kit import files
from tests.softcuda.processes import MakeServers


def test_a_handle_outlives_its_event_and_comes_again(servers: MakeServers) -> None:
    a, b = servers(2)
    base = a("stat", "events")
    h = a("create", "e")
    assert b("open", "e", h) == 0
    for x in (a, b):
        x("stream", 0)
    a("hold", 0)
    a("record", "e", 0)
    a("destroy", "e")
    assert b("query", "e") == 600
    assert b("open", "late", h) == 0
    assert b("query", "late") == 600  # what it finds is the last record
    a("let", 0)
    assert b("sync", "late") == 0
    assert b("record", "e", 0) == 0
    assert b("sync", "e") == 0
    b("destroy", "e")
    b("destroy", "late")
    assert a("stat", "events") == base
    assert [a("create", k) == h for k in (1, 2)] == [True, False]
    other = a("create", 3)
    for k in (1, 3):
        a("destroy", k)
    assert [a("create", k) for k in (4, 5)] == [other, h]  # the last one destroyed is the first one used again
    assert b("open", "x", h) == 0
    a("hold", 0)
    a("record", 5, 0)
    assert b("query", "x") == 600
    a("let", 0)
    assert b("sync", "x") == 0


def test_a_handle_outlives_its_process(servers: MakeServers) -> None:
    a, b = servers(2)
    destroyed = a("create", "e")
    a("destroy", "e")
    handles = [destroyed, a("create", "f")]
    a.kill()
    a.p.join()
    b("stat", "reap")
    b("stream", 0)
    for k, h in enumerate(handles):
        assert b("open", k, h) == 0
        assert b("query", k) == b("record", k, 0) == b("sync", k) == 0
    assert len({b("create", f"new {k}") for k in range(100)} & set(handles)) == 0


def test_the_oldest_slots_of_the_dead_go_first_when_there_is_no_more_room(
    servers: MakeServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IPCSYNC_HOST_SEGMENT", f"selftest-full-{os.getpid()}")
    monkeypatch.setenv("IPCSYNC_HOST_EVENT_LIMIT", "131072")
    b = servers()
    handles = []

    def look(handle: bytes) -> int:
        code: int = b("open", "x", handle)
        assert code or b("destroy", "x") == 0
        return code

    for count in (1, 30_000, 30_000, 30_000, 30_000):
        a = servers()
        handles.append(a("create_many", count))
        if count == 1:
            assert b("open", "kept", handles[0]) == 0
        a.kill()
        a.p.join()
    assert [look(h) for h in handles] == [0] * 5
    last = servers()("create_many", 30_000)
    assert [look(h) for h in [*handles, last]] == [0, 205, 205, 0, 0, 0]


def test_a_slot_is_not_used_again_before_its_record_is_over(servers: MakeServers) -> None:
    a, b = servers(2)
    handles = [a("create", k) for k in range(3)]
    for x in (a, b):
        x("stream", 0)
        x("hold", 0)
    assert [b("open", k, h) for k, h in enumerate(handles)] == [0, 0, 0]
    a("record", 1, 0)
    b("record", 2, 0)
    for k in range(3):
        a("destroy", k)
    assert a("create", "first") == handles[0]
    assert a("create", "new") not in handles
    b("let", 0)
    b("ssync", 0)
    assert a("create", "second") == handles[2]
    a("let", 0)
    a("ssync", 0)
    assert a("create", "third") == handles[1]
    assert [a("query", k) for k in ("first", "second", "third")] == [0, 0, 0]


def test_a_late_signal_reaches_the_next_event_of_the_slot(
    servers: MakeServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IPCSYNC_HOST_PENDING_SLOTS", "1")
    a, b = servers(2)
    h = a("create", "old")
    for x in (a, b):
        for k in range(3):
            x("stream", k)
    assert b("open", "old", h) == 0
    for x, stream in ((b, 0), (a, 1)):
        x("hold", stream)
    b("record", "old", 0)
    a("destroy", "old")
    assert a("create", "new") == h
    assert a("query", "new") == 0
    a("record", "new", 1)
    a("wait", 2, "new")
    assert a("query", "new") == a("squery", 2) == 600
    b("let", 0)
    b("ssync", 0)
    assert a("sync", "new") == a("query", "new") == b("query", "old") == a("ssync", 2) == 0
    a("hold", 2)
    a("record", "new", 2)  # the signal has come: it ends no later record
    assert a("query", "new") == a("squery", 1) == 600
    a("let", 2)
    a("let", 1)
    assert a("sync", "new") == a("ssync", 2) == 0


def test_a_signal_that_came_before_the_record_is_not_late(
    servers: MakeServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IPCSYNC_HOST_PENDING_SLOTS", "1")
    a = servers()
    a("create", "old")
    for k in range(2):
        a("stream", k)
        a("hold", k)
    a("record", "old", 0)
    a("destroy", "old")
    a("create", "new")
    a("let", 0)
    a("ssync", 0)
    a("record", "new", 1)
    assert a("query", "new") == 600
    a("let", 1)
    assert a("sync", "new") == 0


@pytest.mark.parametrize("used", [1, 0])
def test_a_slot_that_the_dead_left_pending_is_not_used_again_or_is_poisoned(
    servers: MakeServers, monkeypatch: pytest.MonkeyPatch, used: int
) -> None:
    monkeypatch.setenv("IPCSYNC_HOST_PENDING_SLOTS", str(used))
    monkeypatch.setenv("IPCSYNC_HOST_DEATH", "pending")
    a, b = servers(2)
    h = a("create", "old")
    for x in (a, b):
        for k in range(2):
            x("stream", k)
    assert b("open", "old", h) == 0
    b("hold", 0)
    b("record", "old", 0)
    b.kill()
    b.p.join()
    for _ in range(2):
        a("destroy", "old")
        assert (a("create", "old") == h) == used
        assert a("create", "elsewhere") != h
        assert a("query", "old") == (600 if used else 0)
        a("record", "elsewhere", 1)
        assert a("sync", "elsewhere") == 0
    a("record", "old", 0)
    a("ssync", 1)
    if used:
        assert a("query", "old") == a("squery", 0) == 600
    else:
        assert a("sync", "old") == a("ssync", 0) == 0


def test_who_makes_an_event_waits_for_nobody_s_end(servers: MakeServers) -> None:
    """A killed process is over when its work is. Till then the slot that it left pending is not used again."""
    a, still_there = servers(2)
    h = a("create", "old")
    still_there("stream", 0)
    before = set(files("~p.*"))
    b = servers()
    assert b("open", "old", h) == 0
    (life,) = set(files("~p.*")) - before
    held = f"import fcntl; held.life = open('/dev/shm/{life}', 'r+b'); fcntl.lockf(held.life, fcntl.LOCK_SH)"
    still_there("python", held)
    b("stream", 0)
    b("hold", 0)
    b("record", "old", 0)
    b.kill()
    b.p.join()
    a("destroy", "old")
    assert a("create", "new") != h
    assert a("destroy", "new") == 0


@pytest.mark.parametrize("serial", [1, 0])
def test_a_record_waits_for_the_earlier_one_of_the_event(
    servers: MakeServers, monkeypatch: pytest.MonkeyPatch, serial: int
) -> None:
    monkeypatch.setenv("IPCSYNC_HOST_SERIAL", str(serial))
    a, b = servers(2)
    h = a("create", "e")
    assert b("open", "e", h) == 0
    for x in (a, b):
        x("stream", 0)
    a("hold", 0)
    a("record", "e", 0)
    b("record", "e", 0)
    if not serial:
        assert b("ssync", 0) == a("sync", "e") == 0
    assert b("squery", 0) == a("query", "e") == (600 if serial else 0)
    a("let", 0)
    assert b("ssync", 0) == a("sync", "e") == 0


def test_of_records_made_at_the_same_moment_one_waits_for_the_other(servers: MakeServers, tmp_path: Path) -> None:
    """However they meet, the event is pending while one of them is held: it is the later one, or waited for by it."""
    a, b = servers(2)
    assert b("open", "e", a("create", "e")) == 0
    page = tmp_path / "page"
    page.write_bytes(bytes(4096))
    for x in (a, b):
        x("stream", 0)
    for _ in range(4):  # in parts: on a busy machine all together take longer than an answer is waited for
        for x in (a, b):
            x.send(("race", "e", str(page), 1000, x is a))
        assert [x.get() for x in (a, b)] == [0, 0]


def test_strict(servers: MakeServers, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("IPCSYNC_HOST_STRICT", "1")
    a, b = servers(2)
    h = a("create", "e")
    assert b("open", "e", h) == 0
    b("stream", 0)
    assert b("record", "e", 0) == 0
    a("destroy", "e")
    for r in (b("query", "e"), b("sync", "e"), b("record", "e", 0), b("wait", 0, "e")):
        assert r == 400
    assert b("destroy", "e") == 0
    b.end()
    text = capfd.readouterr().err
    assert text.count("STRICT") == 4
    assert "cuStreamWaitEvent" in text


@pytest.mark.parametrize("imported", [False, True])
def test_a_capture_does_not_survive_the_record_of_an_interprocess_event(servers: MakeServers, imported: bool) -> None:
    a, b = servers(2)
    assert b("open", "e", a("create", "e")) == 0
    x, y = (b, a) if imported else (a, b)
    for k in (0, 1):
        x("stream", k)
    x("hold", 0)
    x("record", "e", 0)
    x("capture", 1)
    assert y("query", "e") == 600  # captures of other processes do not matter
    assert x("record", "e", 1) == 900
    assert x("endcapture", 1) == 901
    assert x("query", "e") == y("query", "e") == 600
    x("let", 0)
    assert x("sync", "e") == y("sync", "e") == 0


def test_waiting_costs_no_cpu(servers: MakeServers) -> None:
    a, b = servers(2)
    h = a("create", "e")
    b("open", "e", h)
    a("stream", 0)
    a("hold", 0)
    a("record", "e", 0)
    b.send(("sync", "e"))

    def cpu() -> float:
        fields = Path(f"/proc/{b.p.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    b.until_blocked()
    before = cpu()
    time.sleep(1)
    assert cpu() - before < 0.1
    a("let", 0)
    assert b.get() == 0
