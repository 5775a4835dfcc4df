"""The transport between bridges, over NATS: core messages, and a JetStream KV bucket for the fleet's names.

Nothing here gives a guarantee of delivery or of order, and none is needed. No decision rests on a watch of the bucket,
on a TTL of the server's, or on a clock that two machines share.

`ipcsync.FLEET.NODE.ask.SENDER` is what a node receives, `….answer.SENDER.ID` what it asked for.
The servers let each member publish only as the SENDER that it is. A member may however have a server reply to any
subject, with headers or as JetStream's JSON; so nothing with headers is taken, JSON is no message of a bridge's, and
an ID cannot be guessed.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar

import nats
import nats.errors
import nats.js.errors
from nats.aio.client import NO_RESPONDERS_STATUS, Client
from nats.aio.msg import Msg
from nats.js.api import Header, KeyValueConfig, StorageType
from nats.js.kv import KeyValue

from ipcsync._logs import fields, is_round
from ipcsync.errors import IpcSyncError
from ipcsync_bridge.config import Settings

log = logging.getLogger("ipcsync.bridge")
T = TypeVar("T")
Answer: TypeAlias = Callable[[bytes], Coroutine[Any, Any, object]]

MAX_BYTES = 64 * 1024  # of a message
_MOST_PENDING = 8_192  # messages that came and were not read yet
_PENDING_BYTES = 16 * 1024 * 1024
WRONG_REVISIONS = (10071, 10164)  # JetStream's codes for a write at another revision
_CONNECT_S = 2.0
_CANCEL_S = 0.1
_CLOSE_S = 3.0
_TRY_S = 10.0  # for a connection
RETRY_S = 0.1
ASK_S = 1.0  # at most, after which a question without an answer is sent again
_LAST = re.compile(r"[A-Za-z0-9_-]+")  # of a key, behind the dot
_NOT_SENT = (nats.errors.Error, OSError, asyncio.TimeoutError)


class CutOff(IpcSyncError):  # noqa: N818 - as ipcsync's own errors
    """This node is cut off: it is not known who listens."""


class Conflict(IpcSyncError):  # noqa: N818 - as ipcsync's own errors
    """A key is not at the revision that was expected; or the outcome of an earlier try is known now."""


class Unavailable(IpcSyncError):  # noqa: N818 - as ipcsync's own errors
    """The store did not answer in time, or refused; whether something was written is not known."""


class _Client(Client):
    """One that tries on, whatever it meets: nats-py's own tries end for ever at what is no NATS server."""

    # Not async, for nats-py before and since its own is.
    def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> Coroutine[Any, Any, None]:
        why_not = ""
        if "tls" in self.options and not info.get("tls_required"):
            why_not = "the server does not ask for TLS"  # where nats-py goes on in the clear
        elif info.get("max_payload", MAX_BYTES) < MAX_BYTES:
            why_not = f"the server's max_payload is {info['max_payload']} bytes, and bridges send {MAX_BYTES}"
        if initial_connection and why_not:
            self._transport.close()  # type: ignore[union-attr] # there is one, which nats-py leaves open
            raise nats.errors.Error(why_not)
        if "tls" not in self.options and not self.options["insecure"]:
            info.pop("connect_urls", None)  # they may be of other machines
        return super()._process_info(info, initial_connection)

    async def _attempt_reconnect(self) -> None:
        while True:
            try:
                return await super()._attempt_reconnect()
            except Exception as error:  # noqa: BLE001, PERF203 - of what a server says, or an end amid a try
                await self._error_cb(error)
                await asyncio.sleep(ASK_S)


class Listener(Protocol):
    """Receives messages. `sender` is a node's name, which the server vouches for."""

    def received(self, sender: str, data: bytes, answer: Answer | None) -> None:
        """A message; `answer` sends the reply, None if none is awaited."""

    def connected(self) -> None:
        """The connection is back."""

    def closed(self, why: str) -> None:
        """The connection has ended, and will not come back."""


