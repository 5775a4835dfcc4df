"""The units, started by a systemd that is init: `make test-deploy`."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.machine import Machine
from tests.kit.until import until

_PREPARED = os.environ.get("IPCSYNC_DEPLOY")
if not _PREPARED:
    pytest.skip("make test-deploy makes the root file system that this boots", allow_module_level=True)
if os.geteuid() != 0 or shutil.which("systemd-nspawn") is None:
    pytest.skip("needs root and systemd-nspawn (Debian: systemd-container)", allow_module_level=True)

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

_UNITS = Path(__file__).parents[2] / "deploy" / "systemd"
_WORKER = "/opt/ipcsync/bin/python /opt/ipcsync/share/worker.py"
_IPCSYNC = "IPCSYNC_RUNTIME_DIR=/run/ipcsync-alice /opt/ipcsync/bin/ipcsync"
_UNIT = "ipcsync@alice"
_WATCHDOG_S = 40.0


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """One machine for all tests, with the units as the page says that they are installed."""
    root = Path(_PREPARED or "", "root")
    for unit in ("ipcsync@.service", "ipcsync-observer@.service"):
        shutil.copy(_UNITS / unit, root / "etc" / "systemd" / "system" / unit)
    for directory, name in (("etc/ipcsync", "coordinator-alice"), ("home/alice/.config/ipcsync", "coordinator")):
        (root / directory).mkdir(parents=True, exist_ok=True)
        shutil.copy(_UNITS / "coordinator.toml", root / directory / f"{name}.toml")
    for kind, unit in (("system", "ipcsync@.service"), ("user", "ipcsync.service")):  # there is no GPU
        drop_in = root / "etc" / "systemd" / kind / f"{unit}.d" / "driver.conf"
        drop_in.parent.mkdir(exist_ok=True)
        drop_in.write_text("[Service]\nEnvironment=IPCSYNC_DRIVER=host\n")
    shutil.copy(_UNITS / "ipcsync.service", root / "etc" / "systemd" / "user" / "ipcsync.service")
    machine = Machine(root, tmp_path_factory.mktemp("machine") / "console.log")
    yield machine
    machine.off()


@pytest.fixture
def served(machine: Machine) -> Iterator[Machine]:
    """The machine, with alice's coordinator."""
    machine.tried(f"systemctl reset-failed {_UNIT}")  # which counts starts anew; a unit that is not loaded has none
    machine.run(f"systemctl start {_UNIT}")
    yield machine
    machine.run(f"systemctl stop {_UNIT}")


def _status(machine: Machine) -> dict[str, Any]:
    status = json.loads(machine.run(f"{_IPCSYNC} status --json", user="alice"))
    assert isinstance(status, dict)
    return status


def test_the_unit_is_active_once_it_serves_its_user_and_nobody_else(served: Machine) -> None:
    assert served.property(_UNIT, "ActiveState") == "active"
    assert served.property(_UNIT, "StatusText") == "serves ipc:///run/ipcsync-alice/coordinator.sock"
    assert int(served.property(_UNIT, "MainPID")) == _status(served)["stats"]["keeper_pid"]
    refused = served.tried(f"{_IPCSYNC} status", user="bob")
    assert refused.returncode == 1
    assert "/run/ipcsync-alice belongs to uid" in refused.stderr  # and is closed to others
    assert "no sessions" in served.run(f"env {_IPCSYNC} status"), "root may look"


def _seen(machine: Machine) -> int:
    """How many records the waiter has waited for."""
    return len(re.findall("^wait example", machine.run("cat /tmp/waiter.log"), re.MULTILINE))


def test_work_goes_on_through_an_upgrade_and_a_kill_of_the_coordinator(served: Machine) -> None:
    for role, log in (("record", "recorder"), ("wait", "waiter")):
        served.run(
            f"systemd-run --unit=example-{log} --uid=alice --setenv=IPCSYNC_RUNTIME_DIR=/run/ipcsync-alice "
            f"--property=StandardOutput=file:/tmp/{log}.log {_WORKER} {role}"
        )
    until(lambda: _seen(served) > 1, "the workers work")
    served.run(f"systemctl reload {_UNIT}")
    before = _seen(served)
    until(lambda: _seen(served) > before + 1, "they go on after the upgrade")
    killed = _status(served)["stats"]
    assert killed["starts"] == 2
    served.kill(killed["pid"], signal.SIGKILL)
    before = _seen(served)
    until(lambda: _seen(served) > before + 1, "they go on after the kill")
    status = _status(served)["stats"]
    assert (status["starts"], status["keeper_pid"]) == (3, killed["keeper_pid"])
    assert served.property(_UNIT, "NRestarts") == "0"
    for log in ("recorder", "waiter"):
        assert served.property(f"example-{log}", "ActiveState") == "active"
        served.run(f"systemctl stop example-{log}")


