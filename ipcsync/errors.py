"""Every exception of ipcsync.

IpcSyncError(RuntimeError)
├── DriverError                 a driver call failed: .code .name .call
│   └── HandleError             an IPC handle that cannot be opened
├── NoDriver                    neither the cuda nor the host driver works
├── InvalidDevice(ValueError)   no such device
├── ForkedProcessError          used in a child forked after first use
├── StreamCapturing             a record or wait on a stream being captured into a CUDA graph
├── ConnectError                no coordinator, or one that does not fit: .endpoint
├── CoordinatorLost             the coordinator died or restarted
├── SessionExpired              this process was silent for longer than its TTL
├── ClientClosed                the client was closed
├── EventClosed                 the event was closed, or a point of an earlier use of its slot
├── RecorderLost                nobody is left who could finish it: .generation
├── NotRecorder                 recording without the role
│   └── RecorderTaken           another session has the role: .recorder
├── DeviceMismatch              an event, stream or process of another device
├── EngineMismatch              the engine cannot do this here
├── QuotaExceeded               a limit of the coordinator: .limit
├── ProtocolError               a frame, field or point that is none: .code
└── WaitTimeout(TimeoutError)   a wait's own time ran out: .event .generation .timeout

Every one of them pickles, with its attributes.
"""

from __future__ import annotations

__all__ = [
    "ClientClosed",
    "ConnectError",
    "CoordinatorLost",
    "DeviceMismatch",
    "DriverError",
    "EngineMismatch",
    "EventClosed",
    "ForkedProcessError",
    "HandleError",
    "InvalidDevice",
    "IpcSyncError",
    "NoDriver",
    "NotRecorder",
    "ProtocolError",
    "QuotaExceeded",
    "RecorderLost",
    "RecorderTaken",
    "SessionExpired",
    "StreamCapturing",
    "WaitTimeout",
]

# Attributes are keyword-only with defaults: BaseException pickles as (class, args, __dict__), so each class must be
# callable with its message alone.


class IpcSyncError(RuntimeError):
    """The base of all errors that ipcsync raises on its own account."""


class DriverError(IpcSyncError):
    """A driver call returned something other than CUDA_SUCCESS.

    `code` is the CUresult value, `name` its name ("CUDA_ERROR_…"), `call` the function ("cuEventCreate").
    """

    def __init__(self, message: str = "", *, code: int = 0, name: str = "", call: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.name = name
        self.call = call


class HandleError(DriverError):
    """An IPC handle is not 64 bytes, unknown, exported by this very process, or its exporter is gone."""


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


class ConnectError(IpcSyncError):
    """There is no coordinator at `endpoint`, or it is of another user, protocol version or driver."""

    def __init__(self, message: str = "", *, endpoint: str = "") -> None:
        super().__init__(message)
        self.endpoint = endpoint


class CoordinatorLost(IpcSyncError):
    """The coordinator died or restarted: everything of its epoch is void. Connect anew."""


class SessionExpired(IpcSyncError):
    """This process was silent for longer than its lease's TTL, and its lease has ended. Connect anew."""


class ClientClosed(IpcSyncError):
    """The client was closed."""


class EventClosed(IpcSyncError):
    """The shared event was closed here, or the point belongs to an earlier use of its slot."""


class RecorderLost(IpcSyncError):
    """The recorder closed or died before `generation` was known complete, and nobody else can finish it."""

    def __init__(self, message: str = "", *, generation: int = 0) -> None:
        super().__init__(message)
        self.generation = generation


class NotRecorder(IpcSyncError):
    """This session did not open the event with `recorder=True`."""


class RecorderTaken(NotRecorder):
    """Another session records on this event: `recorder` is its name or public id."""

    def __init__(self, message: str = "", *, recorder: str = "") -> None:
        super().__init__(message)
        self.recorder = recorder


class DeviceMismatch(IpcSyncError):
    """The event lives on another device than asked for, or on one that this process does not see."""


class EngineMismatch(IpcSyncError):
    """The engine cannot do this between these processes; the message says why."""


class QuotaExceeded(IpcSyncError):
    """A limit of the coordinator is reached: `limit` is its value."""

    def __init__(self, message: str = "", *, limit: int = 0) -> None:
        super().__init__(message)
        self.limit = limit


class ProtocolError(IpcSyncError):
    """A frame or a point that is malformed, or of another version; `code` says which rule it broke."""

    def __init__(self, message: str = "", *, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class WaitTimeout(IpcSyncError, TimeoutError):
    """The wait's own `timeout` (seconds) ran out before `generation` of `event` was there."""

    def __init__(
        self, message: str = "", *, event: str = "", generation: int = 0, timeout: float | None = None
    ) -> None:
        super().__init__(message)
        self.event = event
        self.generation = generation
        self.timeout = timeout
