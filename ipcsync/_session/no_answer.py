"""Why no coordinator answers at an endpoint, by what can be seen of its socket and its directory, and what to do."""

from __future__ import annotations

import contextlib
import errno
import getpass
import os
import socket
import stat

from ipcsync._board.runtime_dir import KEEPER, SHUT, Serving, who_serves
from ipcsync._linux.process import is_stopped, peer_of
from ipcsync._wire import endpoints

_START = "start one with: ipcsync coordinator"


def why(endpoint: str) -> str:
    """The reason, and what to do; asked once no answer has come."""
    path = endpoints.socket_path(endpoint)
    directory = os.path.dirname(path) or "."
    if os.path.basename(path) == endpoints.FEED:
        return f"a coordinator sends notices there; it takes requests at ipc://{directory}/{endpoints.SOCKET}"
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        failure = probe.connect_ex(path)
        if failure in (errno.ENOENT, errno.ENOTDIR):
            return _without_socket(path, directory)
        if failure == errno.ECONNREFUSED:
            if not stat.S_ISSOCK(os.stat(path).st_mode):
                return f"{path} is not a socket: remove it, and {_START}"
            return f"the socket is stale, since its coordinator has ended: {_START}"
        if failure not in (0, errno.EAGAIN):
            return f"the socket cannot be connected to: {os.strerror(failure)}"
        listener = 0 if failure else peer_of(probe)[0]
    return _without_reply(directory, who_serves(directory), listener)


def _without_socket(path: str, directory: str) -> str:
    if os.path.exists(path + SHUT):
        return "its coordinator has no file descriptors left and takes no connections for now: raise its `ulimit -n`"
    if serving := who_serves(directory):
        return (
            f"a coordinator{_pid(serving.pid)} serves {directory}, but its socket was removed: it makes another one "
            "within a second, so try again; if that does not help, start it again"
        )
    for other in _usual_directories():
        if os.path.realpath(other) != os.path.realpath(directory) and (serving := who_serves(other)):
            return (
                f"there is no socket, but a coordinator{_pid(serving.pid)} serves {other}: set "
                f"IPCSYNC_RUNTIME_DIR={other} for this process"
            )
    return f"there is no socket; {_START}"


def _usual_directories() -> list[str]:
    """Where coordinators of this user serve: by default, in a login session, without one, and by the systemd unit."""
    uid = os.getuid()
    usual = f"/run/user/{uid}"
    login = os.environ.get("XDG_RUNTIME_DIR", usual)
    found = [endpoints.runtime_dir(), f"{login}/ipcsync", f"{usual}/ipcsync", f"/tmp/ipcsync-{uid}"]  # noqa: S108 - only looked at
    with contextlib.suppress(KeyError, OSError):  # this uid has no name
        found.append(f"/run/ipcsync-{getpass.getuser()}")
    return found


def _without_reply(directory: str, serving: Serving | None, listener: int) -> str:
    if serving is None:
        return (
            f"a process{_pid(listener)} listens there, but it is not a coordinator, which would lock {directory}: "
            f"end it, and {_START}"
        )
    pid = _pid(serving.pid)
    if is_stopped(serving.pid):
        return f"its coordinator{pid} is stopped: continue it with: kill -CONT {serving.pid}"
    if serving.role == KEEPER:
        return (
            f"its coordinator hangs, is stopped, or is overloaded; its keeper{pid} replaces one that stands still for "
            "10 s, so try again with a longer timeout, and see its log"
        )
    return (
        f"its coordinator{pid} hangs or is overloaded: try again with a longer timeout; one that stays silent must be "
        "killed and started again, which ends its sessions"
    )


def _pid(pid: int) -> str:
    return f" (pid {pid})" if pid else ""
