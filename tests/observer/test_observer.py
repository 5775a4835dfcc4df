"""The observer as a service: what it serves, what it survives, and who may ask."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import ipcsync
from ipcsync.testing import StreamGate
from tests.kit.browser import eventually
from tests.kit.peer import Peer
from tests.observer.observing import DIRECT, PERIOD_S, Observer, running

pytestmark = pytest.mark.process

_kept: list[object] = []


@pytest.fixture
def new_observer(tmp_path: Path) -> Iterator[Callable[..., Observer]]:
    """Starts observers; none outlives the test."""
    with running(tmp_path) as start:
        yield start


@pytest.fixture
def observer(coordinator: ipcsync.Coordinator, new_observer: Callable[..., Observer]) -> Observer:
    """One that looks at the test's coordinator, and has seen it."""
    one = new_observer("--endpoint", coordinator.endpoint)
    one.until_ready()
    return one


def _row(state: Any, name: str) -> Any:
    (row,) = [row for row in state["events"] if row["name"] == name]
    return row


def _record_and_hold(endpoint: str, name: str) -> None:
    """In a peer: one record that completes, then one that does not."""
    client = ipcsync.connect(endpoint, name="holder")
    stream = ipcsync.Stream()
    event = client.event(name, recorder=True, engine="event")
    event.record(stream).synchronize(10)
    gate = StreamGate(stream)
    gate.__enter__()
    event.record(stream)
    _kept.extend([client, stream, event, gate])


def _let_go() -> None:
    gate = _kept[-1]
    assert isinstance(gate, StreamGate)
    gate.open()


# --- what it shows ----------------------------------------------------------------------------------------------------


def test_the_state_tells_who_records_who_waits_and_how_fast(
    observer: Observer, new_client: Callable[..., ipcsync.Client]
) -> None:
    recorder, waiter = new_client("prefill"), new_client("decode")
    stream = ipcsync.Stream()
    with recorder.event("kv/a", recorder=True) as event, waiter.event("kv/a"):
        until = time.monotonic() + 6 * PERIOD_S
        while time.monotonic() < until:
            event.record(stream).synchronize(10)
        state = observer.until(
            lambda state: state["events"] and _row(state, "kv/a")["completed"] == event.generation, "the last record"
        )
        row = _row(state, "kv/a")
        assert (row["state"], row["completed"], row["recorder"]) == ("open", event.generation, "prefill")
        assert row["attached"] == 2
        assert row["rate"] > 0
        generations = [generation for _, generation, _ in row["lane"]]
        assert len(generations) > 1
        assert generations == sorted(generations)
        links = {(link["session"], link["role"], link["event"], link["state"]) for link in state["links"]}
        assert links == {("prefill", "records", "kv/a", "active"), ("decode", "waits", "kv/a", "active")}
        assert sorted(session["name"] for session in state["sessions"]) == ["decode", "prefill"]  # not its own
    observer.until(lambda state: not state["events"], "the event is gone")


def test_work_that_does_not_complete_is_shown_with_its_age(
    observer: Observer, coordinator: ipcsync.Coordinator, peer: Peer
) -> None:
    peer.call(_record_and_hold, coordinator.endpoint, "stuck")
    state = observer.until(
        lambda state: state["events"] and _row(state, "stuck")["pending_s"] >= 3 * PERIOD_S, "it is pending"
    )
    assert (_row(state, "stuck")["generation"], _row(state, "stuck")["completed"]) == (2, 1)


def test_the_last_recorder_of_a_broken_event_is_told(
    observer: Observer, coordinator: ipcsync.Coordinator, client: ipcsync.Client, peer: Peer
) -> None:
    peer.call(_record_and_hold, coordinator.endpoint, "lost")
    with client.event("lost"):
        observer.until(lambda state: state["events"] and _row(state, "lost")["generation"] == 2, "both records")
        peer.kill()
        state = observer.until(lambda state: _row(state, "lost")["state"] == "broken", "it is broken")
        row = _row(state, "lost")
        assert (row["recorder"], row["completed"], row["pending_s"]) == ("holder", 1, 0.0)
        # A look counts before it lists: the next one counts what this one listed.
        eventually(lambda: observer.metrics()["ipcsync_quarantined", ()] == 1, "it is counted")
        metrics = observer.metrics()
        assert metrics["ipcsync_quarantine_oldest_seconds", ()] >= 0
        assert metrics["ipcsync_deaths_total", ("pidfd",)] == 1


