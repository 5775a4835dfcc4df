"""Other nodes: what sessions ask of them through the bridge, and what the bridge asks of its coordinator."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from ipcsync._wire.messages.base import Count, Effect, Message, Name, RequestBody, Text, Token


class Remote(RequestBody, frozen=True):
    """Ask another node through the bridge; the reply comes once the bridge has answered.

    `what`: "attach", the use that a point of another epoch names; "open", the event `name` of `node`, or of the fleet
    where `node` is empty; "claim", the fleet's name `name` for a use that this session records; "nodes"; "events" of
    `node` whose names begin with `name`; "bridge", which asks the bridge alone.
    """

    what: Text
    node: Name = ""
    name: Name = ""
    epoch: Annotated[bytes, Meta(max_length=16)] = b""
    slot: Count = 0
    incarnation: Count = 0
    default_device: Text = ""  # UUID that the mirror gets as its device


class Import(RequestBody, frozen=True):
    """Create a mirror of another node's slot, on which the bridge then records, and answer the `want` for it.

    The reply is a Failure for a use that is lost for good on this node.
    """

    want: Count
    epoch: Token
    slot: Count
    incarnation: Count
    node: Name
    name: Name = ""


class Answer(RequestBody, frozen=True):
    """The bridge's answer to a `want`; `reply` is a reply's frame, which is forwarded to the session that asked."""

    effect: ClassVar[Effect] = "repeatable"
    want: Count
    reply: bytes


class Finish(RequestBody, frozen=True):
    """End a mirror. `state`: "broken", "closed" (what was recorded may still complete), or "unwanted".

    `reason`, of a broken one, is why its node is lost, or else "died" or "expired" of its recorder there. One that
    other sessions still use is not ended as unwanted.
    """

    slot: Count
    incarnation: Count
    state: Text
    reason: Text = ""


class ListWants(RequestBody, frozen=True):
    """List the unanswered questions to other nodes, for the bridge."""

    effect: ClassVar[Effect] = "none"


class NodeInfo(Message, frozen=True):
    """One node of the fleet, as the bridge beside this coordinator sees it.

    `state` is "linked" while events of it are mirrored here, "known", or "lost", and `reason` then says why; `links`
    counts the mirrors; `last_heard_s` is None if nothing was heard of it.
    """

    name: str
    epoch: bytes
    state: Literal["linked", "known", "lost"]
    links: int
    last_heard_s: float | None = None
    reason: str = ""


class NodeList(Message, frozen=True):
    """The nodes of the fleet, this one first."""

    nodes: list[NodeInfo]


class PeerInfo(Message, frozen=True):
    """One other node that a bridge speaks with.

    `mirrored` counts its events that are waited for here, `followed` those of this node that it waits for, `pending`
    of these those whose newest state it does not have yet. `state` is "linked", or "lost", and `reason` then says why.
    `last_heard_s` is None if nothing was heard of it. At most 400 are told of: those that are linked, then the newest
    of the lost ones.
    """

    name: str
    state: Literal["linked", "lost"]
    mirrored: int = 0
    followed: int = 0
    pending: int = 0
    last_heard_s: float | None = None
    reason: str = ""


class BridgeInfo(Message, frozen=True):
    """The bridge beside a coordinator, and what it knows without asking another node.

    `server` is where it is connected, empty if it is cut off. `counts` holds what it has counted since its start or its
    last upgrade, `nodes_lost` the nodes by reason, `refusals` by error what sessions asked and did not get.
    """

    node: str
    fleet: str
    pid: int
    server: str
    mirrors: int
    exports: int
    peers: list[PeerInfo]
    counts: dict[str, int]
    nodes_lost: dict[str, int]
    refusals: dict[str, int]


class Want(Message, frozen=True):
    """A session's question to other nodes, for the bridge to answer before `deadline_ns` (CLOCK_MONOTONIC).

    The other fields are those of `Remote`.
    """

    number: Count
    what: str
    deadline_ns: Count
    node: str = ""
    name: str = ""
    epoch: bytes = b""
    slot: Count = 0
    incarnation: Count = 0


class WantList(Message, frozen=True):
    """The unanswered questions."""

    wants: list[Want]
