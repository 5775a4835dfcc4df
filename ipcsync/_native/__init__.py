"""The CUDA objects of this process: the fork guard, devices, streams, events.

The layers above import from the modules: `fork.check` and `fork.at_child`, `device.parse`, `device.uuid_of`,
`device.ordinal_of` and `device.collectors`, `stream.resolve`, `stream.stream_handle` and `stream.stream_call`,
`capture.relaxed_call` and `capture.refuse_capturing`, `context.ensure_context` and `context.OnDevice`. The context
managers `device` and `stream` are not named here, since they would hide the modules of those names.
"""

from ipcsync._native.capture import refuse_capturing, relaxed_call
from ipcsync._native.context import OnDevice, driver, ensure_context, ordinal_of, stream_call, uuid_of
from ipcsync._native.device import Device, DeviceProperties, parse
from ipcsync._native.event import Event
from ipcsync._native.stream import ExternalStream, Stream, current_stream, resolve, stream_handle

__all__ = [
    "Device",
    "DeviceProperties",
    "Event",
    "ExternalStream",
    "OnDevice",
    "Stream",
    "current_stream",
    "driver",
    "ensure_context",
    "ordinal_of",
    "parse",
    "refuse_capturing",
    "relaxed_call",
    "resolve",
    "stream_call",
    "stream_handle",
    "uuid_of",
]
