"""LMCache's events between processes, as points: `LMCACHE_DEVICE_BACKEND=ipcsync`.

These are the eight operations of LMCache's event backend for its multiprocess mode. The stock backend keeps each
exported CUDA event as long as a peer may import it, and has to guess how long that is. Here the coordinator owns the
events, the bytes name one record, and a peer's death is an error.
"""

from __future__ import annotations

import ipcsync
from ipcsync.integrations import failing_once
from ipcsync.typing import DeviceLike, StreamLike

__all__ = ["IpcSyncEvent", "IpcSyncEventBackend"]


class IpcSyncEvent:
    """An event in LMCache's sense: created first and recorded later, or imported.

    Each record gives it another point; a handle that was exported earlier still means the earlier point.
    """

    __slots__ = ("recorded",)

    def __init__(self, recorded: ipcsync.Point | None = None) -> None:
        self.recorded = recorded

    @property
    def point(self) -> ipcsync.Point:
        """Its point. Raises RuntimeError before it is recorded, when CUDA would let every wait pass."""
        if self.recorded is None:
            raise RuntimeError("this event was not recorded yet: record it before it is exported or waited for")
        return self.recorded

    def wait(self, stream: StreamLike | None = None) -> None:
        """Have the later work of `stream` wait for it, as LMCache's `IPCEvent`. Raises RecorderLost as `wait_event`."""
        self.point.wait(stream)


class IpcSyncEventBackend:
    """LMCache's `EventIPCBackend` over the process's default client, which connects at the first use.

    An event's record and its waits go to the stream that LMCache hands over, whose device is the record's. Devices are
    not needed beyond that: a point names its own by UUID.
    """

    device_type = "cuda"

    def check_event_support(self, device: DeviceLike) -> None:
        """Raise RuntimeError, with the reason, if no engine works between this process and the coordinator."""
        client = ipcsync.default_client()
        engines = client.check(device if self.device_type == "cuda" else None)  # "cpu" is not a device of a driver
        event, timeline = engines["event"], engines["timeline"]
        if not (event["ok"] or timeline["ok"]):
            why = f"event: {event['why']}; timeline: {timeline['why']}"
            raise RuntimeError(f"no engine works between this process and the coordinator at {client.endpoint}: {why}")

    def create_event(self, device: object) -> IpcSyncEvent:
        """A new event, not recorded yet."""
        return IpcSyncEvent()

    def record_event(self, event: IpcSyncEvent, stream: StreamLike) -> None:
        """Record `event` after all work submitted to `stream` so far, with this process's default client.

        Raises RecorderLost if any of that depended on a peer that died; the next record on the stream does not, once
        the stream is past the wait for that peer.
        """
        with failing_once(stream):
            event.recorded = ipcsync.default_client().record(stream)

    def export_event(self, event: IpcSyncEvent, device: object) -> bytes:
        """The 48 bytes for another process. Raises RuntimeError for an event that was not recorded yet."""
        return bytes(event.point)

    def import_event(self, handle: bytes, device: object) -> IpcSyncEvent:
        """The event that another process exported. Raises ProtocolError for other bytes, RecorderLost if it is gone.

        If its recorder was lost, the first wait raises RecorderLost.
        """
        return IpcSyncEvent(ipcsync.default_client().point(handle))

    def wait_event(self, event: IpcSyncEvent, stream: StreamLike) -> None:
        """Have the later work of `stream` wait for `event`. Raises RecorderLost if it will never be complete."""
        event.wait(stream)

    def query_event(self, event: IpcSyncEvent) -> bool:
        """Whether `event` is complete. Raises RecorderLost if it never will be."""
        return event.point.query()

    def synchronize_event(self, event: IpcSyncEvent, device: object) -> None:
        """Block the host until `event` is complete. Raises RecorderLost if it never will be."""
        event.point.synchronize()


class CpuEventBackend(IpcSyncEventBackend):
    """The backend for LMCache's CPU device, whose streams are stand-ins and whose work is done within each call.

    So a wait is one on the host, and records go to the default stream of ipcsync's driver.
    """

    device_type = "cpu"

    def record_event(self, event: IpcSyncEvent, stream: object) -> None:
        """Record `event` after all that is on the default stream."""
        super().record_event(event, ipcsync.default_stream())

    def wait_event(self, event: IpcSyncEvent, stream: object) -> None:
        """Block until `event` is complete: what follows is done within the next call."""
        event.point.synchronize()
