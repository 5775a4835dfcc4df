"""A coordinator before a session, and without one: the greeting, the board with this process's lifeline, questions.

And why none answers at an endpoint, by what can be seen of its socket and its directory, and what to do.
"""

from __future__ import annotations

import errno
import getpass
import os
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar, cast

from ipcsync import _room as room
from ipcsync._board import Board
from ipcsync._board.runtime_dir import KEEPER, SHUT, Serving, who_serves
from ipcsync._closing import Closing
from ipcsync._linux.process import is_stopped, peer_of, pid_namespace, shm_identity, time_namespace
from ipcsync._session.connection import Connection, check_endpoint, expect
from ipcsync._wire import endpoints, messages
from ipcsync._wire.messages import AttachmentInfo, BridgeInfo, EventInfo, Message, NodeInfo, SessionInfo, Welcome
from ipcsync.errors import ConnectError, IpcSyncError, ProtocolError, WaitTimeout
from ipcsync.typing import CoordinatorStats

_M = TypeVar("_M", bound=Message)

_GOODBYE_S = 0.25  # the caller waits
_START = "start one with: ipcsync coordinator"


# --- the greeting -----------------------------------------------------------------------------------------------------


def greet(
    connection: Connection,
    name: str,
    timeout: float,
    lease_ttl: float | None,
    check: Callable[[], None],
    *,
    driver: str,
    role: str = "",
) -> Welcome:
    """Ask for a session. ConnectError if no coordinator answers within `timeout` seconds, or it uses another driver.

    `role` is "bridge" for a bridge, which has no driver. `check` is called in every slice of the wait and may raise.
    """
    hello = messages.Hello(
        nonce=os.urandom(16),
        driver=driver,
        name=name,
        namespace=pid_namespace(),
        time_namespace=time_namespace(),
        shm=shm_identity(),
        pid=os.getpid(),
        lease_ttl=lease_ttl,
        role=role,
    )
    try:
        with of_this_version(f"the coordinator at {connection.endpoint}", connection.endpoint):
            reply = connection.request(hello, b"", timeout, check)
    except WaitTimeout:
        raise ConnectError(
            f"no coordinator answered at {connection.endpoint} within {timeout} s: "
            f"{why_no_answer(connection.endpoint)}",
            endpoint=connection.endpoint,
        ) from None
    except ConnectError as error:
        error.endpoint = connection.endpoint
        raise
    return expect(reply, Welcome)


def open_board(welcome: Welcome, endpoint: str) -> Board:
    try:
        with of_this_version("the coordinator's board", endpoint):
            board = Board.open(welcome.board)
    except OSError as error:
        raise room.shortage(error, "the coordinator's board") or ConnectError(
            f"the coordinator's board {welcome.board} cannot be opened here: {error.strerror}", endpoint=endpoint
        ) from error
    if board.epoch != welcome.epoch:
        board.close()
        raise ConnectError(f"the board {welcome.board} belongs to another coordinator", endpoint=endpoint)
    return board


def take_leave(connection: Connection, token: bytes) -> None:
    """Say goodbye for a session that failed to begin; without one it would live on for its TTL."""
    with suppress(IpcSyncError):
        connection.request(messages.Bye(released=True), token, _GOODBYE_S)


@contextmanager
def of_this_version(what: str, endpoint: str) -> Iterator[None]:
    """A block that raises ConnectError where it finds that the format of `what` has another version."""
    try:
        yield
    except ProtocolError as error:
        if error.code != "version":
            raise
        raise ConnectError(
            f"{what} is of another version of ipcsync: {error}; install the same version for both, and restart both",
            endpoint=endpoint,
        ) from None


def hold_lifeline(board: Board, welcome: messages.Welcome, endpoint: str, deadline: int) -> None:
    """Take the lock of the line, which shows that this process lives. The last session there has it to its goodbye."""
    line = board.session(welcome.line)
    while not board.hold_lifeline(line):
        if time.monotonic_ns() >= deadline:
            raise ConnectError(
                f"another process still holds the lock of session line {welcome.line} of {board.path}; connect again",
                endpoint=endpoint,
            )
        time.sleep(0.001)
    if line.serial != welcome.serial:  # this process stood still for longer than its TTL
        raise ConnectError("the session was over before it began; connect again", endpoint=endpoint)


