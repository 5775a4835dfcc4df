"""Notifications to the service manager (sd_notify(3)): ready, alive, stopping. Without a manager they do nothing."""

from __future__ import annotations

import logging
import os
import socket
import time

from ipcsync._logs import fields

log = logging.getLogger("ipcsync.coordinator")


class ServiceManager:
    """The socket in $NOTIFY_SOCKET, and the watchdog's period in $WATCHDOG_USEC, if they are meant for this process.

    They are meant for the process that the manager started ($SYSTEMD_EXEC_PID, from systemd 248): another one of its
    service says nothing. They are removed from the environment. What a manager that does not read has no room for is
    sent at a later tick. If it cannot be reached, that is logged once, and only signs of life are still sent.
    """

    def __init__(self) -> None:
        address = os.environ.pop("NOTIFY_SOCKET", "")
        watchdog_us = os.environ.pop("WATCHDOG_USEC", "")
        own = str(os.getpid())
        if os.environ.pop("WATCHDOG_PID", own) != own:
            watchdog_us = ""
        if os.environ.get("SYSTEMD_EXEC_PID", own) != own:
            address = ""
        self.environment: dict[str, str] = {"NOTIFY_SOCKET": address} if address else {}
        """The environment for other code of this process that notifies the manager too."""
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._owed: list[str] = []
        self._was_unreachable = False
        if address:  # now: there may be no descriptor left later
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        self._period_s = int(watchdog_us) / 2e6 if address and watchdog_us.isdigit() else 0.0
        self._next = 0.0

    def ready(self, status: str) -> None:
        self._tell(f"READY=1\nSTATUS={status}")

    def reloading(self) -> None:
        """The daemon is about to change its code or settings; `ready` follows, unless it ends."""
        self._tell(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def alive(self) -> None:
        """Called with each tick; tells the watchdog twice a period."""
        now = time.monotonic()
        self._tell()
        if self._period_s and now >= self._next and self._send("WATCHDOG=1"):
            self._next = now + self._period_s

    def stopping(self) -> None:
        """The daemon ends; the last that is told."""
        self._tell("STOPPING=1")
        if self._address:
            self._socket.close()
        self._address, self._period_s = "", 0.0

    def _tell(self, *texts: str) -> None:
        self._owed += texts
        while self._owed and (not self._address or self._was_unreachable or self._send(self._owed[0])):
            del self._owed[0]

    def _send(self, text: str) -> bool:
        """Whether it was sent; it is not while a manager does not read, which must not block the daemon."""
        try:
            self._socket.sendto(text.encode(), self._address)
        except BlockingIOError:
            return False
        except OSError as error:
            if not self._was_unreachable:
                log.warning("the service manager cannot be notified", extra=fields(why=error))
            self._was_unreachable = True
            return False
        return True
