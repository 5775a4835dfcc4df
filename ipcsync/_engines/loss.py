"""Why a generation is lost, and by whose end: what a RecorderLost says."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

from ipcsync.errors import NodeLost, RecorderLost

Cause: TypeAlias = Literal["died", "expired", "closed", "behind"]
Reason: TypeAlias = Literal["silent", "restarted", "bridge", "replaced", "stopped"]

_ENDS: dict[Cause, str] = {
    "died": "died",
    "expired": "was silent for longer than its lease's TTL, and its session expired",
    "closed": "closed the event before it recorded that",
}
_NODE_ENDS: dict[Reason, str] = {
    "silent": "was not heard of for longer than the bridge's link TTL",
    "restarted": "has another coordinator now: the one that owned the event died, or was started anew",
    "bridge": "is reached by a bridge on each side, and one of the two ended or was silent for too long",
    "replaced": "lost its name to another machine",
    "stopped": "has left the fleet",
}


class Loss(NamedTuple):
    """A generation that will never count, for good. `serial`, `session` and `pid` are of the session that ended.

    `root`, of cause "behind": what was lost first, as a text; empty where only the board tells. `node`: where the
    recorder is, empty for this node; `reason`: why that whole node is lost, None if it is not.
    """

    cause: Cause
    serial: int
    session: str
    pid: int
    root: str = ""
    node: str = ""
    reason: Reason | None = None

    @property
    def who(self) -> str:
        """The session that ended, in a text."""
        if self.node and not self.session:
            return f" on node {self.node!r}"
        return f" {self.session!r} (pid {self.pid or 'not known'})" if self.session else ""

    @property
    def _end(self) -> str:
        """Who ended, and how, in a text."""
        if self.reason is not None:
            return f"node {self.node!r} {_NODE_ENDS[self.reason]}"
        return f"recorder{self.who} {_ENDS[self.cause]}"

    def behind(self, what: str) -> Loss:
        """What this loss of `what` is to a record that stands behind it."""
        if self.cause == "behind":
            return self._replace(root=self.root or what)
        return self._replace(cause="behind", root=f"{what}, whose {self._end}")

    def error(self, event: str, label: str, generation: int, *, over: bool | None = None) -> RecorderLost:
        """The error for `generation` of an event, which is `label` in texts; `over` as in RecorderLost."""
        if self.cause == "behind":
            root = self.root or f"work of the session{self.who}, which ended before that was known complete"
            text = (
                f"generation {generation} of {label} is lost: it stands behind {root}; have the work done again, on a "
                "new event and on a stream that waited for nothing lost"
            )
        else:
            text = (
                f"generation {generation} of {label} will never be complete: its {self._end}; its data counts as never "
                "written: have the work done again, on a new event"
            )
            if self.reason is not None:
                return NodeLost(text, event=event, generation=generation, node=self.node, reason=self.reason)
        return RecorderLost(
            text,
            event=event,
            generation=generation,
            session=self.session,
            pid=self.pid,
            cause=self.cause,
            over=over,
        )
