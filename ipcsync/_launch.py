"""`launch`: a coordinator that lives as long as a `with` block."""

from __future__ import annotations

import difflib
import glob
import os
import re
import shutil
import signal
import tempfile
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from ipcsync import _room as room
from ipcsync._deadline import bounded
from ipcsync._linux.child import PYTHON, ends_within, environment, read_line, start_daemon
from ipcsync._linux.process import is_running, pid_namespace, start_time
from ipcsync._threads import check_threads, errand
from ipcsync.errors import ConnectError, WaitTimeout
from ipcsync.typing import CoordinatorSettings

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

__all__ = ["Coordinator", "launch"]

SETTINGS = tuple(CoordinatorSettings.__annotations__)
_START_S = 30.0
_STOP_S = 5.0


class Coordinator:
    """A running coordinator daemon. `endpoint` is what clients connect to, `pid` its process.

    A context manager that stops it, in no forked child. It ends by itself when this process does, however that ends.
    """

    def __init__(self, command: list[str], env: dict[str, str], runtime_dir: str, temporary: bool) -> None:
        self.runtime_dir = runtime_dir
        self._temporary = temporary
        self._process, ready = start_daemon(command, env)
        self._owner = os.getpid()
        self.pid: int = self._process.pid
        try:
            self._started = start_time(self.pid) or 0
            endpoint = read_line(ready, _START_S)
            if not endpoint:
                raise ConnectError(
                    f"the coordinator closed its pipe, or does not serve after {_START_S:g} s"
                    if not ends_within(self._process, 0.0 if endpoint is None else _STOP_S)
                    else f"the coordinator ended with status {self._process.returncode}; its log, on stderr, says why",
                    endpoint=self.runtime_dir,
                )
        except BaseException:
            with suppress(WaitTimeout):  # that is said already
                self.stop()
            raise
        finally:
            os.close(ready)
        self.endpoint: str = endpoint

    @property
    def is_running(self) -> bool:
        """Whether the daemon runs."""
        return self._process.poll() is None if os.getpid() == self._owner else is_running(self.pid, self._started)

    def stop(self, timeout: float = _STOP_S) -> int:
        """Stop the daemon, by SIGKILL after `timeout` s, else WaitTimeout 5 s later; its exit status, each time."""
        if os.getpid() != self._owner:
            return 0
        seconds = bounded(timeout)
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            self._process.send_signal(signal.SIGCONT)
            if not ends_within(self._process, seconds):
                self._process.kill()
        has_ended = ends_within(self._process, _STOP_S)
        if self._temporary:
            shutil.rmtree(self.runtime_dir, ignore_errors=True)
        if not has_ended:
            raise WaitTimeout(f"the coordinator (pid {self.pid}) was killed and has not ended", timeout=timeout)
        return self._process.returncode

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a coordinator is this process's child: send its endpoint, a str, and call connect(endpoint)")

    def __repr__(self) -> str:
        return f"<ipcsync.Coordinator pid={self.pid} {self.endpoint}>"


def launch(
    *,
    driver: str | None = None,
    runtime_dir: str | None = None,
    keeper: bool = False,
    **settings: Unpack[CoordinatorSettings],
) -> Coordinator:
    """Start a coordinator daemon and wait until it serves.

    `driver` is "auto", "cuda" or "host" ($IPCSYNC_DRIVER by default), `runtime_dir` a directory of its own by default;
    `settings` are named like the flags of `ipcsync coordinator` (`ipcsync.typing.CoordinatorSettings` has their types):
    lease_ttl=5.0, pool=100. The daemon is a process of its own, started by exec, and ends with this one. With a
    `keeper`, whose process `pid` then is, another coordinator goes on when one dies.

    Raises ConnectError if it does not start, with the reason on stderr; QuotaExceeded if this process has no room for
    it (descriptors, processes, memory, a disk's bytes); TypeError for an unknown setting, or a value that is not text,
    a number or a bool; ValueError for text with a NUL; IpcSyncError as `connect`.
    """
    check_threads()
    unknown = sorted(settings.keys() - SETTINGS)
    if unknown:
        close = difflib.get_close_matches(unknown[0], SETTINGS, n=1)
        hint = f"; did you mean {close[0]}?" if close else f": those of `ipcsync coordinator` are {', '.join(SETTINGS)}"
        raise TypeError(f"launch() has no setting {unknown[0]!r}{hint}")
    command = [*PYTHON, "-m", "ipcsync_coordinator"]
    for name, value in {**settings, "driver": driver, "keeper": bool(keeper)}.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            command.append(flag if value else f"--no-{flag[2:]}")
        elif isinstance(value, str | int | float):
            command += [flag, str(value)]
        elif value is not None:
            raise TypeError(f"the setting {name} must be text, a number or a bool, but got {type(value).__name__}")
    if runtime_dir:
        runtime_dir = os.path.abspath(runtime_dir)
    if any("\0" in part for part in (*command, runtime_dir or "")):
        raise ValueError("a setting of launch() has a NUL, which no program can be given")
    try:
        return errand(partial(_start, command, runtime_dir), Coordinator.stop)
    except OSError as error:
        advice = "" if runtime_dir else "; name a runtime_dir, or set TMPDIR"
        why = f"no coordinator can be started here: {error}{advice}"
        raise room.shortage(error, "a coordinator's process") or ConnectError(why, endpoint=runtime_dir or "") from None


def _start(command: list[str], runtime_dir: str | None) -> Coordinator:
    if temporary := not runtime_dir:
        _remove_abandoned()
        runtime_dir = tempfile.mkdtemp(prefix=f"{directory_prefix()}{os.getpid()}-{start_time(os.getpid())}-")
        os.chmod(runtime_dir, 0o700)  # a folder with the set-group-ID bit hands that on
    command += ["--runtime-dir", runtime_dir, "--exit-with", f"{os.getpid()}:{start_time(os.getpid())}"]
    from ipcsync._drivers import WARNED

    # If there is no CUDA driver, this process warns when it connects: one warning is enough.
    try:
        return Coordinator(command, {**environment(), WARNED: "1"}, runtime_dir, temporary)
    except BaseException:  # it did not come as far as its own `stop`
        if temporary:
            shutil.rmtree(runtime_dir, ignore_errors=True)
        raise


def directory_prefix() -> str:
    """How temporary runtime directories are named: by user and pid namespace, since a pid is valid only in its own."""
    return f"ipcsync-u{os.getuid()}-{pid_namespace()}-"


def _remove_abandoned() -> None:
    """Remove the directories of processes of this pid namespace that were killed, unless a coordinator serves there."""
    prefix = os.path.join(tempfile.gettempdir(), directory_prefix())
    for path in glob.glob(f"{glob.escape(prefix)}*"):
        # Others may make directories of any name there.
        found = re.match(r"([0-9]{1,9})-([0-9]{1,18})-", path.removeprefix(prefix))
        if found is None or is_running(int(found[1]), int(found[2])):
            continue
        from ipcsync._board.runtime_dir import who_serves  # not before it is needed: it loads msgspec

        if who_serves(path) is None:
            shutil.rmtree(path, ignore_errors=True)
