"""What the processes that this library starts do not take over from the program that starts them."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ipcsync
from tests.kit import scripts
from tests.kit.descriptors import descriptors
from tests.kit.until import DEADLINE_S, until

pytestmark = [pytest.mark.process, pytest.mark.program]

_ROOT = Path(__file__).parents[2]
_BY_EXEC = {"IPCSYNC_TEST_ZYGOTE": "0"}  # else another process is the parent


_SIGNALS = """
import os, select, signal
import ipcsync
from ipcsync._linux.child import Worker

def words(pid, *names):
    return {name: int(line.split()[1], 16) for line in open(f"/proc/{pid}/status") for name in names
            if line.startswith(name + ":")}

for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD):
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
mine = words(os.getpid(), "SigBlk", "SigIgn")
ignored = sum(1 << number - 1 for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD))
assert mine["SigIgn"] & ignored == ignored

with ipcsync.launch(log_level="error", keeper=has_keeper) as coordinator:
    with ipcsync.connect(coordinator.endpoint, timeout=30) as client:
        pids = {coordinator.pid, client.stats()["pid"]}
        for pid in pids:
            seen = words(pid, "SigBlk", "SigIgn")
            assert not seen["SigBlk"], (pid, hex(seen["SigBlk"]))
            by_itself = 0 if pid == coordinator.pid else 1 << signal.SIGTERM - 1 | 1 << signal.SIGUSR2 - 1
            assert not seen["SigIgn"] & (ignored & ~by_itself), (pid, hex(seen["SigIgn"]))  # a keeper's tells it to end
        if has_keeper:
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            os.kill(client.stats()["pid"], signal.SIGKILL)
            assert client.stats(timeout=30)["starts"] == 2
    os.kill(coordinator.pid, signal.SIGTERM)
    pidfd = os.pidfd_open(coordinator.pid) if coordinator.is_running else None
    if pidfd is not None:
        assert select.select([pidfd], [], [], 30)[0], "SIGTERM does not stop it"
with Worker() as worker:
    assert worker.call(os.getpid) == worker.pid
    seen = words(worker.pid, "SigBlk", "SigIgn")
    assert not seen["SigBlk"] and not seen["SigIgn"] & ignored, seen
"""


@pytest.mark.parametrize("keeper", [True, False])
def test_a_child_of_a_program_that_blocks_and_ignores_every_signal_can_be_stopped(*, keeper: bool) -> None:
    scripts.run(f"has_keeper = {keeper}\n{_SIGNALS}", **_BY_EXEC)


_STARTER = """
import os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
os.execv(sys.executable, [sys.executable, "-m", "ipcsync", "coordinator", *sys.argv[1:]])
"""


@pytest.mark.parametrize("flag", ["--keeper", "--no-keeper"])
def test_a_daemon_whose_starter_blocks_and_ignores_its_signals_is_stopped_by_sigterm(tmp_path: Path, flag: str) -> None:
    command = [sys.executable, "-c", _STARTER, flag, "--runtime-dir", str(tmp_path / "run")]
    with subprocess.Popen(command, env={**os.environ, **_BY_EXEC, "IPCSYNC_LOG_LEVEL": "error"}) as daemon:
        try:
            ipcsync.connect(f"ipc://{tmp_path}/run/coordinator.sock", timeout=DEADLINE_S).close()
            daemon.terminate()
            assert daemon.wait(DEADLINE_S) == 0
        finally:
            daemon.kill()


@pytest.mark.parametrize("keeper", [True, False])
def test_a_coordinator_that_a_service_launches_does_not_speak_for_that_service(tmp_path: Path, *, keeper: bool) -> None:
    scripts.run(
        f"""
        import os, socket
        import ipcsync
        manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        manager.bind({str(tmp_path / "notify")!r})
        os.environ.update(NOTIFY_SOCKET={str(tmp_path / "notify")!r}, WATCHDOG_USEC="100000", LISTEN_FDS="1")
        with ipcsync.launch(log_level="error", keeper={keeper}) as coordinator:
            with ipcsync.connect(coordinator.endpoint, timeout=30) as client:
                pids = {{coordinator.pid, client.stats()["pid"]}}
            for pid in pids:
                variables = open(f"/proc/{{pid}}/environ", "rb").read().split(b"\\0")
                assert not [v for v in variables if v.startswith((b"NOTIFY_", b"WATCHDOG_", b"LISTEN_"))]
        manager.setblocking(False)
        try:
            raise AssertionError(manager.recv(4096))
        except BlockingIOError:
            pass
        """,
        **_BY_EXEC,
    )


_CLOSED = """
import os
for fd in (0, 1, 2):
    os.close(fd)
import ipcsync
with ipcsync.launch(log_level="error") as coordinator, ipcsync.connect(coordinator.endpoint, timeout=30) as client:
    event = client.event("e", recorder=True)
    event.record(ipcsync.Stream()).synchronize(30)
    for pid in (os.getpid(), coordinator.pid):
        found = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in (0, 1, 2)]
        assert found == ["/dev/null"] * 3, found
