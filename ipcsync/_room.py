"""What this process has no room for: descriptors, threads, memory, a disk's bytes. As QuotaExceeded, which says so.

`look` asks before a library that would end the process: libzmq aborts where it gets no descriptor or thread.
"""

from __future__ import annotations

import _thread
import errno
import glob
import mmap
import os
import re
import resource
import threading
import time
from collections import Counter
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

from ipcsync.errors import IpcSyncError, QuotaExceeded

if TYPE_CHECKING:
    import zmq

_MEMORY = 8 << 20
_END_S = 1.0
_USUAL_DESCRIPTORS = 1024


def look(what: str, *, descriptors: int, threads: int) -> None:
    """Raise QuotaExceeded unless `what` can have that many descriptors and threads, and for these some MB, just now."""
    try:
        if threads:
            mmap.mmap(-1, _MEMORY, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
        _try_threads(threads)
        with ExitStack() as opened:  # last: other threads open files more often than they start threads
            for _ in range(descriptors):
                opened.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except (OSError, RuntimeError, MemoryError) as error:
        raise shortage(error, what) or error from None


def new_context(sockets: int = 1023) -> zmq.Context[zmq.Socket[bytes]]:
    """A ZeroMQ context for that many sockets, libzmq's default. QuotaExceeded if this process lacks what it takes."""
    import zmq  # not before it is needed

    look("ZeroMQ", descriptors=8, threads=3)  # libzmq 4.3.5 takes 5 and 2, and a socket one descriptor more
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, sockets)
    context.socket(zmq.PAIR).close()  # it starts with its first socket: now, while there is room
    return context


def limits_of(kind: int) -> tuple[int, int]:
    """The soft and the hard limit (getrlimit(2)); what a process usually has where a sandbox refuses to say."""
    try:
        return resource.getrlimit(kind)
    except OSError:
        return (_USUAL_DESCRIPTORS,) * 2 if kind == resource.RLIMIT_NOFILE else (resource.RLIM_INFINITY,) * 2


def raise_descriptors(wanted: int) -> None:
    """Raise this process's soft limit of descriptors to `wanted`, or as far as it may. For programs of our own only."""
    soft, hard = limits_of(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):  # a sandbox forbids it
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _try_threads(count: int) -> None:
    """Start so many at once, and wait until they are gone. RuntimeError if the kernel refuses one."""
    gate, tids = threading.Lock(), list[int]()

    def stay() -> None:
        tids.append(threading.get_native_id())
        with gate:
            pass

    with gate:
        for _ in range(count):
            _thread.start_new_thread(stay, ())
    deadline = time.monotonic() + _END_S
    # The kernel's own list: it counts a thread until it is out of there, which is later than Python's end of it.
    while len(tids) < count or any(os.path.exists(f"/proc/self/task/{tid}") for tid in tids):
        if time.monotonic() > deadline:
            return
        time.sleep(0.0001)


def shortage(error: BaseException, what: str) -> QuotaExceeded | None:
    """The error that says what was short for `what`; None if `error` does not say that anything was."""
    if isinstance(error, IpcSyncError):
        return None
    number = getattr(error, "errno", None)  # an OSError's or a ZMQError's
    if number == errno.ENFILE:
        most = 0
        with suppress(OSError, ValueError), open("/proc/sys/fs/file-max") as file:
            most = int(file.read())
        return QuotaExceeded(f"the machine has no file descriptor left for {what} (fs.file-max)", limit=most)
    if number == errno.EMFILE:
        soft, hard = limits_of(resource.RLIMIT_NOFILE)
        higher = "" if hard == soft else f", or raise the limit (`ulimit -n`, up to {hard})"
        return QuotaExceeded(
            f"this process has too few of its {soft} file descriptors left for {what}{_holders()}: close some{higher}",
            limit=soft,
        )
    if str(error) == "can't start new thread" or isinstance(error, BlockingIOError):  # the second: of fork(2)
        # With no descriptor left to look with, this finds none.
        limit, count = _finite(resource.RLIMIT_NPROC), len(glob.glob("/proc/self/task/*")) or "many"
        return QuotaExceeded(
            f"no further thread or process can be started for {what}; this process has {count} threads: look at "
            f"`ulimit -u`{f' ({limit})' if limit else ''}, its cgroup's pids.max, and `ulimit -v` with `ulimit -s`",
            limit=limit,
        )
    if number == errno.ENOMEM or isinstance(error, MemoryError):
        limit = _finite(resource.RLIMIT_AS)
        bound = f" of its {limit} bytes of address space (`ulimit -v`)" if limit else ""
        return QuotaExceeded(f"this process has too little memory left{bound} for {what}", limit=limit)
    if number in (errno.ENOSPC, errno.EDQUOT):
        where = getattr(error, "filename", None)
        return QuotaExceeded(f"there is no room on the disk for {what}" + (f": {where}" if where else ""))
    if number == errno.EFBIG:
        most, _ = limits_of(resource.RLIMIT_FSIZE)
        return QuotaExceeded(f"a file of {what} would be larger than this process may write (`ulimit -f`)", limit=most)
    return None


def _finite(kind: int) -> int:
    """The soft limit, 0 if there is none."""
    soft, _ = limits_of(kind)
    return 0 if soft == resource.RLIM_INFINITY else soft


def _holders() -> str:
    """What has the descriptors, by kind: " (812 of kind socket, …)"; empty if there is none left to look with."""
    kinds: Counter[str] = Counter()
    for path in glob.iglob("/proc/self/fd/*"):
        with suppress(OSError):  # it was closed meanwhile
            inode = re.match(r"(?:anon_inode:)?\[?([a-z]+)[\]:]", os.readlink(path))
            kinds[inode[1] if inode else "file"] += 1
    most = ", ".join(f"{count} of kind {kind}" for kind, count in kinds.most_common(3))
    return f" ({most})" if most else ""
