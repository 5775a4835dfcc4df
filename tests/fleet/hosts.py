"""Hosts for tests: each has a network, a process table, IPC objects and /dev/shm of its own, and one wire to a hub.

So nothing but the network can carry anything between two of them. Made with unshare(1) as root, or not at all.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ipcsync
from ipcsync._linux.child import COMMAND, environment
from ipcsync.testing import StreamGate
from tests.fleet import nodes
from tests.fleet.sides import End, Sides
from tests.kit.peer import Peer
from tests.kit.until import DEADLINE_S, until

HUB = "10.77.0.1"
_ISOLATED = [
    "unshare", "--net", "--mount", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c",
    'mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs -o mode=700 tmpfs "$1" && shift && exec "$@"', "sh",
]  # fmt: skip


@functools.cache
def why_not() -> str | None:
    """Why hosts cannot be made here, None if they can."""
    reason = nodes.why_not()
    if reason:
        return reason
    for tool in ("unshare", "nsenter", "ip", "nft"):
        if shutil.which(tool, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") is None:
            return f"there is no {tool}: apt-get install util-linux iproute2 nftables"
    with tempfile.TemporaryDirectory() as path:
        made = subprocess.run([*_ISOLATED, path, "true"], capture_output=True, text=True, timeout=30, check=False)
    if made.returncode:
        return f"namespaces cannot be made here (as root they can): {made.stderr.strip()[:200]}"
    return None


def _in_network(pid: int, *command: str) -> None:
    subprocess.run(["nsenter", "--target", str(pid), "--net", *command], check=True, timeout=30, capture_output=True)


class Hub:
    """The network between hosts, with room for servers."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
        self.pid = self._process.pid
        own = os.readlink("/proc/self/ns/net")
        until(lambda: os.readlink(f"/proc/{self.pid}/ns/net") != own, "a network namespace")
        for command in (
            "ip link set lo up", "ip link add br0 type bridge", f"ip addr add {HUB}/24 dev br0", "ip link set br0 up",
        ):  # fmt: skip
            _in_network(self.pid, *command.split())

    @property
    def prefix(self) -> list[str]:
        """What starts a command there."""
        return ["nsenter", "--target", str(self.pid), "--net"]

    def plug(self, number: int, pid: int) -> None:
        """Give the host of process `pid` a wire to here."""
        _in_network(self.pid, *f"ip link add v{number} type veth peer name eth0 netns {pid}".split())
        _in_network(self.pid, *f"ip link set v{number} master br0 up".split())
        for command in ("ip link set lo up", f"ip addr add 10.77.0.{10 + number}/24 dev eth0", "ip link set eth0 up"):
            _in_network(pid, *command.split())

    def cut(self, number: int) -> None:
        """Nothing goes through its wire any more, and nobody is told."""
        _in_network(self.pid, *f"ip link set v{number} down".split())

    def heal(self, number: int) -> None:
        """The wire is whole again."""
        _in_network(self.pid, *f"ip link set v{number} up".split())

    def close(self) -> None:
        """End it, and with it the wires."""
        self._process.kill()
        self._process.wait()


class Host(Peer):
    """A process that is the first of a host of its own, and runs what it is told there."""

    def __init__(self, hub: Hub, number: int) -> None:
        self.number = number
        self._hub = hub
        self._directory = tempfile.TemporaryDirectory()  # on it lies what only the host itself sees
        super().__init__()
        self.inner = int(until(self._first, "the host's first process").split()[0])
        hub.plug(number, self.inner)

    def _command(self, fd: int) -> list[str]:
        return [*_ISOLATED, self._directory.name, sys.executable, "-c", COMMAND, str(fd), "0"]

    @property
    def directory(self) -> str:
        """The coordinator's, which nobody sees from outside."""
        return self._directory.name

    def close(self, seconds: float = DEADLINE_S) -> int | None:
        """End the host."""
        status = super().close(seconds)
        self._directory.cleanup()
        return status

    def _first(self) -> str:
        return Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()

    def cut(self) -> None:
        """Pull its wire."""
        self._hub.cut(self.number)

    def heal(self) -> None:
        """Plug it in again."""
        self._hub.heal(self.number)

    def drop(self, hook: str) -> None:
        """Drop, without a word, all that goes out ("output") or comes in ("input")."""
        interface = "oifname" if hook == "output" else "iifname"
        for rule in (
            "add table inet cut",
            f"add chain inet cut c {{ type filter hook {hook} priority 0; }}",
            f"add rule inet cut c {interface} != lo drop",
        ):
            _in_network(self.inner, "nft", rule)

    def undrop(self) -> None:
        """Drop nothing."""
        _in_network(self.inner, "nft", "delete table inet cut")


# --- what runs on a host ----------------------------------------------------------------------------------------------

_here: dict[str, Any] = {}


def serve(directory: str, node: str, urls: Sequence[str], *arguments: str) -> None:
    """Start this host's coordinator and its bridge, and wait until the bridge answers."""
    _here["coordinator"] = ipcsync.launch(runtime_dir=directory)
    _here["command"] = [
        sys.executable, "-m", "ipcsync_bridge", "--node", node, *(part for url in urls for part in ("--nats", url)),
        "--insecure", "--runtime-dir", _here["coordinator"].runtime_dir, *arguments,
    ]  # fmt: skip
    _here["log"] = tempfile.TemporaryFile()  # noqa: SIM115 - of the process's life
    _here["client"] = ipcsync.connect(_here["coordinator"].endpoint, name="worker")
    _here["client"].timeout = DEADLINE_S
    start_bridge()
    until(_answers, f"the bridge of {node} to answer")


