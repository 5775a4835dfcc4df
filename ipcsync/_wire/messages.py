"""Message types. A request is answered by exactly one reply; an announcement is numbered and not answered.

Every type is frozen, refuses unknown fields, and checks its values when it is made from bytes.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, TypeAlias

from msgspec import Meta, Struct

from ipcsync.typing import EngineName, EventState

VERSION = 2

Name = Annotated[str, Meta(max_length=255)]
Token = Annotated[bytes, Meta(min_length=16, max_length=16)]
Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Text = Annotated[str, Meta(max_length=1024)]
QuestionToNodes: TypeAlias = Literal["attach", "open", "claim", "nodes", "events", "bridge"]
MirrorEnd: TypeAlias = Literal["broken", "closed", "unwanted"]
RemainsCause: TypeAlias = Literal["died", "expired", "closed", "behind"]


class Message(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The base of all bodies."""


# What a request leaves in the coordinator's journal: nothing; what may be left again; or what must be left once, so
# that its reply is kept with it, for a repetition of the request.
Effect = Literal["none", "repeatable", "once"]


class RequestBody(Message, frozen=True):
    """The base of all requests. One that says nothing of its `effect` must be done once."""

    effect: ClassVar[Effect] = "once"


class Query(RequestBody, frozen=True):
    """The base of all requests that leave nothing."""

    effect: ClassVar[Effect] = "none"


class Done(Message, frozen=True):
    """The request was done; there is no result."""


class Failure(Message, frozen=True):
    """The request was refused. `kind` is a class name of `ipcsync.errors`, `attributes` its attributes."""

    kind: str
    message: str
    attributes: dict[str, object] = {}


# --- a session: its begin, its end, and the list of all ---------------------------------------------------------------


class Hello(RequestBody, frozen=True):
    """Open a session. `nonce` makes a retry give the same session; `lease_ttl` in seconds, None for the default."""

    effect: ClassVar[Effect] = "repeatable"
    nonce: Token
    driver: Text
    name: Annotated[str, Meta(max_length=255)] = ""
    namespace: Count = 0  # inode of the pid namespace
    time_namespace: Count = 0  # inode of the time namespace of heartbeats and deadlines; 0: the kernel has none
    shm: Text = ""  # which /dev/shm the process sees, as device:inode
    pid: Count = 0  # as the process sees itself; compared with the coordinator's own, never an identity
    lease_ttl: float | None = None
    role: Text = ""  # "bridge": it links this coordinator's events with those of other nodes


class Ready(RequestBody, frozen=True):
    """The board is mapped and the lifeline held; also the second word that makes a pidfd count."""

    effect: ClassVar[Effect] = "repeatable"


class Bye(RequestBody, frozen=True):
    """Close the session and all it has. `released`: nothing of this process can touch any slot any more."""

    released: bool = True


class ListSessions(Query, frozen=True):
    """List the sessions."""


class Welcome(Message, frozen=True):
    """The session that Hello opened. Times in seconds."""

    token: Token
    session: str  # its public id
    serial: Count
    line: Count
    epoch: Token
    lease_ttl: float
    heartbeat: float
    board: str
    feed: str
    driver: str
    devices: list[str]
    window: Annotated[int, Meta(ge=1)]  # how many requests may be in flight


class SessionInfo(Message, frozen=True):
    """One session. `id` is public, not its token; `pid` as the coordinator sees it (0: it cannot); times in seconds."""

    id: str
    name: str
    pid: int
    events: int
    connected_s: float
    last_seen_s: float


class SessionList(Message, frozen=True):
    """The sessions."""

    sessions: list[SessionInfo]


# --- the coordinator itself: its counts, and a probe of the engine `event` between it and a process -------------------


class Stats(Query, frozen=True):
    """Count everything."""


class Counters(Message, frozen=True):
    """The counts of `Client.stats()`."""

    stats: dict[str, object]


class Probe(Query, frozen=True):
    """Ask for a handle, to test the engine `event` between this process and the coordinator on `device` (UUID)."""

    device: Text = ""


class ProbeReply(Message, frozen=True):
    """The reply to Probe: the handle of an event made for it, and why that engine cannot work, None if it may."""

    handle: bytes
    why_not_event: str | None


# --- shared events and named streams: how a session opens, closes and lists them --------------------------------------


class Open(RequestBody, frozen=True):
    """Attach to the shared event `name`, or create it. An empty name creates an unnamed one."""

    name: Name
    recorder: bool = False
    device: Text = ""  # UUID; empty: the event's own
    default_device: Text = ""  # UUID for an event that does not exist yet
    engine: Text = "auto"
    depth: Annotated[int, Meta(ge=1, le=1024)] = 4
    default_engine: Text = "auto"  # in place of "auto", for an event that does not exist yet
    why_not_timeline: Text = ""  # why that engine does not work in the process; empty also where it was not tried


