"""Every exception of ipcsync.

IpcSyncError(RuntimeError)
├── DriverError                 a driver call failed: .code .name .call
│   └── HandleError             an IPC handle that cannot be opened
├── NoDriver                    no driver works here
├── InvalidDevice(ValueError)   no such device
├── ForkedProcessError          used in a child forked after first use
├── StreamCapturing             a record or wait on a stream being captured into a CUDA graph
├── CaptureError                a GraphWait, GraphRecord or replay that is used where it cannot be
├── ConnectError                no coordinator, or one that does not fit: .endpoint
│   └── NoBridge                no bridge to other nodes runs beside the coordinator
├── SessionLost                 the session is over, connect again: .endpoint
│   ├── CoordinatorLost         the coordinator died or stopped: .pid .cause
│   └── SessionExpired          this process was silent for longer than its TTL: .session
├── ClientClosed                the client was closed: .client .endpoint
├── EventClosed                 the event was closed in this process: .event
├── RecorderLost                its recorder closed, died or expired: .event .generation .session .pid .cause .over
│   ├── StalePoint              a point of an earlier coordinator; the session is healthy
│   └── NodeLost                the node that records is lost to this one: .node .reason
├── NotComplete                 the time between events whose work is not complete
├── NotRecorder                 recording without the role: .event .recorder .pid
│   └── RecorderTaken           another session has the role
├── DeviceMismatch              an event, stream or process of another device
├── EngineMismatch              the engine cannot do this here
├── Reentered                   called by a finalizer or handler within a call of the same thread
├── QuotaExceeded               a limit of the coordinator, a bridge or the machine: .limit
├── NodeNameTaken               another bridge has the node's name in its fleet: .node
├── FleetUnavailable            the store of the fleet's names did not answer in time: .timeout
├── ProtocolError               a malformed frame, field or point: .code
└── WaitTimeout(TimeoutError)   a wait's own timeout expired: .event .generation .timeout

Every one of them pickles, with its attributes.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

__all__ = [
    "CaptureError",
    "ClientClosed",
    "ConnectError",
    "CoordinatorLost",
    "DeviceMismatch",
    "DriverError",
    "EngineMismatch",
    "EventClosed",
    "FleetUnavailable",
    "ForkedProcessError",
    "HandleError",
    "InvalidDevice",
    "IpcSyncError",
    "NoBridge",
    "NoDriver",
    "NodeLost",
    "NodeNameTaken",
    "NotComplete",
    "NotRecorder",
    "ProtocolError",
    "QuotaExceeded",
    "RecorderLost",
    "RecorderTaken",
    "Reentered",
    "SessionExpired",
    "SessionLost",
    "StalePoint",
    "StreamCapturing",
    "WaitTimeout",
]


class IpcSyncError(RuntimeError):
    """The base of all errors of ipcsync. Each takes a message, and by keyword the attributes that it declares."""

    _attributes: ClassVar[dict[str, object]] = {}
    """Their defaults. BaseException pickles as (class, args, __dict__), so a message alone must be enough."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._attributes = cls._attributes | {name: vars(cls)[name] for name in cls.__annotations__ if name in vars(cls)}

    def __init__(self, message: str = "", **attributes: Any) -> None:
        super().__init__(message)
        for name in attributes:
            if name not in self._attributes:
                raise TypeError(f"{type(self).__name__} has no attribute {name!r}")
        self.__dict__.update(self._attributes, **attributes)


class DriverError(IpcSyncError):
    """The driver's function `call` ("cuEventCreate") returned the CUresult `code`, by its `name` "CUDA_ERROR_…"."""

    code: int = 0
    name: str = ""
    call: str = ""


class HandleError(DriverError):
    """An IPC handle is not 64 bytes, unknown, exported by this process itself, or, of memory, its exporter is gone."""


class NoDriver(IpcSyncError):
    """No usable driver; the message says what was tried."""


class InvalidDevice(IpcSyncError, ValueError):
    """The argument names no device of this process."""


class ForkedProcessError(IpcSyncError):
    """CUDA, or ipcsync, was used before the fork that made this process."""

    TEXT = (
        "Cannot re-initialize CUDA in forked subprocess. "
        "To use CUDA with multiprocessing, you must use the 'spawn' start method"
    )

    def __init__(self, message: str = TEXT) -> None:
        super().__init__(message)


class StreamCapturing(IpcSyncError):
    """The stream is being captured into a CUDA graph: a replayed record would count once and happen many times."""


class CaptureError(IpcSyncError):
    """A GraphWait or GraphRecord captured where nothing is, or twice; a replay within another, or on another stream."""


class ConnectError(IpcSyncError):
    """There is no coordinator at `endpoint` ("": not known), or it is of another user, protocol version or driver."""

    endpoint: str = ""


class NoBridge(ConnectError):
    """No bridge runs beside the client's coordinator: `ipcsync bridge` starts one, which reaches other nodes."""