def start_bridge() -> None:
    """Start the bridge, again."""
    _here["bridge"] = subprocess.Popen(_here["command"], env=environment(), stdout=_here["log"], stderr=_here["log"])


def _answers() -> bool:
    if _here["bridge"].poll() is not None:
        assert "store" in bridge_text(), bridge_text()  # the servers have no leader yet
        start_bridge()
    try:
        return bool(_here["client"].nodes(timeout=5.0))
    except (ipcsync.NoBridge, ipcsync.FleetUnavailable, ipcsync.WaitTimeout):
        return False


def bridge_text() -> str:
    """What the bridge has logged."""
    _here["log"].seek(0)
    text: str = _here["log"].read().decode(errors="replace")
    return text


def signal_bridge(number: int) -> None:
    """Send the bridge a signal."""
    _here["bridge"].send_signal(number)


def bridge_status(seconds: float) -> int | None:
    """The bridge's exit status within so many seconds."""
    status: int = _here["bridge"].wait(seconds)
    return status


def record(name: str, count: int = 1) -> bytes:
    """Record on an event of this host; the last point's bytes."""
    event = _here.get(name) or _here.setdefault(name, _here["client"].event(name, recorder=True, engine="timeline"))
    stream = _here.setdefault("stream", ipcsync.Stream())
    for _ in range(count):
        point = event.record(stream)
    return bytes(point)


def record_gated(name: str) -> None:
    """Record behind a gate, which `open_gate` opens."""
    event = _here.get(name) or _here.setdefault(name, _here["client"].event(name, recorder=True, engine="timeline"))
    stream = _here.setdefault("stream", ipcsync.Stream())
    _here["gate"] = StreamGate(stream).__enter__()
    event.record(stream)


def open_gate() -> None:
    """Let the work go on."""
    _here.pop("gate").open()


def follow(name: str, node: str) -> None:
    """Open an event of another host."""
    _here[f"{node}:{name}"] = _here["client"].event(name, node=node)


def outcome(name: str, node: str, generation: int, seconds: float) -> tuple[str, str, float]:
    """How a wait ends: ("complete", "", s), or (error, its reason or cause, s)."""
    return _outcome(_here[f"{node}:{name}"].at(generation), seconds)


def outcome_later(name: str, node: str, generation: int, seconds: float) -> tuple[str, str, float]:
    """The same for a client that connects now, and has the point's bytes only."""
    data = bytes(_here[f"{node}:{name}"].at(generation))
    with ipcsync.connect(_here["coordinator"].endpoint, name="later", timeout=DEADLINE_S) as client:
        began = time.monotonic()
        try:
            point = client.point(data)
        except ipcsync.NodeLost as error:
            return "NodeLost", str(error.reason), time.monotonic() - began
        return _outcome(point, seconds)


def _outcome(point: ipcsync.Point, seconds: float) -> tuple[str, str, float]:
    began = time.monotonic()
    try:
        point.synchronize(seconds)
    except ipcsync.NodeLost as error:
        return "NodeLost", str(error.reason), time.monotonic() - began
    except ipcsync.RecorderLost as error:
        return "RecorderLost", str(error.cause), time.monotonic() - began
    except ipcsync.WaitTimeout:
        return "WaitTimeout", "", time.monotonic() - began
    return "complete", "", time.monotonic() - began


def wait_everywhere(name: str, node: str, generation: int) -> None:
    """Begin to wait for a generation in each way that there is."""
    _here["sides"] = Sides(_here["client"], _here[f"{node}:{name}"], generation)


def ends() -> dict[str, End]:
    """How these waits ended; the clock is that of all hosts."""
    found: dict[str, End] = _here.pop("sides").ends()
    return found


def gate_a_stream(name: str, node: str, generation: int) -> None:
    """Have a stream wait for another host's event, ahead of its record."""
    _here["waiter"] = ipcsync.Stream()
    _here[f"{node}:{name}"].at(generation).wait(_here["waiter"], ahead=True)


def stream_is_done() -> bool:
    """Whether that stream is past its wait."""
    return bool(_here["waiter"].query())


def await_stream() -> None:
    """Wait until that stream is past its wait."""
    until(_here["waiter"].query, "the stream to go on")


def point_of(data: bytes) -> tuple[bytes, str]:
    """The bytes of a point as it is here, and its node."""
    point = _here["client"].point(data)
    point.synchronize(DEADLINE_S)
    return bytes(point), point.node


def claim(name: str) -> str:
    """Claim a name of the fleet: "" or the error's class."""
    try:
        _here[f"fleet:{name}"] = _here["client"].event(name, recorder=True, fleet=True)
    except ipcsync.IpcSyncError as error:
        return type(error).__name__
    return ""


def end() -> None:
    """End what runs here."""
    _here["client"].close()
    _here["bridge"].send_signal(signal.SIGCONT)
    _here["bridge"].kill()
    _here["bridge"].wait()
    _here["coordinator"].stop()
    _here["log"].close()


Starter = Callable[..., Host]
