"""Starts the tests' Python processes by fork from one that has imported what they import, and has used none of it.

A coordinator that is started by exec spends most of its start on imports. `install` has `subprocess.Popen` ask the
zygote for the programs named in `PROGRAMS`; everything else, and everything with IPCSYNC_TEST_ZYGOTE=0, starts as ever.
What comes is a process like another: a child of the one that asked for it, with a pid, an exit status, an environment,
descriptors and a death of its own. The zygote forks twice, and who asks is a subreaper meanwhile (prctl(2)), so the
kernel hands the grandchild over to it.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import os
import pickle
import pkgutil
import runpy
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ipcsync._linux import child

PROGRAMS = [
    ["-m", "ipcsync_coordinator"],
    ["-m", "tests.faults.patched"],
    ["-c", child.COMMAND],
]
"""How the command lines begin, after the interpreter, of what is forked."""

started: list[object] = []
"""The commands of all processes that this one has started by `subprocess.Popen`."""

_PACKAGES = ("ipcsync.client", "ipcsync_coordinator", "ipcsync_holdings", "ipcsync_keeper")
_MODULES = (
    "cuda.bindings.driver",
    "ipcsync._drivers.cuda",
    "ipcsync._drivers.host",
    "ipcsync.testing",
    "multiprocessing.connection",
    "tests.contract.actions",
    "tests.kit.peer",
    "tests.kit.remote",
)
"""What is imported before anything is forked, every module of the packages included."""
_TAKEN_OVER = ("PYTHONPATH", "PYTHONWARNINGS")
_READ_AT_START = ("LD_", "PYTHON")  # how variables begin that the loader or the interpreter reads once
_ROOT = Path(__file__).parents[2]
_PR_SET_CHILD_SUBREAPER = 36
_ABOVE = 512  # descriptors that come are kept above those that they are to be
_libc = ctypes.CDLL(None)
_Popen = subprocess.Popen
_at_install: dict[str, str] = {}


@dataclass(frozen=True)
class _Request:
    command: list[str]
    directory: str
    environment: dict[str, str]
    descriptors: list[int]
    new_session: bool
    owner: int


# --- who asks ---------------------------------------------------------------------------------------------------------


class _Zygote:
    """The process that forks, started by exec when it is first needed."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair()
        environment = {name: value for name, value in _at_install.items() if name not in _TAKEN_OVER}
        paths = [str(_ROOT), *filter(None, [_at_install.get("PYTHONPATH")])]
        with theirs:
            self._process = _Popen(
                [sys.executable, "-c", "from tests.kit.zygote import main; main()", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=_ROOT,
                env={**environment, "PYTHONPATH": os.pathsep.join(paths)},
            )
        atexit.register(self.close)

    def start(self, request: _Request, descriptors: list[int]) -> int:
        """The pid of a new process, which is a child of this one."""
        body = pickle.dumps(request)
        with self._lock:
            _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._socket, [struct.pack("=I", len(body))], descriptors)
                self._socket.sendall(body)
                (pid,) = struct.unpack("=i", _receive(self._socket, 4))
            finally:
                _libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        return int(pid)

    def close(self) -> None:
        if os.getpid() == self.owner:
            self._socket.close()
            self._process.wait()


_zygote: _Zygote | None = None


class _ForkedPopen(_Popen):  # type: ignore[type-arg]
    """A `Popen` that has the zygote start what it can, and notes what was started."""

    def _execute_child(self, *arguments: Any) -> None:
        started.append(arguments[0])
        command, executable, preexec_fn, close_fds, pass_fds, cwd, env, _, _, shell = arguments[:10]
        pipes, (restore_signals, *identity, new_session) = arguments[10:16], arguments[16:22]
        environment = dict(os.environ if env is None else env)
        started_otherwise = executable or preexec_fn or shell or not close_fds or not restore_signals
        as_another = identity != [None, None, None, -1] or any(group != -1 for group in arguments[22:])
        if started_otherwise or as_another or not _is_ours(command, environment):
            super()._execute_child(*arguments)  # type: ignore[misc]
            return
        global _zygote  # noqa: PLW0603 - one for each process that asks
        if _zygote is None or _zygote.owner != os.getpid():
            _zygote = _Zygote()
        standard = [end if end != -1 else number for number, end in enumerate((pipes[0], pipes[3], pipes[5]))]
        request = _Request(
            command=[os.fspath(part) for part in command],
            directory=os.fspath(cwd or os.getcwd()),
            environment=environment,
            descriptors=[0, 1, 2, *pass_fds],
            new_session=bool(new_session),
            owner=os.getpid(),
        )
        self.pid = _zygote.start(request, [*standard, *pass_fds])
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def _is_ours(command: Any, environment: dict[str, str]) -> bool:
    if os.environ.get("IPCSYNC_TEST_ZYGOTE", "1") == "0":
        return False
    if not isinstance(command, list) or command[:1] != [sys.executable] or command[1:3] not in PROGRAMS:
        return False
    return _read_at_start(environment) == _read_at_start(_at_install)


