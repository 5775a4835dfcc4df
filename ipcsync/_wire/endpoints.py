"""Endpoints: the runtime directory and the socket of a coordinator."""

from __future__ import annotations

import os

from ipcsync.errors import ConnectError

SOCKET = "coordinator.sock"
FEED = "feed.sock"
MAX_PATH = 107  # sockaddr_un


def runtime_dir() -> str:
    """$IPCSYNC_RUNTIME_DIR, else $XDG_RUNTIME_DIR/ipcsync, else /tmp/ipcsync-<uid>."""
    chosen = os.environ.get("IPCSYNC_RUNTIME_DIR")
    if chosen:
        return os.path.abspath(chosen)
    xdg = os.environ.get("XDG_RUNTIME_DIR")
    return os.path.join(xdg, "ipcsync") if xdg else f"/tmp/ipcsync-{os.getuid()}"  # noqa: S108 - mode 0700 is checked


def endpoint_in(directory: str, socket: str = SOCKET) -> str:
    """The ipc:// endpoint of a socket in `directory`; ValueError if its path is too long for a Unix socket."""
    path = os.path.join(directory, socket)
    if len(os.fsencode(path)) > MAX_PATH:
        raise ValueError(
            f"the socket's path is {len(os.fsencode(path))} bytes, but Linux allows {MAX_PATH}: {path}; "
            "choose a shorter runtime directory"
        )
    return f"ipc://{path}"


def default_endpoint() -> str:
    """$IPCSYNC_ENDPOINT, else the coordinator's socket in the runtime directory."""
    return os.environ.get("IPCSYNC_ENDPOINT") or endpoint_in(runtime_dir())


def socket_path(endpoint: str) -> str:
    """The path behind an ipc:// endpoint; ConnectError for any other kind."""
    if not isinstance(endpoint, str):
        raise TypeError(f"an endpoint is a str, not {type(endpoint).__name__}")
    if not endpoint.startswith("ipc://") or len(endpoint) <= len("ipc://"):
        raise ConnectError(
            f"an endpoint looks like ipc:///run/user/1000/ipcsync/coordinator.sock, not {endpoint!r}", endpoint=endpoint
        )
    path = endpoint.removeprefix("ipc://")
    if len(os.fsencode(path)) > MAX_PATH:
        raise ConnectError(f"the socket's path is longer than {MAX_PATH} bytes: {path}", endpoint=endpoint)
    return path