# --- questions --------------------------------------------------------------------------------------------------------


class Reader(Closing):
    """Asks one endpoint's coordinator what there is, each time within `timeout` seconds. Not thread-safe.

    Each call raises ConnectError, with the reason, if none answers; at once if there is no socket. A list has at most
    the coordinator's limit of rows; `stats` has the numbers. It takes no session, loads no driver, and goes on with the
    coordinator that follows one that has ended. A context manager that closes it.
    """

    def __init__(self, endpoint: str, timeout: float) -> None:
        self._path = endpoints.socket_path(endpoint)
        self.endpoint = endpoint
        self.timeout = timeout
        self._connection: Connection | None = None
        self._asked = 0

    def stats(self) -> CoordinatorStats:
        return cast("CoordinatorStats", self._answer(messages.Stats(), messages.Counters).stats)

    def list_events(self) -> list[EventInfo]:
        return self._answer(messages.ListEvents(), messages.EventList).events

    def list_sessions(self) -> list[SessionInfo]:
        return self._answer(messages.ListSessions(), messages.SessionList).sessions

    def list_attachments(self, limit: int) -> list[AttachmentInfo]:
        return self._answer(messages.ListAttachments("", limit), messages.AttachmentList).attachments

    def bridge(self, timeout: float) -> BridgeInfo:
        """The bridge beside the coordinator. NoBridge if there is none, WaitTimeout if it does not answer."""
        return self._ask(messages.Remote("bridge"), messages.BridgeInfo, timeout)

    def nodes(self) -> list[NodeInfo]:
        """The nodes of the fleet, this one first; raises as `bridge`, and FleetUnavailable."""
        self.stats()  # whether there is a coordinator: the next answer is the bridge's
        return self._ask(messages.Remote("nodes"), messages.NodeList, self.timeout).nodes

    def _answer(self, body: Message, kind: type[_M]) -> _M:
        try:
            return self._ask(body, kind, self.timeout)
        except WaitTimeout:
            self.close()
            raise self._nobody(f"answered at {self.endpoint} within {self.timeout:g} s") from None

    def _ask(self, body: Message, kind: type[_M], timeout: float) -> _M:
        if self._connection is None:
            checks_owner = os.geteuid() != 0
            if checks_owner:
                check_endpoint(self.endpoint)
            # Under its other name while one binds it, and maybe back under its own by the second look.
            if not any(os.path.exists(self._path + end) for end in ("", SHUT, "")):
                raise self._nobody(f"at {self.endpoint}")
            self._connection = Connection(self.endpoint, checks_owner=checks_owner)
            self._connection.starts = lambda: self._asked  # so that it looks at each answer's process
        self._asked += 1
        with of_this_version(f"the coordinator at {self.endpoint}", self.endpoint):
            return expect(self._connection.request(body, b"", timeout), kind)

    def _nobody(self, where: str) -> ConnectError:
        return ConnectError(f"no coordinator {where}: {why_no_answer(self.endpoint)}", endpoint=self.endpoint)

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


# --- why none answers -------------------------------------------------------------------------------------------------


def why_no_answer(endpoint: str) -> str:
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
            with suppress(OSError):  # it was removed meanwhile
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
                f"there is no socket, but a coordinator{_pid(serving.pid)} serves {other}: connect to "
                f"{endpoints.endpoint_in(other)}, by IPCSYNC_ENDPOINT for example"
            )
    return f"there is no socket; {_START}"


def _usual_directories() -> list[str]:
    """Where coordinators of this user serve: by default, in a login session, without one, and by the systemd unit."""
    uid = os.getuid()
    usual = f"/run/user/{uid}"
    login = os.environ.get("XDG_RUNTIME_DIR", usual)
    found = [endpoints.runtime_dir(), f"{login}/ipcsync", f"{usual}/ipcsync", f"/tmp/ipcsync-{uid}"]  # noqa: S108 - only looked at
    with suppress(KeyError, OSError):  # this uid has no name
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
