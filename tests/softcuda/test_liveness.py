"""Who is alive and who is dead, as the other processes of a segment see it, whatever became of pids and descriptors."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ipcsync._linux.process import PidFd
from tests.kit.until import DEADLINE_S, until
from tests.softcuda.kit import SIM, files, stat
from tests.softcuda.processes import _PRELUDE, CLONE, HeadlessServer, MakeServers, Server, ServerElsewhere, py


def state(pid: int) -> str:
    """The letter that proc(5) has for it: T stopped, Z zombie."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def assert_alive(subject: Server, *others: Server) -> None:
    """It is there for all others, who just looked for the dead, and its work goes on."""
    handle = subject("create", "proof")
    subject("stream", "proof")
    for other in others:
        assert other("stat", "reap") == 0
        assert other("open", "proof", handle) == 0
        assert subject("record", "proof", "proof") == 0
        assert other("sync", "proof") == 0
        assert other("destroy", "proof") == 0
    assert subject("destroy", "proof") == 0


def assert_dead(processes: int, *others: Server) -> None:
    """It is cleaned up, by whoever of the others is the first to look, and so many processes are left."""

    def is_gone() -> bool:
        others[0]("stat", "reap")
        return bool(others[0]("stat", "processes") == processes)

    until(is_gone, "the death is seen")  # the signal is on its way
    for other in others:
        assert other("stat", "reap") == 0
        assert other("stat", "processes") == processes


def test_processes_of_several_pid_namespaces_share_a_segment(servers: MakeServers) -> None:
    """Both inner ones are process 1, and most likely hold their marks by threads of one number."""
    outer = servers()
    a, b = servers(2, ServerElsewhere)
    assert a("python", "answer = os.getpid()") == b("python", "answer = os.getpid()") == 1
    for subject, others in ((a, (b, outer)), (b, (outer, a)), (outer, (a, b))):
        assert_alive(subject, *others)
        handle = subject("create", "e")
        subject("hold", "proof")
        subject("record", "e", "proof")
        for other in others:
            assert other("open", "e", handle) == 0
            assert other("query", "e") == 600
            assert other("stat", "processes") == 4


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_death_is_seen_from_other_pid_namespaces(servers: MakeServers, victim: int) -> None:
    everybody = [servers(), *servers(2, ServerElsewhere)]
    dead = everybody[victim]
    others = [each for each in everybody if each is not dead]
    for each in everybody:
        each("create", "e")  # all are there
    dead.kill()
    assert_dead(3, *others)
    assert_alive(others[0], others[1])
    assert_alive(others[1], others[0])


# The end of libc's exit(): it flushes its files after the library has left the segment, and sleeps in that.
LINGER = """
import ctypes
r, w = os.pipe()
os.set_blocking(w, False)
try:
    while True:
        os.write(w, bytes(4096))
except BlockingIOError:
    os.set_blocking(w, True)
libc.fdopen.restype = ctypes.c_void_p
libc.fputs(b"more", ctypes.c_void_p(libc.fdopen(w, b"w")))
"""


def test_who_leaves_looks_dead_and_keeps_its_slot_until_it_is_over(servers: MakeServers) -> None:
    """Threads of its own may be within calls. Nor does it mark one of another pid namespace."""
    watcher = servers()
    assert watcher("stat", "processes") == 2
    first = servers(kind=ServerElsewhere)
    first("create", "e")
    first("python", LINGER)
    first.send(("python", "libc.exit(0)"))
    until(lambda: watcher("stat", "dead") == 1, "it has left")
    second = servers(kind=ServerElsewhere)
    assert_alive(second, watcher)
    assert first.p.is_alive()
    assert watcher("stat", "reap") == 0
    assert watcher("stat", "processes") == 4
    first.kill()
    first.p.join()
    assert watcher("stat", "reap") == 1
    assert_alive(second, watcher)


def test_the_image_before_exec_is_dead(servers: MakeServers) -> None:
    a, b = servers(2)
    assert a("stat", "reap") == b("stat", "reap") == 0
    a.send(("python", "os.execv('/bin/sleep', ['sleep', '1000'])"))
    assert_dead(2, b)
    assert state(a.pid) != "Z"


def test_the_end_of_the_main_thread_is_not_the_processs(servers: MakeServers) -> None:
    a, b = servers(kind=HeadlessServer), servers()
    assert a("stat", "reap") == b("stat", "reap") == 0
    until(lambda: state(a.pid) == "Z", "its main thread has ended")
    assert_alive(a, b)
    a.kill()
    assert_dead(2, b)


def test_a_forked_child_of_c_code_does_not_keep_its_parent_alive(servers: MakeServers) -> None:
    a, b = servers(2)
    assert a("stat", "reap") == b("stat", "reap") == 0
    child = a("python", f"answer = libc.syscall({CLONE}, 17, 0, 0, 0, 0)\nif not answer: libc.pause()")
    try:
        assert_alive(a, b)
        assert Path(f"/proc/{child}/map_files").exists()
        a.kill()
        assert_dead(2, b)
        assert state(child) != "Z"
    finally:
        os.kill(child, signal.SIGKILL)


