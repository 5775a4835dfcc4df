"""Which engine a new event has, and whether a session can use an event's."""

from __future__ import annotations

from ipcsync.errors import EngineMismatch, ProtocolError
from ipcsync_coordinator.pool import Pool
from ipcsync_coordinator.state import Session, Slot


def choose(pool: Pool, session: Session, wanted: str, device: str, why_not_timeline: str) -> str:
    """The engine of a new event on `device`. EngineMismatch if the wanted one cannot work, with the reason.

    `why_not_timeline` is what the process found when it tried. The coordinator needs no GPU for words, and so has
    nothing to try there: it stores them with the CPU. DeviceMismatch for a device that is not served.
    """
    if wanted not in ("auto", "event", "timeline"):
        raise ProtocolError(f"an engine must be 'auto', 'event' or 'timeline', not {wanted!r}", code="engine")
    pool.check_served(device)
    reasons: dict[str, str | None] = {}
    if wanted != "event":
        if not why_not_timeline:
            return "timeline"
        reasons["timeline"] = why_not_timeline
    if wanted != "timeline":  # last: it makes a context and CUDA events, which nobody may want
        reasons["event"] = session.why_not_event or pool.why_not_event(device)
        if not reasons["event"]:
            return "event"
    why = "; ".join(f"{engine}: {reason}" for engine, reason in reasons.items())
    raise EngineMismatch(f"the engine {wanted!r} cannot work between this process and the coordinator: {why}")


def check_usable(session: Session, slot: Slot, why_not_timeline: str = "") -> None:
    """Raise EngineMismatch if the session's process cannot use the engine of the event; it names both sides."""
    why_not = session.why_not_event if slot.engine == "event" else why_not_timeline
    if why_not:
        recorder = f", recorded by the session {slot.recorder.who}," if slot.recorder is not None else ""
        other = "timeline" if slot.engine == "event" else "event"
        raise EngineMismatch(
            f"the event {slot.name!r}{recorder} uses the engine {slot.engine!r}, which the session {session.who} "
            f"cannot use: {why_not}; have whoever opens it first ask for engine={other!r}"
        )
