"""Python child processes: start one, talk to it over a pipe, end and reap it. It ends when its parent does.

A child first waits for its work: if an exception interrupts its start, the pipe is closed, and the child ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

from ipcsync._closing import Closing
from ipcsync._linux.process import OF_A_SERVICE, PidFd, PidFdError, forget_parent, open_standard
from ipcsync.errors import IpcSyncError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_PR_SET_PDEATHSIG = 1
PYTHON = [sys.executable, "-P"] if sys.version_info >= (3, 11) else [sys.executable]
"""The interpreter of what is started here. Without -P it would search the working directory first for imports."""

COMMAND = "from ipcsync._linux.child import main; main()"
"""The program that a child's interpreter runs, by -c."""

at_end: list[Callable[[], object]] = []
"""What a worker calls before it ends by itself."""

_REAP_S = 5.0
_PAUSE_S = 0.005

# --- the child's side -------------------------------------------------------------------------------------------------


def main() -> None:
    """Run as a child: take the pipe from the arguments, and the program from the pipe."""
    fd, parent = map(int, sys.argv[1:3])
    forget_parent()
    die_with(parent)
    run(fd)


def run(fd: int) -> None:
    """Take one program from the pipe, and run it; its result is the exit status."""
    from multiprocessing.connection import Connection

    os.set_inheritable(fd, False)
    connection = Connection(fd)
    try:
        fds, program, arguments = connection.recv()
    except EOFError:
        return  # the parent's start was interrupted
    for inherited in fds:
        os.set_inheritable(inherited, False)
    sys.exit(program(connection, *arguments))


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it is gone (PR_SET_PDEATHSIG); now if it is."""
    refused = ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if refused or os.getppid() != parent:  # it was gone before we asked
        os._exit(1)


def serve(connection: Connection) -> None:
    """Run the functions that a `Worker` asks for, until its end of the pipe is closed."""
    owner = os.getpid()
    while True:
        try:
            function, arguments, keywords = connection.recv()
        except (EOFError, ConnectionResetError):
            break
        try:
            answer = (True, function(*arguments, **keywords), "")
        except BaseException as error:
            if os.getpid() != owner:  # a child that the function forked, whose end is its own
                raise
            answer = (False, f"{type(error).__name__}: {error}", traceback.format_exc())
        try:
            connection.send(answer)
        except ConnectionError:
            break  # nobody waits for it any more
    for function in at_end:
        function()


# --- the parent's side ------------------------------------------------------------------------------------------------


def environment(settings: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's variables with `settings` over them, and its import path: a child imports what this one does."""
    here = ""
    with contextlib.suppress(FileNotFoundError):  # it was removed
        here = os.getcwd()  # which "" stands for
    path = os.pathsep.join(filter(None, (entry or here for entry in sys.path if isinstance(entry, str))))
    return {**os.environ, "PYTHONPATH": path, **(settings or {})}


def read_line(fd: int, seconds: float) -> str | None:
    """The next line from a pipe; "" if the pipe is closed first, None if `seconds` pass first."""
    deadline = time.monotonic() + seconds
    poll = select.poll()  # select(2) takes no descriptor above 1023
    poll.register(fd, select.POLLIN)
    data = b""
    while not data.endswith(b"\n"):
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            return None
        if not (chunk := os.read(fd, 4096)):
            return ""
        data += chunk
    return data.decode().strip()


def spawn(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    fds: Sequence[int] = (),
    output: int | IO[bytes] | None = None,
) -> subprocess.Popen[bytes]:
    """Start one of our programs, `output` its stdout and stderr. OSError if no process, memory or descriptor is left.

    It has a session of its own, so Ctrl-C reaches this process alone; no stdin, and no other descriptor of this process
    than `fds`, under the same numbers, a GPU driver's included. See `process` for what it takes over.
    """
    variables = os.environ if env is None else env
    return subprocess.Popen(
        command,
        env={name: value for name, value in variables.items() if name not in OF_A_SERVICE},
        pass_fds=fds,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )


def start_daemon(
    command: list[str], env: Mapping[str, str], output: IO[bytes] | None = None
) -> tuple[subprocess.Popen[bytes], int]:
    """Start a program that writes a line to `--ready-fd` once it serves: its process, and the pipe to read it from."""
    open_standard()  # the pipe must have no such number
    read, write = os.pipe2(os.O_CLOEXEC)
    try:
        process = spawn([*command, "--ready-fd", str(write)], env=env, fds=(write,), output=output)
    except BaseException:
        os.close(read)
        raise
    finally:
        os.close(write)
    return process, read


def in_words(status: int | None) -> str:
    if status is None:
        return "still running"
    if status >= 0:
        return f"exit status {status}"
    names = {each.value: each.name for each in signal.Signals}  # most real-time signals have none
    return f"killed by {names.get(-status, f'signal {-status}')}"


