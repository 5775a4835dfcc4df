"""Starts the tests' Python processes by fork from one that has imported what they import, and has used none of it.

A coordinator that is started by exec spends most of its start on imports. `install` has `subprocess.Popen` ask the
zygote for the programs named in `PROGRAMS`; everything else, and everything with IPCSYNC_TEST_ZYGOTE=0, starts as ever.
What comes is a process like another: a child of the one that asked for it, with a pid, an exit status, a command line,
an environment, descriptors and a death of its own. The zygote forks twice, and who asks is a subreaper meanwhile
(prctl(2)), so the kernel hands the grandchild over to it. A program that starts others has a zygote of its own, one
more child of it. `zygote_process` is the other side.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import pickle
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ipcsync._linux import child

IPCSYNC = [sys.executable, "-c", "import sys; sys.argv[0] = 'ipcsync'; from ipcsync.cli import main; main()"]
"""The command `ipcsync`, wherever it may be installed."""

PROGRAMS = [
    ["-m", "ipcsync_bridge"],
    ["-m", "ipcsync_coordinator"],
    ["-m", "ipcsync_demo"],
    ["-m", "ipcsync_keeper"],
    ["-m", "ipcsync_observer"],
    ["-m", "tests.faults.patched"],
    ["-m", "tests.faults.signalled"],
    ["-m", "tests.soak"],
    ["-m", "tests.soak.chains"],
    ["-c", child.COMMAND],
    IPCSYNC[1:],
]
"""How the command lines begin, after the interpreter, of what is forked."""

EXEC = {"IPCSYNC_TEST_ZYGOTE": "0"}
"""The variable with which a process, and what it starts, is started by exec."""

ZYGOTE = "(zygote of tests)"
"""The command line of one."""

started: list[object] = []
"""The commands of all processes that this one has started by `subprocess.Popen`."""

TAKEN_OVER = ("PYTHONPATH", "PYTHONWARNINGS")
"""Variables that a forked process heeds as one that was started by exec does."""
_READ_ONCE = ("LD_", "PYTHON")  # how variables begin that are read when something is loaded
ROOT = Path(__file__).parents[2]
_PR_SET_CHILD_SUBREAPER = 36
_ROOM = 1000  # for the command line of what is forked
_libc = ctypes.CDLL(None)
_Popen = subprocess.Popen
_execv = os.execv
_at_install: dict[str, str] = {}


@dataclass(frozen=True)
class Request:
    """A process that is asked for."""

    command: list[str]
    directory: str
    environment: dict[str, str]
    descriptors: list[int]
    new_session: bool
    owner: int


class Zygote:
    """The process that forks, as the one that asks sees it: at the other end of `ours`."""

    def __init__(self, ours: socket.socket) -> None:
        self.owner = os.getpid()
        self.socket = ours
        self._lock = threading.Lock()

    @classmethod
    def start(cls) -> Zygote:
        """One that is started by exec, and ends with this process."""
        ours, theirs = socket.socketpair()
        environment = {name: value for name, value in _at_install.items() if name not in TAKEN_OVER}
        paths = [str(ROOT), *filter(None, [_at_install.get("PYTHONPATH")])]
        program = "from tests.kit.zygote_process import main; main()"
        with theirs:
            process = _Popen(
                [sys.executable, "-c", program, str(theirs.fileno()), " " * _ROOM],
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
                env={**environment, "PYTHONPATH": os.pathsep.join(paths)},
            )
        zygote = cls(ours)

        def end() -> None:
            if os.getpid() == zygote.owner:
                ours.close()
                process.wait()

        atexit.register(end)
        return zygote

    def fork(self, request: Request, descriptors: Sequence[int]) -> int:
        """The pid of a new process, which is a child of this one."""
        body = pickle.dumps(request)
        with self._lock:
            _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self.socket, [struct.pack("=I", len(body))], list(descriptors))
                self.socket.sendall(body)
                (pid,) = struct.unpack("=i", receive(self.socket, 4))
            finally:
                _libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        return int(pid)


def receive(source: socket.socket, size: int) -> bytes:
    """So many bytes."""
    data = b""
    while len(data) < size:
        chunk = source.recv(size - len(data))
        if not chunk:
            raise EOFError("the zygote is gone: what it wrote to stderr says why")
        data += chunk
    return data


_zygote: Zygote | None = None


class _ForkedPopen(_Popen):  # type: ignore[type-arg]
    """A `Popen` that has the zygote start what it can, and notes what was started."""

    def _execute_child(self, *arguments: Any) -> None:
        started.append(arguments[0])
        command, executable, preexec_fn, close_fds, pass_fds, cwd, env, _, _, shell = arguments[:10]
        pipes, (restore_signals, *identity, new_session) = arguments[10:16], arguments[16:22]
        environment = dict(os.environ if env is None else env)
        started_otherwise = executable or preexec_fn or shell or not close_fds or not restore_signals
        as_another = identity != [None, None, None, -1] or any(group != -1 for group in arguments[22:])
        zygote = None if started_otherwise or as_another or not _is_ours(command, environment) else _own_zygote()
        if zygote is None:
            super()._execute_child(*arguments)  # type: ignore[misc]
            return
        standard = [end if end != -1 else number for number, end in enumerate((pipes[0], pipes[3], pipes[5]))]
        request = Request(
            command=[os.fspath(part) for part in command],
            directory=os.fspath(cwd or os.getcwd()),
            environment=environment,
            descriptors=[0, 1, 2, *pass_fds],
            new_session=bool(new_session),
            owner=os.getpid(),
        )
        self.pid = zygote.fork(request, [*standard, *pass_fds])
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def _own_zygote() -> Zygote | None:
    """This process's; None in a child that was forked from it, whose children another's zygote cannot start."""
    global _zygote  # noqa: PLW0603 - one for each process that asks
    _zygote = _zygote or Zygote.start()
    return _zygote if _zygote.owner == os.getpid() else None


def _is_ours(command: Any, environment: Mapping[str, str]) -> bool:
    if environment.get("IPCSYNC_TEST_ZYGOTE", "1") == "0":
        return False
    if not isinstance(command, list) or command[:1] != [sys.executable] or program_of(command)[:2] not in PROGRAMS:
        return False
    return _read_once(environment) == _read_once(_at_install)


def program_of(command: list[str]) -> list[str]:
    """A command line of Python from its -m or -c on."""
    return command[len(child.PYTHON) :] if command[: len(child.PYTHON)] == child.PYTHON else command[1:]


def _read_once(environment: Mapping[str, str]) -> dict[str, str]:
    taken = {name: value for name, value in environment.items() if name.startswith(_READ_ONCE)}
    return {name: value for name, value in taken.items() if name not in TAKEN_OVER}


def install(own: Zygote | None = None) -> None:
    """From now on `subprocess.Popen` of this process has a zygote start what is named in `PROGRAMS`.

    With its `own`, this process was forked itself, and `os.execv` of such a program goes on in it.
    """
    global _zygote  # noqa: PLW0603 - the same
    _zygote = own
    _at_install.update(os.environ)
    subprocess.Popen = _ForkedPopen  # type: ignore[misc]
    if own is not None:
        os.execv = _become  # type: ignore[assignment]


def own_socket() -> socket.socket:
    """By which this forked process asks its own zygote."""
    assert _zygote is not None
    return _zygote.socket


class Became(BaseException):
    """Raised in a forked process instead of exec, where what follows can go on in it."""

    def __init__(self, command: list[str]) -> None:
        super().__init__(command)
        self.command = command


def _become(path: str, command: list[str]) -> NoReturn:
    if path == sys.executable and _is_ours(command, os.environ):
        raise Became(command)
    _execv(path, command)


def children_of(pid: int) -> list[int]:
    """The processes that another one has started, in the order of their start, without its zygote."""
    pids = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return [child for child in pids if not command_of(child).startswith(ZYGOTE)]


def command_of(pid: int) -> str:
    """A process's command line; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").replace("\0", " ")
    except (FileNotFoundError, ProcessLookupError):
        return ""
