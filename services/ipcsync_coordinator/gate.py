"""Who may connect, how many, and whose connection is cut.

Only processes of this uid and of root may connect, and root may only ask; the kernel says which are (SO_PEERCRED).
Connections that send invalid messages are cut, so that no process can flood the coordinator.

Each connection is accepted after a look at the file descriptors. libzmq 4.3.5 aborts its process if accepting one on a
Unix socket fails with EMFILE (ipc_listener.cpp tolerates ENFILE, not EMFILE), and offers no option that keeps it from
accepting. But it accepts once for each event of the epoll set in which it keeps its listening sockets, and a process
may change its epoll sets from outside. So each listening socket is in there with EPOLLONESHOT: the kernel reports one
connection, and no other until this process allows it. A burst waits in the kernel's queue, however fast it is, and
however late the thread that allows.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import platform
import re
import resource
import select
import socket
import struct
import sys
import termios
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
import zmq

from ipcsync import _room as room
from ipcsync._board.runtime_dir import Place
from ipcsync._linux.process import peer_of
from ipcsync._logs import fields, is_round
from ipcsync.errors import QuotaExceeded

log = logging.getLogger("ipcsync.coordinator")

_PER_SESSION = 3  # its connection, its subscription to the feed, and a file of its process if the kernel marks no death
_PER_CONNECTION = 2  # itself, and the file that may follow
_ENOUGH = 65_536
_RECOUNT_MS = 100
_LOOK_MS = 1000  # the coordinator's own thread may have shut it
_NO_HANDSHAKE = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_ACCEPT_FAILED | _NO_HANDSHAKE | zmq.EVENT_MONITOR_STOPPED
_FOUND_S = 5.0
_EPOLL_CTL_MOD = 3
_EVENT = struct.Struct("=IQ" if platform.machine() == "x86_64" else "@IQ")  # the kernel's is packed on x86-64 only

DOMAIN = b"ipcsync"
_REMEMBERED = 1 << 16  # connections: more than may be open, else many of them together would be forgotten in turn
_SMALL = 4096
UNREAD_BYTES = 16 << 20

_libc = ctypes.CDLL(None, use_errno=True)


# --- how many may connect ---------------------------------------------------------------------------------------------


def raise_limit(sessions: int) -> None:
    """Raise the soft limit of descriptors to `_ENOUGH`, or to what so many sessions need, if that is allowed."""
    room.raise_descriptors(max(_ENOUGH, (count() + sessions * _PER_SESSION) * 2))


def count() -> int:
    """How many descriptors this process has open; OSError if there is none left to count with."""
    return len(os.listdir("/proc/self/fd")) - 1


def _usable() -> int:
    """How many descriptors may be open before the gate shuts: a third is for what is opened for sessions by then."""
    soft, _ = room.limits_of(resource.RLIMIT_NOFILE)
    return 1 << 30 if soft == resource.RLIM_INFINITY else soft - soft // 3


class Gate:
    """Lets connections in while descriptors are free, on a thread of its own: the loop may be busy for long.

    `place` is where the sockets are bound: while the gate is shut they have other names, which refuses new connections
    at once and leaves the existing ones alone. `on_refusal` is called on that thread with "descriptors" each time the
    gate shuts, and with "handshake" for each connection without a greeting in time. (libzmq reports no others: it drops
    a peer that does not speak ZeroMQ, or sends a frame far over the limit, without an event.)
    """

    def __init__(self, place: Place, on_refusal: Callable[[str], None]) -> None:
        self._place = place
        self._on_refusal = on_refusal
        self._own = 0  # what is open without any connection
        self._estimate = 0
        self._is_shut = False
        self._failures = 0  # to rename
        self._looked = 0.0
        self._accepts: list[Accepts] = []
        self._monitors: dict[zmq.Socket[bytes], zmq.Socket[bytes]] = {}
        self._thread = threading.Thread(target=self._run, name="ipcsync-gate", daemon=True)

    def bind(self, socket: zmq.Socket[bytes], listening: int, endpoint: str) -> None:
        """Bind a socket to a listening one, behind this gate: nothing is accepted before `start`.

        Until libzmq has it in its epoll set and this process has changed that, only what waits there may be accepted,
        which is less than a coordinator has free at its start.
        """
        self._has_renamed(self._place.shut)
        try:
            socket.setsockopt(zmq.USE_FD, listening)
            socket.bind(endpoint)
            accepts = Accepts.of(listening)
        finally:
            if not self._is_shut:
                # An earlier coordinator may have shut it. If that fails, the thread tries again.
                self._is_shut = not self._has_renamed(self._place.reopen)
        if accepts is not None:
            self._accepts.append(accepts)
        else:
            log.warning(
                "connections are accepted without a look at the file descriptors here, since libzmq's epoll set cannot "
                "be seen: a burst of them may end this process if its descriptors are few"
            )
        if socket not in self._monitors:
            self._monitors[socket] = socket.get_monitor_socket(_EVENTS)
            self._own = count()
        elif accepts is not None and not self._is_shut:
            accepts.allow_one()

    def start(self) -> None:
        """Begin to let connections in. QuotaExceeded if not a single session has room."""
        if self.sessions() < 1:
            soft, _ = room.limits_of(resource.RLIMIT_NOFILE)
            least = (self._own + 2 * _PER_SESSION) * 3 // 2 + 1
            raise QuotaExceeded(
                f"a coordinator needs {least} file descriptors for its first session, and may have {soft}: raise the "
                "hard limit (`ulimit -Hn`, LimitNOFILE= of a systemd unit)",
                limit=soft,
            )
        self._estimate = count()
        self._thread.start()

    def sessions(self) -> int:
        """How many sessions there may be, with a connection left on which a further one is refused."""
        return max(0, (_usable() - self._own) // _PER_SESSION - 1)

    def _run(self) -> None:
        poller = zmq.Poller()
        for monitor in self._monitors.values():
            poller.register(monitor, zmq.POLLIN)
        running = len(self._monitors)
        while running:
            self._look()
            for monitor, _ in poller.poll(_RECOUNT_MS if self._is_shut else _LOOK_MS):
                for head, _endpoint in _messages(monitor):  # all: what was accepted is known before more is allowed
                    event = int.from_bytes(head[:2], sys.byteorder)
                    if event == zmq.EVENT_MONITOR_STOPPED:
                        poller.unregister(monitor)
                        running -= 1
                    elif event == zmq.EVENT_ACCEPTED:
                        self._estimate += _PER_CONNECTION
                    elif event & _NO_HANDSHAKE:
                        self._on_refusal("handshake")
        for monitor in self._monitors.values():
            monitor.close()

    def _look(self) -> None:
        usable, now = _usable(), time.monotonic()
        if now - self._looked >= _RECOUNT_MS / 1000 if self._is_shut else self._estimate >= usable:
            self._looked = now
            self._recount(usable)
        if not self._is_shut:
            for accepts in self._accepts:
                accepts.allow_one()

    def _recount(self, usable: int) -> None:
        try:
            self._estimate = count()
        except OSError:
            self._estimate = usable  # none is left
        if self._estimate >= usable and not self._is_shut:
            self._is_shut = True
            self._has_renamed(self._place.shut)
            log.error("no new connections", extra=fields(descriptors=self._estimate, usable=usable))
            self._on_refusal("descriptors")
        elif self._estimate < usable and self._is_shut and self._has_renamed(self._place.reopen):
            self._is_shut = False
            log.info("new connections again", extra=fields(descriptors=self._estimate, usable=usable))

    def stop(self) -> None:
        """End the thread, and give the sockets their own names."""
        for listening in self._monitors:
            listening.disable_monitor()
        self._thread.join()
        if self._is_shut:
            self._has_renamed(self._place.reopen)

    def _has_renamed(self, rename: Callable[[], None]) -> bool:
        """Rename the sockets, if possible: that they keep their names only makes clients wait longer."""
        try:
            rename()
        except OSError as error:  # the disk is full, or cannot be written any more
            self._failures += 1
            if is_round(self._failures):
                log.warning("the sockets cannot be renamed", extra=fields(why=error))
            return False
        return True


def _messages(socket: zmq.Socket[bytes]) -> Iterator[list[bytes]]:
    """The messages that are there."""
    with suppress(zmq.Again):
        while True:
            yield socket.recv_multipart(zmq.NOBLOCK)


class Accepts(NamedTuple):
    """What libzmq accepts from the descriptor `listening`, by its entry, with `data`, in libzmq's epoll set `epoll`."""

    epoll: int
    listening: int
    data: int

    @classmethod
    def of(cls, listening: int) -> Accepts | None:
        """Those of a descriptor that was just bound, stopped; None if no epoll set shows it, as in a sandbox (proc(5)).

        libzmq's thread makes its entry in two steps, of which the last asks for input.
        """
        deadline = time.monotonic() + _FOUND_S
        while True:
            seen = [(epoll, *entry) for epoll in map(int, os.listdir("/proc/self/fd")) for entry in _entries(epoll)]
            for epoll, descriptor, events, data in seen:
                if descriptor == listening and events & select.EPOLLIN:
                    found = cls(epoll, listening, data)
                    found._change(select.EPOLLONESHOT)
                    return found
            if not seen or time.monotonic() >= deadline:
                return None
            time.sleep(0.0001)

    def allow_one(self) -> None:
        """Let libzmq accept one connection: the next, or one that waits."""
        self._change(select.EPOLLIN | select.EPOLLONESHOT)

    def _change(self, events: int) -> None:
        if _libc.epoll_ctl(self.epoll, _EPOLL_CTL_MOD, self.listening, _EVENT.pack(events, self.data)) != 0:
            raise OSError(ctypes.get_errno(), "libzmq's epoll set cannot be changed")


