"""Events that several processes share."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from cuda.bindings import driver as drv

from tests.softcuda.kit import IPC, code, handle_bytes, ok, open_event
from tests.softcuda.processes import MakeServers


def test_ipc_handle_errors(ctx: Any) -> None:
    e = ok(drv.cuEventCreate(IPC))
    assert code(drv.cuIpcGetEventHandle(ok(drv.cuEventCreate(2)))) == 400
    assert code(drv.cuIpcGetEventHandle(ok(drv.cuEventCreate(0)))) == 400
    assert code(open_event(handle_bytes(e))) == 201  # in the process that made it
    assert handle_bytes(e) == handle_bytes(e)
    for bad in (bytes(64), os.urandom(64), handle_bytes(e)[:40] + bytes(24)):
        assert code(open_event(bad)) in (1, 400)
    assert len(handle_bytes(e)) == 64


def test_ipc_event_both_ways(servers: MakeServers) -> None:
    a, b = servers(2)
    h = a("create", "e")
    assert b("open", "e", h) == 0
    assert b("reexport", "e") == 400  # an imported event has no handle to give
    for x in (a, b):
        x("stream", 0)
        assert x("query", "e") == 0
        assert x("sync", "e") == 0
    a("hold", 0)
    assert a("record", "e", 0) == 0
    assert b("query", "e") == 600
    assert a("query", "e") == 600
    assert b("wait", 0, "e") == 0
    assert b("squery", 0) == 600
    a("let", 0)
    assert b("ssync", 0) == 0
    assert b("sync", "e") == 0
    assert b("query", "e") == 0
    b("hold", 0)  # now the importer records, and the exporter sees it
    assert b("record", "e", 0) == 0
    assert a("query", "e") == 600
    assert a("wait", 0, "e") == 0
    assert a("squery", 0) == 600
    assert a("record", "e", 0) == 0  # the exporter's record, behind the importer's, is the latest for both
    b("let", 0)
    assert b("sync", "e") == 0
    assert a("query", "e") == 0
    a.end()
    b.end()


def test_ipc_wait_is_not_moved_by_a_later_record(servers: MakeServers) -> None:
    a, b, c = servers(3)
    h = a("create", "e")
    for x in (b, c):
        assert x("open", "e", h) == 0
    for x in (a, b, c):
        x("stream", 0)
        x("stream", 1)
    a("hold", 0)
    b("hold", 0)
    a("record", "e", 0)
    c("wait", 0, "e")
    b("record", "e", 0)
    c("wait", 1, "e")
    a("let", 0)
    assert c("ssync", 0) == 0
    assert c("squery", 1) == 600
    assert a("query", "e") == 600
    b("let", 0)
    assert c("ssync", 1) == 0
    assert a("sync", "e") == 0


def test_ipc_open_several_times(servers: MakeServers) -> None:
    a, b = servers(2)
    base = a("stat", "events")
    h = a("create", "e")
    b("stream", 0)
    a("stream", 0)
    for k in range(3):
        assert b("open", k, h) == 0
    a("hold", 0)
    a("record", "e", 0)
    assert b("destroy", 0) == 0
    assert b("query", 1) == 600
    assert b("query", 2) == 600
    a("let", 0)
    assert b("sync", 2) == 0
    assert b("destroy", 1) == 0
    assert b("destroy", 2) == 0
    assert a("destroy", "e") == 0
    assert a("stat", "events") == base


def test_exporter_destroys_while_importer_lives(servers: MakeServers) -> None:
    a, b = servers(2)
    base = a("stat", "events")
    h = a("create", "e")
    assert b("open", "e", h) == 0
    a("stream", 0)
    b("stream", 0)
    a("hold", 0)
    a("record", "e", 0)
    a("destroy", "e")
    assert b("query", "e") == 600  # tolerated
    assert b("open", "late", h) == 400  # but not opened any more
    a("let", 0)
    assert b("sync", "e") == 0
    assert b("record", "e", 0) == 0
    assert b("sync", "e") == 0
    b("destroy", "e")
    assert a("stat", "events") == base
    h2 = a("create", "e2")  # a slot used again is not mistaken for the old event
    assert b("open", "x", h) == 400
    assert b("open", "x", h2) == 0


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


def test_capture_of_an_interprocess_event_stays_in_the_process(servers: MakeServers) -> None:
    a, b = servers(2)
    h = a("create", "e")
    b("open", "e", h)
    a("stream", 0)
    a("stream", 1)
    b("stream", 0)
    a("hold", 0)
    a("record", "e", 0)
    a("capture", 1)
    assert b("query", "e") == 600  # captures of other processes do not matter
    assert a("record", "e", 1) == 0
    assert a("endcapture", 1) == 0
    assert a("query", "e") == 907
    assert b("query", "e") == 600
    assert b("wait", 0, "e") == 0
    a("let", 0)
    assert b("sync", "e") == 0
    assert b("ssync", 0) == 0
    assert a("query", "e") == 907
    assert a("record", "e", 0) == 0
    assert a("sync", "e") == 0


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
