"""LMCache's own server and client over points, not a line of theirs changed: `make test-lmcache`.

Its CPU device does each copy within the call, so checksums are right with any events. What tells is time: a record
that is held back in one process holds up what the other does behind it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import ipcsync
from tests.kit.until import until

if importlib.util.find_spec("lmcache") is None:
    pytest.skip("LMCache is not installed: make test-lmcache installs it", allow_module_level=True)

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

_LMCACHE = Path(sys.executable).with_name("lmcache")
_HELD_BACK = Path(__file__).with_name("held_back.py")
_OURS = "ipcsync.integrations.lmcache:CpuEventBackend"
_STOCK = "lmcache.v1.platform.base.event_ipc:DefaultEventIPCBackend"
_HELD_S = 0.3
_FOR_EVER_S = 3600.0
_START_S = 120.0  # its imports take long on a busy machine
_LOSS_S = 5.0
_REQUESTS = 3
_QUIET = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"}
_CHOSEN = {"LMCACHE_DEVICE_BACKEND": "ipcsync"}


@dataclass
class Server:
    """One `lmcache server`, and where it is reached."""

    process: subprocess.Popen[bytes]
    rpc: str
    http: str
    log: Path


Start = Callable[..., Server]


def _free_ports(count: int) -> list[int]:
    """Ports that nobody has, and that are given to nobody else while all of them are looked for."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


@pytest.fixture
def environment(coordinator: ipcsync.Coordinator) -> dict[str, str]:
    """What processes of LMCache run in."""
    return {**os.environ, **_QUIET, "IPCSYNC_ENDPOINT": coordinator.endpoint}


@pytest.fixture
def start_server(environment: dict[str, str], tmp_path: Path) -> Iterator[Start]:
    """Starts cache servers; none outlives the test."""
    started: list[subprocess.Popen[bytes]] = []

    def start(**extra: str) -> Server:
        rpc, http = _free_ports(2)
        log = tmp_path / f"server-{rpc}.log"
        command = f"""{_LMCACHE} server --supported-transfer-mode lmcache_driven --l1-size-gb 1 --eviction-policy LRU
            --host 127.0.0.1 --port {rpc} --http-host 127.0.0.1 --http-port {http} --disable-observability"""
        with log.open("wb") as out:
            process = subprocess.Popen(command.split(), env={**environment, **extra}, stdout=out, stderr=out)
        started.append(process)
        until(lambda: process.poll() is not None or "Uvicorn running" in log.read_text(), "it serves", _START_S)
        assert process.poll() is None, log.read_text()
        return Server(process, f"tcp://127.0.0.1:{rpc}", f"http://127.0.0.1:{http}", log)

    yield start
    for process in started:
        process.kill()
        process.wait()


@dataclass
class Client:
    """One run of LMCache's own benchmark: requests that are each stored and retrieved."""

    process: subprocess.Popen[bytes]
    log: Path
    results: Path

    def end(self, seconds: float = _START_S) -> int:
        """Its exit status."""
        return self.process.wait(seconds)

    def shortest(self, operation: str) -> float:
        """Seconds of the fastest `cold_store` or `warm_retrieve`, of which there was one for each request."""
        measured = json.loads(self.results.read_text())["metrics"][operation]
        assert measured[f"{operation}_count"] == _REQUESTS
        return float(measured[f"{operation}_min"]) / 1000


@pytest.fixture
def start_client(environment: dict[str, str], tmp_path: Path) -> Iterator[Callable[..., Client]]:
    """Starts clients of a server; none outlives the test."""
    started: list[subprocess.Popen[bytes]] = []

    def start(server: Server, **extra: str) -> Client:
        log, results = tmp_path / "client.log", tmp_path / "client.json"
        command = f"""{_LMCACHE} bench server --rpc-url {server.rpc} --url {server.http} --mode cpu
            --transfer-mode lmcache_driven --num-tokens 256 --start 0 --end {_REQUESTS} --interval 0.2
            --kvcache-shape-spec (2,64,16,2,32):float16:2 --format json --output {results}"""
        with log.open("wb") as out:
            process = subprocess.Popen(command.split(), env={**environment, **extra}, stdout=out, stderr=out)
        started.append(process)
        return Client(process, log, results)

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def hold_back(tmp_path: Path) -> Callable[[str, float], dict[str, str]]:
    """Gives the environment of a process whose records are held back."""

    def settings(backend: str, seconds: float) -> dict[str, str]:
        path = tmp_path / "held"
        path.mkdir()
        (path / "sitecustomize.py").write_text(_HELD_BACK.read_text())
        return {
            "PYTHONPATH": str(path),
            "HELD_BACK_BACKEND": backend,
            "HELD_BACK_S": str(seconds),
            "HELD_BACK_FILE": str(path / "holding"),
        }

    return settings