os._exit(7)
"""


def test_nothing_of_ours_stands_where_a_standard_descriptor_was_closed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _CLOSED], capture_output=True, timeout=100, check=False, env={**os.environ, **_BY_EXEC}
    )
    assert done.returncode == 7


def test_a_process_that_only_makes_a_stream_has_no_file_of_ours_at_a_standard_descriptor() -> None:
    program = (
        "import os, time\nos.close(0)\nimport ipcsync\nipcsync.Stream()\nprint('made', flush=True)\ntime.sleep(99)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"made\n"
        assert descriptors(process.pid)[0] == "/dev/null"
        process.kill()


@pytest.mark.parametrize("keeper", [True, False])
def test_the_umask_of_its_starter_is_not_the_one_of_a_coordinator(*, keeper: bool) -> None:
    scripts.run(
        f"""
        import os, stat
        import ipcsync
        os.umask(0o777)
        with ipcsync.launch(log_level="error", keeper={keeper}) as coordinator:
            path = coordinator.endpoint.removeprefix("ipc://")
            assert stat.S_IMODE(os.stat(path).st_mode) == 0o700
            ipcsync.connect(coordinator.endpoint, timeout=30).close()
        """,
        **_BY_EXEC,
    )


def test_a_relative_path_still_leads_to_the_coordinator_after_chdir(tmp_path: Path) -> None:
    scripts.run(
        f"""
        import os, signal
        import ipcsync
        os.chdir({str(tmp_path)!r})
        with ipcsync.launch(log_level="error", keeper=True, runtime_dir="run") as coordinator:
            assert coordinator.runtime_dir == os.path.abspath("run")
            with ipcsync.connect("ipc://run/coordinator.sock", timeout=30) as client:
                assert client.endpoint == coordinator.endpoint
                event = client.event("e", recorder=True)
                os.chdir("/")
                os.kill(client.stats()["pid"], signal.SIGKILL)
                assert client.stats(timeout=30)["starts"] == 2
                list(client.watch(timeout=0))
                event.record(ipcsync.Stream()).synchronize(30)
        os.environ["IPCSYNC_ENDPOINT"] = "ipc://run/coordinator.sock"
        os.chdir({str(tmp_path)!r})
        os.mkdir("gone")
        os.chdir("gone")
        os.rmdir("../gone")
        try:
            ipcsync.connect(timeout=1)
        except ipcsync.ConnectError as error:
            assert "was removed" in str(error), error
        """,
        **_BY_EXEC,
    )


@pytest.mark.parametrize("path", ["/tmp/\0x", "/tmp/\udcff"])
def test_an_endpoint_that_can_be_no_path_is_refused(path: str) -> None:
    with pytest.raises(ipcsync.ConnectError, match="the socket's path") as caught:
        ipcsync.connect(f"ipc://{path}")
    assert caught.value.endpoint == f"ipc://{path}"
    with pytest.raises(ValueError, match="NUL"):
        ipcsync.launch(runtime_dir="/tmp/\0x")


def test_a_keeper_sees_a_coordinators_death_by_its_signal(tmp_path: Path) -> None:
    """Not by a tick, nor by a pidfd, which a sandbox may refuse."""
    coordinator = ipcsync.launch(keeper=True, runtime_dir=str(tmp_path / "run"), log_level="error")
    with coordinator, ipcsync.connect(coordinator.endpoint, timeout=DEADLINE_S) as client:
        assert not [to for to in descriptors(coordinator.pid).values() if "pidfd" in to]
        os.kill(client.stats()["pid"], 9)
        until(lambda: client.stats(timeout=DEADLINE_S)["starts"] == 2, "the next one serves")


def test_all_our_processes_are_started_in_one_place() -> None:
    """So that none takes over what it should not. Recipes and benchmarks show, and measure, foreign programs."""
    files = [path for folder in ("ipcsync", "services") for path in (_ROOT / folder).rglob("*.py")]
    found = [
        f"{path.relative_to(_ROOT)}: {ast.unparse(node.func)}"
        for path in files
        if not {"recipes", "ipcsync_bench"} & set(path.parts)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in _STARTS
    ]
    assert sorted(found) == [
        "ipcsync/_linux/child.py: subprocess.Popen",
        "ipcsync/pytest_plugin/__init__.py: subprocess.run",  # of nvidia-smi
        "services/ipcsync_bridge/upgrade.py: subprocess.Popen",  # of itself, only to ask for its versions
    ]


_STARTS = {
    "Popen",
    "subprocess.Popen",
    "subprocess.run",
    "subprocess.check_output",
    "subprocess.check_call",
    "asyncio.create_subprocess_exec",
    "asyncio.create_subprocess_shell",
    "os.fork",
    "os.posix_spawn",
    "os.system",
}