def _read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    taken = {name: value for name, value in environment.items() if name.startswith(_READ_AT_START)}
    return {name: value for name, value in taken.items() if name not in _TAKEN_OVER}


def install() -> None:
    """From now on `subprocess.Popen` of this process has the zygote start what is named in `PROGRAMS`."""
    _at_install.update(os.environ)
    subprocess.Popen = _ForkedPopen  # type: ignore[misc]


# --- the process that forks -------------------------------------------------------------------------------------------


def main() -> None:
    """Fork what is asked for, until whoever asks is gone. Returns in no process but the zygote."""
    asked = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(asked.fileno(), False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends when who asks does
    for name in (*_MODULES, *_modules_of(_PACKAGES)):
        importlib.import_module(name)
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"a process with {threads} threads cannot be forked"
    told = os.environ["PYTHONPATH"].split(os.pathsep)  # each request brings its own
    own_path = [entry for entry in sys.path if entry and entry not in told]
    gc.collect()
    gc.freeze()  # what lies here already is left alone by the collector, and so stays shared
    with asked:
        while (come := _next_request(asked)) is not None:
            request, descriptors = come
            reading, writing = os.pipe()
            if (between := os.fork()) == 0:
                if (pid := os.fork()) != 0:
                    os.write(writing, struct.pack("=i", pid))
                    os._exit(0)
                asked.close()
                os.close(reading)
                os.close(writing)
                _become(request, descriptors, own_path)
                return
            os.waitpid(between, 0)
            asked.sendall(os.read(reading, 4))
            for fd in (reading, writing, *descriptors):
                os.close(fd)


def _modules_of(packages: tuple[str, ...]) -> Iterator[str]:
    for package in packages:
        path = importlib.import_module(package).__path__
        yield from (f"{package}.{module.name}" for module in pkgutil.iter_modules(path) if module.name != "__main__")


def _next_request(asked: socket.socket) -> tuple[_Request, list[int]] | None:
    head, descriptors, _, _ = socket.recv_fds(asked, 4, 250)
    if len(head) < 4:
        return None
    request: _Request = pickle.loads(_receive(asked, struct.unpack("=I", head)[0]))
    return request, descriptors


def _receive(source: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        chunk = source.recv(size - len(data))
        if not chunk:
            raise EOFError("the zygote is gone: what it wrote to stderr says why")
        data += chunk
    return data


def _become(request: _Request, descriptors: list[int], own_path: list[str]) -> None:
    """Be the process that was asked for, as far as a Python program can tell."""
    while os.getppid() != request.owner:  # the one between us is still ending
        os.kill(request.owner, 0)  # ProcessLookupError ends this process if there is nobody to be the child of
        time.sleep(0.0001)
    if request.new_session:
        os.setsid()
    above = [fcntl.fcntl(fd, fcntl.F_DUPFD, _ABOVE) for fd in descriptors]
    for fd in descriptors:
        os.close(fd)
    for fd, number in zip(above, request.descriptors, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(request.directory)
    os.environ.clear()
    os.environ.update(request.environment)
    entries = filter(None, request.environment.get("PYTHONPATH", "").split(os.pathsep))
    first = "" if request.command[1] == "-c" else request.directory
    sys.path[:] = [first, *entries, *own_path]
    sys.orig_argv[:] = request.command
    _warn_as_told(request.environment.get("PYTHONWARNINGS", ""))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    option, program, *arguments = request.command[1:]
    sys.argv[:] = [option, *arguments]
    if option == "-m":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        exec(program, {"__name__": "__main__"})


def _warn_as_told(options: str) -> None:
    sys.warnoptions[:] = [option for option in options.split(",") if option]
    warnings._processoptions(sys.warnoptions)  # type: ignore[attr-defined] # what the interpreter does at its start
