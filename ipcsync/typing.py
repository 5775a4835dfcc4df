"""Types for annotations: of arguments that take a stream, a device or an event of any library, and of results.

Importing it loads neither ZeroMQ nor CUDA.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol, SupportsIndex, TypeAlias, TypedDict

__all__ = [
    "Chains",
    "ClientStats",
    "CoordinatorSettings",
    "CoordinatorStats",
    "DeviceLike",
    "EngineCheck",
    "EngineChecks",
    "EngineChoice",
    "EngineName",
    "EventLike",
    "EventState",
    "HasCudaEvent",
    "HasCudaStream",
    "HasDeviceId",
    "HasHandle",
    "HasId",
    "HasIndex",
    "HasPtr",
    "Latency",
    "NoticeKind",
    "Stats",
    "StreamLike",
    "SupportsCudaStream",
    "Waitable",
]

EngineName: TypeAlias = Literal["event", "timeline"]
EngineChoice: TypeAlias = Literal["auto", "event", "timeline"]
Chains: TypeAlias = Literal["stream", "session"]
EventState: TypeAlias = Literal["open", "broken", "closed"]
NoticeKind: TypeAlias = Literal[
    "opened",
    "closed",
    "broken",
    "recorder_closed",
    "recorder_died",
    "recorder_expired",
    "session_opened",
    "session_closed",
    "coordinator_restarted",
]


class SupportsCudaStream(Protocol):
    """A stream by the protocol of cuda.core, numba and torch: `__cuda_stream__()` gives (0, pointer)."""

    def __cuda_stream__(self) -> tuple[int, int]:
        """Version of the protocol, which is 0, and the stream's address."""


class HasCudaStream(Protocol):
    """A stream as torch has it."""

    @property
    def cuda_stream(self) -> int:
        """The stream's address."""


class HasPtr(Protocol):
    """A stream as cupy has it."""

    @property
    def ptr(self) -> int:
        """The stream's address."""


class HasCudaEvent(Protocol):
    """An event as torch has it."""

    @property
    def cuda_event(self) -> int:
        """The event's address; 0 while it was never recorded."""


class HasHandle(Protocol):
    """An event as cuda.core has it."""

    @property
    def handle(self) -> Any:
        """The event's CUevent."""


class Waitable(Protocol):
    """An event that makes a stream wait by itself, as cupy's does."""

    def wait(self, stream: Any, /) -> object:
        """Have the stream's later work wait for the event."""


class HasIndex(Protocol):
    """A device as torch has it; None is the current one."""

    @property
    def index(self) -> int | None:
        """The device's ordinal."""


class HasDeviceId(Protocol):
    """A device as cuda.core has it."""

    @property
    def device_id(self) -> int:
        """The device's ordinal."""


class HasId(Protocol):
    """A device as cupy has it."""

    @property
    def id(self) -> int:
        """The device's ordinal."""


StreamLike: TypeAlias = SupportsIndex | SupportsCudaStream | HasCudaStream | HasPtr
"""A stream of any library, or its address. `None`, where allowed, is the current one.

That is torch's once torch has initialised CUDA, but for a thread that has called `ipcsync.set_stream`, or is inside
`with ipcsync.stream(…)`; else it is `ipcsync.current_stream()`.
"""

EventLike: TypeAlias = SupportsIndex | HasCudaEvent | HasHandle | Waitable
"""An event of any library, or its address."""

DeviceLike: TypeAlias = SupportsIndex | str | HasIndex | HasDeviceId | HasId
"""A device: an ordinal, "cuda", "cuda:1", a UUID, or a device object of any library."""


class CoordinatorSettings(TypedDict, total=False):
    """The settings that `launch` passes on to the coordinator: its flags, in seconds and bytes."""

    devices: str
    pool: int
    max_cuda_events: int
    lease_ttl: float
    max_sessions: int
    max_attachments: int
    max_streams: int
    max_name: int
    max_frame: int
    max_frames: int
    max_invalid: int
    reply_queue: int
    feed_queue: int
    remembered_requests: int
    handshake_s: float
    exit_when_idle: float
    spare: bool
    log_level: str
    log_json: bool


class EngineCheck(TypedDict):
    """Whether an engine works between this process and the coordinator; `why` says why not, and is empty if it does."""

    ok: bool
    why: str


class EngineChecks(TypedDict):
    """The result of `Client.check`."""

    event: EngineCheck
    timeline: EngineCheck


class Latency(TypedDict):
    """A histogram of the coordinator's time for a request; the counts are not cumulative."""

    bounds_s: list[float]
    counts: list[int]
    sum_s: float


class ClientStats(TypedDict):
    """Counts that a client keeps itself."""

    messages_sent: int
    full_ring_waits: int
    shortcuts: int
    """Calls on streams that the compiled core knew."""
    slow_calls: int
    """Calls whose arguments Python looked at first."""
    driver_stands_s: float
    """For how long the driver has kept the session's thread for it in a call; 0 if that is not over a second."""


class CoordinatorStats(TypedDict):
    """What a coordinator counts, and what it is.

    Requests, refusals, deaths, resyncs, results and latency are counted since the last start (`start_s`).
    """

    version: str
    """The coordinator's version of ipcsync; `epoch` in hexadecimal; and its driver."""
    epoch: str
    driver: str
    lease_ttl_s: float
    """The TTL of a session that asks for none."""
    sessions: int
    max_sessions: int
    oldest_lease_s: float
    attachments: int
    events: int
    """Those that are open."""
    states: dict[str, dict[str, int]]
    """By engine and state how many there are, those in quarantine included."""
    pool_size: int
    pool_in_use: int
    pool_high_water: int
    cuda_events: int
    kept: dict[str, int]
    """What of dead recorders their GPU work may still touch: words ("timeline") and CUDA events ("event")."""
    kept_limit: dict[str, int]
    """From how many on new events of that engine are refused."""
    quarantined: int
    quarantine_oldest_s: float
    feed_number: int
    requests: dict[str, int]
    refusals: dict[str, int]
    deaths: dict[str, int]
    resyncs: int
    results: dict[str, dict[str, int]]
    latency: Latency
    uptime_s: float
    starts: int
    """How many coordinators have served these events; above 1 only with a keeper."""
    start_s: float
    """Seconds since the last of them began to serve."""
    pause_s: float
    """For how long no coordinator served before it; 0 for the first."""
    restarts: dict[str, int]
    """Starts by reason: the last coordinator died, hung and was killed, or new code was loaded (`reloaded`)."""
    pid: int
    keeper_pid: int
    """Equal to `pid` without a keeper, as the memory of both is."""
    memory_bytes: int
    keeper_memory_bytes: int


class Stats(CoordinatorStats):
    """The result of `Client.stats`: the coordinator's counts, and under `client` this client's own."""

    client: ClientStats
