"""The commands that an operator of a fleet has: nodes, the doctor, and what docs/fleet.md tells to type."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ipcsync
from ipcsync._linux.child import environment
from tests.fleet.nodes import Node, Server
from tests.kit.until import DEADLINE_S, until

pytestmark = pytest.mark.process

_PAGE = Path(__file__).parents[2] / "docs" / "fleet.md"


def run(*words: str, **settings: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ipcsync", *words]
    return subprocess.run(
        command, env=environment(settings), capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )


def examine(*flags: str) -> tuple[int, dict[str, Any]]:
    """The doctor's exit status, and its findings by name."""
    done = run("doctor", "--fleet", "--json", *flags)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, {finding["name"]: finding for finding in json.loads(done.stdout)["checks"]}


@pytest.mark.thorough
def test_nodes_lists_them_and_says_what_is_lost(pair: tuple[Node, Node]) -> None:
    a, b = pair
    a.client().event("kv", recorder=True, engine="timeline")
    seen = b.client().event("kv", node="a")
    where = ("--runtime-dir", b.coordinator.runtime_dir)
    rows = {row["name"]: row for row in json.loads(run("nodes", "--json", *where).stdout)}
    assert list(rows) == ["b", "a"]
    assert (rows["a"]["state"], rows["a"]["links"]) == ("linked", 1)
    assert rows["a"]["epoch"] == a.client().epoch.hex()
    a.end_bridge()
    with pytest.raises(ipcsync.NodeLost):
        seen.at(1).synchronize(DEADLINE_S)
    text = run("nodes", *where).stdout
    assert re.search(r"^2 nodes$", text, re.MULTILINE)
    assert re.search(r"^\W*a\W+lost\W+.*stopped", text, re.MULTILINE), text


def test_nodes_without_a_bridge_or_a_coordinator_says_so(new_node: Callable[..., Node], tmp_path: Path) -> None:
    alone = new_node("a", has_bridge=False)
    done = run("nodes", "--runtime-dir", alone.coordinator.runtime_dir)
    assert (done.returncode, done.stdout) == (1, "")
    assert "ipcsync bridge" in done.stderr
    done = run("nodes", "--runtime-dir", str(tmp_path / "none"), "--timeout", "0.2")
    assert done.returncode == 1
    assert "no coordinator" in done.stderr


@pytest.mark.parametrize("command", [("nodes",), ("bridge", "--node", "a", "--nats", "nats://127.0.0.1:4222")])
def test_a_runtime_directory_with_too_long_a_path_is_told_in_one_line(command: tuple[str, ...]) -> None:
    done = run(*command, "--runtime-dir", "/" + "d" * 120)
    assert done.returncode == 2
    assert "choose another runtime directory" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_bridge_that_cannot_keep_what_it_is_known_by_says_so_in_one_line(new_node: Callable[..., Node]) -> None:
    node = new_node("a", has_bridge=False)
    (Path(node.coordinator.runtime_dir) / "bridge-main-a").mkdir()  # as where there is no room on the disk
    done = run("bridge", *node.flags)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert "bridge-main-a" in done.stderr


def test_a_bridge_that_is_told_to_stop_while_it_connects_for_the_first_time_does() -> None:
    pytest.importorskip("nats", reason="nats-py is not installed: pip install -e '.[fleet]'")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(DEADLINE_S)
        node = Node("a", [f"nats://127.0.0.1:{silent.getsockname()[1]}"])
        try:
            node.start_bridge()
            with silent.accept()[0]:
                assert node.end_bridge() == 0, node.text()  # and not 1, as that of one that got no connection
        finally:
            node.close()


def test_the_doctor_finds_all_well_before_there_is_a_bridge_and_beside_it(new_node: Callable[..., Node]) -> None:
    node = new_node("a", has_bridge=False)
    status, found = examine(*node.flags)
    assert status == 0, found
    assert "is free" in found["name"]["detail"]
    assert "the first bridge makes it" in found["JetStream"]["detail"]
    assert "nats-server 2." in found["server"]["detail"]
    node.start_bridge()
    node.await_bridge()
    status, found = examine(*node.flags)
    assert status == 0, found
    assert "this machine's, and its bridge answers" in found["name"]["detail"]
    assert {name for name, finding in found.items() if finding["result"] != "ok"} == {"certificates"}  # there are none
    assert node.client().nodes()[0].name == "a"


def test_the_doctor_of_a_fleet_has_the_bridges_variables_and_no_endpoint(server: Server) -> None:
    call = ("--node", "a", "--nats", server.url)
    assert "KV_ipcsync_prod " in run("doctor", "--fleet", *call, IPCSYNC_BRIDGE_FLEET="prod").stdout
    assert "KV_ipcsync_other " in run("doctor", "--fleet", "other", *call, IPCSYNC_BRIDGE_FLEET="prod").stdout
    done = run("doctor", "--fleet", "--endpoint", "ipc:///nowhere/coordinator.sock", *call)
    assert (done.returncode, "--endpoint" in done.stderr) == (2, True), done.stdout