def test_unnamed_events_of_one_session_are_told_apart(observer: Observer, client: ipcsync.Client) -> None:
    streams = [ipcsync.Stream() for _ in range(3)]
    for count, stream in enumerate(streams, 1):
        for _ in range(count):
            client.record(stream)
    state = observer.until(
        lambda state: sorted(row["generation"] for row in state["events"]) == [1, 2, 3], "three events"
    )
    assert len({(row["slot"], row["incarnation"]) for row in state["events"]}) == 3


def test_who_closed_an_event_lingers_until_its_work_is_done(
    observer: Observer, coordinator: ipcsync.Coordinator, client: ipcsync.Client, peer: Peer
) -> None:
    peer.call(_record_and_hold, coordinator.endpoint, "held")
    stream = ipcsync.Stream()
    event = client.event("held")
    event.at(2).wait(stream)
    event.close()
    found = {
        (link["session"], link["role"], link["state"])
        for link in observer.until(
            lambda state: any(link["state"] == "lingering" for link in state["links"]), "the wait lingers"
        )["links"]
    }
    assert found == {("holder", "records", "active"), ("main", "waits", "lingering")}
    assert {(row.event, row.role, row.state) for row in client.list_attachments("he")} == {
        ("held", "records", "active"),
        ("held", "waits", "lingering"),
    }
    assert len(client.list_attachments(limit=1)) == 1
    assert client.list_attachments("other") == []
    peer.call(_let_go)
    observer.until(lambda state: len(state["links"]) == 1, "its work is done")


def test_of_many_events_it_shows_those_asked_for_and_counts_the_rest(
    observer: Observer, client: ipcsync.Client
) -> None:
    events = [client.event(f"many/{number}", depth=1) for number in range(320)]
    state = observer.until(lambda state: state["events_total"] == len(events), "all are seen")
    assert (len(state["events"]), state["events_found"]) == (300, 320)
    state = observer.state("?contains=MANY/31")
    assert sorted(row["name"] for row in state["events"]) == sorted(["many/31", *(f"many/31{n}" for n in range(10))])
    assert {link["event"] for link in state["links"]} == {row["name"] for row in state["events"]}


# --- metrics ----------------------------------------------------------------------------------------------------------


def test_metrics_say_what_the_coordinator_counts(
    observer: Observer, coordinator: ipcsync.Coordinator, client: ipcsync.Client
) -> None:
    with client.event("a", recorder=True, engine="event"), client.event("b", engine="timeline"):
        observer.until(lambda state: state["events_total"] == 2, "both are seen")
        with pytest.raises(ipcsync.EngineMismatch):
            client.event("a", engine="timeline")
        state = observer.until(lambda state: state["stats"]["refusals"].get("EngineMismatch"), "the refusal is seen")
        metrics = observer.metrics()
        stats = client.stats()
    assert metrics["ipcsync_up", ()] == 1
    assert metrics["ipcsync_sessions", ()] == 2
    assert metrics["ipcsync_attachments", ()] == 2
    assert metrics["ipcsync_events", ("event", "open")] == 1
    assert metrics["ipcsync_events", ("timeline", "open")] == 1
    assert metrics["ipcsync_pool_in_use", ()] == 2
    assert metrics["ipcsync_pool_high_water", ()] == 2
    assert metrics["ipcsync_pool_size", ()] == stats["pool_size"]
    assert metrics["ipcsync_requests_total", ("open", "ok")] == 2
    assert metrics["ipcsync_requests_total", ("open", "EngineMismatch")] == 1
    assert metrics["ipcsync_refusals_total", ("EngineMismatch",)] == 1
    assert metrics["ipcsync_deaths_total", ("ttl",)] == 0
    assert metrics["ipcsync_resyncs_total", ()] == 0
    assert metrics["ipcsync_feed_number", ()] == state["stats"]["feed_number"]
    assert 0 < metrics["ipcsync_oldest_lease_seconds", ()] <= metrics["ipcsync_uptime_seconds", ()]
    count = metrics["ipcsync_request_seconds_count", ()]
    assert metrics["ipcsync_request_seconds_bucket", ("+Inf",)] == count > 0
    assert metrics["ipcsync_request_seconds_sum", ()] > 0


# --- health, and the coordinator's life -------------------------------------------------------------------------------


