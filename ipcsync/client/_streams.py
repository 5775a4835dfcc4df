"""Named streams: every worker that opens a name gets a stream of the same device and priority."""

from __future__ import annotations

from ipcsync._native import device as devices
from ipcsync._native.context import current_ordinal, ordinal_of, uuid_of
from ipcsync._native.stream import Stream
from ipcsync._session.session import Session
from ipcsync._wire import messages
from ipcsync.client._naming import Naming
from ipcsync.errors import DeviceMismatch, InvalidDevice
from ipcsync.typing import DeviceLike


def open_stream(
    session: Session, naming: Naming, name: str, device: DeviceLike | None, priority: int, timeout: float | None
) -> Stream:
    """A new stream of this process, with the device and priority that the coordinator has for the name."""
    body = messages.OpenStream(
        name=naming.full(name),
        device="" if device is None else uuid_of(devices.parse(device)),
        default_device=uuid_of(current_ordinal()),
        priority=priority,
    )
    spec = session.request(body, messages.StreamSpec, timeout)
    try:
        ordinal = ordinal_of(spec.device)
    except InvalidDevice as error:
        raise DeviceMismatch(f"the stream {name!r} is on a device that is not visible here: {error}") from None
    return Stream(ordinal, spec.priority)
