"""`ipcsync top`: live on a terminal, text or JSON elsewhere."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ipcsync
from tests.kit.until import DEADLINE_S
from tests.kit.zygote import IPCSYNC

pytestmark = [pytest.mark.own_coordinator, pytest.mark.process]

_RUN = [*IPCSYNC, "top"]
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """`ipcsync top` on a terminal of 100 columns and 30 lines."""

    def __init__(self, *arguments: str) -> None:
        self._ours, theirs = pty.openpty()
        self.modes = termios.tcgetattr(theirs)
        env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"}
        self.process = subprocess.Popen(
            [*_RUN, "--period", "0.1", *arguments], env=env, stdin=theirs, stdout=theirs, stderr=theirs
        )
        self.theirs = theirs
        self._raw = b""

    def until(self, pattern: str) -> str:
        """What it has drawn since the last call, once that holds `pattern`."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            text = _ESCAPE.sub("", self._raw.decode(errors="ignore"))
            if re.search(pattern, text):
                self._raw = b""
                return text
            assert time.monotonic() < deadline, f"{pattern!r} was not drawn: {text[-2000:]}"
            if select.select([self._ours], [], [], 0.1)[0]:
                self._raw += os.read(self._ours, 65536)

    def type(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def wait(self) -> int:
        """Its exit status, once it has ended by itself."""
        deadline = time.monotonic() + DEADLINE_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline, "it did not end"
            if select.select([self._ours], [], [], 0.05)[0]:
                os.read(self._ours, 65536)  # a writer that is not read does not end
        return self.process.returncode

    def close(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)
        os.close(self._ours)
        os.close(self.theirs)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    """Starts it on terminals; none outlives the test."""
    started: list[Terminal] = []

    def start(*arguments: str) -> Terminal:
        started.append(Terminal(*arguments))
        return started[-1]

    yield start
    for one in started:
        one.close()


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*_RUN, *arguments], capture_output=True, text=True, timeout=60, check=False)


def _json(*arguments: str) -> Any:
    done = _run("--json", "--once", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    (line,) = done.stdout.splitlines()
    return json.loads(line)


def test_one_look_as_json_holds_everything(coordinator: ipcsync.Coordinator, client: ipcsync.Client) -> None:
    with client.event("kv/a", recorder=True) as event:
        event.record(ipcsync.Stream()).synchronize(10)
        found = _json("--endpoint", coordinator.endpoint)
    assert found["epoch"] == client.epoch.hex()
    assert [session["name"] for session in found["sessions"]] == ["main"]  # not its own
    (row,) = found["events"]
    assert (row["name"], row["generation"], row["recorder"], row["rate"]) == ("kv/a", 1, "main", None)
    assert found["stats"]["results"]["open"] == {"ok": 1}
    assert "client" not in found["stats"]


def test_json_is_one_object_a_look_with_rates_until_it_is_interrupted(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client
) -> None:
    command = [*_RUN, "--json", "--period", "0.1", "--endpoint", coordinator.endpoint]
    with (
        client.event("e", recorder=True) as event,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process,
    ):
        assert process.stdout is not None
        stream = ipcsync.Stream()
        for line in process.stdout:
            event.record(stream).synchronize(10)
            (row,) = json.loads(line)["events"]
            if row["rate"]:
                break
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE_S) == 0
    assert row["generation"] > 0


def test_elsewhere_than_on_a_terminal_it_prints_plain_text(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client
) -> None:
    with client.event("[red]kv[/red]", recorder=True):
        done = _run("--once", "--endpoint", coordinator.endpoint)
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    assert re.search(r"^up \d+ s   sessions 1   events 1   pool 1/2048", done.stdout)
    assert re.search(r"^\[red\]kv\[/red\] +timeline +open ", done.stdout, re.MULTILINE)
    assert re.search(rf"^main +{os.getpid()} +1 +\d+\.\d +\d\.\d +", done.stdout, re.MULTILINE)
    assert "known complete" in done.stdout
    assert "unconfirmed" in done.stdout


def test_on_a_terminal_it_is_live_and_q_ends_it(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, terminal: Callable[..., Terminal]
) -> None:
    one = terminal("--endpoint", coordinator.endpoint)
    with client.event("[red]kv[/red]", recorder=True) as event:
        drawn = one.until(r"\[red\]kv\[/red\] +timeline +open +0 +0 ")
        assert re.search(rf"main +{os.getpid()} +1 +\d+\.\d +\d\.\d +{client.session_id}", drawn)
        event.record(ipcsync.Stream()).synchronize(10)
        one.until(r"\[red\]kv\[/red\] +timeline +open +1 +1 ")
        one.type(b"q")
        assert one.wait() == 0
    assert termios.tcgetattr(one.theirs)[3] == one.modes[3], "the terminal is left as it was"


def test_sigterm_leaves_the_terminal_as_it_was(
    coordinator: ipcsync.Coordinator, terminal: Callable[..., Terminal]
) -> None:
    one = terminal("--endpoint", coordinator.endpoint)
    one.until(r"up \d+ s")
    one.process.terminate()
    assert one.wait() == 128 + signal.SIGTERM
    assert termios.tcgetattr(one.theirs)[3] == one.modes[3]


@pytest.mark.parametrize("command", ["top", "nodes"])
def test_nan_is_no_number_of_seconds(command: str) -> None:
    option = {"top": "--period", "nodes": "--timeout"}[command]
    done = subprocess.run([*IPCSYNC, command, option, "nan"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"Invalid value for '{option}': nan is not a number of seconds" in done.stderr


def test_a_trace_that_cannot_be_written_is_no_matter_of_a_command_that_only_looks(
    coordinator: ipcsync.Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IPCSYNC_TRACE", "/proc/trace")
    assert _json("--endpoint", coordinator.endpoint)["stats"]
    done = subprocess.run(
        [*IPCSYNC, "status", "--endpoint", coordinator.endpoint],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_on_a_terminal_it_waits_for_the_next_coordinator(
    new_coordinator: Callable[..., ipcsync.Coordinator], terminal: Callable[..., Terminal], tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    first = new_coordinator(runtime_dir=str(directory))
    one = terminal("--endpoint", first.endpoint)
    one.until(r"up \d+ s")
    first.stop()
    one.until(r"waiting for it; q ends")
    second = new_coordinator(runtime_dir=str(directory))
    with ipcsync.connect(second.endpoint) as client, client.event("again"):
        one.until(r"again +\w+ +open")
    one.process.send_signal(signal.SIGINT)
    assert one.wait() == 0


def test_without_a_coordinator_it_fails_at_once_in_one_line(tmp_path: Path) -> None:
    done = _run("--once", "--endpoint", f"ipc://{tmp_path}/nobody.sock")
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()  # its end depends on whether one serves elsewhere
    assert line.startswith(f"ipcsync: no coordinator at ipc://{tmp_path}/nobody.sock: there is no socket")