class Transport:
    """One connection to the servers of `settings`, as the node of `settings`: `client`."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.client = _Client()
        self._bucket: KeyValue | None = None
        self._is_replicated = True
        self._listener: Listener | None = None
        self._asked: dict[str, asyncio.Future[bytes]] = {}  # by the subject of the answer
        self._errors = 0
        self._closing: asyncio.Task[Any] | None = None  # which closes it
        self.last_error = ""  # the server says why it refuses only here, not in the reply

    # --- the connection -----------------------------------------------------------------------------------------------

    async def listen(self, listener: Listener) -> None:
        """Connect, and have `listener` called from now on. Unavailable if that cannot be within 10 seconds."""
        self._listener = listener
        await self.connect(_TRY_S)
        await self._subscribe("ask.*", self._on_ask)

    async def connect(self, timeout: float) -> None:
        """Connect, only to ask. Unavailable if that cannot be within `timeout` seconds."""
        self.client = _Client()
        settings = self.settings
        self.client.options["insecure"] = settings.insecure  # beside nats-py's own
        try:
            connecting = self.client.connect(
                list(settings.servers),
                name=f"ipcsync bridge {settings.node}",
                error_cb=self._failed,
                reconnected_cb=self._reconnected,
                disconnected_cb=self._disconnected,
                closed_cb=self._closed,
                connect_timeout=int(_CONNECT_S),
                reconnect_time_wait=0.05,  # type: ignore[arg-type] # it takes fractions
                max_reconnect_attempts=-1,
                ping_interval=1,
                max_outstanding_pings=2,
                pending_size=1024 * 1024,
                inbox_prefix=f"_INBOX_{settings.node}".encode(),
                tls=tls_of(settings),
                user_credentials=settings.credentials or None,
            )
            # nats-py itself tries for ever, and may wait for ever for the end of a connection.
            await _within(connecting, timeout)
        except Exception as error:  # of what is no NATS server, nats-py raises anything
            why = self.last_error or said(error)
            raise Unavailable(f"no NATS server at {', '.join(settings.servers)} takes this node: {why}") from error
        await self._subscribe("answer.*.*", self._on_answer)
        self._limit_silence()

    async def _subscribe(self, kind: str, callback: Callable[[Msg], Awaitable[None]]) -> None:
        subject = self.subject(self.settings.node, kind)
        await self.client.subscribe(
            subject, cb=callback, pending_msgs_limit=_MOST_PENDING, pending_bytes_limit=_PENDING_BYTES
        )

    def _limit_silence(self) -> None:
        """Have the kernel drop the connection once what was sent is not taken in for a link's TTL.

        nats-py waits for its end before it makes a new one, and TCP alone tries for a quarter of an hour.
        """
        if (writer := self._writer()) is not None:
            milliseconds = round(1000 * self.settings.link_ttl)
            writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)

    def _writer(self) -> asyncio.StreamWriter | None:
        """The connection's stream, if there is one. nats-py offers neither its socket nor a way to drop it."""
        return getattr(self.client._transport, "_io_writer", None)  # noqa: SLF001 - see above

    @property
    def certificate(self) -> dict[str, Any]:
        """The server's certificate, as `ssl` describes it; empty without TLS."""
        writer = self._writer()
        return (writer and writer.get_extra_info("peercert")) or {}

    def subject(self, node: str, kind: str) -> str:
        """On which `node` is spoken to; who speaks stands in `kind`."""
        return f"ipcsync.{self.settings.fleet}.{node}.{kind}"

    async def _failed(self, error: Exception) -> None:
        if self._closing not in (None, asyncio.current_task()):
            raise asyncio.CancelledError  # nats-py swallows some cancellations, and would try to connect for ever
        if not (self.last_error and isinstance(error, (BrokenPipeError, ConnectionResetError))):
            self.last_error = said(error)  # else what the server said before it hung up
        self._errors += 1
        if is_round(self._errors):
            log.warning("nats", extra=fields(error=self.last_error, count=self._errors))

    async def _disconnected(self) -> None:
        for asked in self._asked.values():  # their answers may be lost with the connection
            if not asked.done():
                asked.set_exception(CutOff("this node is cut off from NATS: the connection was lost"))

    async def _reconnected(self) -> None:
        if self._closing is not None:
            await self.client.close()
            return
        self._limit_silence()
        self._errors = 0
        log.warning("nats: connected again", extra=fields(server=self.server))
        if self._listener is not None:
            self._listener.connected()

    async def _closed(self) -> None:
        """The client has given up: a server has told it that it may not connect any more, for instance."""
        if self._listener is not None and self._closing is None:
            self._listener.closed(str(self.client.last_error or self.last_error))

    async def close(self) -> None:
        """Flush what was sent, if that is quick, and end. What cannot be sent is dropped."""
        try:
            await _within(self._close(), _CLOSE_S)
        except asyncio.TimeoutError:
            # asyncio never tells the end of a connection that was cut off amid its TLS handshake.
            log.debug("nats: the connection did not end")

    async def _close(self) -> None:
        self._closing = asyncio.current_task()
        try:
            await asyncio.wait_for(flushed(self.client, _CONNECT_S), 1.0)
        except (*_NOT_SENT, ValueError):
            log.debug("nats: not flushed")
            if (writer := self._writer()) is not None:
                writer.transport.abort()
        try:
            await self.client.close()
        except (*_NOT_SENT, AssertionError, RuntimeError):  # of a connection that was not begun, or is over for uvloop
            log.debug("nats: not closed")

    @property
    def server(self) -> str:
        """The server's URL, empty if there is no connection."""
        url = self.client.connected_url
        return "" if url is None else url.geturl()

    # --- messages -----------------------------------------------------------------------------------------------------

    async def _on_ask(self, message: Msg) -> None:
        assert self._listener is not None
        sender = message.subject.rpartition(".")[2]
        if message.headers:
            return
        if not message.reply:
            self._listener.received(sender, message.data, None)
        elif message.reply.startswith(self.subject(sender, f"answer.{self.settings.node}.")):
            self._listener.received(sender, message.data, partial(self._publish, message.reply))

    async def _on_answer(self, message: Msg) -> None:
        asked = self._asked.get(message.subject)
        if asked is None or asked.done():
            return
        if not message.headers:
            asked.set_result(message.data)
        elif message.headers.get(Header.STATUS) == NO_RESPONDERS_STATUS:
            node = message.subject.split(".")[-2]
            asked.set_exception(TimeoutError(f"no bridge of node {node!r} listens"))

    async def send(self, to: str, data: bytes) -> bool:
        """Send a node what it does not answer; False if nothing was sent."""
        return await self._publish(self.subject(to, f"ask.{self.settings.node}"), data)

    async def _publish(self, subject: str, data: bytes, reply: str = "") -> bool:
        """Nothing is sent while there is no connection: nats-py would keep it, and what comes late is useless."""
        if not self.client.is_connected:
            return False
        try:
            await self.client.publish(subject, data, reply=reply)
        except _NOT_SENT as error:
            self.last_error = said(error)
            return False
        return True

    async def ask(self, to: str, data: bytes, timeout: float) -> bytes:
        """The first answer of a node, which is asked again and again: its bridge may be being started again.

        If none comes in `timeout` seconds, TimeoutError says why; CutOff if this node was cut off meanwhile.
        """
        subject = self.subject(to, f"ask.{self.settings.node}")
        reply = self.subject(self.settings.node, f"answer.{to}.{secrets.token_hex(16)}")
        again_s = min(ASK_S, self.settings.link_ttl / 4)
        until = time.monotonic() + timeout
        why: Exception = TimeoutError(f"node {to!r} did not answer within {timeout:g} s")
        try:
            while (left := until - time.monotonic()) > 0:
                answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
                self._asked[reply] = answer
                try:
                    if not await self._publish(subject, data, reply):
                        raise CutOff(f"this node is cut off from NATS: {self.last_error or 'not connected'}")
                    await asyncio.wait((answer,), timeout=min(left, again_s))
                    if answer.done():
                        return answer.result()
                except (CutOff, TimeoutError) as error:
                    why = why if isinstance(why, CutOff) else error
                    await asyncio.sleep(max(min(RETRY_S, until - time.monotonic()), 0.0))
        finally:
            self._asked.pop(reply, None)
        raise why

    # --- the store ----------------------------------------------------------------------------------------------------

    async def _open(self) -> KeyValue:
        if self._bucket is not None:
            return self._bucket
        name = f"ipcsync_{self.settings.fleet}"
        stream = self.client.jetstream(timeout=5.0)
        try:
            bucket = await stream.key_value(name)
        except nats.js.errors.BucketNotFoundError:
            config = KeyValueConfig(name, history=1, storage=StorageType.FILE, replicas=self.settings.replicas)
            bucket = await stream.create_key_value(config)
        # One made by hand may allow direct reads, for which no node has the permission, and by which it may read late.
        bucket._direct = False  # noqa: SLF001 - nats-py offers no other way
        replicas = (await bucket.status()).stream_info.config.num_replicas
        self._is_replicated = replicas is None or replicas > 1
        self._bucket = bucket  # last: another question that fails meanwhile forgets it
        return bucket

    async def _ask_store(self, what: Callable[[KeyValue], Awaitable[T]], timeout: float) -> T:
        self.last_error = ""
        if not self.client.is_connected:
            raise Unavailable("this node is cut off from NATS")

        async def ask() -> T:
            return await what(await self._open())

        try:
            return await asyncio.wait_for(ask(), timeout)
        except nats.js.errors.APIError as error:
            if isinstance(error, nats.js.errors.KeyWrongLastSequenceError) or error.err_code in WRONG_REVISIONS:
                raise Conflict(str(error)) from None
            self._bucket = None
            raise Unavailable(f"the store refused: {error.description or error}") from error
        except _NOT_SENT as error:
            self._bucket = None
            why = self.last_error or said(error)
            raise Unavailable(f"the store of the fleet's names did not answer within {timeout:g} s: {why}") from error

    async def cas(self, key: str, value: bytes | None, last: int, timeout: float) -> int:
        """Write a key that is at revision `last` (0: there is none), or delete it (value None): the new revision.

        Conflict, or Unavailable: then it may be applied later still.
        """

        async def write(bucket: KeyValue) -> int:
            if value is None:
                await bucket.delete(key, last=last)
                return 0
            revision = int(await (bucket.update(key, value, last=last) if last else bucket.create(key, value)))
            if self._is_replicated:
                await self._confirm(bucket, key, revision)
            return revision

        return await self._ask_store(write, timeout)

    async def _confirm(self, bucket: KeyValue, key: str, revision: int) -> None:
        """Conflict if another write that expected the same was accepted too, and replaced this one.

        Of several servers the leader checks what a write expects, and then they agree on it (seen with nats-server
        2.9). So it may accept several that come at once, of which the last one stays. All stand before any later write:
        once one of ours is done, the key says whose it is.
        """
        await bucket.put(f"names.={self.settings.node}", b"")  # "=" is in no name's key
        with suppress(nats.js.errors.KeyNotFoundError):
            if (await bucket.get(key)).revision == revision:
                return
        raise Conflict(f"another write of {key} was accepted at the same time")

    async def read(self, key: str, timeout: float) -> tuple[bytes, int]:
        """What a key holds, with its revision; 0 if there is no such key. Raises Unavailable."""

        async def get(bucket: KeyValue) -> tuple[bytes, int]:
            with suppress(nats.js.errors.KeyNotFoundError):
                entry = await bucket.get(key)
                return entry.value or b"", entry.revision or 0
            return b"", 0

        return await self._ask_store(get, timeout)

    async def keys(self, prefix: str, timeout: float) -> list[str]:
        """The keys that begin with `prefix`, which ends in a dot; some may have been deleted. Raises Unavailable.

        Not by a consumer, as nats-py lists keys: who may make one may have the server send to any subject. A key
        that no bridge writes, and that nats-py refuses to read, is left out: any member may write it.
        """
        bucket = f"ipcsync_{self.settings.fleet}"

        async def list_(_: KeyValue) -> list[str]:
            stream = self.client.jetstream(timeout=timeout)
            info = await stream.stream_info(f"KV_{bucket}", subjects_filter=f"$KV.{bucket}.{prefix}>")
            found = [each.removeprefix(f"$KV.{bucket}.") for each in info.state.subjects or ()]
            return [key for key in found if _LAST.fullmatch(key.removeprefix(prefix))]

        return await self._ask_store(list_, timeout)


