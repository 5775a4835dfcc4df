"""Endpoints: the runtime directory and the socket of a coordinator."""

from __future__ import annotations

import os

from ipcsync.errors import ConnectError

SOCKET = "coordinator.sock"
FEED = "feed.sock"
MAX_PATH = 107  # sockaddr_un


def runtime_dir() -> str:
    """$IPCSYNC_RUNTIME_DIR, else $XDG_RUNTIME_DIR/ipcsync, else /tmp/ipcsync-<uid>."""
    if chosen := os.environ.get("IPCSYNC_RUNTIME_DIR"):
        return os.path.abspath(_from_root(chosen))
    xdg = os.environ.get("XDG_RUNTIME_DIR")
    return os.path.abspath(_from_root(os.path.join(xdg, "ipcsync"))) if xdg else f"/tmp/ipcsync-{os.getuid()}"  # noqa: S108 - mode 0700 is checked


def endpoint_in(directory: str, socket: str = SOCKET) -> str:
    """The ipc:// endpoint of a socket in `directory`; ValueError if it can be the path of none."""
    path = os.path.join(os.path.abspath(_from_root(directory)), socket)
    if why_not := _why_not(path):
        raise ValueError(f"{why_not}; choose another runtime directory")
    return f"ipc://{path}"


def _from_root(path: str, endpoint: str = "") -> str:
    """The path from the root on, not normalized: a part may be a link. ConnectError if there is none."""
    try:
        return path if os.path.isabs(path) else os.path.join(os.getcwd(), path)
    except FileNotFoundError:
        raise ConnectError(f"{path} is relative to a directory that was removed", endpoint=endpoint) from None


def _why_not(path: str) -> str:
    """Why there can be no Unix socket of that path, "" if there can be."""
    try:
        length = len(path.encode())  # which ZeroMQ does too
    except UnicodeEncodeError:
        return f"the socket's path is not UTF-8: {path!r}"
    if "\0" in path:
        return f"the socket's path has a NUL: {path!r}"
    if length > MAX_PATH:
        return f"the socket's path is {length} bytes, but Linux allows {MAX_PATH}: {path}"
    return ""


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
    if why_not := _why_not(path):
        raise ConnectError(why_not, endpoint=endpoint)
    return path


def absolute(endpoint: str) -> str:
    """The endpoint that leads to the same socket from any working directory. ConnectError if there is none."""
    found = f"ipc://{_from_root(socket_path(endpoint), endpoint)}"
    socket_path(found)
    return found
