"""Whom the observer answers, with what, and row 50: connections that say nothing keep nobody out."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import ipcsync
from tests.kit.until import until
from tests.observer.observing import DIRECT, Observer

pytestmark = pytest.mark.process


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


# --- row 50: connections that say nothing -----------------------------------------------------------------------------


def _assert_answers(observer: Observer) -> None:
    assert observer.get("/healthz/ready")[0] == 200
    assert observer.metrics()["ipcsync_up", ()] == 1


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"", id="idle"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: localhost\r\nX-A: ", id="half"),
        pytest.param(b"\x16\x03\x01", id="noise", marks=pytest.mark.thorough),
    ],
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
        until(lambda: all(map(_is_closed, held)), "the end of all that asked for nothing")
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
    until(lambda: observer.get("/api/state")[0] == 200, "an answer")


def test_row_50_a_connection_that_takes_no_answers_is_ended(observer: Observer) -> None:
    """Hundreds of them would take all places."""
    address = urlsplit(observer.url)
    request = f"GET /static/app.js HTTP/1.1\r\nHost: {address.netloc}\r\n\r\n".encode()

    with socket.create_connection((address.hostname, address.port), timeout=10) as connection:
        ports = f":{address.port:04X}", f":{connection.getsockname()[1]:04X}"

        def kept() -> bool:
            """Whether the observer still has its end: one that no process has is listed with the inode 0."""
            rows = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
            return any((row[1][-5:], row[2][-5:]) == ports and row[9] != "0" for row in rows)

        until(kept, "the connection")
        connection.sendall(1000 * request)  # the answers are more than what the kernel keeps
        until(lambda: not kept(), "its end")
    _assert_answers(observer)


def test_row_50_a_connection_that_is_kept_alive_asks_again(observer: Observer) -> None:
    address = urlsplit(observer.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=10)
    for _ in range(3):
        connection.request("GET", "/healthz/ready")
        response = connection.getresponse()
        assert (response.status, response.read()[:1]) == (200, b"{")
    connection.close()
