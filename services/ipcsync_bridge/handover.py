"""What a bridge leaves to the one that goes on in its place: the same process, with the code that is on disk now.

It calls exec, so the process stays, and with it the session, the lease, and the lock on its line of the board: no
process sees a death. What it knew is in a file without a name (memfd_create(2)), whose descriptor the new code gets.
"""

from __future__ import annotations

import os

import msgspec
from msgspec import Struct

from ipcsync._board import layout
from ipcsync._linux.files import memory_file
from ipcsync._wire import messages
from ipcsync._wire.messages import Attachment, Welcome
from ipcsync.errors import IpcSyncError
from ipcsync_bridge import wire
from ipcsync_bridge.wire import Key

VERSION = 4

VARIABLE = "IPCSYNC_BRIDGE_HANDOVER"
"""Of the environment, for the new code: the file's descriptor."""


class Session(Struct, frozen=True):
    """The session with the coordinator; `board` is the descriptor that holds its lifeline."""

    welcome: Welcome
    board: int
    last_request: int


class State(Struct, frozen=True):
    """What others do not tell the new code. `held`: what its session is attached to. `claims`, `over`: of `Names`.

    `began`: CLOCK_MONOTONIC, in seconds.
    """

    session: Session
    began: float
    term: int
    lost: dict[str, tuple[bytes, str]]
    mirrors: list[Attachment]
    held: list[Key]
    claims: dict[Key, tuple[str, int]]
    over: set[Key]
    handovers: int


def versions() -> str:
    """The numbers of the formats that both must have, as one text."""
    return f"handover {VERSION}, board {layout.VERSION}, wire {messages.VERSION}, bridges {wire.VERSION}"


def put(state: State) -> int:
    """The descriptor of a file with the state, which is inherited by exec alone."""
    file = memory_file("ipcsync-handover")
    with open(file, "wb", closefd=False) as written:
        written.write(msgspec.msgpack.encode(state))
    for descriptor in (file, state.session.board):
        os.set_inheritable(descriptor, True)
    return file


def take() -> State | None:
    """What the bridge before this one left, once; None if there was none. IpcSyncError if it cannot be read."""
    number = os.environ.pop(VARIABLE, "")
    if not number:
        return None
    try:
        file = int(number)
        data = os.pread(file, os.fstat(file).st_size, 0)
        os.close(file)
        state = msgspec.msgpack.decode(data, type=State)
        os.set_inheritable(state.session.board, False)
    except (ValueError, OSError, msgspec.MsgspecError) as error:
        raise IpcSyncError(f"what the bridge before this one left cannot be read: {error}") from None
    return state
