"""How a session begins: the greeting, and the board with this process's lifeline on it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from ipcsync import _room as room
from ipcsync._board import Board
from ipcsync._deadline import deadline_of
from ipcsync._linux.process import pid_namespace, shm_identity, time_namespace
from ipcsync._session import no_answer
from ipcsync._session.connection import Connection, expect
from ipcsync._wire.messages import Bye, Hello, Welcome
from ipcsync.errors import ConnectError, IpcSyncError, ProtocolError, WaitTimeout

_GOODBYE_S = 0.25  # the caller waits


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
    hello = Hello(
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
            f"{no_answer.why(connection.endpoint)}",
            endpoint=connection.endpoint,
        ) from None
    except ConnectError as error:
        error.endpoint = connection.endpoint
        raise
    return expect(reply, Welcome)


def open_board(welcome: Welcome, endpoint: str) -> Board:
    """The coordinator's board."""
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
        connection.request(Bye(released=True), token, _GOODBYE_S)


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


def hold_lifeline(board: Board, index: int, endpoint: str, timeout: float) -> None:
    """Take the lock of the line, which shows that this process lives. The last session there has it to its goodbye."""
    line = board.session(index)
    deadline = deadline_of(timeout)
    while not board.hold_lifeline(line):
        if time.monotonic_ns() >= deadline:
            raise ConnectError(
                f"another process still holds the lock of session line {index} of {board.path}; connect again",
                endpoint=endpoint,
            )
        time.sleep(0.001)
