"""A bridge goes on with the code that is on disk now, and neither it nor its peers lose a link."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ipcsync
import ipcsync_bridge
from ipcsync._linux.child import environment
from ipcsync_bridge import upgrade as formats
from ipcsync_bridge.bridge import Bridge
from ipcsync_bridge.config import Settings
from ipcsync_bridge.transport import Transport
from tests.fleet.nodes import Node, Server
from tests.kit.until import DEADLINE_S, until

pytestmark = pytest.mark.process

UPGRADE_S = 120.0
"""How long an upgrade may take: two starts of Python, on a machine that does more than it can."""


def upgrade(node: Node) -> None:
    """Have a node's bridge go on with the code on disk, and wait until it is connected again."""
    before = node.text().count("took over")
    ask(node)
    until(lambda: is_served(node).count("took over") > before, "the new code to take over", UPGRADE_S)


def ask(node: Node) -> None:
    assert node.bridge is not None
    node.bridge.send_signal(signal.SIGUSR2)  # as SIGHUP, which a terminal could send too


def is_new_code(node: Node) -> bool:
    """Whether the first upgrade of a bridge has come to its exec."""
    assert node.bridge is not None
    return formats.VARIABLE.encode() in Path(f"/proc/{node.bridge.pid}/environ").read_bytes()


def is_served(node: Node) -> str:
    """The bridge's log, for as long as it runs."""
    assert node.bridge is not None
    assert node.bridge.poll() is None, node.text()
    return node.text()


class Load:
    """One node records again and again, the other waits for each record."""

    def __init__(self, recorder: ipcsync.Client, waiter: ipcsync.Client, node: str) -> None:
        self._event = recorder.event(f"of/{node}", recorder=True, engine="timeline")
        self._seen = waiter.event(f"of/{node}", node=node)
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=work) for work in (self._record, self._wait)]
        self.recorded = self.seen = 0
        self.error: BaseException | None = None
        for thread in self._threads:
            thread.start()

    def _record(self) -> None:
        stream = ipcsync.Stream()
        while not self._is_over.wait(0.002):
            self.recorded = self._event.record(stream).generation

    def _wait(self) -> None:
        recording = self._threads[0]  # its last record may be under way when all is over
        while recording.is_alive() or self.seen < self.recorded:
            if self.seen == self.recorded:
                self._is_over.wait(0.001)
                continue
            try:
                self._seen.at(self.seen + 1).synchronize(DEADLINE_S)
                self.seen += 1
                if self.seen % 10 == 0:
                    self.seen = self._seen.completed  # for the newest, else it is behind for ever
            except ipcsync.IpcSyncError as error:
                self.error = error
                return

    def end(self) -> None:
        """All that was recorded is seen, without an error."""
        self._is_over.set()
        for thread in self._threads:
            thread.join()
        if self.error is not None:
            raise self.error
        assert self.seen == self.recorded > 0
        self._seen.close()
        self._event.close()


@pytest.mark.thorough
@pytest.mark.timeout(1200)
def test_twenty_upgrades_under_load_lose_no_link(patient_pair: tuple[Node, Node]) -> None:
    a, b = (node.client() for node in patient_pair)
    pids = [node.bridge.pid for node in patient_pair if node.bridge is not None]
    loads = [Load(a, b, "a"), Load(b, a, "b")]
    for number in range(20):
        claimed = until(lambda: claim(a, "weights"), "the name")
        late = b.event(f"late/{number}", node="a")
        upgrade(patient_pair[number % 2])
        claimed.close()
        event = a.event(f"late/{number}", recorder=True, engine="timeline")
        event.record(ipcsync.Stream())
        late.at(1).synchronize(DEADLINE_S)
        late.close()
        event.close()
        until(lambda: claim(b, "weights"), "the name to be free").close()
    for load in loads:
        load.end()
    assert [node.bridge.pid for node in patient_pair if node.bridge is not None] == pids
    for client in (a, b):
        until(lambda: client.stats()["pool_in_use"] == 0, "all slots to be free")  # noqa: B023 - at once


