"""What comes while a keeper starts: signals, a reload, and the death of its first coordinator.

Each keeper runs in a process that a script has changed so that it comes at just that moment.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import ipcsync
from tests.faults import fixtures
from tests.kit.until import DEADLINE_S, until
from tests.kit.zygote import EXEC

pytestmark = [pytest.mark.keeper, pytest.mark.process]

_EARLY = """
import os, signal, sys, threading
from ipcsync_keeper.config import Settings
from ipcsync_keeper.resources import Resources
from ipcsync_keeper import __main__ as program
from ipcsync_keeper.keeper import Keeper, Plan

what, directory, driver = sys.argv[1:]
command = [sys.executable, "-m", "ipcsync_coordinator", "--runtime-dir", directory, "--driver", driver]
"""
_SIGNALLED = """
make = Resources.__init__
def make_and_be_signalled(self, *args):
    os.kill(os.getpid(), getattr(signal, what))
    make(self, *args)
Resources.__init__ = make_and_be_signalled
"""
_FULL = """
import errno
from ipcsync._board import runtime_dir
write = runtime_dir._write
def write_until_it_is_full(path, name, found):
    if found.role == what:
        raise OSError(errno.ENOSPC, "No space left on device")
    write(path, name, found)
runtime_dir._write = write_until_it_is_full
"""
_NO_THREAD = """
import resource
make = Resources.__init__
def make_and_have_no_room(self, *args):
    make(self, *args)
    threading.stack_size(1 << 30)
    size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + (256 << 20), resource.RLIM_INFINITY))
Resources.__init__ = make_and_have_no_room
"""
_KILLED = """
import time
see = Keeper._supervise_active
killed = []
def see_late(self):
    child = self._active
    if child is not None and child.is_serving and not killed:
        while not os.path.exists(what):
            time.sleep(0.01)
        os.kill(child.pid, signal.SIGKILL)
        child._process.wait(10)
        killed.append(child)
    see(self)
Keeper._supervise_active = see_late
"""
_SHOT = """
from ipcsync_keeper.link import CoordinatorProcess
start = CoordinatorProcess.__init__
def start_and_shoot(self, *args):
    start(self, *args)
    os.kill(self.pid, getattr(signal, what))
CoordinatorProcess.__init__ = start_and_shoot
"""
_BE_KEEPER = """
sys.exit(program.main(Plan(Settings(runtime_dir=directory, driver=driver, pool=64, max_sessions=16), command)))
"""


def test_row_54_killed_behind_its_first_reply_ends_no_session(tmp_path: Path) -> None:
    """The keeper, which is late, finds that its first coordinator has served and is dead."""
    connected, directory = tmp_path / "connected", fixtures.private_dir()
    script = _EARLY + _KILLED + _BE_KEEPER
    with subprocess.Popen([sys.executable, "-c", script, str(connected), directory, ipcsync.driver_name()]) as keeper:
        with ipcsync.connect(f"ipc://{directory}/coordinator.sock", timeout=DEADLINE_S) as client:
            event = client.event("held", recorder=True)
            connected.touch()
            until(lambda: client.stats(timeout=DEADLINE_S)["starts"] == 2, "the next one")
            event.record().synchronize(timeout=DEADLINE_S)
        keeper.terminate()
        assert keeper.wait(DEADLINE_S) == 0


@pytest.mark.parametrize("role", ["", "keeper"])
def test_row_71_a_disk_that_is_full_when_a_keeper_says_that_it_serves_is_one_line_and_leaves_nothing(role: str) -> None:
    directory = os.path.join(fixtures.private_dir(), "run")
    command = [sys.executable, "-c", _EARLY + _FULL + _BE_KEEPER, role, directory, ipcsync.driver_name()]
    done = subprocess.run(command, timeout=DEADLINE_S, check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert "cannot start" in done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert not os.path.exists(directory)


def test_row_71_a_keeper_without_room_for_its_thread_says_so_and_leaves_nothing() -> None:
    directory = os.path.join(fixtures.private_dir(), "run")
    command = [sys.executable, "-c", _EARLY + _NO_THREAD + _BE_KEEPER, "", directory, ipcsync.driver_name()]
    done = subprocess.run(command, timeout=DEADLINE_S, check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert "no further thread or process can be started for a keeper" in done.stderr
    assert not os.path.exists(directory)


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV"])
def test_row_58_a_first_coordinator_that_is_killed_before_it_serves_is_named_by_its_signal(name: str) -> None:
    directory = os.path.join(fixtures.private_dir(), "run")
    command = [sys.executable, "-c", _EARLY + _SHOT + _BE_KEEPER, name, directory, ipcsync.driver_name()]
    done = subprocess.run(command, timeout=DEADLINE_S, check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"killed by {name}" in done.stderr
    assert not os.path.exists(directory)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_row_59_told_to_end_while_it_starts_a_keeper_leaves_nothing(name: str) -> None:
    directory = os.path.join(fixtures.private_dir(), "run")
    script = _EARLY + _SIGNALLED + _BE_KEEPER
    command = [sys.executable, "-c", script, name, directory, ipcsync.driver_name()]
    assert subprocess.run(command, timeout=DEADLINE_S, check=False).returncode == 0
    assert not os.path.exists(directory)


def test_row_54_the_next_one_needs_no_working_directory(tmp_path: Path) -> None:
    """Its keeper was started in one that is gone, with a runtime directory relative to that."""
    directory, started_in = fixtures.private_dir(), tmp_path / "started_in"
    started_in.mkdir()
    options = ["--runtime-dir", os.path.relpath(directory, started_in), "--driver", ipcsync.driver_name()]
    command = [sys.executable, "-m", "ipcsync_coordinator", *options]
    with subprocess.Popen(command, cwd=started_in, env={**os.environ, **EXEC}) as keeper:
        with ipcsync.connect(f"ipc://{directory}/coordinator.sock", timeout=DEADLINE_S) as client:
            started_in.rmdir()
            os.kill(client.stats()["pid"], signal.SIGKILL)
            until(lambda: client.stats(timeout=DEADLINE_S)["starts"] == 2, "the next one")
        keeper.terminate()
        assert keeper.wait(DEADLINE_S) == 0


def test_row_57_a_reload_asked_for_while_a_keeper_starts_is_done() -> None:
    directory = os.path.join(fixtures.private_dir(), "run")
    command = [sys.executable, "-c", _EARLY + _SIGNALLED + _BE_KEEPER, "SIGUSR2", directory, ipcsync.driver_name()]
    with subprocess.Popen(command) as keeper:
        with ipcsync.connect(f"ipc://{directory}/coordinator.sock", timeout=DEADLINE_S) as client:
            until(lambda: client.stats(timeout=DEADLINE_S)["restarts"]["reloaded"] == 1, "the reload")
        keeper.terminate()
        assert keeper.wait(DEADLINE_S) == 0