def test_programs_that_a_process_starts_change_nothing(servers: MakeServers) -> None:
    a, b = servers(2)
    assert a("stat", "reap") == b("stat", "reap") == 0
    start = "import subprocess; subprocess.run(['true']); answer = subprocess.Popen(['sleep', '1000']).pid"
    sleeper = a("python", start)
    try:
        assert_alive(a, b)
        a.kill()
        assert_dead(2, b)
    finally:
        os.kill(sleeper, signal.SIGKILL)


def test_a_process_that_closes_every_descriptor_stays_alive(servers: MakeServers) -> None:
    a, b = servers(2)
    assert a("stat", "reap") == b("stat", "reap") == 0
    a("python", "for fd in range(3, 4096):\n    if fd != conn.fileno():\n        libc.close(fd)")
    assert_alive(a, b)
    a.kill()
    assert_dead(2, b)


def test_a_stopped_process_is_alive(servers: MakeServers) -> None:
    a, b = servers(2)
    handle, _ = a("create", "e"), b("create", "e")
    os.kill(a.pid, signal.SIGSTOP)
    until(lambda: state(a.pid) == "T", "it is stopped")
    assert b("stat", "reap") == 0
    assert b("open", "e", handle) == 0
    os.kill(a.pid, signal.SIGCONT)
    assert_alive(a, b)
    os.kill(a.pid, signal.SIGSTOP)
    a.kill()
    assert_dead(2, b)


def test_a_zombie_that_nobody_reaps_is_dead(ctx: Any) -> None:
    stat("reap")
    others = stat("processes")
    program = "start(); print(stat('processes'), flush=True); os.kill(os.getpid(), 9)"
    with subprocess.Popen([sys.executable, "-c", _PRELUDE + program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert int(process.stdout.readline()) == others + 1
        with closing(PidFd(process.pid)) as pidfd:
            assert pidfd.has_ended(DEADLINE_S)  # "Z" alone is said of the main thread, while others still run
        assert stat("reap") == 1
        assert stat("processes") == others
        assert state(process.pid) == "Z"


def test_a_reaper_killed_at_any_moment_leaves_the_rest_to_the_next(servers: MakeServers) -> None:
    rnd = random.Random(7)
    watcher, other = servers(2)
    events = watcher("stat", "events")
    for _ in range(12):
        victim, reaper = servers(2)
        assert reaper("stat", "reap") == 0
        for k in range(40):
            victim("create", k)
            victim("stream", k)
        handle = victim("create", "pending")
        assert watcher("open", "pending", handle) == 0
        victim("hold", 0)
        victim("record", "pending", 0)
        victim.kill()
        victim.p.join()
        reaper.send(("stat", "reap"))
        time.sleep(rnd.uniform(0, 0.001))  # somewhere within: which moment it is does not matter
        reaper.kill()
        reaper.p.join()
        watcher("stat", "reap")
        assert watcher("stat", "processes") == 3
        assert watcher("destroy", "pending") == 0
        assert watcher("stat", "events") == events
        assert_alive(watcher, other)


def test_a_fork_while_a_thread_waits_until_a_dead_process_is_over_keeps_nobody_from_its_leftovers() -> None:
    py(
        """
    import threading
    from tests.kit.until import until
    context = start()
    a, codes, hold = Server(), [], os.pipe()
    handle = a("alloc", "m", 4096)
    def open_it():
        ok(drv.cuCtxSetCurrent(context))
        codes.append(code(open_memory(handle)))
    a.kill()
    until(lambda: stat("dead") == 1, "it is dead")
    thread = threading.Thread(target=open_it)
    thread.start()
    def waits():
        return any("->" in line and {"OFDLCK", str(os.getpid())} & set(line.split()) for line in open("/proc/locks"))
    until(lambda: waits() or codes, "it waits until that is over")
    if not (child := os.fork()):
        os.read(hold[0], 1)
        os._exit(0)
    thread.join()
    assert codes == [400] and stat("processes") == 1, (codes, stat("processes"))
    os.write(hold[1], b"x")
    os.waitpid(child, 0)
    """,
        IPCSYNC_HOST_TEARDOWN_MS=1000,
        IPCSYNC_HOST_SEGMENT=f"selftest-v-{os.getpid()}",
    )


def test_what_one_left_that_was_killed_within_cuinit_goes(servers: MakeServers) -> None:
    before = set(files("~p.*"))
    one = servers()
    one("stat", "processes")
    (mark,) = set(files("~p.*")) - before
    one.end()
    assert stat("reap") == 1
    assert set(files("~p.*")) == before
    left = Path(SIM.softcudaPath().decode()).with_name(mark)
    left.touch()  # it had made its file, and was not entered yet
    servers()("stat", "processes")
    assert not left.exists()