def claim(client: ipcsync.Client, name: str) -> ipcsync.SharedEvent | None:
    """The fleet's event of a name, None while another one has it: a name is free soon after its event is closed."""
    try:
        return client.event(name, recorder=True, fleet=True)
    except (ipcsync.RecorderTaken, ipcsync.FleetUnavailable):
        return None


def test_a_bridge_that_ends_amid_an_upgrade_ends_the_new_codes_trial(patient_pair: tuple[Node, Node]) -> None:
    node = patient_pair[0]
    trial = until(lambda: trial_of(node), "the trial")
    assert node.end_bridge() == 0
    assert not trial.exists()
    assert "ResourceWarning" not in node.text()


def trial_of(node: Node) -> Path | None:
    """The process of the new code that says whether it can go on; without one, have the bridge begin one."""
    assert node.bridge is not None
    for child in Path(f"/proc/{node.bridge.pid}/task/{node.bridge.pid}/children").read_text().split():
        with contextlib.suppress(OSError):  # it has ended
            if b"--try-handover" in Path("/proc", child, "cmdline").read_bytes():
                return Path("/proc", child)
    ask(node)
    return None


def test_a_trial_that_is_cancelled_again_and_again_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "_command", lambda *_: [sys.executable, "-c", "import time; time.sleep(600)"])

    async def run() -> list[str]:
        children = Path(f"/proc/{os.getpid()}/task/{threading.get_native_id()}/children")
        before = set(children.read_text().split())
        task = asyncio.create_task(formats.why_not())
        while not (begun := set(children.read_text().split()) - before):
            await asyncio.sleep(0.01)
        while not task.done():
            task.cancel()
            await asyncio.sleep(0)
        return [pid for pid in begun if Path("/proc", pid).exists()]

    assert asyncio.run(run()) == []


@pytest.mark.filterwarnings("ignore:.*FileIO:pytest.PytestUnraisableExceptionWarning")  # its pipe
def test_a_trial_that_no_thread_can_wait_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(formats, "_command", lambda *_: [sys.executable, "-c", "import time; time.sleep(600)"])
    monkeypatch.setattr(asyncio, "to_thread", refuse)
    assert asyncio.run(formats.why_not()) == "the new code cannot be waited for: can't start new thread"
    gc.collect()


def test_what_is_lost_of_the_recorder_is_lost_after_an_upgrade_as_before(patient_pair: tuple[Node, Node]) -> None:
    a, b = (node.client() for node in patient_pair)
    event = a.event("kv", recorder=True, engine="timeline")
    seen = b.event("kv", node="a")
    event.record(ipcsync.Stream())
    seen.at(1).synchronize(DEADLINE_S)
    for node in patient_pair:
        upgrade(node)
    seen.at(1).synchronize(0)
    event.close()
    with pytest.raises(ipcsync.RecorderLost):
        seen.at(2).synchronize(DEADLINE_S)


@pytest.mark.thorough
def test_an_upgrade_while_the_servers_are_away_waits_for_them(patient_pair: tuple[Node, Node], server: Server) -> None:
    a, b = (node.client() for node in patient_pair)
    event = a.event("kv", recorder=True, engine="timeline")
    seen = b.event("kv", node="a")
    server.kill()
    event.record(ipcsync.Stream())
    for node in patient_pair:
        ask(node)
        until(lambda: is_new_code(node), "the new code", UPGRADE_S)  # noqa: B023 - at once
    (peer,) = b.bridge().peers
    assert (peer.name, peer.state, peer.last_heard_s) == ("a", "linked", None)
    server.start()
    seen.at(1).synchronize(UPGRADE_S)
    assert seen.state == "open"


