"""Only processes of this uid and of root may connect, and root may only ask; the kernel says which are (SO_PEERCRED).

A ZAP handler (ZeroMQ RFC 27) of our own, because over ipc the address is `localhost:uid:gid:pid`, which handlers for
lists of whole addresses cannot match.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

DOMAIN = b"ipcsync"


class ZapHandler:
    """Answers ZAP requests on this context. `refused` counts the uids turned away, through `on_refusal`."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], on_refusal: Callable[[str], None]) -> None:
        self._on_refusal = on_refusal
        self._uids = {"0", str(os.geteuid())}
        self.socket = context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.bind("inproc://zeromq.zap.01")

    def serve_one(self) -> bool:
        """Answer one request; returns whether there was one."""
        try:
            parts = self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        split = parts.index(b"") + 1
        version, request_id, _domain, address = parts[split : split + 4]
        allowed = uid_of(address.decode(errors="replace")) in self._uids
        if not allowed:
            self._on_refusal("uid")
        answer = [version, request_id, b"200" if allowed else b"400", b"" if allowed else b"another uid", b"", b""]
        self.socket.send_multipart(parts[:split] + answer)
        return True

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()


def uid_of(address: str) -> str:
    """The uid in an ipc peer's address, empty if there is none."""
    parts = address.split(":")
    return parts[1] if len(parts) == 4 else ""


class Sender(msgspec.Struct, frozen=True, gc=False):
    """The sender of a frame, as the kernel says.

    `routing` names one connection, and is not an identity; `frame` is the zmq.Frame, which is asked only when needed.
    """

    routing: bytes
    frame: Any

    @property
    def uid(self) -> str:
        """Its user, empty if it is unknown."""
        return uid_of(self.frame.get("Peer-Address"))

    @property
    def pid(self) -> int:
        """Its process id, 0 if it is unknown (a process of a pid namespace that is not visible here)."""
        parts = self.frame.get("Peer-Address").split(":")  # localhost:uid:gid:pid
        return int(parts[3]) if len(parts) == 4 and parts[3].isdigit() else 0
