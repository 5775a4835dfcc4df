"""What `ipcsync doctor --fleet` tries, of what a bridge needs."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import nats.errors
import nats.js.errors

from ipcsync._board.runtime_dir import who_serves
from ipcsync.cli.output import Findings, Outcome, Result
from ipcsync.errors import IpcSyncError
from ipcsync_bridge import wire
from ipcsync_bridge.config import Settings
from ipcsync_bridge.store import Owner, decode, known_owner_id
from ipcsync_bridge.transport import WRONG_REVISIONS, Transport, flushed, said

_ANSWER_S = 2.0
_SOON_DAYS = 14
_OLDEST = (2, 9)
_NEVER = 1 << 60  # a revision that no key has: what is written with it is refused, once it is allowed to be tried
_NOBODY = "_"  # no node may be called so


async def _is_refused(transport: Transport, subject: str, work: Awaitable[object]) -> bool:
    """Whether the server forbids what is done on a subject, as it says behind it."""
    transport.last_error = ""
    await work
    await flushed(transport.client, _ANSWER_S)
    said = transport.last_error.lower()
    return subject.lower() in said and "permissions violation" in said


async def run(settings: Settings) -> Findings:
    transport = Transport(settings)
    found = Findings()
    try:
        for name, check in CHECKS.items():
            found.add(name, found.skips or await _tried(check, transport), is_vital=check is _server)
    finally:
        await transport.close()
    return found


async def _tried(check: Callable[[Transport], Awaitable[Outcome]], transport: Transport) -> Outcome:
    try:
        return await check(transport)
    except (nats.errors.Error, IpcSyncError, OSError, asyncio.TimeoutError) as error:
        return "fail", said(error), "See the servers' log, and their permissions for this node (deploy/nats)."


async def _coordinator(transport: Transport) -> Outcome:
    serving = who_serves(transport.settings.directory)
    if serving is None:
        return "warn", f"none serves {transport.settings.directory}", "A bridge needs one: ipcsync coordinator"
    return "ok", f"pid {serving.pid} serves {transport.settings.directory}", ""


async def _certificates(transport: Transport) -> Outcome:
    settings = transport.settings
    if not settings.tls_ca:
        return "warn", "none: what bridges say is in the clear", "Use TLS between machines: see docs/fleet.md."
    if not settings.tls_cert:
        return "warn", "none of this node's own: the servers know it by other means", ""
    try:
        name, days, authority_days = _own(settings)
    except OSError as error:
        return "fail", str(error), "Certificates, their key and --tls-ca must be of one authority, and not ended."
    detail = f"this node's ends in {days:.0f} days, the authority's ends in {authority_days:.0f} days"
    if name != settings.node:
        return "fail", f"the certificate is {name!r}'s, and the node is {settings.node!r}", "Each node has its own."
    if min(days, authority_days) < _SOON_DAYS:
        return "warn", detail, "Renew it, then send the bridge SIGHUP: no link is lost."
    return "ok", detail, ""


def _own(settings: Settings) -> tuple[str, float, float]:
    """Name and days left of this node's as a server sees it, and the authority's days. OSError if none takes it."""
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
    name, days = _of(server.getpeercert() or {})
    return name, days, min((_of(each)[1] for each in at_server.get_ca_certs()), default=days)  # else it is its own


def _of(found: Mapping[str, Any]) -> tuple[str, float]:
    """The name that a server knows a certificate by (its first DNS name, else its subject's), and its days left."""
    names = [name for kind, name in found.get("subjectAltName", ()) if kind == "DNS"]
    names += [value for part in found["subject"] for key, value in part if key == "commonName"]
    ends = ssl.cert_time_to_seconds(found["notAfter"])
    return names[0] if names else "", (ends - time.time()) / 86_400


async def _server(transport: Transport) -> Outcome:
    await transport.connect(len(transport.settings.servers) * _ANSWER_S + 1.0)
    client = transport.client
    trips = []
    for _ in range(5):
        began = time.monotonic()
        await client.flush(timeout=int(_ANSWER_S))
        trips.append(time.monotonic() - began)
    version = client.connected_server_version
    number = f"{version.major}.{version.minor}.{version.patch}"
    detail = f"{transport.server}, nats-server {number}, round trip {sorted(trips)[2] * 1000:.2f} ms"
    if (version.major, version.minor) < _OLDEST:
        return "warn", detail, f"The oldest that was tried is {_OLDEST[0]}.{_OLDEST[1]}."
    if transport.certificate:
        days = _of(transport.certificate)[1]
        detail += f", its certificate ends in {days:.0f} days"
        if days < _SOON_DAYS:
            return "warn", detail, "Renew it there."
    return "ok", detail, ""


async def _jetstream(transport: Transport) -> Outcome:
    jetstream = transport.client.jetstream(timeout=_ANSWER_S)
    try:
        await jetstream.account_info()
    except nats.js.errors.ServiceUnavailableError as error:
        return "fail", f"not there: {error.description or error}", "Start the servers with it: nats-server -js"
    name = f"KV_ipcsync_{transport.settings.fleet}"
    try:
        info = await jetstream.stream_info(name)
    except nats.js.errors.NotFoundError:
        return "ok", f"the store {name} is not there: the first bridge makes it (--replicas)", ""
    copies = info.config.num_replicas or 1
    leader = info.cluster.leader if info.cluster is not None else "the server"
    detail = f"{name}: {info.state.messages} keys, {copies} of each, led by {leader or 'nobody'}"
    if info.cluster is not None and not leader:
        return "fail", detail, "Without a leader no name is found: more than half of the servers must run."
    if copies < 2:
        return "ok", detail, "With one copy, names wait while that server is away; links do not. Three are better."
    return "ok", detail, ""


async def _permissions(transport: Transport) -> Outcome:
    client, settings = transport.client, transport.settings
    node = settings.node
    refused: list[str] = []
    for kind, rest in (("ask", ""), ("answer", f".{_NOBODY}")):
        subject = transport.subject(_NOBODY, f"{kind}.{node}{rest}")
        if await _is_refused(transport, subject, client.publish(subject, b"")):
            refused.append(f"to speak on {subject}")
        subject = transport.subject(node, f"{kind}.*{rest and '.*'}")
        if await _is_refused(transport, subject, client.subscribe(subject)):
            refused.append(f"to hear {subject}")
    bucket = f"$KV.ipcsync_{settings.fleet}"
    keys = (f"{bucket}.nodes.{node}", f"{bucket}.names.{_NOBODY}")
    refused += [f"to write {key}" for key in keys if await _is_refused(transport, key, _try_to_write(transport, key))]
    if refused:
        return "fail", f"forbidden: {', '.join(refused)}", "deploy/nats has what each node needs."
    advice = "Fine on one machine. Elsewhere any member could speak for another: deploy/nats has permissions."
    level: Result = "warn" if settings.tls_ca else "ok"
    subject = transport.subject(_NOBODY, f"ask.{_NOBODY}")
    if not await _is_refused(transport, subject, client.publish(subject, b"")):
        return level, "all that it needs, and to speak as any other node", advice
    if not await _is_response_refused(transport):
        return level, "all that it needs, and to speak as another node in a response (allow_responses)", advice
    return "ok", "all that it needs, and not to speak as another node", ""


async def _is_response_refused(transport: Transport) -> bool:
    """Whether this node may not respond on another's subject, to a question of its own that names it as its reply's."""
    node = transport.settings.node
    question = transport.subject(node, f"ask.{node}")
    heard = await transport.client.subscribe(question)
    subject = transport.subject(_NOBODY, f"ask.{_NOBODY}")
    await transport.client.publish(question, b"", reply=subject)
    await heard.next_msg(timeout=_ANSWER_S)
    return await _is_refused(transport, subject, transport.client.publish(subject, b""))


async def _try_to_write(transport: Transport, subject: str) -> None:
    """Write what cannot be: only whether that is allowed to be tried counts."""
    headers = {"Nats-Expected-Last-Subject-Sequence": str(_NEVER)}
    try:
        await transport.client.jetstream(timeout=_ANSWER_S).publish(subject, b"", headers=headers)
    except nats.js.errors.NoStreamResponseError:
        return  # there is no store so far
    except nats.js.errors.APIError as error:
        if error.err_code not in WRONG_REVISIONS:
            raise
    except (nats.errors.TimeoutError, asyncio.TimeoutError):
        return  # refused, which the server has told


async def _name(transport: Transport) -> Outcome:
    node = transport.settings.node
    mine = known_owner_id(transport.settings.owner_file)
    answers = await wire.owner_of(transport, node, _ANSWER_S)
    if answers is not None and answers == mine:
        return "ok", f"{node!r} is this machine's, and its bridge answers", ""
    if answers is not None:
        return "fail", f"{node!r} is another machine's, whose bridge answers", "Give each node a name of its own."
    try:
        bucket = f"ipcsync_{transport.settings.fleet}"
        key = f"$KV.{bucket}.nodes.{node}"
        found = await transport.client.jetstream(timeout=_ANSWER_S).get_last_msg(f"KV_{bucket}", key)
        owner = decode(found.data or b"", Owner)
    except nats.js.errors.NotFoundError:
        owner = None
    if owner is None:
        return "ok", f"{node!r} is free", ""
    if mine is not None and owner.owner == mine.hex():
        return "ok", f"{node!r} is this machine's, and its bridge does not run", ""
    return "warn", f"{node!r} was another machine's, which does not answer", "A bridge here takes it after --link-ttl."


CHECKS: dict[str, Callable[[Transport], Awaitable[Outcome]]] = {
    "coordinator": _coordinator,
    "certificates": _certificates,
    "server": _server,
    "JetStream": _jetstream,
    "name": _name,  # before this connection hears what is sent to the name
    "permissions": _permissions,
}
