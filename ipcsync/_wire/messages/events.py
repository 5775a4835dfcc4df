"""Shared events and named streams: how a session opens, closes and lists them."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, TypeAlias

from msgspec import Meta

from ipcsync._wire.messages.base import Count, Effect, Message, Name, RequestBody, Text, Token
from ipcsync.typing import EngineName, EventState

RemainsCause: TypeAlias = Literal["died", "expired", "closed", "behind"]


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
    """Finish one's use of a slot. `released`: nothing of this process can touch it any more.

    `drained`, of a recorder that has not released it yet: all that it recorded is complete.
    """

    slot: Count
    incarnation: Count
    released: bool = True
    drained: bool = False


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


class ListEvents(RequestBody, frozen=True):
    """List the events whose names begin with `prefix`."""

    effect: ClassVar[Effect] = "none"
    prefix: Name = ""


class ListAttachments(RequestBody, frozen=True):
    """List up to `limit` uses of events whose names begin with `prefix`."""

    effect: ClassVar[Effect] = "none"
    prefix: Name = ""
    limit: Annotated[int, Meta(ge=0, le=100_000)] = 100_000


class Origin(Message, frozen=True):
    """The use of another node's slot that a mirror stands for."""

    epoch: Token
    slot: Count
    incarnation: Count
    node: str


class Attachment(Message, frozen=True):
    """What a session needs to use a shared event. `serials` number the CUDA events behind `handles`; none is reused.

    `origin`: of a mirror, what it mirrors.
    """

    name: str
    slot: Count
    incarnation: Count
    base: Count
    device: str
    engine: str
    depth: int
    recorder: bool
    handles: list[bytes]
    serials: list[int]
    origin: Origin | None = None


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

    name: str
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
