"""Notifications to the service manager (sd_notify(3)): ready, alive, stopping. Without a manager they do nothing."""

from __future__ import annotations

import logging
import os
import socket
import time

from ipcsync._logs import fields

log = logging.getLogger("ipcsync.coordinator")


class ServiceManager:
    """The socket in $NOTIFY_SOCKET, and the watchdog's period in $WATCHDOG_USEC, if that one is meant for this process.

    They are removed from the environment. If the manager cannot be reached, that is logged once, and nothing more is
    sent.
    """

    def __init__(self) -> None:
        address = os.environ.pop("NOTIFY_SOCKET", "")
        watchdog_us = os.environ.pop("WATCHDOG_USEC", "")
        if os.environ.pop("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
            watchdog_us = ""
        self.environment: dict[str, str] = {"NOTIFY_SOCKET": address} if address else {}
        """The environment for other code of this process that notifies the manager too."""
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._period_s = int(watchdog_us) / 2e6 if watchdog_us.isdigit() else 0.0
        self._next = 0.0

    def ready(self, status: str) -> None:
        """The daemon serves."""
        self._send(f"READY=1\nSTATUS={status}")

    def reloading(self) -> None:
        """The daemon is about to change its code or settings; `ready` follows in any case."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def alive(self) -> None:
        """Called with each tick; tells the watchdog twice a period."""
        now = time.monotonic()
        if self._period_s and now >= self._next:
            self._next = now + self._period_s
            self._send("WATCHDOG=1")

    def stopping(self) -> None:
        """The daemon ends."""
        self._send("STOPPING=1")

    def _send(self, text: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(
                socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
            ) as sender:
                sender.sendto(text.encode(), self._address)
        except BlockingIOError:
            return  # a manager that does not read must not block the daemon; the next tick sends again
        except OSError as error:
            log.warning("the service manager cannot be notified", extra=fields(why=error))
            self._address = ""