def test_it_survives_the_coordinators_restart_and_says_so_meanwhile(
    new_coordinator: Callable[..., ipcsync.Coordinator], new_observer: Callable[..., Observer], tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    first = new_coordinator(runtime_dir=str(directory))
    one = new_observer("--endpoint", first.endpoint)
    epoch = one.until_ready()["epoch"]
    first.stop()
    state = one.until(lambda state: not state["ready"], "the loss is seen")
    assert state["problem"]
    assert one.get("/healthz")[0] == 200
    assert one.get("/healthz/ready")[0] == 503
    metrics = one.metrics()
    assert metrics == {("ipcsync_up", ()): 0.0, ("ipcsync_observer_connects_total", ()): 1.0}
    second = new_coordinator(runtime_dir=str(directory))
    assert second.endpoint == first.endpoint
    state = one.until_ready()
    assert state["epoch"] != epoch
    assert one.get("/healthz/ready")[0] == 200
    assert one.metrics()["ipcsync_observer_connects_total", ()] == 2


def test_a_coordinator_that_does_not_answer_is_not_ready_and_then_is_again(
    observer: Observer, coordinator: ipcsync.Coordinator
) -> None:
    assert json.loads(observer.get("/healthz")[1]) == {"live": True, "ready": True, "problem": ""}
    os.kill(coordinator.pid, signal.SIGSTOP)
    try:
        observer.until(lambda state: not state["ready"], "the silence is seen")
        health = json.loads(observer.get("/healthz")[1])
        assert health["live"]
        assert not health["ready"]
        assert health["problem"]
    finally:
        os.kill(coordinator.pid, signal.SIGCONT)
    observer.until_ready()


def test_it_starts_before_any_coordinator(new_observer: Callable[..., Observer], tmp_path: Path) -> None:
    one = new_observer("--endpoint", f"ipc://{tmp_path}/nobody.sock")
    state = one.until(lambda state: "no coordinator answered" in state["problem"], "nobody is there")
    assert not state["ready"]
    assert one.stop() == 0


def test_sigterm_ends_it_with_an_open_page_and_leaves_no_session(observer: Observer, client: ipcsync.Client) -> None:
    with DIRECT.open(f"{observer.url}/api/stream", timeout=10) as stream:
        assert json.loads(stream.readline().removeprefix(b"data: "))["ready"]
        began = time.monotonic()
        assert observer.stop() == 0
        assert time.monotonic() - began < 5
    assert [session.name for session in client.list_sessions()] == ["main"]
    assert client.stats()["deaths"] == {"pidfd": 0, "ttl": 0}
    assert "event=stopped" in observer.log.read_text()


def test_the_stream_sends_lanes_once(observer: Observer, client: ipcsync.Client) -> None:
    with client.event("e"):
        observer.until(lambda state: state["events"], "the event is seen")
        with DIRECT.open(f"{observer.url}/api/stream", timeout=10) as stream:
            first = json.loads(stream.readline().removeprefix(b"data: "))
            assert stream.readline() == b"\n"
            second = json.loads(stream.readline().removeprefix(b"data: "))
    assert first["events"][0]["lane"]
    assert "lane" not in second["events"][0]


# --- who may ask ------------------------------------------------------------------------------------------------------


def test_it_serves_on_loopback_and_under_its_own_names_only(observer: Observer) -> None:
    assert observer.url.startswith("http://127.0.0.1:")
    port = observer.url.rpartition(":")[2]
    for host in ("localhost", f"localhost:{port}", "127.0.0.1", f"[::1]:{port}"):
        assert observer.get("/api/state", Host=host)[0] == 200, host
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "localhost.", "[::1].evil", "::1:x"):
        status, text = observer.get("/api/state", Host=host)
        assert (status, "sessions" in text) == (421, False), host


def test_elsewhere_than_on_loopback_it_answers_to_any_name_and_warns(
    coordinator: ipcsync.Coordinator, new_observer: Callable[..., Observer]
) -> None:
    one = new_observer("--endpoint", coordinator.endpoint, "--host", "0.0.0.0")
    one.url = one.url.replace("0.0.0.0", "127.0.0.1")
    assert one.get("/healthz", Host="pod.example")[0] == 200
    assert "level=warning" in one.log.read_text()


def test_every_answer_forbids_what_is_not_its_own(observer: Observer) -> None:
    for path in ("/", "/static/app.js", "/metrics", "/api/state", "/nothing"):
        try:
            response = DIRECT.open(observer.url + path, timeout=10)
        except urllib.error.HTTPError as error:
            response = error
        with response:
            assert response.headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'self';")
            assert response.headers["X-Content-Type-Options"] == "nosniff"


