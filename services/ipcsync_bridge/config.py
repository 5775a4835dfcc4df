"""The bridge's settings: an option, else IPCSYNC_BRIDGE_*, else the default here."""

from __future__ import annotations

import dataclasses
import importlib.util
import ipaddress
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

import click

from ipcsync._wire import endpoints, names
from ipcsync.cli.output import Failed, WrongCall
from ipcsync.errors import ConnectError

C = TypeVar("C", bound=Callable[..., Any])

VARIABLES = "IPCSYNC_BRIDGE"
"""The prefix of environment variables for options."""


def _setting(text: str, *default: object, name: str = "", **option: object) -> Any:  # noqa: ANN401 - as `field`
    """A field with its option, `--name`, which is required if there is no default."""
    about = {"name": name, "option": {"help": text, "required": not default, **option}}
    return field(default=default[0], metadata=about) if default else field(metadata=about)


@dataclass(frozen=True)
class Settings:
    """Every setting. Durations are in seconds. ValueError, which names it, for one that is invalid."""

    node: str = _setting("What this node is called in the fleet.", metavar="NAME")
    servers: tuple[str, ...] = _setting("A server; more than once for more.", name="nats", metavar="URL", multiple=True)
    fleet: str = _setting("Which fleet of those on the servers.", "main", metavar="NAME")
    insecure: bool = _setting("Speak in the clear to servers that are not on this machine.", False, is_flag=True)
    tls_ca: str = _setting("The CA certificate that verifies the servers.", "", metavar="FILE")
    tls_cert: str = _setting("This node's certificate; its name is the node's.", "", metavar="FILE")
    tls_key: str = _setting("Its key, mode 0600.", "", metavar="FILE")
    credentials: str = _setting("NATS credentials (JWT and NKEY), mode 0600.", "", metavar="FILE")
    link_ttl: float = _setting("Silence after which a node is lost; from 1.", 5.0, metavar="S")
    exports: tuple[str, ...] = _setting(
        "Names that others may wait for. [all]", (), name="export", metavar="PREFIX", multiple=True
    )
    replicas: int = _setting("Copies of the names' store, if made here.", 1, type=click.IntRange(1, 5), metavar="N")
    max_nodes: int = _setting("Most nodes linked, by either side.", 256, type=click.IntRange(1, 65_536), metavar="N")
    max_links: int = _setting("The most events linked.", 4096, type=click.IntRange(1, 5_000), metavar="N")
    runtime_dir: str = _setting("Where the coordinator serves. [IPCSYNC_RUNTIME_DIR or the user's]", "", metavar="DIR")

    def __post_init__(self) -> None:
        for what, name in (("--node", self.node), ("--fleet", self.fleet)):
            reason = names.why_not_node(name)
            if reason:
                raise ValueError(f"{what} {reason}, not {name!r}")
        if not 1.0 <= self.link_ttl <= 3600.0:
            raise ValueError(f"--link-ttl is from 1 to 3600 seconds, not {self.link_ttl}")
        if not self.servers:
            raise ValueError("--nats names at least one server")
        for server in self.servers:
            self._check_server(server)
        for path in filter(None, (self.tls_key, self.credentials)):
            try:
                mode = os.stat(path).st_mode
            except OSError as error:
                raise ValueError(f"cannot read {path}: {error.strerror}") from None
            if mode & 0o077:
                raise ValueError(f"{path} can be read by others (mode {mode & 0o777:o}): chmod 600")
        for path in filter(None, (self.tls_ca, self.tls_cert)):
            if not os.path.isfile(path):
                raise ValueError(f"there is no file {path}")
        if self.tls_cert and not self.tls_ca:
            raise ValueError("--tls-cert needs --tls-ca, to verify the servers")
        if self.tls_key and not self.tls_cert:
            raise ValueError("--tls-key needs --tls-cert, whose key it is")

    def _check_server(self, server: str) -> None:
        try:
            url = urlsplit(server)
            if url.scheme not in ("nats", "tls") or not url.hostname or url.port == 0:
                raise ValueError
        except ValueError:  # of the port too
            raise ValueError(f"a server is nats://HOST:PORT or tls://HOST:PORT, not {server!r}") from None
        if url.username or url.password:
            raise ValueError("a server's URL holds no password: it would be seen in the list of processes")
        is_here = url.hostname == "localhost"
        with suppress(ValueError):  # else it is a name
            is_here = ipaddress.ip_address(url.hostname).is_loopback
        if url.scheme == "nats" and not (self.tls_ca or self.insecure or is_here):
            raise ValueError(
                f"{server} would be spoken to in the clear: use tls:// with --tls-ca, --tls-cert and --tls-key, or say "
                "--insecure"
            )
        if url.scheme == "tls" and not self.tls_ca:
            raise ValueError(f"{server} needs --tls-ca, to verify it")

    @property
    def directory(self) -> str:
        return self.runtime_dir or endpoints.runtime_dir()

    @property
    def owner_file(self) -> str:
        return os.path.join(self.directory, f"bridge-{self.fleet}-{self.node}")

    def exports_name(self, name: str) -> bool:
        return not self.exports or name.startswith(self.exports)


def options(command: C) -> C:
    for setting in reversed(dataclasses.fields(Settings)):
        name = setting.metadata["name"] or setting.name
        flag, variable = f"--{name.replace('_', '-')}", f"{VARIABLES}_{name.upper()}"
        more = {} if setting.default is dataclasses.MISSING else {"default": setting.default}
        option = {"envvar": variable, **more, **setting.metadata["option"]}
        command = click.option(flag, setting.name, **option)(command)
    return command


def load(given: Mapping[str, Any]) -> Settings:
    """The settings. Failed without the libraries that they need, WrongCall if one is invalid."""
    try:
        import nats  # noqa: F401 - whether it is there
    except ModuleNotFoundError:
        raise Failed("the bridge needs nats-py; in a checkout of ipcsync: pip install -e '.[fleet]'") from None
    if given.get("credentials") and importlib.util.find_spec("nkeys") is None:
        raise Failed("--credentials needs nkeys: pip install 'nats-py[nkeys]'")
    try:
        settings = Settings(**given)
        endpoints.endpoint_in(settings.directory)
    except (ConnectError, ValueError) as error:
        raise WrongCall(str(error)) from None
    return settings