@pytest.mark.thorough
def test_new_code_has_its_nodes_name_though_the_file_of_its_owner_is_gone(new_node: Callable[..., Node]) -> None:
    node = new_node("a", "--link-ttl", "600", lease_ttl=600)
    node.await_bridge()
    client = node.client()
    event = client.event("w", recorder=True, fleet=True)
    (Path(node.coordinator.runtime_dir) / "bridge-main-a").unlink()
    upgrade(node)
    event.close()
    until(lambda: claim(client, "w"), "the name to be freed and claimed again")
    is_served(node)


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The code of bridges that are started from now on, to be changed."""
    copy = tmp_path / "ipcsync_bridge"
    shutil.copytree(Path(ipcsync_bridge.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("IPCSYNC_TEST_ZYGOTE", "0")  # what is forked has imported the other one
    return copy


@pytest.mark.thorough
def test_code_that_cannot_go_on_is_refused_and_the_old_one_stays(
    server: Server, new_node: Callable[..., Node], code: Path
) -> None:
    node = new_node("a")
    node.await_bridge()
    client = node.client()
    sound = (code / "wire.py").read_text()
    # Of another size: bytecode that is less than a second old stands for any source of the same size.
    (code / "wire.py").write_text(sound.replace("VERSION = 2\n", "VERSION = 77\n"))
    ask(node)
    until(lambda: is_served(node).count("goes on") == 1, "the outcome", UPGRADE_S)
    assert "bridges 77: stop it, and start anew" in node.text()
    (code / "wire.py").write_text(sound)
    (code / "exports.py").write_text("this is no Python")
    ask(node)
    until(lambda: is_served(node).count("goes on") == 2, "the outcome", UPGRADE_S)
    assert "SyntaxError" in node.text()
    assert client.nodes()[0].name == "a"
    (code / "exports.py").write_text((Path(ipcsync_bridge.__file__).parent / "exports.py").read_text())
    upgrade(node)
    assert client.nodes()[0].name == "a"


def test_an_upgrade_that_is_asked_for_during_one_that_is_refused_comes(
    new_node: Callable[..., Node], code: Path, tmp_path: Path
) -> None:
    """As for a certificate whose key is written after it, each with a signal."""
    node = new_node("a", "--link-ttl", "600", lease_ttl=600)
    node.await_bridge()
    sound, gate = (code / "exports.py").read_text(), tmp_path / "gate"
    os.mkfifo(gate)
    (code / "exports.py").write_text(f"open({str(gate)!r}).read()\nraise ImportError('half of it')\n")
    ask(node)
    with gate.open("w"):  # once the trial is at its other end
        (code / "exports.py").write_text(sound)
        ask(node)
        assert node.client().nodes()[0].name == "a"
    until(lambda: "took over" in is_served(node), "the new code to take over", UPGRADE_S)
    assert "half of it; the old code goes on" in node.text()


def test_an_end_that_is_asked_for_during_an_upgrade_comes(new_node: Callable[..., Node]) -> None:
    node = new_node("a")
    node.await_bridge()
    assert node.bridge is not None
    ask(node)
    node.bridge.terminate()
    assert node.bridge.wait(UPGRADE_S) == 0


@pytest.mark.parametrize("outcome", [None, "half of it"], ids=["sound", "refused"])
def test_an_end_that_comes_with_the_outcome_of_the_trial_is_no_failed_reload(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, outcome: str | None
) -> None:
    told: list[str] = []

    async def pause(_timeout: float) -> bool:
        return True

    async def scenario() -> str:
        session: Any = SimpleNamespace(epoch=b"e" * 16, board=None, pause=pause)
        bridge = Bridge(session, Transport(Settings("a", ("nats://127.0.0.1:4222",))), b"o" * 16)
        manager: Any = SimpleNamespace(reloading=lambda: told.append("reloading"), ready=told.append)
        bridge.manager = manager

        async def why_not() -> str | None:
            bridge.stop("stopped")  # as SIGTERM does
            return outcome

        monkeypatch.setattr(formats, "why_not", why_not)
        bridge._begin_reload()
        await asyncio.wait(bridge._tasks)
        bridge.remote_requests.close()
        return bridge.why

    assert asyncio.run(scenario()) == "stopped"
    assert told == ["reloading"]
    assert caplog.messages == []


def test_formats_that_differ_are_named(server: Server) -> None:
    command = [sys.executable, "-m", "ipcsync_bridge", "--node", "a", "--nats", server.url, "--try-handover"]
    for versions, status in ((formats.versions(), 0), ("handover 0", 1)):
        done = subprocess.run(
            [*command, versions], env=environment(), capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        assert done.returncode == status
        assert ("handover 0" in done.stderr) == bool(status)
