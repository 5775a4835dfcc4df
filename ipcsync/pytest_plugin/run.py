"""One coordinator for one test run, shared by every process of it.

A run belongs to a process: xdist's controller, or pytest itself without xdist. The first process that needs the
coordinator starts it, under a file lock, in a directory named after the run. The daemon outlives the worker that
started it, and ends by itself when the run's process does, even by SIGKILL (`--exit-with`). Normally the run's process
stops it once its workers have ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import signal
import stat
import tempfile
from pathlib import Path
from typing import NamedTuple

from ipcsync._launch import directory_prefix
from ipcsync._linux.child import PYTHON, environment, read_line, start_daemon
from ipcsync._linux.process import PidFd, PidFdError, is_running, start_time
from ipcsync.errors import ConnectError

_START_S = 30.0
_STOP_S = 5.0
_FILE = "coordinator.json"  # its lock too
_TAIL_LINES = 20
_TAIL_BYTES = 16_384


class Run(NamedTuple):
    """A run: its process as (pid, start time), a token, since a process may have several runs, and its directory."""

    pid: int
    started: int
    token: str
    directory: str  # by its name, a later `launch` removes it if the run was killed


class RunCoordinator(NamedTuple):
    """The run's coordinator: `endpoint` is what clients connect to, `log` where its log is."""

    endpoint: str
    pid: int
    started: int
    log: str

    @property
    def is_running(self) -> bool:
        """Whether the daemon lives."""
        return is_running(self.pid, self.started)

    def check(self) -> None:
        """Raise ConnectError if the daemon has ended; the message has the end of its log."""
        if not self.is_running:
            raise ConnectError(
                f"the run's coordinator (pid {self.pid}) has ended; its log is {self.log}, which ends with:\n"
                + tail(self.log),
                endpoint=self.endpoint,
            )


def own() -> Run:
    """A run of this process itself."""
    pid, started, token = os.getpid(), start_time(os.getpid()) or 0, secrets.token_hex(4)
    return Run(pid, started, token, os.path.join(tempfile.gettempdir(), f"{directory_prefix()}{pid}-{started}-{token}"))


def join(run: Run, driver: str, log: Path) -> RunCoordinator:
    """The run's coordinator, started if this is the first to ask.

    Raises ConnectError if it does not start, or has ended since; the message names its log.
    """
    _make_private(Path(run.directory))
    with open(os.path.join(run.directory, _FILE), "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # held during a start, and released by the kernel after a crash
        found = _known(run)
        if found is None:
            found = _start(run, driver, log)
            file.write(json.dumps(found))
    found.check()
    return found


def stop(run: Run) -> None:
    """Stop the run's coordinator, if one was started, and wait until it is gone."""
    found = _known(run)
    if found is not None:
        _end(found)
    shutil.rmtree(run.directory, ignore_errors=True)


def tail(log: str | Path) -> str:
    """The last lines of a log."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError as error:
        return f"(it cannot be read: {error})"
    return "\n".join(lines[-_TAIL_LINES:]) or "(it is empty)"


# --- the directory ----------------------------------------------------------------------------------------------------


def _make_private(directory: Path) -> None:
    with contextlib.suppress(FileExistsError):  # another worker came first
        directory.mkdir(mode=0o700)
    status = os.lstat(directory)
    # A directory with the set-group-ID bit hands it on, which gives nobody a right.
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o777 != 0o700:
        raise ConnectError(f"{directory} is not a directory of mode 0700 of this user: remove it")


def _known(run: Run) -> RunCoordinator | None:
    try:
        text = Path(run.directory, _FILE).read_text()
    except FileNotFoundError:
        return None
    return RunCoordinator(*json.loads(text)) if text else None


# --- the daemon -------------------------------------------------------------------------------------------------------


def _start(run: Run, driver: str, log: Path) -> RunCoordinator:
    """Start the daemon and wait until it serves."""
    # One for each start: a worker that crashes right after it leaves an unknown daemon, which keeps its own.
    command = [*PYTHON, "-m", "ipcsync_coordinator", "--runtime-dir", f"{run.directory}/{os.getpid()}"]
    command += ["--no-keeper", "--driver", driver, "--exit-with", f"{run.pid}:{run.started}", "--exit-when-idle", "0"]
    with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb") as output:
        process, ready = start_daemon(command, environment(), output)
    pid = process.pid
    process.returncode = 0  # it belongs to the run, not to this worker: avoids Popen's warning that it still runs
    try:
        endpoint = read_line(ready, _START_S) or ""  # "" if it ends or takes too long
    finally:
        os.close(ready)
    coordinator = RunCoordinator(endpoint, pid, start_time(pid) or 0, str(log))
    if not endpoint:
        _end(coordinator)
        raise ConnectError(f"the run's coordinator did not start; its log {log} ends with:\n{tail(log)}")
    return coordinator


def _end(coordinator: RunCoordinator) -> None:
    """End a process by SIGTERM, by SIGKILL if that is not enough, and wait. It need not be a child of this process."""
    # It may end meanwhile. Without a pidfd it is left alone: it ends with the run's process.
    with contextlib.suppress(ProcessLookupError, PidFdError), contextlib.closing(PidFd(coordinator.pid)) as process:
        if coordinator.is_running:
            signal.pidfd_send_signal(process.fileno(), signal.SIGTERM)
            signal.pidfd_send_signal(process.fileno(), signal.SIGCONT)
            if not process.has_ended(_STOP_S):
                signal.pidfd_send_signal(process.fileno(), signal.SIGKILL)
                process.has_ended(_STOP_S)
    with contextlib.suppress(ChildProcessError):  # a worker started it, so another process reaps it
        os.waitpid(coordinator.pid, os.WNOHANG)