def _entries(descriptor: int) -> list[tuple[int, int, int]]:
    """What an epoll set watches: descriptor, events, data; nothing if it is none."""
    try:
        with open(f"/proc/self/fdinfo/{descriptor}") as file:
            found = re.findall(r"^tfd: *(\d+) events: *([0-9a-f]+) data: *([0-9a-f]+)", file.read(), re.MULTILINE)
    except OSError:
        return []  # it was closed meanwhile
    return [(int(watched), int(events, 16), int(data, 16)) for watched, events, data in found]


# --- who may connect --------------------------------------------------------------------------------------------------


class ZapHandler:
    """Answers ZAP requests (ZeroMQ RFC 27) on this context; `on_refusal` is called for each uid that is refused.

    pyzmq's own handlers take lists of whole addresses, and over ipc one is `localhost:uid:gid:pid`.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], on_refusal: Callable[[str], None]) -> None:
        self._on_refusal = on_refusal
        self._uids = {"0", str(os.geteuid())}
        self.socket = context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.bind("inproc://zeromq.zap.01")

    def drain(self) -> None:
        for parts in _messages(self.socket):
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
    return with it. The last `_REMEMBERED` connections are kept.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._is_due = False
        self._counts: OrderedDict[bytes, int] = OrderedDict()

    def strike(self, routing: bytes) -> None:
        count = self._counts.get(routing, 0) + 1
        _remember(self._counts, routing, count)
        if count == self._most:
            self._is_due = True
            del self._counts[routing]

    def clear(self, routing: bytes) -> None:
        """Forget the count: a session sent a valid message over that connection."""
        self._counts.pop(routing, None)

    def take_due(self) -> bool:
        """Whether the last counted connection is to be cut; asked after each message, and True once."""
        is_due, self._is_due = self._is_due, False
        return is_due


def _remember(counts: OrderedDict[bytes, int], routing: bytes, count: int) -> None:
    counts[routing] = count
    counts.move_to_end(routing)
    if len(counts) > _REMEMBERED:
        counts.popitem(last=False)


def cut(sender: Sender, why: str, refuse: Callable[..., None]) -> None:
    """Shut down the connection that a frame came by, if possible, and have that counted."""
    with suppress(zmq.ZMQError, ValueError):  # this libzmq has no such option any more
        if disconnect(int(sender.frame.get(zmq.SRCFD)), sender.pid):
            refuse(why, pid=sender.pid)


def disconnect(descriptor: int, pid: int) -> bool:
    """Shut down the connection behind a descriptor of libzmq, if process `pid` is its peer; returns whether it was.

    libzmq may close its descriptor at any time, and another connection may then get the number. So a duplicate is
    checked and shut down, which is one connection for good. A peer of unknown pid (0, of a pid namespace that is not
    visible here) is not cut, since it might be another one.
    """
    with suppress(OSError):  # it is gone already, or there is no descriptor for the duplicate
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

    Once the kernel holds nothing that the peer has not read, the count starts again: ZeroMQ does not say what it sent.
    Small replies are not counted: their number bounds them. The last `_REMEMBERED` connections are kept.
    """

    def __init__(self) -> None:
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
        _remember(self._counts, sender.routing, before + size)
        return True


def _has_read_all(frame: Any) -> bool:  # noqa: ANN401 - a zmq.Frame
    """Whether the peer has read all that was written to its connection; also where the kernel cannot be asked."""
    try:
        return not any(fcntl.ioctl(int(frame.get(zmq.SRCFD)), termios.TIOCOUTQ, bytes(4)))
    except (zmq.ZMQError, ValueError, OSError):
        return True