@pytest.mark.thorough
def test_the_doctor_says_what_is_wrong(new_node: Callable[..., Node], server: Server, tmp_path: Path) -> None:
    taken = new_node("a")
    taken.await_bridge()
    other = new_node("a", has_bridge=False)
    status, found = examine(*other.flags)
    assert status == 1
    assert "another machine's, whose bridge answers" in found["name"]["detail"]
    taken.end_bridge(signal.SIGKILL)
    status, found = examine(*other.flags)
    assert (status, found["name"]["result"]) == (0, "warn")
    without = Server(tmp_path / "plain", has_jetstream=False)
    status, found = examine("--node", "a", "--nats", without.url, "--runtime-dir", str(tmp_path / "none"))
    without.kill()
    assert (status, found["JetStream"]["result"]) == (1, "fail")
    assert "nats-server -js" in found["JetStream"]["advice"]
    assert found["coordinator"]["result"] == "warn"
    server.kill()
    status, found = examine(*other.flags)
    assert (status, found["server"]["result"]) == (1, "fail")
    assert found["permissions"]["result"] == "skipped"
    done = run("doctor", "--node", "a")
    assert done.returncode == 2
    assert "--fleet" in done.stderr


@pytest.mark.program
def test_each_command_of_the_page_is_one(server: Server, new_node: Callable[..., Node]) -> None:
    """Typed as they stand, but for the server's port and the directory that no other test uses."""
    node = new_node("prefill-0", has_bridge=False)
    commands = re.findall(r"^(ipcsync .*)$", _PAGE.read_text(), re.MULTILINE)
    assert {command.split()[1] for command in commands} == {"bridge", "doctor", "nodes"}
    settings = {"IPCSYNC_RUNTIME_DIR": node.coordinator.runtime_dir}
    started: list[subprocess.Popen[bytes]] = []
    try:
        for command in sorted(commands):
            words = shlex.split(command.replace("nats://127.0.0.1:4222", server.url), comments=True)[1:]
            if "--tls-ca" in words:  # of files that are not there: the call is right, and says what is missing
                done = run(*words, **settings)
                assert done.returncode == 2
                assert "there is no file" in done.stderr or "cannot read" in done.stderr
            elif words[0] == "bridge":
                started.append(
                    subprocess.Popen([sys.executable, "-m", "ipcsync", *words], env=environment(settings), stderr=-3)
                )
                client = node.client()
                until(lambda: answers(client), "the bridge to answer")  # noqa: B023 - at once
            else:
                done = run(*words, **settings)
                assert done.returncode == 0, done.stdout + done.stderr
    finally:
        for process in started:
            process.terminate()
            process.wait(DEADLINE_S)
    assert len(started) == 1


def answers(client: ipcsync.Client) -> bool:
    try:
        return client.bridge().node == "prefill-0"
    except (ipcsync.NoBridge, ipcsync.WaitTimeout):
        return False


def test_a_bridge_says_what_it_has_counted(pair: tuple[Node, Node]) -> None:
    a, b = (node.client() for node in pair)
    event = a.event("kv", recorder=True, engine="timeline")
    seen = b.event("kv", node="a")
    for _ in range(3):
        seen.at(event.record(ipcsync.Stream()).generation).synchronize(DEADLINE_S)
    until(lambda: a.bridge().counts["news_sent"] >= 3, "the news to be acknowledged")
    here, there = a.bridge(), b.bridge()
    assert (here.node, here.fleet, there.node) == ("a", "main", "b")
    assert pair[0].bridge is not None
    assert here.pid == pair[0].bridge.pid != os.getpid()
    assert here.server.startswith("nats://127.0.0.1:")
    assert (here.exports, here.mirrors, there.exports, there.mirrors) == (1, 0, 0, 1)
    assert [(peer.name, peer.state, peer.followed) for peer in here.peers] == [("b", "linked", 1)]
    assert [(peer.name, peer.state, peer.mirrored) for peer in there.peers] == [("a", "linked", 1)]
    assert there.counts["news_received"] >= 3
    assert there.counts["remote_requests"] >= 1
    pair[0].end_bridge()
    until(lambda: b.bridge().nodes_lost == {"stopped": 1}, "the goodbye to be counted")
    (peer,) = b.bridge().peers
    assert (peer.state, peer.reason) == ("lost", "stopped")


def test_a_bridge_that_may_not_connect_any_more_ends(tmp_path: Path) -> None:
    settings = tmp_path / "nats.conf"
    settings.write_text("")
    server = Server(tmp_path / "server", "-c", str(settings))
    node = Node("a", [server.url])
    node.start_bridge()
    node.await_bridge()
    assert node.bridge is not None
    settings.write_text('authorization { user: "somebody", password: "else" }')
    server.process.send_signal(signal.SIGHUP)
    assert node.bridge.wait(DEADLINE_S) == 1
    node.close()
    server.kill()
