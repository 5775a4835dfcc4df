"""A sandbox refuses system calls: what is left serves, or one sentence says why not. Row 62."""

from __future__ import annotations

import errno

import pytest

from tests.kit import scripts

pytestmark = [pytest.mark.process, pytest.mark.program]

_BY_EXEC = {"IPCSYNC_TEST_ZYGOTE": "0"}  # the filter is inherited by children

_SERVES = """
import os, signal, sys
from tests.kit.refused import refuse
refuse({call!r}, {error})
import ipcsync
from ipcsync._linux.child import Worker
from ipcsync.testing import StreamGate
from tests.kit import remote
from tests.kit.until import until

def name_is_free():
    try:
        client.event("e", recorder=True).close()
    except ipcsync.RecorderTaken:
        return False
    return True

with (
    ipcsync.launch(log_level="error", keeper={keeper}) as coordinator,
    ipcsync.connect(coordinator.endpoint, name="stays", timeout=30) as client,
    Worker() as worker,
):
    worker.call(remote.connect, coordinator.endpoint, "dies")
    worker.call(remote.open_event, "e", {{"recorder": True}})
    worker.call(remote.hold)
    worker.call(remote.record, "e")
    event = client.event("e")
    worker.kill()
    try:
        event.at(1).synchronize(30)
        raise AssertionError("a silent pass")
    except ipcsync.RecorderLost as lost:
        assert lost.cause == "died"
    event.close()
    until(name_is_free, "the name is free")
    mine = client.event("mine", recorder=True)
    mine.record(ipcsync.Stream()).synchronize(30)
    if {keeper}:
        os.kill(client.stats()["pid"], signal.SIGKILL)
        until(lambda: client.stats(timeout=30)["starts"] == 2, "the next coordinator serves")
    child = os.fork()
    if child == 0:
        try:
            mine.record(ipcsync.Stream())
        except ipcsync.ForkedProcessError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert not worker.has_spoken(0) or worker.has_ended(0)
assert coordinator.stop() == 0
"""


@pytest.mark.parametrize(
    ("call", "error", "keeper"),
    [
        ("pidfd_open", errno.ENOSYS, True),
        ("pidfd_open", errno.ENOSYS, False),
        ("memfd_create", errno.ENOSYS, True),
        ("madvise", errno.EINVAL, True),
        ("futex_waitv", errno.ENOSYS, True),
        ("prlimit64", errno.EPERM, True),
        pytest.param("futex_waitv", errno.EPERM, True, marks=pytest.mark.thorough),
        pytest.param("pidfd_open", errno.EPERM, True, marks=pytest.mark.thorough),
        pytest.param("memfd_create", errno.EPERM, True, marks=pytest.mark.thorough),
        pytest.param("memfd_create", errno.ENOSYS, False, marks=pytest.mark.thorough),
        pytest.param("madvise", errno.EINVAL, False, marks=pytest.mark.thorough),
    ],
)
def test_row_72_a_call_for_which_there_is_another_way(call: str, error: int, *, keeper: bool) -> None:
    scripts.run(_SERVES.format(call=call, error=error, keeper=keeper), **_BY_EXEC)


@pytest.mark.parametrize("flag", ["--keeper", "--no-keeper"])
def test_row_72_without_locks_no_coordinator_starts_and_one_sentence_says_so(flag: str) -> None:
    scripts.run(
        f"""
        import subprocess, sys, tempfile
        from tests.kit.refused import refuse
        folder = tempfile.mkdtemp()
        refuse("flock", {errno.ENOLCK})
        command = [sys.executable, "-m", "ipcsync_coordinator", {flag!r}, "--runtime-dir", folder + "/run"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 1, done
        (line,) = done.stderr.splitlines()
        assert "cannot be locked" in line and folder in line and "choose a runtime directory" in line, line
        """,
        **_BY_EXEC,
    )


@pytest.mark.parametrize("flag", ["--keeper", "--no-keeper"])
def test_row_72_what_is_lost_without_pidfds_is_logged(flag: str) -> None:
    scripts.run(
        f"""
        import subprocess, sys, tempfile
        from tests.kit.refused import refuse
        folder = tempfile.mkdtemp()
        refuse("pidfd_open", {errno.EPERM})
        where = ["--runtime-dir", folder + "/run", "--driver", "host", "--exit-when-idle", "0.1"]
        command = [sys.executable, "-m", "ipcsync_coordinator", {flag!r}, *where]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done
        (line,) = [line for line in done.stderr.splitlines() if "pidfd_open" in line]
        assert "level=warning" in line and "seen by their lifelines alone" in line, line
        """,
        **_BY_EXEC,
    )