def test_nothing_but_its_own_files_is_served(observer: Observer) -> None:
    for path in ("/static/../app.py", "/static/%2e%2e/app.py", "/static//etc/passwd", "/static/"):
        assert observer.get(path)[0] == 404, path
    with pytest.raises(urllib.error.HTTPError) as caught:
        DIRECT.open(urllib.request.Request(f"{observer.url}/api/state", b"{}", method="POST"), timeout=10)
    with caught.value:
        assert caught.value.code == 405


# --- the command ------------------------------------------------------------------------------------------------------

_WITHOUT = """
import sys
from importlib.abc import MetaPathFinder
class Missing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in {missing!r}:
            raise ModuleNotFoundError(f'No module named {{name!r}}', name=name)
sys.meta_path.insert(0, Missing())
from ipcsync_observer.__main__ import main
main(sys.argv[1:], prog_name='ipcsync observer')
"""


@pytest.mark.parametrize("missing", ["prometheus_client", "starlette", "uvicorn"])
def test_without_the_extra_it_says_which_one_to_install(missing: str) -> None:
    command = [sys.executable, "-c", _WITHOUT.format(missing=(missing,)), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert (
        done.stderr
        == f"ipcsync: the observer needs {missing}; in a checkout of ipcsync: pip install -e '.[observer]'\n"
    )


def test_without_the_extra_its_help_is_there() -> None:
    missing = ("prometheus_client", "starlette", "uvicorn")
    command = [sys.executable, "-c", _WITHOUT.format(missing=missing), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0
    assert done.stdout.startswith("Usage: ipcsync observer")


def test_a_port_in_use_is_one_line_and_status_1(coordinator: ipcsync.Coordinator) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-c", "from ipcsync.cli import main; main()"]
        command += ["observer", "--port", str(port), "--endpoint", coordinator.endpoint]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert done.stderr == f"ipcsync: cannot serve on 127.0.0.1 port {port}: Address already in use\n"


@pytest.mark.parametrize("arguments", [("--endpoint", "tcp://a:1"), ("--port", "x"), ("--period", "0")])
def test_a_wrong_call_has_status_2(arguments: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "ipcsync_observer", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2, done.stderr


# --- row 50: connections that say nothing -----------------------------------------------------------------------------


def _assert_answers(observer: Observer) -> None:
    assert observer.get("/healthz/ready")[0] == 200
    assert observer.metrics()["ipcsync_up", ()] == 1


@pytest.mark.parametrize(
    "sent", [b"", b"GET / HTTP/1.1\r\nHost: localhost\r\nX-A: ", b"\x16\x03\x01"], ids=["idle", "half", "noise"]
)
def test_row_50_a_thousand_connections_that_ask_for_nothing_keep_nobody_out(observer: Observer, sent: bytes) -> None:
    address = urlsplit(observer.url)
    held = []
    try:
        for _ in range(1000):
            connection = socket.create_connection((address.hostname, address.port), timeout=10)
            held.append(connection)
            if sent:
                with contextlib.suppress(ConnectionError):  # others needed its place already
                    connection.send(sent)
        _assert_answers(observer)
        assert len(os.listdir(f"/proc/{observer.process.pid}/fd")) < 600
        eventually(lambda: all(map(_is_closed, held)), "the end of all that asked for nothing")
        _assert_answers(observer)
    finally:
        for connection in held:
            connection.close()


def _is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return not connection.recv(4096) or _is_closed(connection)
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def test_row_50_pages_that_are_open_keep_no_health_check_out(observer: Observer) -> None:
    address = urlsplit(observer.url)
    request = f"GET /api/stream HTTP/1.1\r\nHost: {address.netloc}\r\n\r\n".encode()
    pages = []
    try:
        for _ in range(110):
            pages.append(socket.create_connection((address.hostname, address.port), timeout=10))
            pages[-1].sendall(request)
        answers = [page.recv(12) for page in pages]
        assert answers == [b"HTTP/1.1 200"] * 100 + [b"HTTP/1.1 503"] * 10
        _assert_answers(observer)
    finally:
        for page in pages:
            page.close()
    eventually(lambda: observer.get("/api/state")[0] == 200, "an answer")


def test_row_50_a_connection_that_is_kept_alive_asks_again(observer: Observer) -> None:
    address = urlsplit(observer.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=10)
    for _ in range(3):
        connection.request("GET", "/healthz/ready")
        response = connection.getresponse()
        assert (response.status, response.read()[:1]) == (200, b"{")
    connection.close()