def said(error: Exception) -> str:
    return str(error) or type(error).__name__


async def flushed(client: Client, timeout: float) -> None:
    """Await that the server has taken in what was sent, by two pings: the first overtakes what nats-py still keeps.

    Raises nats.errors.TimeoutError if one is not answered within `timeout` whole seconds, ConnectionClosedError if the
    connection is lost before, where nats-py's own flush returns at once.
    """
    connection = client.stats["reconnects"]
    for _ in range(2):
        if client.is_connected:
            await client.flush(timeout=int(timeout))
        if not client.is_connected or client.stats["reconnects"] != connection:
            raise nats.errors.ConnectionClosedError


async def _within(work: Coroutine[Any, Any, None], timeout: float) -> None:
    """Await it, and cancel it after `timeout` seconds: more than once, since nats-py swallows some cancellations."""
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=timeout)
        if done:
            await task
            return
    finally:
        while not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=_CANCEL_S)
    raise asyncio.TimeoutError


def tls_of(settings: Settings) -> ssl.SSLContext | None:
    """The TLS context with this node's certificate and the authorities; None without TLS. Raises OSError."""
    if not settings.tls_ca:
        return None
    context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=settings.tls_ca)
    if settings.tls_cert:
        context.load_cert_chain(settings.tls_cert, settings.tls_key or None)
    return context
