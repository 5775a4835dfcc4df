"""What is asked of the coordinator itself: its counts, and a probe of the engine `event` between it and a process."""

from __future__ import annotations

from typing import ClassVar

from ipcsync._wire.messages.base import Effect, Message, RequestBody, Text


class Stats(RequestBody, frozen=True):
    """Count everything."""

    effect: ClassVar[Effect] = "none"


class Counters(Message, frozen=True):
    """The counts of `Client.stats()`."""

    stats: dict[str, object]


class Probe(RequestBody, frozen=True):
    """Ask for a handle, to test the engine `event` between this process and the coordinator on `device` (UUID)."""

    effect: ClassVar[Effect] = "none"
    device: Text = ""


class ProbeReply(Message, frozen=True):
    """The reply to Probe: the handle of an event made for it, and why that engine cannot work, None if it may."""

    handle: bytes
    why_not_event: str | None
