"""A segment of the host driver: the processes that can open each other's handles, and what of it outlives a process."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import mmap
import os
import platform
import re
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Concatenate, ParamSpec, TypeVar

from ipcsync._drivers.host import layout
from ipcsync._linux import locks, process
from ipcsync._linux.death_mark import DeathMark
from ipcsync._linux.futex import Futex
from ipcsync._linux.robust import OWNER_DIED
from ipcsync._locks import CallLock, HeldBelow

P = ParamSpec("P")
T = TypeVar("T")

DIRECTORY = "/dev/shm"  # noqa: S108 - the one tmpfs that every Linux has; files in it are 0600 and checked for their owner
_PREFIX = f"ipcsync-host-{layout.LAYOUT}-{os.getuid()}-"
_MEMORY = re.compile(r"-mem-(\d+)-\d+$")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,120}")

# x86-64 shows stores in program order. Elsewhere `fence(SEQ_CST)` stands between work and the `done` that shows it.
fence = None if platform.machine() == "x86_64" else ctypes.CDLL("libatomic.so.1").atomic_thread_fence
SEQ_CST = 5


def open_segment(name: str) -> Segment:
    """Join the segment `name`, created if it is empty; first clean up after the dead, in every segment of this user.

    Raises ValueError for a bad name, OSError when the file cannot be had or all lines for processes are taken.
    """
    if not _NAME.fullmatch(name) or _MEMORY.search(name):
        raise ValueError(f"IPCSYNC_HOST_SEGMENT must be 1 to 120 of A-Z a-z 0-9 _ . - but is {name!r}")
    segment = Segment(os.path.join(DIRECTORY, _PREFIX + name))
    _remove_dead_segments(segment.path)
    return segment


def exclusive(method: Callable[Concatenate[Segment, P], T]) -> Callable[Concatenate[Segment, P], T]:
    """Make a method that runs alone among all threads of all processes of the segment."""

    def call(self: Segment, /, *args: P.args, **kwargs: P.kwargs) -> T:
        lock = self.thread_lock
        if lock.is_mine() and lock.is_held_below():
            raise HeldBelow  # a finalizer or a signal's handler, in the middle of another such call
        try:
            with lock:
                return locked(self, *args, **kwargs)
        except BaseException:
            lock.unwind()
            raise

    def locked(self: Segment, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            result = method(self, *args, **kwargs)
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        except BaseException:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            raise
        return result

    return functools.update_wrapper(call, method)


class Segment:
    """This process's mapping of a control file, and its line in it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.thread_lock = CallLock()
        self._futexes: dict[int, Futex] = {}
        self._left = False
        self._fd = _open_locked(path)
        try:
            if os.fstat(self._fd).st_size == 0:
                os.posix_fallocate(self._fd, 0, layout.SIZE)  # a hole would be SIGBUS on a full tmpfs
            self._map = _map(path)
            self.words = memoryview(self._map).cast("Q")
            self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
            if not self.words[layout.H_MAGIC]:
                self.words[layout.H_NONCE] = int.from_bytes(os.urandom(8), "little")
                self.words[layout.H_MAGIC] = layout.MAGIC
            self.nonce = self.words[layout.H_NONCE]
            self.serial = self.line = 0
            self._reap()
            self._register()
            self._life = DeathMark(self.address + (layout.process(self.line) + layout.P_MARK) * 8)
        except BaseException:
            os.close(self._fd)
            raise
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        # The life lock belongs to the open file: a child that keeps the descriptor would keep this process alive.
        os.register_at_fork(after_in_child=self._close_in_child)

    def _close_in_child(self) -> None:
        if self._fd >= 0:  # not again in a child's child
            os.close(self._fd)
            self._fd = -1

    def _register(self) -> None:
        words = self.words
        for line in range(layout.MAX_PROCESSES):
            base = layout.process(line)
            # A process on its way out frees its line a moment before the kernel frees its lock.
            if words[base] or not locks.try_lock(self._fd, layout.LIFE + line):
                continue
            words[layout.H_SERIAL] = serial = words[layout.H_SERIAL] + 1
            for word in range(1, layout.PROCESS_WORDS):
                words[base + word] = 0
            words[base + layout.P_PID] = os.getpid()
            words[base + layout.P_START] = process.start_time(os.getpid()) or 0
            words[base + layout.P_NAMESPACE] = process.pid_namespace()
            words[base + layout.P_SERIAL] = serial
            self.line, self.serial = line, serial
            return
        raise OSError(f"{self.path}: {layout.MAX_PROCESSES} processes have it already")

    # -- waiting ------------------------------------------------------------------------------------------------------

    def wait_record(self, record: int, deadline_ns: int | None = None) -> bool:
        """Sleep until `record` is complete; False if CLOCK_MONOTONIC passed `deadline_ns` (None: never) before."""
        slot, position = record >> layout.POSITION_BITS, record & layout.POSITION_MASK
        done_at = layout.STREAMS + (slot << layout.STREAM_SHIFT)
        words = self.words
        futex = self.futex(slot)
        while (done := words[done_at]) < position:
            if deadline_ns is None:
                futex.wait(done)
            elif not futex.wait(done, deadline_ns - time.monotonic_ns()):
                return bool(words[done_at] >= position)
        if fence:
            fence(SEQ_CST)
        return True

    def futex(self, slot: int) -> Futex:
        """The futex of a stream slot's `done`."""
        futex = self._futexes.get(slot)
        if futex is None:
            address = self.address + (layout.STREAMS + (slot << layout.STREAM_SHIFT)) * 8
            futex = self._futexes[slot] = Futex(address)
        return futex

    # -- slots --------------------------------------------------------------------------------------------------------

    @exclusive
    def claim_stream(self) -> int | None:
        """A stream slot for this process, whose positions go on where they stand; None if all are taken."""
        slot = self._free_slot(layout.STREAM_MAP, layout.MAX_STREAMS, layout.H_STREAM_CURSOR)
        if slot is not None:
            base = layout.STREAMS + slot * layout.STREAM_WORDS
            self.words[base + layout.S_DONE] = self.words[base + layout.S_TAIL] = self._position(base)
            self.words[base + layout.S_OWNER] = self.serial
            self._map[layout.STREAM_MAP + slot] = layout.USED
        return slot

    def _position(self, base: int) -> int:
        # A process killed between its two stores of a position has left `done` ahead of `tail`.
        return max(self.words[base + layout.S_DONE], self.words[base + layout.S_TAIL])

    @exclusive
    def free_stream(self, slot: int) -> None:
        """Give a stream slot back; nothing once this process has left."""
        if not self._left:
            self._free_stream(slot)

    @exclusive
    def claim_event(self, device: int) -> int | None:
        """The first word of a line for an interprocess event of a physical device; None if all are taken."""
        if not self._left:
            self._life.show()
        slot = self._free_slot(layout.EVENT_MAP, layout.MAX_EVENTS, layout.H_EVENT_CURSOR)
        if slot is None:
            return None
        base, words = layout.EVENTS + slot * layout.EVENT_WORDS, self.words
        words[base + layout.E_LATEST] = 0
        words[base + layout.E_DEVICE] = device
        words[base + layout.E_PROCESS] = self.line
        words[base + layout.E_OWNER] = self.serial
        words[base + layout.E_WORD] = ((words[base + layout.E_WORD] >> 1) + 1) << 1 | 1
        self._map[layout.EVENT_MAP + slot] = layout.USED
        return base

    @exclusive
    def free_event(self, base: int) -> None:
        """Free the line of an event: its importers are refused from now on."""
        if not self._left:
            self._free_event((base - layout.EVENTS) // layout.EVENT_WORDS)

    def _free_slot(self, start: int, size: int, cursor: int) -> int | None:
        slot = self._find(start, size, cursor)
        if slot is None:
            self._reap()
            slot = self._find(start, size, cursor)
        return slot

    def _find(self, start: int, size: int, cursor: int) -> int | None:
        here = start + self.words[cursor] % size
        found = self._map.find(b"\0", here, start + size)
        if found < 0:
            found = self._map.find(b"\0", start, here)
        if found < 0:
            return None
        self.words[cursor] = found - start + 1
        return found - start

    def _free_stream(self, slot: int) -> None:
        base = layout.STREAMS + slot * layout.STREAM_WORDS
        # Unfinished work stays so for ever, and its slot with it.
        lost = self.words[base + layout.S_DONE] < self.words[base + layout.S_TAIL]
        self.words[base + layout.S_OWNER] = 0
        self._map[layout.STREAM_MAP + slot] = layout.RETIRED if lost else layout.FREE

    def _free_event(self, slot: int) -> None:
        base = layout.EVENTS + slot * layout.EVENT_WORDS
        self.words[base + layout.E_WORD] &= ~1
        self.words[base + layout.E_OWNER] = 0
        self._map[layout.EVENT_MAP + slot] = layout.FREE

    # -- memory -------------------------------------------------------------------------------------------------------

    @exclusive
    def take_memory(self, device: int, size: int, limit: int) -> bool:
        """Count `size` more bytes of a physical device as this process's; False if all together would pass `limit`."""
        if self.used_memory(device) + size > limit:
            return False
        self.words[layout.process(self.line) + layout.P_USED + device] += size
        return True

    @exclusive
    def give_memory(self, device: int, size: int) -> None:
        """Count `size` bytes of a physical device as free again."""
        if not self._left:
            self.words[layout.process(self.line) + layout.P_USED + device] -= size

    def used_memory(self, device: int) -> int:
        """Bytes of a physical device that the processes of the segment have."""
        first = layout.PROCESSES + layout.P_USED + device
        end = first + layout.MAX_PROCESSES * layout.PROCESS_WORDS
        return sum(self.words[first : end : layout.PROCESS_WORDS].tolist())

    # -- life and death -----------------------------------------------------------------------------------------------

    def is_member(self, line: int, serial: int) -> bool:
        """Whether the process `serial` that registered in `line` is still in the segment, and alive."""
        base = layout.process(line)
        mark = self.words[base + layout.P_MARK]  # before the serial, which changes after it when the line is reused
        if self.words[base] != serial:
            return False
        if mark & OWNER_DIED:  # of that one thread: the process ends with its last one
            return _is_living(self._fd, self.words, line, process.pid_namespace())
        return bool(mark) or line == self.line or locks.is_locked(self._fd, layout.LIFE + line)

    def _reap(self) -> None:
        """Free the objects of dead processes. A reaper that is killed leaves the rest to the next one."""
        living = _living(self._fd, self.words)
        if self.serial:
            living[self.serial] = self.line
        dead = [line for line, serial in enumerate(_serials(self.words)) if serial and serial not in living]
        if dead:
            self._sweep(living)
            for line in dead:
                self._clear_line(line)

    def _clear_line(self, line: int) -> None:
        base = layout.process(line)
        for device in range(layout.MAX_DEVICES):
            self.words[base + layout.P_USED + device] = 0
        self.words[base + layout.P_SERIAL] = 0

    def _sweep(self, living: dict[int, int]) -> None:
        """Free the streams, events and memory files of all processes but the `living`."""
        for slot in self._used(layout.STREAM_MAP, layout.MAX_STREAMS):
            if self.words[layout.STREAMS + slot * layout.STREAM_WORDS + layout.S_OWNER] not in living:
                self._free_stream(slot)
        for slot in self._used(layout.EVENT_MAP, layout.MAX_EVENTS):
            if self.words[layout.EVENTS + slot * layout.EVENT_WORDS + layout.E_OWNER] not in living:
                self._free_event(slot)
        _remove_memory(self.path, living)

    def _used(self, start: int, size: int) -> list[int]:
        return [match.start() for match in re.finditer(b"\1", self._map[start : start + size])]

    @exclusive
    def leave(self) -> None:
        """Free all that this process has; the last one out removes the file. The mapping stays: threads may look."""
        self._left = True
        self._life.end()
        living = _living(self._fd, self.words)
        self._sweep(living)
        self._clear_line(self.line)
        if not living:
            os.unlink(self.path)


def _open_locked(path: str) -> int:
    """A descriptor of the control file, flocked: of one with living processes, or of an empty one."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            status = os.fstat(fd)
            if status.st_uid != os.geteuid():
                raise PermissionError(f"{path} belongs to uid {status.st_uid}")
            if _is_linked(fd, path):
                if status.st_size == 0 or _living_in(fd):
                    return fd
                _remove_memory(path, {})
                os.unlink(path)
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _map(path: str) -> mmap.mmap:
    # By a descriptor of its own: mmap keeps a duplicate, through which a forked child would keep the locks.
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return mmap.mmap(fd, layout.SIZE)
    finally:
        os.close(fd)


def _is_linked(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _living_in(fd: int) -> bool:
    data = os.pread(fd, layout.STREAMS * 8, 0)
    if len(data) < layout.STREAMS * 8:
        return False
    words = memoryview(data).cast("Q")
    return words[layout.H_MAGIC] == layout.MAGIC and bool(_living(fd, words))


def _living(fd: int, words: memoryview) -> dict[int, int]:
    """The lines of the living processes by their serials, but for the process whose open file `fd` is."""
    namespace = process.pid_namespace()
    return {
        serial: line for line, serial in enumerate(_serials(words)) if serial and _is_living(fd, words, line, namespace)
    }


def _serials(words: memoryview) -> list[int]:
    """The serials in all lines for processes, 0 where none is."""
    return words[layout.PROCESSES + layout.P_SERIAL : layout.STREAMS : layout.PROCESS_WORDS].tolist()


def _is_living(fd: int, words: memoryview, line: int, namespace: int) -> bool:
    """Whether the process that registered in `line` lives, seen from the pid namespace `namespace`."""
    if not locks.is_locked(fd, layout.LIFE + line):
        return False
    # A child forked by C code keeps its dead parent's lock; where the pid means anything, it has a say too.
    base = layout.process(line)
    in_sight = words[base + layout.P_NAMESPACE] == namespace
    return not in_sight or process.is_running(words[base + layout.P_PID], words[base + layout.P_START])


def _remove_memory(path: str, living: dict[int, int]) -> None:
    """Remove the memory files of a segment whose process is not among the `living`."""
    directory, name = os.path.split(path)
    for file in os.listdir(directory):
        match = _MEMORY.search(file)
        if match and file[: match.start()] == name and int(match[1]) not in living:
            with suppress(FileNotFoundError):  # its owner freed it in this moment
                os.unlink(os.path.join(directory, file))


def _remove_dead_segments(own: str) -> None:
    """Remove the files of every segment of this user that has no living process."""
    for entry in os.scandir(DIRECTORY):
        if not entry.name.startswith(_PREFIX) or _MEMORY.search(entry.name) or entry.path == own:
            continue
        if not entry.is_file(follow_symlinks=False):
            continue
        # It is gone, in use, or another user's of the same name.
        with suppress(FileNotFoundError, BlockingIOError, PermissionError):
            fd = os.open(entry.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_linked(fd, entry.path) and not _living_in(fd):
                    _remove_memory(entry.path, {})
                    os.unlink(entry.path)
            finally:
                os.close(fd)
