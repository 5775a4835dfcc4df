"""How a slot orders GPU work: `event` by interprocess CUDA events, `timeline` by a 64-bit word of the board."""

from ipcsync._engines.base import Engine
from ipcsync._engines.event import EventEngine
from ipcsync._engines.slot_view import Guard
from ipcsync._engines.timeline import TimelineEngine

__all__ = ["Engine", "EventEngine", "Guard", "TimelineEngine"]
