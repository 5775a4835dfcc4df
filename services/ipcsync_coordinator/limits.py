"""Who may connect, and whose connection is cut.

Only processes of this uid and of root may connect, and root may only ask; the kernel says which are (SO_PEERCRED).
Connections that send invalid messages are cut, so that no process can flood the coordinator.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import termios
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from ipcsync._linux.process import peer_of

DOMAIN = b"ipcsync"
_SMALL = 4096
UNREAD_BYTES = 16 << 20


# --- who may connect --------------------------------------------------------------------------------------------------


class ZapHandler:
    """Answers ZAP requests (ZeroMQ RFC 27) on this context; `on_refusal` is called for each uid that is refused.

    A handler of our own: over ipc the address is `localhost:uid:gid:pid`, which handlers for lists of whole addresses
    cannot match.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], on_refusal: Callable[[str], None]) -> None:
        self._on_refusal = on_refusal
        self._uids = {"0", str(os.geteuid())}
        self.socket = context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.bind("inproc://zeromq.zap.01")

    def drain(self) -> None:
        """Answer the waiting requests."""
        with contextlib.suppress(zmq.Again):
            while True:
                self._answer(self.socket.recv_multipart(zmq.NOBLOCK))

    def _answer(self, parts: list[bytes]) -> None:
        split = parts.index(b"") + 1
        version, request_id, _domain, address = parts[split : split + 4]
        allowed = _peer(address.decode(errors="replace"))[0] in self._uids
        if not allowed:
            self._on_refusal("uid")
        answer = [version, request_id, b"200" if allowed else b"400", b"" if allowed else b"another uid", b"", b""]
        self.socket.send_multipart(parts[:split] + answer)


def _peer(address: str) -> tuple[str, str]:
    """The uid and pid in an ipc peer's address, localhost:uid:gid:pid; empty if there are none."""
    parts = address.split(":")
    return (parts[1], parts[3]) if len(parts) == 4 else ("", "")


class Sender(msgspec.Struct, frozen=True, gc=False):
    """The sender of a frame, as the kernel says.

    `routing` names one connection, and is not an identity; `frame` is the zmq.Frame, which is asked only when needed.
    """

    routing: bytes
    frame: Any

    @property
    def uid(self) -> str:
        """Its user, empty if it is unknown."""
        return _peer(self.frame.get("Peer-Address"))[0]

    @property
    def pid(self) -> int:
        """Its process id, 0 if it is unknown (a process of a pid namespace that is not visible here)."""
        pid = _peer(self.frame.get("Peer-Address"))[1]
        return int(pid) if pid.isdigit() else 0


# --- whose connection is cut ------------------------------------------------------------------------------------------


class StrikeCounter:
    """Counts, for each connection, the messages in a row that were malformed or of no session.

    A connection is cut at the `most`-th of them, and its count starts again then: a peer may choose its routing id and
    return with it. The last `remembered` connections are kept.
    """

    def __init__(self, most: int, remembered: int) -> None:
        self._most = most
        self._remembered = remembered
        self._is_due = False
        self._counts: OrderedDict[bytes, int] = OrderedDict()

    def strike(self, routing: bytes) -> None:
        """Count an invalid message of that connection."""
        count = self._counts[routing] = self._counts.get(routing, 0) + 1
        self._counts.move_to_end(routing)
        if len(self._counts) > self._remembered:
            self._counts.popitem(last=False)
        if count == self._most:
            self._is_due = True
            del self._counts[routing]

    def clear(self, routing: bytes) -> None:
        """Forget the count: a session sent a valid message over that connection."""
        if self._counts:
            self._counts.pop(routing, None)

    def take_due(self) -> bool:
        """Whether the last counted connection is to be cut; asked after each message, and True once."""
        is_due, self._is_due = self._is_due, False
        return is_due


def cut(sender: Sender, why: str, refuse: Callable[..., None]) -> None:
    """Shut down the connection that a frame came by, if possible, and have that counted."""
    with contextlib.suppress(zmq.ZMQError, ValueError):  # this libzmq has no such option any more
        if disconnect(int(sender.frame.get(zmq.SRCFD)), sender.pid):
            refuse(why, pid=sender.pid)


def disconnect(descriptor: int, pid: int) -> bool:
    """Shut down the connection behind a descriptor of libzmq, if process `pid` is its peer; returns whether it was.

    libzmq may close its descriptor at any time, and another connection may then get the number. So a duplicate is
    checked and shut down, which is one connection for good. A peer of unknown pid (0, of a pid namespace that is not
    visible here) is not cut, since it might be another one.
    """
    with contextlib.suppress(OSError):  # it is gone already, or there is no descriptor for the duplicate
        duplicate = os.dup(descriptor)
        try:
            connection = socket.socket(fileno=duplicate)
        except OSError:
            os.close(duplicate)
            raise
        with connection:
            if pid and peer_of(connection)[0] == pid:
                connection.shutdown(socket.SHUT_RDWR)
                return True
    return False


# --- what is queued for who does not read -----------------------------------------------------------------------------


class Unread:
    """Bounds the bytes of the replies that a connection has not read; ZeroMQ's own queues are bounded by number only.

    ZeroMQ does not say what it has sent. But the kernel does: once it holds nothing that the peer has not read, the
    count starts again. Small replies are not counted: their number bounds them. The last `remembered` connections are
    kept.
    """

    def __init__(self, remembered: int) -> None:
        self._remembered = remembered
        self._counts: OrderedDict[bytes, int] = OrderedDict()

    def admits(self, sender: Sender, size: int) -> bool:
        """Whether a reply of `size` bytes may be queued for `sender`; it counts as queued then."""
        if size < _SMALL:
            return True
        before = self._counts.get(sender.routing, 0)
        if before and _has_read_all(sender.frame):
            before = 0
        if before and before + size > UNREAD_BYTES:
            return False
        self._counts[sender.routing] = before + size
        self._counts.move_to_end(sender.routing)
        if len(self._counts) > self._remembered:
            self._counts.popitem(last=False)
        return True


def _has_read_all(frame: Any) -> bool:  # noqa: ANN401 - a zmq.Frame
    """Whether the peer has read all that was written to its connection; also where the kernel cannot be asked."""
    try:
        return not any(fcntl.ioctl(int(frame.get(zmq.SRCFD)), termios.TIOCOUTQ, bytes(4)))
    except (zmq.ZMQError, ValueError, OSError):
        return True
