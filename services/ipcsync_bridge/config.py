"""The bridge's settings."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from urllib.parse import urlsplit

from ipcsync._wire import nodes


class ConfigError(Exception):
    """A setting is invalid; the message names it."""


@dataclass(frozen=True)
class Settings:
    """Every setting. Durations are in seconds."""

    node: str
    servers: tuple[str, ...]
    fleet: str = "main"
    endpoint: str = ""
    link_ttl: float = 5.0
    exports: tuple[str, ...] = ()  # prefixes; none: everything
    insecure: bool = False
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    credentials: str = ""
    replicas: int = 1
    max_nodes: int = 256
    max_links: int = 4096

    def __post_init__(self) -> None:
        for what, name in (("--node", self.node), ("--fleet", self.fleet)):
            reason = nodes.why_not(name)
            if reason:
                raise ConfigError(f"{what} {reason}, not {name!r}")
        if not 1.0 <= self.link_ttl <= 3600.0:
            raise ConfigError(f"--link-ttl is from 1 to 3600 seconds, not {self.link_ttl}")
        if not self.servers:
            raise ConfigError("--nats names at least one server")
        for server in self.servers:
            self._check_server(server)
        for path in (self.tls_key, self.credentials):
            _check_secret(path)
        for path in (self.tls_ca, self.tls_cert):
            if path and not os.path.isfile(path):
                raise ConfigError(f"there is no file {path}")
        if self.tls_cert and not self.tls_ca:
            raise ConfigError("--tls-cert needs --tls-ca, to verify the servers")

    def _check_server(self, server: str) -> None:
        url = urlsplit(server)
        if url.scheme not in ("nats", "tls") or not url.hostname:
            raise ConfigError(f"a server is nats://HOST:PORT or tls://HOST:PORT, not {server!r}")
        if url.username or url.password:
            raise ConfigError("a server's URL holds no password: it would be seen in the list of processes")
        is_plain = url.scheme == "nats" and not self.tls_ca
        if is_plain and not self.insecure and not _is_loopback(url.hostname):
            raise ConfigError(
                f"{server} would be spoken to in the clear: use tls:// with --tls-ca, --tls-cert and --tls-key, or say "
                "--insecure"
            )
        if url.scheme == "tls" and not self.tls_ca:
            raise ConfigError(f"{server} needs --tls-ca, to verify it")

    def exports_name(self, name: str) -> bool:
        """Whether other nodes may wait for the event of that name."""
        return not self.exports or any(name.startswith(prefix) for prefix in self.exports)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_secret(path: str) -> None:
    if not path:
        return
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    if mode & 0o077:
        raise ConfigError(f"{path} can be read by others (mode {mode & 0o777:o}): chmod 600")
