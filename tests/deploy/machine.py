"""A machine to deploy on: a systemd that is init, in namespaces of its own, over a root file system of Debian's."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from pathlib import Path

from tests.kit.until import until

_BOOT_S = 120.0
_COMMAND_S = 60.0


class Machine:
    """Boots when it is made, with a network that holds nothing but its own loopback; `off` ends it."""

    def __init__(self, root: Path, log: Path) -> None:
        self._log = log
        command = f"systemd-nspawn --register=no --keep-unit --boot --private-network --console=read-only -D {root}"
        with log.open("wb") as out:
            self._process = subprocess.Popen(shlex.split(command), stdout=out, stderr=out, start_new_session=True)
        try:
            self._init: int = until(self._find_init, "it has an init", _BOOT_S)
            until(self._is_up, "it has booted", _BOOT_S)
        except BaseException:
            self._end()
            raise

    def _find_init(self) -> int:
        assert self._process.poll() is None, self._log.read_text()
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        return next((int(pid) for pid in children if _name(pid) == "systemd"), 0)  # others prepare the namespaces

    def _is_up(self) -> bool:
        return self._enter("systemctl is-system-running").stdout.strip() in ("running", "degraded")

    def _enter(self, command: str) -> subprocess.CompletedProcess[str]:
        words = ["nsenter", "--target", str(self._init), "--all", *shlex.split(command)]
        return subprocess.run(words, capture_output=True, text=True, timeout=_COMMAND_S, check=False)

    def run(self, command: str, *, user: str = "") -> str:
        """What a command prints; AssertionError if it fails."""
        done = self.tried(command, user=user)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def tried(self, command: str, *, user: str = "") -> subprocess.CompletedProcess[str]:
        """A command's status and what it printed."""
        return self._enter(f"su {user} -c {shlex.quote(command)}" if user else command)

    def kill(self, pid: int, number: signal.Signals) -> None:
        """Send a signal to a process by the machine's own number for it."""
        self.run(f"sh -c 'kill -{int(number)} {pid}'")

    def property(self, unit: str, name: str) -> str:
        """What systemd says of a unit."""
        return self.run(f"systemctl show --property={name} --value {unit}").strip()

    def off(self) -> None:
        """Power it off."""
        if self._process.poll() is None:
            os.kill(self._init, signal.SIGRTMIN + 4)  # which has systemd power off
            try:
                self._process.wait(_COMMAND_S)
            finally:
                self._end()

    def _end(self) -> None:
        """The machine goes with what holds it."""
        self._process.kill()
        self._process.wait()


def _name(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""
