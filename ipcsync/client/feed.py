"""The feed's subscriber: a snapshot, then every change in order, across gaps and slow readers.

It subscribes, waits for the publisher's welcome message, then asks for a snapshot with its number, drops what is older,
and asks again whenever a number is missing. Asking right after subscribing would miss changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import zmq

from ipcsync._wire import codec
from ipcsync._wire.messages import Announcement, EventRow, SessionRow, State
from ipcsync.client.rows import Notice
from ipcsync.errors import WaitTimeout

_WELCOME = b"ipcsync-feed"
_SLICE_MS = 50


class Replay:
    """The state that snapshot and changes make, and the notices that follow; no socket in here."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._events: dict[tuple[int, int], Notice] = {}
        self._sessions: dict[str, Notice] = {}
        self.number = -1

    def is_behind(self, announcement: Announcement) -> bool:
        """Whether a change before this one was missed."""
        expected = self.number if announcement.kind == "tick" else self.number + 1
        return announcement.number > expected

    def apply(self, announcement: Announcement) -> list[Notice]:
        """The notices of the next change; nothing for one that is known already."""
        if announcement.kind == "tick" or announcement.number <= self.number:
            return []
        self.number = announcement.number
        return self._change(announcement)

    def _change(self, announcement: Announcement) -> list[Notice]:
        notice = Notice(
            announcement.kind,
            announcement.name,
            announcement.number,
            announcement.device,
            announcement.engine,
            announcement.session,
        )
        if announcement.kind == "session_opened":
            self._sessions[announcement.session] = notice
        elif announcement.kind == "session_closed":
            if self._sessions.pop(announcement.session, None) is None:
                return []
        else:
            return self._event_change(notice, (announcement.slot, announcement.incarnation))
        return [notice]

    def _event_change(self, notice: Notice, key: tuple[int, int]) -> list[Notice]:
        if not notice.name.startswith(self._prefix):
            return []
        if notice.kind == "opened":
            self._events[key] = notice
        elif notice.kind == "closed" or key in self._events:
            # A closed event whose recorder then dies is told as broken too; it is over already.
            if self._events.pop(key, None) is None:
                return []
        else:
            return []
        return [notice]

    def resync(self, state: State) -> list[Notice]:
        """The notices that lead from what is known to a snapshot."""
        notices = []
        events = {(row.slot, row.incarnation): row for row in state.events if row.state == "open"}
        sessions = {row.id: row for row in state.sessions}
        for key in [key for key in self._events if key not in events]:
            gone = self._events.pop(key)
            now = next((row for row in state.events if (row.slot, row.incarnation) == key), None)
            kind = "broken" if now is not None and now.state == "broken" else "closed"
            notices.append(Notice(kind, gone.name, state.number, gone.device, gone.engine))
        for session in [session for session in self._sessions if session not in sessions]:
            gone = self._sessions.pop(session)
            notices.append(Notice("session_closed", gone.name, state.number, session=session))
        notices += [self._new_session(row, state.number) for row in state.sessions if row.id not in self._sessions]
        notices += [self._new_event(key, row, state.number) for key, row in events.items() if key not in self._events]
        self.number = state.number
        return notices

    def _new_session(self, row: SessionRow, number: int) -> Notice:
        notice = Notice("session_opened", row.name, number, session=row.id)
        self._sessions[row.id] = notice
        return notice

    def _new_event(self, key: tuple[int, int], row: EventRow, number: int) -> Notice:
        notice = Notice("opened", row.name, number, row.device, row.engine)
        self._events[key] = notice
        return notice


def watch(
    context: zmq.Context[zmq.Socket[bytes]],
    endpoint: str,
    prefix: str,
    timeout: float | None,
    snapshot: Callable[[], State],
    look: Callable[[], None],
) -> Iterator[Notice]:
    """The notices, from a subscription of its own; ends when none came for `timeout` seconds."""
    socket = context.socket(zmq.SUB)
    socket.linger = 0
    try:
        socket.connect(endpoint)
        socket.subscribe(b"")
        _await_welcome(socket, 5.0 if timeout is None else max(timeout, 1.0), look)
        replay = Replay(prefix)
        yield from replay.resync(snapshot())
        last = time.monotonic()
        while timeout is None or time.monotonic() - last < timeout:
            frame = _receive(socket, timeout if timeout is None else last + timeout - time.monotonic(), look)
            if frame is None or frame == _WELCOME:
                continue  # a welcome in the middle: the publisher's socket was joined anew
            announcement = codec.decode_announcement(frame)
            notices = replay.resync(snapshot()) if replay.is_behind(announcement) else replay.apply(announcement)
            for notice in notices:
                yield notice
                last = time.monotonic()
    finally:
        socket.close()


def _receive(socket: zmq.Socket[bytes], timeout: float | None, look: Callable[[], None]) -> bytes | None:
    slice_ms = _SLICE_MS if timeout is None else min(_SLICE_MS, max(1, int(timeout * 1000)))
    if not socket.poll(slice_ms):
        look()
        return None
    return bytes(socket.recv(zmq.NOBLOCK))


def _await_welcome(socket: zmq.Socket[bytes], seconds: float, look: Callable[[], None]) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if _receive(socket, deadline - time.monotonic(), look) == _WELCOME:
            return
    raise WaitTimeout(f"the feed did not answer within {seconds} s", timeout=seconds)
