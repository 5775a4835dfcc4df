"""Why a generation is lost, and by whose end: what a RecorderLost says."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

from ipcsync.errors import RecorderLost

Cause: TypeAlias = Literal["died", "expired", "closed", "behind"]

_ENDS: dict[Cause, str] = {
    "died": "died",
    "expired": "was silent for longer than its lease's TTL, and its session expired",
    "closed": "closed the event before it recorded that",
}


class Loss(NamedTuple):
    """A generation that will never count, for good. `serial`, `session` and `pid` are of the session that ended.

    `root`, of cause "behind": what was lost first, as a text; empty where only the board tells.
    """

    cause: Cause
    serial: int
    session: str
    pid: int
    root: str = ""

    @property
    def who(self) -> str:
        """The session that ended, in a text."""
        return f" {self.session!r} (pid {self.pid or 'not known'})" if self.session else ""

    def behind(self, what: str) -> Loss:
        """What this loss of `what` is to a record that stands behind it."""
        if self.cause == "behind":
            return self._replace(root=self.root or what)
        return self._replace(cause="behind", root=f"{what}, whose recorder{self.who} {_ENDS[self.cause]}")

    def error(self, event: str, label: str, generation: int) -> RecorderLost:
        """The error for `generation` of an event, which is `label` in texts."""
        if self.cause == "behind":
            root = self.root or f"work of the session{self.who}, which ended before that was known complete"
            text = (
                f"generation {generation} of {label} is lost: it stands behind {root}; have the work done again, on a "
                "new event and on a stream that waited for nothing lost"
            )
        else:
            text = (
                f"generation {generation} of {label} will never be complete: its recorder{self.who} "
                f"{_ENDS[self.cause]}; its data counts as never written: have the work done again, on a new event"
            )
        return RecorderLost(
            text, event=event, generation=generation, session=self.session, pid=self.pid, cause=self.cause
        )