def ends_within(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


class Child(Closing):
    """A fresh Python process that runs `program(connection, *arguments)`, a function of a module, and ends.

    What the program returns is the exit status, None for 0. `connection` is this process's end of the pipe between the
    two. The child has a session of its own (Ctrl-C reaches the parent alone, which then ends it), no stdin, and the
    descriptors `fds` under the same numbers; stdout and stderr are `output`. Program and arguments are pickled.
    """

    def __init__(
        self,
        program: Callable[..., object],
        *arguments: Any,
        env: Mapping[str, str] | None = None,
        fds: Sequence[int] = (),
        output: int | None = None,
    ) -> None:
        from multiprocessing import Pipe  # not before a child is started: it takes milliseconds to import

        self._owner = os.getpid()
        open_standard()  # the pipe must have no such number
        ours, theirs = Pipe()
        self.connection: Connection = ours
        name = f"{program.__module__}.{program.__qualname__}"  # for those who look at ps(1)
        with theirs, contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            command = [*self._command(theirs.fileno()), name]
            process = spawn(command, env=environment(env), fds=(theirs.fileno(), *fds), output=output)
            undo.callback(_end, process)  # in one step: a wait for one that is not killed does not end
            theirs.close()
            self._process = process
            self.pid: int = process.pid
            self._pidfd: PidFd | None = None
            with contextlib.suppress(PidFdError):
                self._pidfd = PidFd(process.pid)
            with contextlib.suppress(BrokenPipeError):  # it is gone already: its status says how
                self.connection.send((tuple(fds), program, arguments))
            undo.pop_all()

    def _command(self, fd: int) -> list[str]:
        return [*PYTHON, "-c", COMMAND, str(fd), str(os.getpid())]

    @property
    def status(self) -> int | None:
        """Its exit status (negative: the signal that killed it), None while it runs."""
        return self._process.poll() if os.getpid() == self._owner else None

    def has_spoken(self, seconds: float) -> bool:
        """Whether a message can be received, or the child has ended, within `seconds`."""
        from multiprocessing.connection import wait

        ends = [self._pidfd.fileno()] if self._pidfd is not None else []  # else its end of the pipe says so
        return bool(wait([self.connection, *ends], max(0.0, seconds)))

    def has_ended(self, seconds: float = 0.0) -> bool:
        """Whether it ends within `seconds`. It is not reaped, so that `kill` still finds its group."""
        if self._pidfd is not None:
            return self._pidfd.has_ended(max(0.0, seconds))
        deadline = time.monotonic() + seconds
        with contextlib.suppress(ChildProcessError):  # it was reaped, or this process ignores SIGCHLD
            while os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                if time.monotonic() >= deadline:
                    return False
                time.sleep(_PAUSE_S)
        return True

    def wait(self, seconds: float = _REAP_S) -> bool:
        return ends_within(self._process, seconds)

    def kill(self, *, with_group: bool = False) -> bool:
        """Kill it by SIGKILL and reap it, `with_group` together with its process group; whether that worked.

        A process that is stuck in the kernel is left alone after five seconds. In a forked child nothing happens.
        """
        if os.getpid() != self._owner:
            return False
        if self._process.returncode is None:
            if with_group:  # until it is reaped, no other process can have its group's number
                with contextlib.suppress(ProcessLookupError):  # it has not made its group yet, or the group is empty
                    os.killpg(self.pid, signal.SIGKILL)
            self._process.kill()
        return self.wait()

    def close(self, seconds: float = _REAP_S) -> int | None:
        """Close the pipe, at which it ends; kill it after `seconds`; its exit status. A forked child ends nothing."""
        self.connection.close()
        if os.getpid() == self._owner and not self.wait(seconds):
            self.kill()
        if self._pidfd is not None:
            self._pidfd.close()
        return self.status


class WorkerError(IpcSyncError):
    """A worker's function raised (`trace` is its traceback), or the worker ended or took too long."""

    trace: str = ""


class Worker(Child):
    """A child that runs functions, one after another: `call`, or `begin` and later `result`.

    Arguments and results are pickled. If there is no result, WorkerError is raised, which names the worker by `name`.
    """

    def __init__(
        self, name: str = "worker", *, env: Mapping[str, str] | None = None, output: int | None = None
    ) -> None:
        self.name = name
        self._owed = 0
        super().__init__(serve, env=env, output=output)

    def begin(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> None:
        try:
            self.connection.send((function, arguments, keywords))
        except (BrokenPipeError, ConnectionResetError):
            raise self._ended() from None
        self._owed += 1

    def result(self, seconds: float) -> Any:
        """The result of the earliest `begin` that has none yet; WorkerError after `seconds`."""
        if not self.has_spoken(seconds):
            raise WorkerError(f"the {self.name} process (pid {self.pid}) did not answer within {seconds:g} s")
        try:
            if not self.connection.poll(0):
                raise self._ended()
            succeeded, value, trace = self.connection.recv()
        except (EOFError, OSError):  # the second: it ended amid its answer
            raise self._ended() from None
        self._owed -= 1
        if succeeded:
            return value
        raise WorkerError(value, trace=trace)

    def call(self, function: Callable[..., Any], *arguments: Any, timeout: float = 60.0, **keywords: Any) -> Any:
        self.begin(function, *arguments, **keywords)
        return self.result(timeout)

    def close(self, seconds: float = _REAP_S) -> int | None:
        """As `Child.close`; a worker that is inside a function is killed at once."""
        if self._owed:
            self.kill()
        return super().close(seconds)

    def _ended(self) -> WorkerError:
        self.kill()
        return WorkerError(f"the {self.name} process (pid {self.pid}) ended: {in_words(self.status)}")