class Attach(RequestBody, frozen=True):
    """Attach to the slot and incarnation that a point names; answered by `Remains` if that use is over."""

    slot: Count
    incarnation: Count


class Close(RequestBody, frozen=True):
    """Finish one's use of a slot."""

    slot: Count
    incarnation: Count
    released: bool = True  # nothing of this process can touch it any more
    drained: bool = False  # of a recorder that has not released it yet: all that it recorded is complete


class Break(RequestBody, frozen=True):
    """End an event that this session records: part of its work stood behind work that is lost."""

    slot: Count
    incarnation: Count


class OpenStream(RequestBody, frozen=True):
    """Open a named stream: the first to name it decides device and priority."""

    name: Name
    device: Text = ""
    default_device: Text = ""
    priority: Annotated[int, Meta(ge=-1024, le=1024)] = 0


class ListEvents(Query, frozen=True):
    """List the events whose names begin with `prefix`."""

    prefix: Name = ""


class ListAttachments(Query, frozen=True):
    """List up to `limit` uses of events whose names begin with `prefix`."""

    prefix: Name = ""
    limit: Annotated[int, Meta(ge=0, le=100_000)] = 100_000


class Origin(Message, frozen=True):
    """The use of another node's slot that a mirror stands for."""

    epoch: Token
    slot: Count
    incarnation: Count
    node: str


class Attachment(Message, frozen=True):
    """What a session needs to use a shared event."""

    name: str
    slot: Count
    incarnation: Count
    base: Count
    device: str
    engine: str
    depth: int
    recorder: bool
    handles: list[bytes]
    origin: Origin | None = None  # of a mirror: what it mirrors


class Remains(Message, frozen=True):
    """What became of a use of a slot that every session has released, as long as the slot is not used again.

    Generations up to `good` are complete; of the later ones, up to `recorded` were recorded, none counts, and `cause`
    says why. `serial`, `session` (name or id) and `pid` are of who ended; 0 and "" if that is not known.
    """

    name: str
    slot: Count
    incarnation: Count
    device: str
    recorded: Count
    good: Count
    cause: RemainsCause
    serial: Count = 0
    session: str = ""
    pid: Count = 0


class StreamSpec(Message, frozen=True):
    """A named stream's specification."""

    device: str
    priority: int


class EventInfo(Message, frozen=True):
    """One shared event. `device` is a UUID, `attached` a count, `recorder` a session's name or id, empty for none.

    `slot` and `incarnation` identify the event, also if it has no name or an earlier one had the same. `node` is where
    it is recorded; empty for the node of the coordinator that was asked. `ended_s` is for how many seconds it has not
    been open, None while it is; `cause` then says why: "closed", "died", "expired", "behind", or what the reason is of
    another node's; empty if it had no recorder.
    """

    name: str
    device: str
    engine: EngineName
    state: EventState
    generation: Count
    completed: Count
    attached: int
    recorder: str
    slot: Count = 0
    incarnation: Count = 0
    node: str = ""
    cause: str = ""
    ended_s: float | None = None


class EventList(Message, frozen=True):
    """The events asked for."""

    events: list[EventInfo]


class AttachmentInfo(Message, frozen=True):
    """One session's use of one shared event.

    `event` is its name, empty for an unnamed one, `session` a name or else the id, `session_id` public. `role` is
    "records" or "waits"; `state` "active", or "draining" once it closed the event but may still touch it. `slot` and
    `incarnation` are the event's, as in `EventInfo`.
    """

    event: str
    session: str
    session_id: str
    role: Literal["records", "waits"]
    state: Literal["active", "draining"]
    slot: Count
    incarnation: Count


class AttachmentList(Message, frozen=True):
    """The attachments asked for."""

    attachments: list[AttachmentInfo]


# --- other nodes: what sessions ask of them through the bridge, and what the bridge asks of its coordinator -----------


class Remote(RequestBody, frozen=True):
    """Ask another node through the bridge; the reply comes once the bridge has answered.

    `what`: "attach", the use that a point of another epoch names; "open", the event `name` of `node`, or of the fleet
    where `node` is empty; "claim", the fleet's name `name` for a use that this session records; "nodes"; "events" of
    `node` whose names begin with `name`; "bridge", which asks the bridge alone.
    """

    what: QuestionToNodes
    node: Name = ""
    name: Name = ""
    epoch: Annotated[bytes, Meta(max_length=16)] = b""
    slot: Count = 0
    incarnation: Count = 0
    default_device: Text = ""  # UUID that the mirror gets as its device