class SessionLost(IpcSyncError):
    """The session with the coordinator at `endpoint` is over, and all that it opened is void. Connect again."""

    endpoint: str = ""


class CoordinatorLost(SessionLost):
    """The coordinator died or was stopped: everything of its epoch is void.

    `pid` is its process id in its own pid namespace (0: not known); `cause` says what became of it (None: not known).
    """

    pid: int = 0
    cause: Literal["died", "stopped"] | None = None


class SessionExpired(SessionLost):
    """This process was silent for longer than its lease's TTL, and its lease has ended; `session` is its name or id."""

    session: str = ""


class ClientClosed(IpcSyncError):
    """`close()` was called on this client; `client` is its name, "" if it has none."""

    client: str = ""
    endpoint: str = ""


class EventClosed(IpcSyncError):
    """The shared event, `event`, was closed in this process, is a recorded Reservation (""), or is not exported."""

    event: str = ""


class RecorderLost(IpcSyncError):
    """The recorder closed, died or expired before `generation` of `event` was known complete: it never will be.

    `session` is the recorder's name (at most 64 bytes of it), or its id if it has no name, and `pid` its process id as
    the coordinator sees it; "" and 0 if that is not known. `cause`:
    - "died": its process ended before the work was known complete;
    - "expired": it was silent for longer than its lease's TTL;
    - "closed": it closed the event before it recorded this generation;
    - "behind": the work depended on a wait that was lost; `session` and `pid` are then of the one that died;
    - "gone": the event ended so long ago that its slot is another's by now, and how it ended is not known any more.

    `over` is True if the recorder's GPU work is proven to have ended, None if that is not known.
    """

    event: str = ""
    generation: int = 0
    session: str = ""
    pid: int = 0
    cause: Literal["died", "expired", "closed", "behind", "gone"] | None = None
    over: bool | None = None


class StalePoint(RecorderLost):
    """The point is of an earlier coordinator, or of one that this client is not connected to.

    What it stands for is void; `cause` is "gone". The session of the client that was asked is healthy: drop the point,
    and ask its sender for a new one, who has to connect again too.
    """


class NodeLost(RecorderLost):
    """`node`, on which the event is recorded, is lost to this node; what was known complete here stays good.

    This use of the event is lost for good, also if the node comes back. `reason`:
    - "silent": this node heard nothing of it for longer than the bridge's link TTL;
    - "restarted": its coordinator died or was restarted without a keeper;
    - "bridge": this node's bridge ended, or was silent for longer than its lease's TTL; or the other node's was started
      again, and may not follow the event any more;
    - "replaced": another machine has taken its name, or its coordinator has another one;
    - "stopped": its bridge said goodbye.

    A lost node need not be dead: revoke its GPU's and its network card's access to memory before you use that again.
    """

    node: str = ""
    reason: Literal["silent", "restarted", "bridge", "replaced", "stopped"] | None = None


class NotComplete(IpcSyncError):
    """`Event.elapsed_time` of events whose work is not complete, with torch's text."""


class NotRecorder(IpcSyncError):
    """This session did not open `event` with `recorder=True`.

    `recorder` is the name or public id of the session that records on it, "" if there is none or it is not known;
    `pid` is its process id as the coordinator sees it.
    """

    event: str = ""
    recorder: str = ""
    pid: int = 0


class RecorderTaken(NotRecorder):
    """Another session, `recorder`, records on `event`; of a fleet's event that is a node, and `pid` is 0."""


class DeviceMismatch(IpcSyncError):
    """The event is on another device than asked for, or on one that this process or the coordinator does not see."""


class EngineMismatch(IpcSyncError):
    """The engine cannot do this between these processes; the message says why."""


class Reentered(IpcSyncError):
    """A finalizer or a signal's handler made this call within another one, of the same thread.

    That one works on the same object; or it has a lock while another thread has one that this call needs. The outer
    call goes on as if this one had not been made. Call again when it has returned.
    """


class QuotaExceeded(IpcSyncError):
    """A limit of the coordinator, of a bridge or of the machine is reached: `limit` is its value (0: see the text)."""

    limit: int = 0


class NodeNameTaken(IpcSyncError):
    """Another bridge, which is alive, has the name `node` in its fleet."""

    node: str = ""


class FleetUnavailable(IpcSyncError):
    """The store of the fleet's names did not answer in `timeout` s, or refused; or (None) a name's node is silent."""

    timeout: float | None = None


class ProtocolError(IpcSyncError):
    """A frame or a point that is malformed, or of another version; `code` says which rule it broke."""

    code: str = ""


class WaitTimeout(IpcSyncError, TimeoutError):
    """The call's own `timeout` (seconds) expired; of a wait, before `generation` of `event` was recorded or complete.

    TimeoutError makes it an OSError too: an `except OSError` around other work catches it.
    """

    event: str = ""
    generation: int = 0
    timeout: float | None = None
