"""Messages between bridges: MessagePack arrays [version, [kind, …]], at most 64 KiB each; and questions by them.

The subject, which the server enforces, says who speaks; a message never does. Lists are bounded, so that nothing much
larger than the message itself is built from it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple, TypeAlias, TypeVar, get_args

import msgspec
from msgspec import Meta, Struct

from ipcsync._wire import codec, messages
from ipcsync.errors import CoordinatorLost, IpcSyncError, NodeLost, ProtocolError, QuotaExceeded, SessionLost
from ipcsync_bridge.transport import MAX_BYTES, RETRY_S, CutOff, Transport, Unavailable

VERSION = 2
MAX_ANSWER = MAX_BYTES - 256  # of a coordinator's reply that a message, or a request to the coordinator, holds
MAX_ROWS = 1_000  # of one message
MAX_KEYS = 5_000
UNSURE = 1
"""The `Pong.version` of a node that sends news which its peer may not want, or not know that it does."""

StateName: TypeAlias = Literal["open", "closed", "broken", "gone"]
CauseName: TypeAlias = Literal["", "died", "expired"]
_ORDER = get_args(StateName)

_Slot = Annotated[int, Meta(ge=0, lt=1 << 32)]
_Number = Annotated[int, Meta(ge=0, lt=1 << 62)]
# Far above those of any event: a mirror's slot counts on through its uses, and no node may use its numbers up.
_Generation = Annotated[int, Meta(ge=0, lt=1 << 50)]
Key: TypeAlias = tuple[_Slot, _Number]
Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Id = Annotated[bytes, Meta(min_length=16, max_length=16)]
Text = Annotated[str, Meta(max_length=1024)]


class Row(NamedTuple):
    """What is known of one use of a slot, which only grows.

    All generations up to `completed`, never more than `recorded`, count; `lost` is the first that never will, 0 for
    none. `state`: open, closed (nothing more is recorded), broken (nothing more counts), or gone (there is no such use
    any more, and how it ended is unknown). `cause`, of a broken one: whether its recorder died or expired.
    """

    slot: _Slot
    incarnation: _Number
    recorded: _Generation = 0
    completed: _Generation = 0
    lost: _Generation = 0
    state: StateName = "open"
    cause: CauseName = ""

    @property
    def key(self) -> Key:
        return self.slot, self.incarnation

    @property
    def has_ended(self) -> bool:
        """Whether no news can change it."""
        return self.state == "broken" or (self.state == "closed" and self.completed >= self.recorded)

    def merged(self, news: Row) -> Row:
        """It with news of the same use. A broken one takes none, and that a use is gone is no news of it."""
        if self.state == "broken" or news.state == "gone":
            return self
        # Never beyond what is said to be recorded: a GPU may have written its word before the record was published.
        completed = max(self.completed, min(news.completed, news.recorded))
        lost = news.lost if news.lost and not 0 < self.lost <= news.lost else self.lost
        last = news if _ORDER.index(news.state) > _ORDER.index(self.state) else self
        return Row(*self.key, max(self.recorded, news.recorded), completed, lost, last.state, last.cause)


class _Body(Struct, frozen=True, array_like=True, tag=str.lower):
    """What a message says. Its kind, the class's name in lower case, comes first."""


class Open(_Body, frozen=True):
    """Ask for the event of a name, which is created if it does not exist. Answered by State."""

    name: Annotated[str, Meta(max_length=255)]


class Attach(_Body, frozen=True):
    """Ask for a use of a slot. Answered by State."""

    epoch: Id
    key: Key


class Ping(_Body, frozen=True):
    """Ask whether the node is there. Answered by Pong."""


class Events(_Body, frozen=True):
    """Ask for the events whose names begin with `prefix`. Answered by Listed."""

    prefix: Annotated[str, Meta(max_length=255)]


class Follow(_Body, frozen=True):
    """All the uses whose news the asker wants, under a number of its own. Answered by Pong, once they are sent.

    `is_afresh`: it may have missed some, and wants the news of all now, not only of those that it did not want before.
    """

    epoch: Id
    version: Count
    is_afresh: bool
    keys: Annotated[list[Key], Meta(max_length=MAX_KEYS)]


class Refused(_Body, frozen=True):
    """A refusal; `kind` is a class name of `ipcsync.errors`."""

    kind: Text
    text: Text


class FromNode(_Body, frozen=True):
    """What a node says of itself, in this life of it."""

    term: Count
    epoch: Id


class State(FromNode, frozen=True):
    """How the use that was asked for is; its news come by themselves from now on."""

    row: Row


class Pong(FromNode, frozen=True):
    """The node is alive, and sends the asker the news of what it wants by the Follow of this `version`, 0 for none."""

    owner: Id
    version: Count


class Listed(_Body, frozen=True):
    """The events asked for, as the reply to `ListEvents`."""

    reply: Annotated[bytes, Meta(max_length=MAX_BYTES)]


class News(FromNode, frozen=True):
    """The rows that have changed of uses that the other node mirrors. Answered by Ack, else sent again."""

    rows: Annotated[list[Row], Meta(max_length=MAX_ROWS)]


