"""What there is to say of a node's certificates, by the `ssl` module alone, which reads one only from a handshake."""

from __future__ import annotations

import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ipcsync_bridge.config import Settings


@dataclass(frozen=True)
class Certificate:
    """The name that a server knows it by (its first DNS name, else its subject's), and how long it is good for."""

    name: str
    days_left: float


def own(settings: Settings) -> Certificate:
    """This node's, as a server that trusts its authority sees it. ssl.SSLError, OSError if no such server takes it."""
    at_server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    at_server.verify_mode = ssl.CERT_REQUIRED
    at_server.load_verify_locations(settings.tls_ca)
    at_server.load_cert_chain(settings.tls_cert, settings.tls_key or None)  # who serves does not matter here
    at_client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    at_client.check_hostname = False
    at_client.verify_mode = ssl.CERT_NONE
    at_client.load_cert_chain(settings.tls_cert, settings.tls_key or None)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = at_server.wrap_bio(to_server, to_client, server_side=True)
    client = at_client.wrap_bio(to_client, to_server)
    waiting = [client, server]
    while waiting:
        side = waiting.pop(0)
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            waiting.append(side)
    return of(server.getpeercert() or {})


def authority(settings: Settings) -> Certificate:
    """The certificate of an authority of `--tls-ca` that expires first."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(settings.tls_ca)
    return min(map(of, context.get_ca_certs()), key=lambda each: each.days_left)


def of(found: Mapping[str, Any]) -> Certificate:
    """One as `ssl` describes it, in which what is not there is empty."""
    names = [name for kind, name in found.get("subjectAltName", ()) if kind == "DNS"]
    names += [value for part in found["subject"] for key, value in part if key == "commonName"]
    ends = ssl.cert_time_to_seconds(found["notAfter"])
    return Certificate(names[0] if names else "", (ends - time.time()) / 86_400)
