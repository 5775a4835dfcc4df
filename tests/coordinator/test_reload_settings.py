"""What a reload says: which settings it took, which only a restart takes, and why it took none."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import ipcsync
from ipcsync._wire import endpoints
from tests.kit.until import DEADLINE_S, until
from tests.kit.zygote import IPCSYNC

pytestmark = [pytest.mark.process, pytest.mark.keeper]


class Served:
    """A coordinator with a keeper and a configuration file, which logs JSON."""

    def __init__(self, directory: Path, more: str = "") -> None:
        self.config, self._log = directory / "coordinator.toml", directory / "log"
        self.runtime_dir = str(directory / "run")
        self.endpoint = endpoints.endpoint_in(self.runtime_dir)
        self.config.write_text(f"max_sessions = 40\nlease_ttl = 20.0\nlog_json = true\n{more}")
        command = [*IPCSYNC, "coordinator", "--runtime-dir", self.runtime_dir, "--config", str(self.config)]
        with self._log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    @property
    def log(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self._log.read_text().splitlines()]

    def reload(self) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*IPCSYNC, "reload", "--runtime-dir", self.runtime_dir],
            capture_output=True,
            text=True,
            timeout=2 * DEADLINE_S,
            check=False,
        )


@contextmanager
def _serving(directory: Path, more: str = "") -> Iterator[Served]:
    one = Served(directory, more)
    yield one
    one.process.terminate()
    one.process.wait(DEADLINE_S)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with _serving(tmp_path) as one:
        yield one


@pytest.fixture
def served_client(served: Served) -> Iterator[ipcsync.Client]:
    with ipcsync.connect(served.endpoint, name="client", timeout=DEADLINE_S) as one:
        yield one


def test_a_reload_says_what_it_took_and_what_only_a_restart_takes(
    served: Served, served_client: ipcsync.Client
) -> None:
    served.config.write_text("max_sessions = 80\nreply_queue = 4\nlease_ttl = 30.0\nlog_json = true\n")
    done = served.reload()
    left = "not before a restart: max_sessions 40 -> 80, reply_queue 512 -> 4"  # each client's window was half of that
    expected = f"lease_ttl 20.0 -> 30.0; {left}"
    assert (done.returncode, done.stdout, done.stderr) == (0, f"reloaded: {expected}\n", "")
    stats = served_client.stats()
    assert (stats["max_sessions"], stats["lease_ttl_s"]) == (40, 30.0)
    assert [line["note"] for line in served.log if line["event"] == "reload"] == [expected]
    again = served.reload()
    assert again.stdout == f"reloaded: {left}\n", "it is still not taken"
    served.config.write_text("max_sessions = 40\nlease_ttl = 30.0\nlog_json = true\n")
    assert served.reload().stdout == "reloaded\n"


def test_a_reload_says_of_the_files_driver_what_it_says_of_other_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = ipcsync.driver_name()
    monkeypatch.delenv("IPCSYNC_DRIVER", raising=False)
    with _serving(tmp_path, f"driver = '{here}'\n") as served, ipcsync.connect(served.endpoint, timeout=DEADLINE_S):
        settings = served.config.read_text()
        served.config.write_text(settings.replace(here, "auto"))
        assert served.reload().stdout == f"reloaded: not before a restart: driver {here} -> auto\n"
        served.config.write_text(settings.replace(here, "none"))
        assert "driver must be auto, cuda or host, not 'none'" in served.reload().stderr


def test_a_reload_that_is_refused_has_the_reason_of_the_settings(served: Served, served_client: ipcsync.Client) -> None:
    pid = served_client.stats()["pid"]
    served.config.write_text("log_json = true\nsesions = 80\n")
    done = served.reload()
    why = f"{served.config}: unknown setting 'sesions'; the old code goes on"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"ipcsync: not reloaded: {why}\n")
    assert served_client.stats()["pid"] == pid
    assert [line["outcome"] for line in served.log if line["event"] == "reload"] == [why], "and each line is JSON"


def test_a_death_after_which_the_settings_cannot_be_read_is_logged_with_the_reason(
    served: Served, served_client: ipcsync.Client
) -> None:
    pid = served_client.stats()["pid"]
    served.config.write_text("pool = 'many'\n")
    os.kill(pid, signal.SIGKILL)
    until(lambda: len([line for line in served.log if "must be a whole number" in str(line.get("how"))]) > 1, "tried")
    served.config.write_text("log_json = true\n")
    assert served_client.stats(timeout=DEADLINE_S)["pid"] != pid, "it is tried again until they can"


def test_the_first_line_of_each_log_has_the_version(served: Served, served_client: ipcsync.Client) -> None:
    assert served_client.stats()["version"] == ipcsync.__version__
    first = {str(line["event"]): line for line in served.log}
    assert first["serving"]["version"] == first["ready"]["version"] == ipcsync.__version__
