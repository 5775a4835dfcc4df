"""The feed's subscriber: a snapshot, then every change in order, across gaps and slow readers.

It subscribes, waits for the first announcement, then asks for a snapshot with its number, drops what is older, and asks
again whenever a number is missing. Before that announcement the publisher may not have taken in the subscription, and a
snapshot could be followed by changes that are never sent. A gap is bridged by a snapshot, which leads from the state
before to the state after: an event that was opened and closed within it gives no notice.
"""

from __future__ import annotations

import select
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Literal, TypeAlias, cast

import zmq

from ipcsync import _room as room
from ipcsync._deadline import deadline_of, left_of
from ipcsync._native import fork
from ipcsync._session.connection import zmq_context
from ipcsync._session.session import Session
from ipcsync._wire import codec
from ipcsync._wire.messages import Announcement, Snapshot, SnapshotReply
from ipcsync.errors import WaitTimeout
from ipcsync.typing import EngineName, NoticeKind

_SLICE_MS = 50


@dataclass(frozen=True)
class Notice:
    """One change, or one row of the first snapshot.

    `kind` is "opened", "closed" or "broken" of an event, "session_opened" or "session_closed" of a session; `name` is
    its name, `number` counts the coordinator's changes. "coordinator_restarted" has no name: a keeper has started
    another coordinator, and no session ended.

    The end of an event that had a recorder is followed by a second notice of the same number, which says how the
    recorder ended: "recorder_closed", "recorder_died" (its process is dead) or "recorder_expired" (it was silent for
    longer than its TTL). It, the notice before it, and "session_closed" have the process as `pid` (0: unknown), and as
    `cause` "closed", "died" or "expired"; `session` is the recorder's name, or else its id. An event that ended while
    its recorder goes on, because its work depended on what was lost, is "broken" by the cause "behind".

    Across a gap (the reader was too slow, or the coordinator was another one meanwhile) only the states before and
    after are known: the cause is empty, and no recorder's end is told.
    """

    kind: NoticeKind
    name: str
    number: int
    device: str = ""
    engine: EngineName | Literal[""] = ""
    session: str = ""
    pid: int = 0
    cause: str = ""


_Key: TypeAlias = tuple[int, int] | str
"""An event's slot and incarnation, or a session's id."""


class Replay:
    """The state after a snapshot and changes, and the notices that follow from them. It uses no socket.

    It holds the events whose names begin with `prefix`, and the sessions whose names begin with `sessions`.
    """

    def __init__(self, prefix: str = "", sessions: str = "") -> None:
        self._prefixes = {"opened": prefix, "session_opened": sessions}
        self._known: dict[_Key, Notice] = {}
        self.number = -1

    def is_behind(self, announcement: Announcement) -> bool:
        expected = self.number if announcement.kind == "tick" else self.number + 1
        return announcement.number > expected

    def apply(self, announcement: Announcement) -> list[Notice]:
        """The notices of the next change; none for a change that is known already."""
        if announcement.kind == "tick" or announcement.number <= self.number:
            return []
        self.number = announcement.number
        if announcement.kind in ("wanted", "unwanted"):  # for the bridge: no change of an event or a session
            return []
        notice = Notice(**{field.name: getattr(announcement, field.name) for field in fields(Notice)})
        is_session = notice.kind.startswith("session_")
        key: _Key = notice.session if is_session else (announcement.slot, announcement.incarnation)
        if notice.kind in self._prefixes:
            if not notice.name.startswith(self._prefixes[notice.kind]):
                return []
            self._known[key] = notice
            return [notice]
        # A closed event whose recorder dies later is announced as broken too, but is gone here already.
        gone = self._known.pop(key, None)
        if gone is None:
            return []
        told = replace(notice, name=gone.name, device=gone.device, engine=gone.engine)
        if is_session or notice.cause not in ("closed", "died", "expired") or not notice.session:
            return [told]
        return [told, replace(told, kind=cast("NoticeKind", f"recorder_{notice.cause}"))]

    def resync(self, state: SnapshotReply) -> list[Notice]:
        """The notices that lead from the known state to a snapshot."""
        notices = []
        if 0 <= self.number >> codec.FEED_START_BITS < state.number >> codec.FEED_START_BITS:
            notices.append(Notice("coordinator_restarted", "", state.number))
        found: dict[_Key, Notice] = {
            row.id: Notice("session_opened", row.name, state.number, session=row.id) for row in state.sessions
        }
        for row in state.events:
            if row.state == "open":
                opened = Notice("opened", row.name, state.number, row.device, row.engine)
                found[row.slot, row.incarnation] = opened
        # Once its slot is free, closed and broken cannot be told apart.
        broken = {(row.slot, row.incarnation) for row in state.events if row.state == "broken"}
        gone = [key for key in self._known if key not in found]
        for key in sorted(gone, key=lambda key: isinstance(key, str)):  # events first
            kind: NoticeKind = "session_closed" if isinstance(key, str) else "broken" if key in broken else "closed"
            notices.append(replace(self._known.pop(key), kind=kind, number=state.number))
        for key, notice in found.items():
            if key not in self._known and notice.name.startswith(self._prefixes[notice.kind]):
                self._known[key] = notice
                notices.append(notice)
        self.number = state.number
        return notices


def watch(
    session: Session, prefix: str, sessions: str, timeout: float | None, check: Callable[[], None]
) -> Iterator[Notice]:
    """The notices, from a subscription of its own; ends when none came for `timeout` seconds.

    `check` is called at least every 50 ms, and after each announcement: an announcement counts only if its coordinator
    is found alive afterwards, since a new coordinator counts from the start. What `check` raises ends the subscription.
    """
    replay = Replay(prefix, sessions)
    seconds = 5.0 if timeout is None else max(timeout, 2.0)

    def resync(is_again: bool) -> list[Notice]:
        left = session.timeout if timeout is None else min(seconds, session.timeout)
        return replay.resync(session.request(Snapshot(prefix, is_again), SnapshotReply, left))

    fork.check()
    room.look("a subscription", descriptors=2, threads=0)  # without the second one, libzmq tries again for ever
    try:
        socket = zmq_context().socket(zmq.SUB)
    except zmq.ZMQError as error:
        raise room.shortage(error, "a subscription") or error from None
    socket.linger = 0
    try:
        socket.connect(session.feed_endpoint)
        socket.subscribe(b"")
        # The publisher has taken in the subscription once it announces its number, or a change comes.
        deadline = deadline_of(seconds)
        while _receive(socket, deadline, check) is None:
            if not left_of(deadline):
                raise WaitTimeout(f"the feed did not answer within {seconds} s", timeout=seconds)
        yield from resync(False)
        deadline = deadline_of(timeout)
        while left_of(deadline):
            frame = _receive(socket, deadline, check)
            if frame is None:
                continue
            announcement = codec.decode_announcement(frame)
            for notice in resync(True) if replay.is_behind(announcement) else replay.apply(announcement):
                yield notice
                deadline = deadline_of(timeout)
    finally:
        socket.close()


def _receive(socket: zmq.Socket[bytes], deadline: int, check: Callable[[], None]) -> bytes | None:
    fork.check()  # before the socket is touched
    if not socket.poll(0):  # else its descriptor may be quiet
        poll = select.poll()  # not libzmq's, which never ends in a child that a handler forks amid it
        poll.register(socket, select.POLLIN)
        poll.poll(min(1000 * left_of(deadline), _SLICE_MS))
        fork.check()
    frame = bytes(socket.recv(zmq.NOBLOCK)) if socket.poll(0) else None
    check()
    return frame