class Import(RequestBody, frozen=True):
    """Create a mirror of another node's slot for the bridge, and answer the `want`. Failure: its use is lost here."""

    want: Count
    epoch: Token
    slot: Count
    incarnation: Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]  # 0 has the tombstone of the whole epoch
    node: Name
    name: Name = ""


class Answer(RequestBody, frozen=True):
    """The bridge's answer to a `want`; `reply` is a reply's frame, which is forwarded to the session that asked."""

    effect: ClassVar[Effect] = "repeatable"
    want: Count
    reply: bytes


class Finish(RequestBody, frozen=True):
    """End a mirror. One that other sessions still use is not ended as unwanted."""

    slot: Count
    incarnation: Count
    state: MirrorEnd  # of a closed one, what was recorded may still complete
    reason: Text = ""  # of a broken one: why its node is lost, or else "died" or "expired" of its recorder there


class ListWants(Query, frozen=True):
    """List the unanswered questions to other nodes, for the bridge."""


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
    `last_heard_s` is None if nothing was heard of it. At most 400 are told of: the linked ones, then the newest lost.
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
    """A session's question that the bridge has until `deadline_ns` (CLOCK_MONOTONIC) to answer, as in `Remote`."""

    number: Count
    what: QuestionToNodes
    deadline_ns: Count
    node: str = ""
    name: str = ""
    epoch: bytes = b""
    slot: Count = 0
    incarnation: Count = 0


class WantList(Message, frozen=True):
    """The unanswered questions."""

    wants: list[Want]


# --- the feed: a snapshot, and the announcement of each change --------------------------------------------------------


class Snapshot(Query, frozen=True):
    """All that is open, with the feed number up to which that holds. `is_resync`: because of a gap in the feed."""

    prefix: Name = ""
    is_resync: bool = False


class SnapshotReply(Message, frozen=True):
    """A snapshot, and the number of the last announcement that it holds."""

    number: Count
    events: list[EventInfo]
    sessions: list[SessionInfo]


class Announcement(Message, frozen=True):
    """One change. kind: opened, closed, broken, session_opened, session_closed, or tick (the number again).

    Of an event's end, `session` is its recorder's name or else its id, `pid` that process (0: unknown), and `cause` is
    "closed", "died", "expired", or "behind" for work behind what was lost; of a session's end, `pid` and `cause` are
    its own. `cause` is empty for an event without a recorder, and may be another node's reason.

    For the bridge: wanted, with the `want`; and unwanted, a mirror that no other session uses any more.
    """

    number: Count
    kind: str
    name: str = ""
    slot: Count = 0
    incarnation: Count = 0
    device: str = ""
    engine: EngineName | Literal[""] = ""
    handles: list[bytes] = []
    session: str = ""
    want: Want | None = None
    pid: Count = 0
    cause: str = ""


# --- all --------------------------------------------------------------------------------------------------------------

REQUESTS: dict[str, type[RequestBody]] = {
    "hello": Hello,
    "ready": Ready,
    "open": Open,
    "attach": Attach,
    "close": Close,
    "break": Break,
    "stream": OpenStream,
    "events": ListEvents,
    "sessions": ListSessions,
    "attachments": ListAttachments,
    "stats": Stats,
    "snapshot": Snapshot,
    "probe": Probe,
    "bye": Bye,
    "remote": Remote,
    "import": Import,
    "answer": Answer,
    "finish": Finish,
    "wants": ListWants,
}
REPLIES: dict[str, type[Message]] = {
    "welcome": Welcome,
    "done": Done,
    "attachment": Attachment,
    "remains": Remains,
    "stream": StreamSpec,
    "events": EventList,
    "sessions": SessionList,
    "attachments": AttachmentList,
    "stats": Counters,
    "snapshot": SnapshotReply,
    "probe": ProbeReply,
    "failure": Failure,
    "nodes": NodeList,
    "bridge": BridgeInfo,
    "wants": WantList,
}


def is_question(body: RequestBody) -> bool:
    """Whether a request only asks what there is: it then needs no session, and its failure is no refusal."""
    return isinstance(body, _QUESTIONS) or (isinstance(body, Remote) and body.what in _QUESTIONS_TO_NODES)


_QUESTIONS = (ListAttachments, ListEvents, ListSessions, Stats)
_QUESTIONS_TO_NODES = ("bridge", "events", "nodes")
OPS: dict[type[Message], str] = {kind: op for op, kind in REQUESTS.items()}
ANSWERS: dict[type[Message], str] = {kind: op for op, kind in REPLIES.items()}