HoldBack = Callable[[str, float], dict[str, str]]
StartClient = Callable[..., Client]


def _chosen(environment: dict[str, str], **extra: str) -> str:
    """The class of the device that LMCache takes."""
    program = "from lmcache.v1.platform._device_detect import current_device_spec as spec; print(type(spec()).__name__)"
    command = [sys.executable, "-c", program]
    env = {**environment, **extra}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.split()[-1]


def test_it_is_taken_by_its_name_and_changes_nothing_without_it(environment: dict[str, str]) -> None:
    assert _chosen(environment, **_CHOSEN) == "IpcSyncCpuSpec"
    assert _chosen(environment) == "CpuDeviceSpec"
    assert _chosen(environment, **_CHOSEN, DEVICE_TYPE="cpu") == "IpcSyncCpuSpec", "with LMCache's other variable"
    assert _chosen(environment, DEVICE_TYPE="cpu") == "CpuDeviceSpec"


def test_requests_are_stored_and_retrieved_by_points(
    start_server: Start, start_client: StartClient, coordinator: ipcsync.Coordinator
) -> None:
    server = start_server(**_CHOSEN)
    client = start_client(server, **_CHOSEN)
    assert client.end() == 0, client.log.read_text()
    results = json.loads(client.results.read_text())["metrics"]["results"]
    assert (results["checksum_ok"], results["checksum_fail"]) == (_REQUESTS, 0)
    with ipcsync.connect(coordinator.endpoint) as observer:
        (event,) = observer.list_events()  # the server's, on which it told of each operation; the client has ended
        assert event.generation == event.completed == 2 * _REQUESTS


@pytest.mark.parametrize("held", ["server", "client"])
def test_each_operation_waits_for_a_record_that_is_held_back(
    held: str, start_server: Start, start_client: StartClient, hold_back: HoldBack
) -> None:
    settings = {name: hold_back(_OURS, _HELD_S) if name == held else {} for name in ("server", "client")}
    client = start_client(start_server(**_CHOSEN, **settings["server"]), **_CHOSEN, **settings["client"])
    assert client.end() == 0, client.log.read_text()
    for operation in ("cold_store", "warm_retrieve"):
        assert client.shortest(operation) >= 0.9 * _HELD_S


def test_stock_events_of_its_cpu_device_wait_for_nothing(
    start_server: Start, start_client: StartClient, hold_back: HoldBack
) -> None:
    settings = hold_back(_STOCK, _FOR_EVER_S)
    client = start_client(start_server(**settings))
    assert client.end() == 0, client.log.read_text()
    assert Path(settings["HELD_BACK_FILE"]).read_text().split()  # records were held back, and nobody noticed


def test_a_client_ends_soon_after_its_server_is_killed(
    start_server: Start, start_client: StartClient, hold_back: HoldBack
) -> None:
    settings = hold_back(_OURS, _FOR_EVER_S)
    server = start_server(**_CHOSEN, **settings)
    client = start_client(server, **_CHOSEN)
    holding = Path(settings["HELD_BACK_FILE"])
    until(lambda: holding.exists() and holding.read_text(), "the server holds a record back", _START_S)
    server.process.send_signal(signal.SIGKILL)
    until(lambda: "will never be complete: its recorder" in client.log.read_text(), "the client is told", _LOSS_S)
    assert client.end() == 1  # after it has asked the dead server, until its own timeout, to forget it
