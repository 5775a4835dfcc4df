"""The process that forks for `zygote`, and what it does to be the program that was asked for."""

from __future__ import annotations

import atexit
import contextlib
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
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from ipcsync._linux import child
from tests.kit import zygote
from tests.kit.zygote import Became, Request, Zygote, receive

_PACKAGES = (
    "ipcsync.cli",
    "ipcsync.client",
    "ipcsync_bridge",
    "ipcsync_coordinator",
    "ipcsync_keeper",
    "ipcsync_observer",
)
_MODULES = (
    "cuda.bindings.driver",
    "ipcsync._drivers",
    "ipcsync.testing",
    "ipcsync_demo",
    "multiprocessing.connection",
    "nats",
    "pytest",
    "rich.live",
    "rich.table",
    "tests.contract.actions",
    "tests.kit.peer",
    "tests.kit.remote",
    "tests.soak.session",
)
"""What is imported before anything is forked, every module of the packages included."""
_ABOVE = 512  # descriptors that come are kept above those that they are to be
_COMMAND_BEGINS, _COMMAND_ENDS = 45, 46  # the fields of /proc/self/stat that tell where, from the third on


def main() -> None:
    """Fork what is asked for, until whoever asks is gone. Returns in no process but a forked one."""
    asked = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(asked.fileno(), False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends when who asks does
    for name in (*_MODULES, *_modules_of(_PACKAGES)):
        with contextlib.suppress(ModuleNotFoundError):  # of the observer, what not everybody has installed
            importlib.import_module(name)
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"a process with {threads} threads cannot be forked"
    told = os.environ["PYTHONPATH"].split(os.pathsep)  # each request brings its own
    own_path = [entry for entry in sys.path if entry and entry not in told]
    own_path.append(
        str(zygote.ROOT)
    )  # an editable install has it there too: what is started by exec from here needs it
    gc.collect()
    gc.freeze()  # what lies here already is left alone by the collector, and so stays shared
    _be_called(zygote.ZYGOTE)
    while True:
        request, descriptors = _fork_for(asked)
        theirs = None if _starts_none(request) else _fork_zygote()
        if theirs is None:
            break
        for fd in descriptors:  # it is the zygote of what was asked for
            os.close(fd)
        asked = theirs
    try:
        _become(request, descriptors, own_path)
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            raise
        _end(end.code or 0)
    _end(0)


def _modules_of(packages: tuple[str, ...]) -> Iterator[str]:
    for package in packages:
        path = importlib.import_module(package).__path__
        yield from (f"{package}.{module.name}" for module in pkgutil.iter_modules(path) if module.name != "__main__")


def _fork_for(asked: socket.socket) -> tuple[Request, list[int]]:
    """Fork what is asked for. Returns in each process that was forked, what it is to be."""
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
            while os.getppid() != request.owner:  # the one between us is still ending
                os.kill(request.owner, 0)  # ProcessLookupError ends this process if there is nobody to be the child of
                time.sleep(0.0001)
            return request, descriptors
        os.waitpid(between, 0)
        asked.sendall(os.read(reading, 4))
        for fd in (reading, writing, *descriptors):
            os.close(fd)
    os._exit(0)


def _next_request(asked: socket.socket) -> tuple[Request, list[int]] | None:
    head, descriptors, _, _ = socket.recv_fds(asked, 4, 250)
    if len(head) < 4:
        return None
    request: Request = pickle.loads(receive(asked, struct.unpack("=I", head)[0]))
    return request, descriptors


def _starts_none(request: Request) -> bool:
    is_peer = zygote.program_of(request.command)[:2] == ["-c", child.COMMAND]
    return is_peer or "--no-keeper" in request.command or "--kept" in request.command


def _fork_zygote() -> socket.socket | None:
    """Fork a zygote for the program to be started here: None in the program, what it asks by in the zygote."""
    ours, theirs = socket.socketpair()
    program = os.getpid()
    if os.fork() == 0:
        ours.close()
        child.die_with(program)
        return theirs
    theirs.close()
    with ours:  # a descriptor that comes may have its number
        above = fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, _ABOVE)
    zygote.install(Zygote(socket.socket(fileno=above)))
    return None


def _become(request: Request, descriptors: list[int], own_path: list[str]) -> None:
    """Be the process that was asked for, as far as a Python program can tell."""
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
    path = [*entries, *own_path]
    command: list[str] | None = request.command
    while command is not None:
        command = _run(command, path)


def _run(command: list[str], path: list[str]) -> list[str] | None:
    """Run it to its end; what it has become if it has called exec."""
    _be_called("\0".join(command))
    option, program, *arguments = zygote.program_of(command)
    first = [] if command[1] == "-P" else ["" if option == "-c" else os.getcwd()]
    sys.path[:] = [*first, *path]
    sys.orig_argv[:] = command
    sys.argv[:] = [option, *arguments]
    _warn_as_told(os.environ.get("PYTHONWARNINGS", ""))
    # As an interpreter makes it: the zygote's is another file's, of which it may be known where in it one is.
    sys.stdout = open(1, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors, closefd=False)  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if option == "-m":
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            exec(program, {"__name__": "__main__"})
    except Became as another:
        next_one = another.command
    else:
        return None
    _forget_as_exec_does()
    return next_one


def _end(status: int) -> NoReturn:
    """End as an interpreter does, but destroy no module: that copies all memory that is still the zygote's, in 25 ms.

    Processes that were started by exec do it; so do these if an exception that nobody caught ends them.
    """
    threading._shutdown()  # type: ignore[attr-defined] # waits for its threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    ctypes.PyDLL(None).exit(status)  # a driver has exit handlers of C; with the GIL, which no thread gets any more
    raise AssertionError("exit returned")


def _warn_as_told(options: str) -> None:
    sys.warnoptions[:] = [option for option in options.split(",") if option]
    warnings._processoptions(sys.warnoptions)  # type: ignore[attr-defined] # what the interpreter does at its start


def _be_called(command: str) -> None:
    """Show a command line to ps(1), and to whoever else looks."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[_COMMAND_BEGINS]), int(fields[_COMMAND_ENDS])
    text = command.encode()[: end - begin - 1]
    ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


def _forget_as_exec_does() -> None:
    """Let go of what exec lets go of: handlers of signals, and descriptors, but the one that the zygote is asked by."""
    gc.collect()  # before a number can be somebody else's
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    kept = zygote.own_socket().fileno()
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the one that the list was read by
            if fd != kept and fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC:
                os.close(fd)
