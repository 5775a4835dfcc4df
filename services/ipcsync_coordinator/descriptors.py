"""File descriptors: how many sessions they allow, and a gate that refuses connections while they are short.

libzmq 4.3.5 aborts its process if accepting a connection on a Unix socket fails with EMFILE (ipc_listener.cpp tolerates
ENFILE, not EMFILE). So before the descriptors are used up, the sockets are renamed: that refuses new connections and
leaves the existing ones alone. Later the sockets get their names back.
"""

from __future__ import annotations

import logging
import os
import resource
import threading
import time
from collections.abc import Callable

import zmq
from zmq.utils.monitor import parse_monitor_message

from ipcsync import _room as room
from ipcsync._board.runtime_dir import Place
from ipcsync._logs import fields

log = logging.getLogger("ipcsync.coordinator")

_PER_SESSION = 3  # its connection, its pidfd, its subscription to the feed
_PER_CONNECTION = 2  # itself, and the pidfd that may follow
_ENOUGH = 65_536
_RECOUNT_MS = 100
_NO_HANDSHAKE = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


class Descriptors:
    """The descriptors of this process; the soft limit is raised to `_ENOUGH` or what `sessions` need, if allowed.

    A third of them is a reserve for connections that are accepted before the gate shuts. Where the limit is a thousand,
    that is some milliseconds, and on a busy machine the gate may come too late.
    """

    def __init__(self, sessions: int) -> None:
        self._own = count()
        room.raise_descriptors(max(_ENOUGH, (self._own + sessions * _PER_SESSION) * 2))

    def usable(self) -> int:
        """How many may be open before the gate shuts, under the present limit."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft == resource.RLIM_INFINITY:
            return 1 << 30
        return soft - soft // 3

    def sessions(self) -> int:
        """How many sessions there may be, with a connection left on which a further one is refused."""
        return max(0, (self.usable() - self._own) // _PER_SESSION - 1)


def count() -> int:
    """How many descriptors this process has open; OSError if there is none left to count with."""
    return len(os.listdir("/proc/self/fd")) - 1


class Gate:
    """Watches new connections, on a thread of its own: the loop may be busy while hundreds arrive.

    `place` is where the `sockets` are bound. `on_refusal` is called on that thread with "descriptors" each time the
    gate shuts, and with "handshake" for each connection without a greeting in time. (libzmq reports no others: it drops
    a peer that does not speak ZeroMQ, or sends a frame far over the limit, without an event.)
    """

    def __init__(
        self,
        sockets: list[zmq.Socket[bytes]],
        place: Place,
        usable: Callable[[], int],
        on_refusal: Callable[[str], None],
    ) -> None:
        self._sockets = sockets
        self._place = place
        self._usable = usable
        self._on_refusal = on_refusal
        self._estimate = count()
        self._is_shut = False
        self._looked = 0.0
        place.reopen()  # an earlier coordinator may have shut it
        mask = zmq.EVENT_ACCEPTED | _NO_HANDSHAKE | zmq.EVENT_MONITOR_STOPPED
        self._monitors = [socket.get_monitor_socket(mask) for socket in sockets]
        self._thread = threading.Thread(target=self._run, name="ipcsync-gate", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        poller = zmq.Poller()
        for monitor in self._monitors:
            poller.register(monitor, zmq.POLLIN)
        running = len(self._monitors)
        while running:
            for monitor, _ in poller.poll(_RECOUNT_MS if self._is_shut else None):
                event = parse_monitor_message(monitor.recv_multipart())["event"]
                if event == zmq.EVENT_MONITOR_STOPPED:
                    poller.unregister(monitor)
                    running -= 1
                elif event == zmq.EVENT_ACCEPTED:
                    self._estimate += _PER_CONNECTION
                else:
                    self._on_refusal("handshake")
            usable = self._usable()
            if self._is_look_due(usable):
                self._look(usable)
        for monitor in self._monitors:
            monitor.close()

    def _is_look_due(self, usable: int) -> bool:
        # Not at each event while it is shut: a thousand may wait here, and libzmq's I/O thread for their turn.
        if self._is_shut:
            return time.monotonic() - self._looked >= _RECOUNT_MS / 1000
        return self._estimate >= usable

    def _look(self, usable: int) -> None:
        self._looked = time.monotonic()
        try:
            self._estimate = count()
        except OSError:
            self._estimate = usable  # none is left
        if self._estimate >= usable and not self._is_shut:
            self._is_shut = True
            self._place.shut()
            log.error("no new connections", extra=fields(descriptors=self._estimate, usable=usable))
            self._on_refusal("descriptors")
        elif self._estimate < usable and self._is_shut:
            self._is_shut = False
            self._place.reopen()
            log.info("new connections again", extra=fields(descriptors=self._estimate, usable=usable))

    def stop(self) -> None:
        """End the thread, and give the sockets their own names."""
        for socket in self._sockets:
            socket.disable_monitor()
        self._thread.join()
        if self._is_shut:
            self._place.reopen()
