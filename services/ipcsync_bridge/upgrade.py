"""From a bridge to the code that is on disk now, which goes on in the same process, once a trial has said that it can.

It is entered by exec, so the process stays, and with it the session, the lease, and the lock on its line of the board:
no process sees a death. What the old code knew is in a file without a name (memfd_create(2)), whose descriptor it gets.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from typing import NoReturn

import msgspec
from msgspec import Struct

from ipcsync._board import layout
from ipcsync._linux.files import memory_file
from ipcsync._wire import messages
from ipcsync._wire.messages import Attachment, Welcome
from ipcsync.cli.output import Failed
from ipcsync.errors import IpcSyncError
from ipcsync_bridge import wire
from ipcsync_bridge.config import Settings
from ipcsync_bridge.transport import tls_of
from ipcsync_bridge.wire import Key

VERSION = 6

VARIABLE = "IPCSYNC_BRIDGE_HANDOVER"
"""Of the environment, for the new code: the file's descriptor."""
_TRIAL_S = 30.0


class Session(Struct, frozen=True):
    """The session with the coordinator; `board` is the descriptor that holds its lifeline."""

    welcome: Welcome
    board: int
    last_request: int


class State(Struct, frozen=True):
    """What others do not tell the new code. `held`: what its session is attached to. `claims`, `over`: of `Names`."""

    session: Session
    owner: bytes
    term: int
    lost: dict[str, tuple[bytes, str]]
    mirrors: list[Attachment]
    held: list[Key]
    claims: dict[Key, tuple[str, int]]
    over: set[Key]
    handovers: int


def versions() -> str:
    return f"handover {VERSION}, board {layout.VERSION}, wire {messages.VERSION}, bridges {wire.VERSION}"


def _command(*more: str) -> list[str]:
    return [sys.executable, *sys.orig_argv[1:], *more]


async def why_not() -> str | None:
    """Why the code on disk cannot go on, None if it can."""
    command = _command("--try-handover", versions())
    try:
        trial = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    except OSError as error:
        return f"the new code cannot be started: {error}"
    try:
        said: bytes = (await asyncio.to_thread(trial.communicate, timeout=_TRIAL_S))[1]
    except RuntimeError as error:
        return f"the new code cannot be waited for: {error}"
    except subprocess.TimeoutExpired:
        return f"the new code has not said within {_TRIAL_S:g} s whether it can go on"
    finally:
        trial.kill()
        trial.wait()  # it is dead; an await could be cancelled once more
    lines = said.decode(errors="replace").strip().splitlines()
    return (lines[-1] if lines else f"status {trial.returncode}") if trial.returncode else None


def answer(theirs: str, settings: Settings) -> None:
    """Return if this code can go on with a state of the formats `theirs`; raise Failed with the reason if not."""
    if theirs != versions():
        raise Failed(f"the running bridge has {theirs}, and the new code {versions()}: stop it, and start anew")
    try:
        tls_of(settings)
    except OSError as error:  # ssl.SSLError is one
        raise Failed(f"its certificates cannot be used: {error}") from None


def go_on(state: State, environment: dict[str, str]) -> NoReturn:
    file = memory_file("ipcsync-handover")
    with open(file, "wb", closefd=False) as written:
        written.write(msgspec.msgpack.encode(state))
    for descriptor in (file, state.session.board):
        os.set_inheritable(descriptor, True)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(  # noqa: S606 - no shell
        sys.executable, _command(), {**os.environ, **environment, VARIABLE: str(file)}
    )


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
