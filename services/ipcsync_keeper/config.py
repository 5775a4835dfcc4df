"""The coordinator's settings: a flag, else IPCSYNC_*, else the TOML file, else the default here."""

from __future__ import annotations

import dataclasses
import os
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ipcsync._wire import endpoints

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MIN_TTL, MAX_TTL = 0.2, 3600.0
MAX_FRAME = 64 * 1024  # of a request; replies carry lists and may be larger


class ConfigError(Exception):
    """An invalid setting; the message names it."""


def _setting(default: Any, text: str, *, least: float | None = None, most: float | None = None) -> Any:
    return field(default=default, metadata={"help": text, "least": least, "most": most})


@dataclass(frozen=True)
class Settings:
    """Every setting. Durations are in seconds, sizes in bytes."""

    runtime_dir: str = _setting("", "directory for the sockets, mode 0700; the user's runtime directory by default")
    driver: str = _setting("auto", "auto, cuda or host")
    devices: str = _setting("", "ordinals to serve, separated by commas; all by default")
    pool: int = _setting(
        2048,
        "the most shared events there may be, those in quarantine included; of each engine half as many more are kept "
        "for the dead",
        least=1,
        most=65_536,
    )
    max_cuda_events: int = _setting(
        10_000,
        "the most CUDA events behind them; at most half are kept for the dead; drivers fail beyond some 20,000",
        least=1,
        most=1_000_000,
    )
    lease_ttl: float = _setting(5.0, "seconds of silence after which a session expires", least=MIN_TTL, most=MAX_TTL)
    max_sessions: int = _setting(1024, "the most sessions", least=1, most=65_535)
    max_attachments: int = _setting(4096, "the most events one session may be attached to", least=1, most=1_000_000)
    max_streams: int = _setting(1024, "the most named streams", least=0, most=1_000_000)
    max_name: int = _setting(255, "the longest name, in bytes of UTF-8", least=1, most=255)
    max_frame: int = _setting(MAX_FRAME, "the largest frame that a client may send", least=1024, most=16 << 20)
    max_frames: int = _setting(1, "the most frames of one message; only the first is read", least=1, most=16)
    max_invalid: int = _setting(
        100,
        "malformed or foreign messages in a row after which a connection is cut; a client then connects again",
        least=1,
        most=1_000_000_000,
    )
    reply_queue: int = _setting(
        512,
        "replies queued for a client that does not read; beyond it, or 16 MiB, they are dropped",
        least=1,
        most=1_000_000,
    )
    feed_queue: int = _setting(1000, "announcements kept for a subscriber that does not read", least=1, most=10_000_000)
    remembered_requests: int = _setting(
        64, "replies kept for each session, so that a repeated request is done once", least=1, most=100_000
    )
    handshake_s: float = _setting(5.0, "seconds until a connection without greeting is closed", least=0.05, most=600.0)
    exit_when_idle: float = _setting(
        0.0, "seconds without a session after which the coordinator ends; 0: never", least=0.0, most=1e9
    )
    keeper: bool = _setting(
        True, "a keeper holds the events, and starts another coordinator when one dies, so that no session ends"
    )
    spare: bool = _setting(False, "with a keeper: have the next coordinator wait with its modules imported")
    log_level: str = _setting("info", "debug, info, warning or error")
    log_json: bool = _setting(False, "log JSON instead of key=value")

    def __post_init__(self) -> None:
        if self.driver not in ("auto", "cuda", "host"):
            raise ConfigError(f"driver must be auto, cuda or host, not {self.driver!r}")
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise ConfigError(f"log_level must be debug, info, warning or error, not {self.log_level!r}")
        for setting in dataclasses.fields(self):
            least, most = setting.metadata["least"], setting.metadata["most"]
            value = getattr(self, setting.name)
            if least is not None and not least <= value <= most:  # False for NaN
                raise ConfigError(f"{setting.name} must be from {least} to {most}, not {value}")
        self.device_list()

    def device_list(self) -> list[int] | None:
        """The ordinals to serve, None for all."""
        if not self.devices.strip():
            return None
        parts = [part.strip() for part in self.devices.split(",")]
        if not all(part.isascii() and part.isdigit() and len(part) <= 9 for part in parts):
            raise ConfigError(f"devices must be ordinals such as 0,1, not {self.devices!r}")
        return [int(part) for part in parts]

    @property
    def kept_slots(self) -> int:
        """How many slots of each engine are kept beside the pool, while a dead recorder's GPU work may go on."""
        return max(self.pool // 2, 1)

    @property
    def most_slots(self) -> int:
        return self.pool + 2 * self.kept_slots


FIXED = frozenset(("devices", "driver", "keeper", "max_sessions", "pool", "reply_queue", "runtime_dir", "spare"))
"""What no reload changes: the settings of the resources, of what each client was told, and the keeper's own."""

FIELDS = {setting.name: setting for setting in dataclasses.fields(Settings)}


def load(flags: dict[str, Any], config_file: str | None) -> Settings:
    """The settings in force; ConfigError says which one is wrong and where it came from."""
    values = _from_file(config_file) if config_file else {}
    for name in FIELDS:
        if text := os.environ.get(f"IPCSYNC_{name.upper()}"):
            values[name] = _parse(name, text, f"IPCSYNC_{name.upper()}")
    values.update({name: value for name, value in flags.items() if value is not None})
    values["runtime_dir"] = values.get("runtime_dir") or endpoints.runtime_dir()
    with suppress(FileNotFoundError):  # without a working directory; a keeper's coordinator is told the path by it
        values["runtime_dir"] = os.path.abspath(values["runtime_dir"])
    return Settings(**values)


def _from_file(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            str(table := tomllib.load(file))  # a ValueError for a number of too many digits to be shown
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {str(error).partition('; use sys.')[0]}") from None
    values = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in FIELDS:
            raise ConfigError(f"{path}: unknown setting {key!r}")
        values[name] = _parse(name, value, path)
    return values


def _parse(name: str, value: object, where: str) -> object:
    kind: type = type(FIELDS[name].default)
    try:
        if kind is bool and isinstance(value, str):
            return _SWITCHES[value.lower()]
        if not isinstance(value, str | int | kind) or isinstance(value, bool) != (kind is bool):
            raise ValueError
        return kind(value)
    except (KeyError, ValueError, OverflowError):
        raise ConfigError(f"{where}: {name} must be {_KINDS[kind]}, not {value!r}") from None


_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
_SWITCHES = {**dict.fromkeys(("1", "true", "yes", "on"), True), **dict.fromkeys(("0", "false", "no", "off"), False)}
