"""Message types. A request is answered by exactly one reply; an announcement is numbered and not answered.

Every type is frozen, refuses unknown fields, and checks its values when it is made from bytes.
"""

from __future__ import annotations

from ipcsync._wire.messages.base import Done, Failure, Message, RequestBody
from ipcsync._wire.messages.coordinator import Counters, Probe, ProbeReply, Stats
from ipcsync._wire.messages.events import (
    Attach,
    Attachment,
    AttachmentInfo,
    AttachmentList,
    Break,
    Close,
    EventInfo,
    EventList,
    ListAttachments,
    ListEvents,
    Open,
    OpenStream,
    Origin,
    Remains,
    RemainsCause,
    StreamSpec,
)
from ipcsync._wire.messages.feed import Announcement, Snapshot, SnapshotReply
from ipcsync._wire.messages.fleet import (
    Answer,
    BridgeInfo,
    Finish,
    Import,
    ListWants,
    NodeInfo,
    NodeList,
    PeerInfo,
    Remote,
    Want,
    WantList,
)
from ipcsync._wire.messages.sessions import Bye, Hello, ListSessions, Ready, SessionInfo, SessionList, Welcome

VERSION = 2

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
