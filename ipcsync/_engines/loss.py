"""Losses: why a generation is lost, and the text of its RecorderLost."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

from ipcsync.errors import NodeLost, RecorderLost

Cause: TypeAlias = Literal["died", "expired", "closed", "behind", "orphaned"]
Reason: TypeAlias = Literal["silent", "restarted", "bridge", "replaced", "stopped"]

_ENDS: dict[Cause, str] = {
    "died": "died",
    "expired": "was silent for longer than its lease's TTL, and its session expired",
    "closed": "closed the event before it recorded this generation",
    "orphaned": "lost its coordinator, which owned the event, before that was known complete",
}
_NODE_ENDS: dict[Reason, str] = {
    "silent": "has not been heard from for longer than the bridge's link TTL",
    "restarted": "has another coordinator now: the one that owned the event died or was restarted",
    "bridge": "is reached by a bridge on each side, and one of the two ended or was silent for too long",
    "replaced": "lost its name to another machine",
    "stopped": "has left the fleet",
}


class Loss(NamedTuple):
    """Why a generation will never count. `serial`, `session` and `pid` are of the session that ended.

    "orphaned" is the cause of a wait only, which a process queued before it lost the coordinator. `root`, of cause
    "behind": what was lost first, as a text; empty if it is known from the board only. `node`: the recorder's node,
    empty for this one; `reason`: why that whole node is lost, None if it is not.
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
        """The loss of a record that depends on `what`, which this loss is of."""
        if self.cause == "behind":
            return self._replace(root=self.root or what)
        return self._replace(cause="behind", root=f"{what}, whose {self._end}")

    def error_behind(self, what: str, work: str, event: str, generation: int, on: str = "a new stream") -> RecorderLost:
        """The error for `work` of this process that stands still behind `what`, a generation of an event."""
        lost = self.behind(what)
        why = f"{work} may never be done: it stands behind {lost.root}; go on with {on}"
        return RecorderLost(why, event=event, generation=generation, session=self.session, pid=self.pid, cause="behind")

    def error(self, event: str, label: str, generation: int, *, over: bool | None = None) -> RecorderLost:
        """The error for `generation` of an event, which is `label` in texts; `over` as in RecorderLost."""
        assert self.cause != "orphaned", "a wait's; the events of such a coordinator raise CoordinatorLost"
        if self.cause == "behind":
            root = self.root or f"work of the session{self.who}, which ended before that was known complete"
            text = (
                f"generation {generation} of {label} is lost: it stands behind {root}; repeat the work on a "
                "new event and on a stream that waited for nothing lost"
            )
        else:
            text = (
                f"generation {generation} of {label} will never be complete: its {self._end}; its data counts as never "
                "written: repeat the work on a new event"
            )
            if self.reason is not None:
                return NodeLost(text, event=event, generation=generation, node=self.node, reason=self.reason)
        return RecorderLost(
            text, event=event, generation=generation, session=self.session, pid=self.pid, cause=self.cause, over=over
        )