@pytest.mark.parametrize(
    ("number", "result"), [(signal.SIGKILL, "signal"), (signal.SIGSTOP, "watchdog")], ids=["killed", "hung"]
)
def test_systemd_starts_the_unit_again_if_its_keeper_is(served: Machine, number: signal.Signals, result: str) -> None:
    before = served.property(_UNIT, "MainPID")
    restarts = int(served.property(_UNIT, "NRestarts"))
    served.run("touch /run/ipcsync-alice/journal", user="alice")  # as one that gives up leaves it
    served.kill(int(before), number)
    until(lambda: int(served.property(_UNIT, "NRestarts")) == restarts + 1, "it was started again", _WATCHDOG_S)
    until(lambda: served.property(_UNIT, "ActiveState") == "active", "it serves again")
    assert served.property(_UNIT, "MainPID") != before
    assert _status(served)["stats"]["starts"] == 1
    served.run("rm /run/ipcsync-alice/journal", user="alice")
    assert f"result '{result}'" in served.run(f"journalctl --unit {_UNIT} --output cat")


def test_what_it_does_is_in_the_journal(served: Machine) -> None:
    lines = served.run(f"journalctl --unit {_UNIT} --output cat")
    assert "event=ready endpoint=ipc:///run/ipcsync-alice/coordinator.sock" in lines
    connect = "import ipcsync; ipcsync.connect(name='a worker').close()"
    served.run(f'IPCSYNC_RUNTIME_DIR=/run/ipcsync-alice /opt/ipcsync/bin/python -c "{connect}"', user="alice")
    until(lambda: 'name="a worker"' in served.run(f"journalctl --unit {_UNIT} --output cat"), "a session's line")


def test_a_stop_leaves_nothing(machine: Machine) -> None:
    machine.run(f"systemctl start {_UNIT}")
    _status(machine)
    machine.run(f"systemctl stop {_UNIT}")
    assert machine.property(_UNIT, "Result") == "success"
    assert "ipcsync" not in machine.run("ls /run /dev/shm")


_ASK = (
    "import sys, urllib.request as r; "
    "print(r.urlopen('http://127.0.0.1:9464' + sys.argv[1], timeout=3).read().decode())"
)


def test_the_observer_answers_probes_through_a_restart_of_the_coordinator(served: Machine) -> None:
    served.run("systemctl start ipcsync-observer@alice")
    ask = f'/opt/ipcsync/bin/python -c "{_ASK}"'
    try:
        until(lambda: served.tried(f"{ask} /healthz").returncode == 0, "it is healthy")
        assert "ipcsync_up 1.0" in served.run(f"{ask} /metrics")
        served.run(f"systemctl restart {_UNIT}")
        until(lambda: "ipcsync_up 1.0" in served.tried(f"{ask} /metrics").stdout, "it found the next coordinator")
        assert served.property("ipcsync-observer@alice", "NRestarts") == "0"
    finally:
        served.run("systemctl stop ipcsync-observer@alice")


def test_a_user_runs_it_without_root(machine: Machine) -> None:
    uid = machine.run("id -u alice").strip()
    machine.run("loginctl enable-linger alice")
    environment = f"XDG_RUNTIME_DIR=/run/user/{uid}"
    control = f"{environment} systemctl --user"
    state = f"{control} is-system-running"
    until(lambda: "running" in machine.tried(state, user="alice").stdout, "alice's manager runs")
    machine.run(f"{control} start ipcsync", user="alice")
    assert machine.run(f"{control} is-active ipcsync", user="alice").strip() == "active"
    machine.run(f"{environment} /opt/ipcsync/bin/ipcsync status", user="alice")
    machine.run(f"{control} reload ipcsync", user="alice")
    machine.run(f"{control} stop ipcsync", user="alice")
    machine.run("loginctl disable-linger alice")
