"""The units, and the NATS configuration beside them: what systemd says of them, and that what they start is there."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from ipcsync_bridge.__main__ import main as bridge
from ipcsync_keeper.config import Settings, load
from tests.unit.deploy.deploying import (
    DEPLOY,
    parse,
    run,
    tool,
)

_UNITS = {"ipcsync@.service": "system", "ipcsync.service": "user"}
_OBSERVER = "ipcsync-observer@.service"
_BRIDGE_UNIT = "ipcsync-bridge@.service"

_INSTALLED = "/opt/ipcsync/bin"

_EXPOSURE = 20  # tenths
_BRIDGE_EXPOSURE = 30  # it speaks over the network


@pytest.fixture(params=_UNITS)
def unit(request: pytest.FixtureRequest) -> Path:
    """Each unit."""
    return DEPLOY / "systemd" / str(request.param)


@pytest.mark.process
def test_a_unit_is_what_systemd_takes(unit: Path, tmp_path: Path) -> None:
    analyze = tool("systemd-analyze")
    command = tmp_path / "bin" / "ipcsync"  # the one that it names is not installed here
    command.parent.mkdir()
    command.touch(0o755)
    copy = tmp_path / unit.name
    copy.write_text(unit.read_text().replace(_INSTALLED, str(command.parent)))
    (tmp_path / "run").mkdir(mode=0o700)
    manager = f"--{_UNITS[unit.name]}"
    said = run(analyze, "verify", "--man=no", manager, copy, XDG_RUNTIME_DIR=str(tmp_path / "run"))
    assert copy.name.partition(".")[0] not in said, said


@pytest.mark.process
@pytest.mark.parametrize("name", ["ipcsync@.service", _OBSERVER])
def test_the_machines_units_are_hardened(name: str) -> None:
    analyze = tool("systemd-analyze")
    run(analyze, "security", "--offline=yes", f"--threshold={_EXPOSURE}", DEPLOY / "systemd" / name)


def test_the_observers_unit_looks_at_the_coordinator_of_its_user() -> None:
    settings = _settings(DEPLOY / "systemd" / _OBSERVER)
    (start,) = settings["ExecStart"]
    variables = dict(variable.split("=", 1) for variable in settings["Environment"])
    program, *words = start.replace("${PORT}", variables.pop("PORT")).split()
    assert program == f"{_INSTALLED}/ipcsync"
    parse(words)
    directories = _settings(DEPLOY / "systemd" / "ipcsync@.service")["RuntimeDirectory"]
    assert [variables] == [{"IPCSYNC_RUNTIME_DIR": f"/run/{directory}"} for directory in directories]
    assert settings["Wants"] == settings["After"] == ["ipcsync@%i.service"]


@pytest.mark.process
def test_the_bridges_unit_is_hardened() -> None:
    analyze = tool("systemd-analyze")
    run(analyze, "security", "--offline=yes", f"--threshold={_BRIDGE_EXPOSURE}", DEPLOY / "systemd" / _BRIDGE_UNIT)


@pytest.mark.process
def test_the_bridges_unit_is_what_systemd_takes(tmp_path: Path) -> None:
    analyze = tool("systemd-analyze")
    command = tmp_path / "bin" / "ipcsync"
    command.parent.mkdir()
    command.touch(0o755)
    copy = tmp_path / _BRIDGE_UNIT
    copy.write_text((DEPLOY / "systemd" / _BRIDGE_UNIT).read_text().replace(_INSTALLED, str(command.parent)))
    said = run(analyze, "verify", "--man=no", "--system", copy)
    assert "ipcsync-bridge" not in said, said


def test_the_bridges_unit_starts_what_there_is_with_variables_that_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    unit = DEPLOY / "systemd" / _BRIDGE_UNIT
    settings = _settings(unit)
    for name in re.findall(r"IPCSYNC_BRIDGE_\w+", unit.read_text()):
        monkeypatch.setenv(name, "nats://127.0.0.1:4222" if name.endswith("NATS") else "a")
    (start,) = settings["ExecStart"]
    program, *words = start.split()
    assert program == f"{_INSTALLED}/ipcsync"
    parse(words)
    assert settings["RestartPreventExitStatus"] == ["3"]


def test_each_option_of_the_bridge_can_be_a_variable_of_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPCSYNC_BRIDGE_NODE", "a")
    monkeypatch.setenv("IPCSYNC_BRIDGE_NATS", "nats://127.0.0.1:4222 nats://127.0.0.1:4223")
    monkeypatch.setenv("IPCSYNC_BRIDGE_EXPORT", "kv/ weights/")
    given = bridge.make_context("bridge", []).params
    assert given["servers"] == ("nats://127.0.0.1:4222", "nats://127.0.0.1:4223")
    assert given["exports"] == ("kv/", "weights/")


def test_the_configuration_of_nats_lets_each_node_speak_as_itself_only() -> None:
    text = (DEPLOY / "nats" / "nats-server.conf").read_text()
    users = text.split("user: ")[1:]
    assert len(users) == 2
    for user in users:
        node = user.partition('"')[2].partition('"')[0].removeprefix("CN=")
        speaks = re.findall(r"ipcsync\.main\.\*\.(?:ask|answer)\.([\w-]+)", user)
        assert len(speaks) == 2
        assert "allow_responses:" not in user
        hears = re.findall(r'"ipcsync\.main\.([\w-]+)\.>", "_INBOX_([\w-]+)\.>"', user)
        keys = re.findall(r"\$KV\.ipcsync_main\.nodes\.([\w-]+)", user)
        assert {*speaks, *(each for pair in hears for each in pair), *keys} == {node}


def _settings(unit: Path) -> dict[str, list[str]]:
    settings: dict[str, list[str]] = {}
    for line in unit.read_text().splitlines():
        name, is_setting, value = line.partition("=")
        if is_setting and not line.startswith("#"):
            settings.setdefault(name, []).append(value)
    return settings


def test_a_unit_starts_a_command_that_there_is_in_the_directory_that_it_makes(unit: Path) -> None:
    settings = _settings(unit)
    (start,) = settings["ExecStart"]
    program, *words = start.split()
    assert program == f"{_INSTALLED}/ipcsync"
    parse(words)
    (directory,) = settings["RuntimeDirectory"]
    assert words[words.index("--runtime-dir") + 1] in (f"/run/{directory}", f"%t/{directory}")
    assert settings["RuntimeDirectoryMode"] == ["0700"]
    assert settings["RuntimeDirectoryPreserve"] == ["restart"], "the journal of a keeper that gave up is there"
    (reload,) = settings["ExecReload"]
    assert reload.split()[0] == program
    parse(reload.split()[1:])
    assert "--no-keeper" not in words
    assert "--spare" in words
    assert settings["Type"] == ["notify"]
    assert int(settings["WatchdogSec"][0]) > 1
    assert settings["Environment"] == ["IPCSYNC_DRIVER=cuda"], "at boot the GPU's driver may not be up yet"
    assert (settings["StartLimitIntervalSec"], settings["RestartPreventExitStatus"]) == (["0"], ["2"])
    config = words[words.index("--config") + 1].replace("%i", "alice").replace("%E", "~/.config")
    page = (DEPLOY / "systemd" / "README.md").read_text()
    assert f"install -D -m 0644 deploy/systemd/coordinator.toml {config}\n" in page
    assert config in unit.read_text().replace("%i", "alice").replace("%E", "~/.config").partition("[Unit]")[0]


def test_the_settings_beside_the_units_are_settings_with_their_defaults(tmp_path: Path) -> None:
    text = (DEPLOY / "systemd" / "coordinator.toml").read_text()
    config = tmp_path / "coordinator.toml"
    config.write_text(re.sub(r"^# (\w+ = )", r"\1", text, flags=re.MULTILINE))
    assert load({"runtime_dir": "/run"}, str(config)) == Settings("/run", driver=os.environ["IPCSYNC_DRIVER"])
    assert len(re.findall(r"^\w+ = ", config.read_text(), re.MULTILINE)) > 4


@pytest.mark.parametrize(
    "name", ["PrivateIPC", "PrivateDevices", "PrivateUsers", "PrivateTmp", "MemoryDenyWriteExecute"]
)
def test_a_unit_keeps_what_cuda_and_the_workers_need(unit: Path, name: str) -> None:
    assert name not in _settings(unit)