class Ack(_Body, frozen=True):
    """The news are taken in."""


class Over(FromNode, frozen=True):
    """The epoch is over for other nodes; `reason` is a NodeLost's. Not answered."""

    reason: Text


Message: TypeAlias = Open | Attach | Ping | Events | Follow | State | Pong | Listed | Refused | News | Ack | Over
T = TypeVar("T", bound=Message)
_envelope = msgspec.msgpack.Decoder(tuple[int, msgspec.Raw])
_body: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_encoder = msgspec.msgpack.Encoder()


def encode(body: Message) -> bytes:
    """The bytes of a message. Raises ProtocolError if they are too many."""
    data = _encoder.encode((VERSION, body))
    if len(data) > MAX_BYTES:
        raise ProtocolError(f"a message of {len(data)} bytes, more than {MAX_BYTES}", code="too_large")
    return data


def encode_reply(body: messages.Message) -> bytes:
    """The bytes of a coordinator's reply that is sent on. QuotaExceeded if no message holds them."""
    data = codec.encode_reply(0, body)
    if len(data) > MAX_ANSWER:
        text = f"the answer has {len(data)} bytes, more than one message holds ({MAX_ANSWER}): of events, ask for those"
        raise QuotaExceeded(f"{text} with a longer prefix", limit=MAX_ANSWER)
    return data


def decode(data: bytes) -> Message:
    """The message in bytes that anybody may have sent. Raises ProtocolError if they are not a message."""
    if len(data) > MAX_BYTES:
        raise ProtocolError(f"a message of {len(data)} bytes, more than {MAX_BYTES}", code="too_large")
    try:
        version, body = _envelope.decode(data)
    except codec.UNREADABLE as error:
        raise ProtocolError(f"not an array of version and body: {error}", code="malformed") from None
    if version != VERSION:
        raise ProtocolError(f"bridges' protocol {version}, and this is {VERSION}", code="version")
    try:
        return _body.decode(body)
    except codec.UNREADABLE as error:
        raise ProtocolError(f"no message of bridges: {error}", code="invalid") from None


# --- questions to other nodes -----------------------------------------------------------------------------------------


async def ask(transport: Transport, node: str, body: Message, kind: type[T], timeout: float) -> T:
    """A node's answer. NodeLost if none comes in `timeout` seconds, or in a link's TTL."""
    try:
        data = await transport.ask(node, encode(body), min(timeout, transport.settings.link_ttl))
    except (CutOff, TimeoutError) as error:
        raise NodeLost(f"node {node!r} does not answer: {error}", node=node, reason="silent") from None
    reply = decode(data)
    if isinstance(reply, Refused):
        raise refusal(node, reply)
    if not isinstance(reply, kind):
        raise ProtocolError(f"node {node!r} answered {type(reply).__name__}", code="reply")
    return reply


async def owner_of(transport: Transport, node: str, timeout: float) -> bytes | None:
    """The owner id of the bridge that answers as `node`, None if none does within `timeout` seconds.

    An answer counts however late in that time it comes. Raises Unavailable if this node is cut off, and hears none.
    """
    until = time.monotonic() + timeout
    while (left := until - time.monotonic()) > 0:
        try:
            body = decode(await transport.ask(node, encode(Ping()), left))
            if isinstance(body, Pong):
                return body.owner
        except CutOff as error:
            raise Unavailable(str(error)) from None
        except TimeoutError:
            break
        except ProtocolError:
            pass  # an answer that cannot be read names no owner: it is asked again
        await asyncio.sleep(RETRY_S)
    return None


def refusal(node: str, body: Refused) -> IpcSyncError:
    error = codec.error_of(messages.Failure(body.kind, body.text, {}))
    if isinstance(error, NodeLost):
        return NodeLost(body.text, node=node, reason="restarted")
    if isinstance(error, CoordinatorLost):  # its bridge's, which ends with it
        return NodeLost(f"the coordinator of node {node!r} has ended", node=node, reason="restarted")
    if type(error) is IpcSyncError or isinstance(error, SessionLost):
        return IpcSyncError(f"node {node!r} refused: {body.text}")
    return error


@dataclass
class Counters:
    """What a bridge counts, since the start of the process or its last upgrade; `handovers` counts those upgrades."""

    handovers: int = 0
    remote_requests: int = 0
    news_sent: int = 0
    rows_sent: int = 0
    conflated: int = 0
    news_received: int = 0
    acks: int = 0
    resyncs: int = 0
    pings: int = 0
    pings_lost: int = 0
    invalid_messages: int = 0
    store_failures: int = 0
    names_lost: int = 0  # names of the fleet that the store gave to others, while their events were open here
    lost: Counter[str] = field(default_factory=Counter)  # nodes, by reason
    refusals: Counter[str] = field(default_factory=Counter)  # of remote requests, by error

    def counts(self) -> dict[str, int]:
        return {name: count for name, count in vars(self).items() if isinstance(count, int)}
