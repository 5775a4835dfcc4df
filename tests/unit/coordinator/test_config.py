"""The coordinator's settings: flag over environment over TOML over default, and what cannot be is said by name."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from ipcsync_coordinator import __main__ as program
from ipcsync_keeper.config import FIELDS, ConfigError, Settings, load
from tests.kit.raw_client import run_coordinator
from tests.kit.zygote import EXEC

_NONE: dict[str, Any] = dict.fromkeys(FIELDS)


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in FIELDS:
        monkeypatch.delenv(f"IPCSYNC_{name.upper()}", raising=False)


def _toml(tmp_path: Path, text: str) -> str:
    path = tmp_path / "settings.toml"
    path.write_text(text)
    return str(path)


def test_defaults_are_those_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    loaded = load(_NONE, None)
    assert loaded == Settings(runtime_dir="/run/user/7/ipcsync")
    assert (loaded.pool, loaded.lease_ttl, loaded.driver) == (2048, 5.0, "auto")


def test_a_flag_goes_over_the_environment_over_toml_over_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = _toml(tmp_path, "pool = 2\nlease-ttl = 2\nmax_sessions = 2\n")
    monkeypatch.setenv("IPCSYNC_POOL", "3")
    monkeypatch.setenv("IPCSYNC_LEASE_TTL", "3")
    loaded = load({**_NONE, "pool": 4}, file)
    assert (loaded.pool, loaded.lease_ttl, loaded.max_sessions, loaded.max_streams) == (4, 3.0, 2, 1024)


@pytest.mark.parametrize("name", FIELDS)
def test_every_setting_has_a_flag_a_variable_and_a_toml_key(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = _another_value(name)
    text = str(other).lower() if isinstance(other, bool) else str(other)
    written = f'"{other}"' if isinstance(other, str) else text
    assert getattr(load(_NONE, _toml(tmp_path, f"{name} = {written}\n")), name) == other
    assert getattr(load(_NONE, _toml(tmp_path, f"{name.replace('_', '-')} = {written}\n")), name) == other
    monkeypatch.setenv(f"IPCSYNC_{name.upper()}", text)
    assert getattr(load(_NONE, None), name) == other
    assert any(f"--{name.replace('_', '-')}" in parameter.opts for parameter in program.main.params)


def _another_value(name: str) -> Any:
    default: Any = FIELDS[name].default
    chosen = {"driver": "host", "log_level": "debug", "runtime_dir": "/other", "devices": "0,1"}
    if name in chosen:
        return chosen[name]
    if isinstance(default, bool):
        return not default
    least, most = FIELDS[name].metadata["least"], FIELDS[name].metadata["most"]
    other = type(default)(least) if default != least else type(default)(most)
    assert other != default
    return other


def test_an_empty_variable_is_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPCSYNC_POOL", "")
    assert load(_NONE, None).pool == 2048


@pytest.mark.parametrize("ttl", ["nan", "inf", "-inf", "-1", "0", "1e300", "0.1", "3601"])
def test_a_ttl_that_cannot_be_is_refused_from_wherever_it_comes(
    ttl: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"lease_ttl must be from 0\.2 to 3600"):
        load({**_NONE, "lease_ttl": float(ttl)}, None)
    with pytest.raises(ConfigError, match="lease_ttl"):
        load(_NONE, _toml(tmp_path, f"lease_ttl = {ttl}\n"))
    monkeypatch.setenv("IPCSYNC_LEASE_TTL", ttl)
    with pytest.raises(ConfigError, match="lease_ttl"):
        load(_NONE, None)


_NUMBERS = [name for name, setting in FIELDS.items() if type(setting.default) in (int, float)]


@pytest.mark.parametrize("name", _NUMBERS)
def test_bounds_hold_and_say_so(name: str) -> None:
    least, most = FIELDS[name].metadata["least"], FIELDS[name].metadata["most"]
    default: Any = FIELDS[name].default
    kind: Any = type(default)
    for value in (least, most):
        assert getattr(load({**_NONE, name: kind(value)}, None), name) == value
    for value in (least - 1, most + 1, float("nan")):
        with pytest.raises(ConfigError, match=f"{name} must be from"):
            load({**_NONE, name: value}, None)


def test_every_number_has_bounds() -> None:
    assert [name for name, setting in FIELDS.items() if setting.metadata["least"] is not None] == _NUMBERS
    assert [name for name, setting in FIELDS.items() if setting.metadata["most"] is not None] == _NUMBERS


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("pool = 'many'", "pool must be a whole number"),
        ("pool = 2.5", "pool must be a whole number"),
        ("pool = true", "pool must be a whole number"),
        ("pool = [1]", "pool must be a whole number"),
        ("pool = -1", "pool must be from 1"),
        ("pool = 99999999999999999999999999", "pool must be from 1"),
        (f"lease_ttl = 1{'0' * 400}", "lease_ttl must be a number"),
        ("lease_ttl = 'soon'", "lease_ttl must be a number"),
        ("log_json = 3", "log_json must be true or false"),
        ("log_json = 'perhaps'", "log_json must be true or false"),
        ("runtime_dir = 1.5", "runtime_dir must be text"),
        ("runtime_dir = false", "runtime_dir must be text"),
        ("driver = 'opencl'", "driver must be auto, cuda or host"),
        ("log_level = 'loud'", "log_level must be debug"),
        ("devices = 'gpu0'", "devices must be ordinals"),
        ("devices = '0,,1'", "devices must be ordinals"),
        ("devices = '-1'", "devices must be ordinals"),
        ("pol = 1", "unknown setting 'pol'"),
        ("[coordinator]\npool = 1", "unknown setting 'coordinator'"),
        ("pool = ", "is not valid TOML"),
        ("pool 1", "is not valid TOML"),
    ],
)
def test_what_cannot_be_in_a_file_is_said(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(_NONE, _toml(tmp_path, text))
    assert why in str(caught.value)


@pytest.mark.parametrize("number", ["9" * 5000, "0x" + "f" * 4000], ids=["to read", "to show"])
def test_a_number_of_too_many_digits_is_said_with_its_file(tmp_path: Path, number: str) -> None:
    file = _toml(tmp_path, f"pool = {number}")
    with pytest.raises(ConfigError, match=f"^{re.escape(file)} .*4300 digits[^;]*$"):
        load(_NONE, file)


def test_a_file_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(ConfigError, match="cannot read"):
            load(_NONE, str(path))
    noise = tmp_path / "noise.toml"
    noise.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        load(_NONE, str(noise))


@pytest.mark.parametrize(("text", "value"), [("1", True), ("TRUE", True), ("on", True), ("0", False), ("No", False)])
def test_switches_in_the_environment(monkeypatch: pytest.MonkeyPatch, text: str, value: bool) -> None:
    monkeypatch.setenv("IPCSYNC_LOG_JSON", text)
    assert load(_NONE, None).log_json is value


def test_a_bad_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPCSYNC_MAX_SESSIONS", "1.5")
    with pytest.raises(ConfigError, match=r"IPCSYNC_MAX_SESSIONS: max_sessions must be a whole number, not '1\.5'"):
        load(_NONE, None)


@pytest.mark.parametrize(
    ("text", "ordinals"), [("", None), (" ", None), ("0", [0]), ("1,0", [1, 0]), (" 2 , 3", [2, 3])]
)
def test_devices_are_ordinals(text: str, ordinals: list[int] | None) -> None:
    assert Settings(devices=text).device_list() == ordinals


def test_settings_do_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().pool = 1  # type: ignore[misc] # that is what is tried


@pytest.mark.parametrize(
    "arguments", [["--lease-ttl", "nan"], ["--pool", "x"], ["--driver", "opencl"], ["--colour"], ["--config", "/none"]]
)
def test_a_wrong_call_ends_with_status_2_and_says_why(arguments: list[str]) -> None:
    result = CliRunner().invoke(program.main, arguments)
    assert result.exit_code == click.UsageError.exit_code == 2
    told = result.output.replace("-", "_")
    assert arguments[0].removeprefix("--").replace("-", "_") in told or "/none" in told


@pytest.mark.process
@pytest.mark.parametrize("place", ["argument", "variable"])
def test_what_is_not_utf_8_is_a_wrong_call_of_one_line(tmp_path: Path, place: str) -> None:
    path = os.path.join(tmp_path, os.fsdecode(b"\xff"))
    if place == "argument":
        done = run_coordinator("--keeper", "--runtime-dir", path, **EXEC)
    else:
        done = run_coordinator("--keeper", **EXEC, IPCSYNC_RUNTIME_DIR=path)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("Error: not UTF-8: ")
    assert r"\udcff" in done.stderr
    assert "Traceback" not in done.stderr
    assert os.listdir(tmp_path) == []
