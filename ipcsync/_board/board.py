"""The board file itself, made by the coordinator, mapped by every client; and whether the processes of sessions live.

A process is over once it, and every child forked from it, has closed all files. A driver tears down a process's GPU
work when the last descriptor of its files is closed: while a forked child keeps them, it may go on. So each session has
a shared lock of a byte of its own, far behind the board's end, through an open file that children keep and the kernel
closes last (`LastLock`). The byte is never another session's, unlike the line, which says whether the lock was taken. A
session whose work is done by a server (CUDA MPS) does not take it: there closed files prove nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import stat
import struct
import time
from typing import Literal

from ipcsync._board import layout
from ipcsync._board.layout import Line, SessionLine, SlotLine, Word
from ipcsync._linux import files
from ipcsync._linux.files import LastLock
from ipcsync._linux.futex import OWNER_DIED, DeathMark
from ipcsync._linux.process import Process, pid_namespace, start_time
from ipcsync._threads import CallLock, under
from ipcsync.errors import CoordinatorLost, ProtocolError

log = logging.getLogger("ipcsync")

_HEADER = struct.Struct("=QQ16sQQQQQQQQ")
_LIFELINE = 0  # the coordinator's lock: on the header's first byte; a session's is on the first byte of its line
_LAST_LOCKS = 1 << 40  # the first byte of those that show ends
_held: dict[bytes, LastLock] = {}  # by epoch; one for each coordinator that lives
_lock = CallLock()


class Board(Line):
    """A mapped board: `words` is all of it as 8-byte words; in this process it lies at `address`, `length` bytes long.

    `header` equals `running_header` while the coordinator has neither died nor stopped, and no program has overwritten
    the header. The kernel marks a death there by a robust futex; `has_mark` is False if it has none. The file is
    allocated in full, and never truncated. Not promised: if another program does, who has it mapped dies of SIGBUS.
    """

    epoch: bytes
    sessions: int
    slots: int
    has_mark: bool

    heartbeat: Word = Word(layout.H_HEARTBEAT)  # CLOCK_MONOTONIC in ns at the coordinator's last beat
    newest: Word = Word(layout.H_NEWEST)  # the count of the newest session, stored before its line is given to it
    starts: Word = Word(layout.H_STARTS)  # how many coordinators have served with this board, one after the other

    def __init__(self, fd: int, path: str) -> None:
        self.path: str = path
        self.descriptor: int = fd
        """The open file on which this process's lifelines are, -1 once this board was closed."""
        length = os.fstat(fd).st_size
        if length < layout.HEADER:
            raise ProtocolError(f"{path} is not a board: {length} bytes", code="board")
        header = os.pread(fd, _HEADER.size, 0)
        magic, version, self.epoch, pid, started, namespace, owner, _, _, self.sessions, self.slots = _HEADER.unpack(
            header
        )
        if magic == layout.MAGIC and version != layout.VERSION:
            raise ProtocolError(f"{path} is of version {version}, and this is version {layout.VERSION}", code="version")
        self.layout: layout.Layout = layout.Layout(self.sessions, self.slots)
        if magic != layout.MAGIC or length != self.layout.size:
            raise ProtocolError(f"{path} is not a board of version {layout.VERSION}", code="board")
        # mmap keeps a duplicate of its descriptor, which forked children inherit: if it were the lifeline's, a child
        # would hold the lifeline as long as it lives.
        mapped = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            self._map = mmap.mmap(mapped, length)
        finally:
            os.close(mapped)
        self._bytes: memoryview[int] = memoryview(self._map)
        self._anchor = ctypes.c_char.from_buffer(self._map)
        super().__init__(self._bytes.cast("Q"), ctypes.addressof(self._anchor))
        self.length: int = length
        self.coordinator: tuple[int, int, int] = (pid, started, namespace)
        self.process: tuple[int, int, int] = os.getpid(), start_time(os.getpid()) or 0, pid_namespace()
        self.header: memoryview[int] = self.words[: layout.H_STATE + 1]
        self.running_header: memoryview[int] = memoryview(bytearray(header)).cast("Q")[: layout.H_STATE + 1]
        self.running_header[layout.H_OWNER] = owner if owner < OWNER_DIED else 0  # not a dead one's: so the two differ
        self.running_header[layout.H_STATE] = layout.RUNNING
        self.running_header_address: int = ctypes.addressof(ctypes.c_char.from_buffer(self.running_header))
        self.has_mark = 0 < owner < OWNER_DIED
        self._life: DeathMark | None = None
        self._lifeline: int | None = None  # the offset of the lock that shows that this session's process lives

    @classmethod
    def create(cls, path: str, epoch: bytes, sessions: int, slots: int) -> Board:
        """Make a new board file at `path` (which must not exist), hold its lifeline, and map it (coordinator).

        It gets its name last: who finds it finds it complete and locked, and a failure before that leaves nothing.
        """
        fd = os.open(os.path.dirname(path), os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
        try:
            files.try_lock(fd, _LIFELINE)
            size = layout.Layout(sessions, slots).size
            os.posix_fallocate(fd, 0, size)  # a sparse file on a full tmpfs would be SIGBUS
            me = os.getpid(), start_time(os.getpid()) or 0, pid_namespace()
            counts = time.monotonic_ns(), sessions, slots
            os.pwrite(fd, _HEADER.pack(layout.MAGIC, layout.VERSION, epoch, *me, 0, layout.RUNNING, *counts), 0)
            # os.link follows the link only if it gets a directory's descriptor, which an absolute path ignores.
            os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd, follow_symlinks=True)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, path)

    @classmethod
    def open(cls, path: str) -> Board:
        """Map the board at `path` (client). Raises OSError, or ProtocolError if the file is not a board."""
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            return cls(fd, path)
        except BaseException:
            os.close(fd)
            raise

    def check(self) -> None:
        """Raise CoordinatorLost after a stop or a death, ProtocolError if the header was overwritten."""
        if self.header == self.running_header:
            return
        if self.header[: layout.H_OWNER] == self.running_header[: layout.H_OWNER]:
            owner, state = self.header[layout.H_OWNER :]
            if state == layout.STOPPED:
                raise self.lost("stopped")
            if state == layout.RUNNING and owner == OWNER_DIED:
                raise self.lost("died")
        raise ProtocolError(f"the header of {self.path} was overwritten by another program", code="board")

    def lost(self, cause: Literal["died", "stopped"]) -> CoordinatorLost:
        """The error that says what became of the coordinator."""
        pid = self.coordinator[0]
        return CoordinatorLost(
            f"the coordinator (pid {pid}) has {cause}: all that it served is void; connect again", pid=pid, cause=cause
        )

    def who(self, serial: int) -> tuple[str, int]:
        """(name or id, pid as the coordinator sees it) of a session; ("", 0) once another session has its line."""
        line = self.session(serial & 0xFFFF)
        label, pid = line.label, line.process[0]
        return (label, pid) if line.serial == serial else ("", 0)

    def show_life(self) -> bool:
        """Have the kernel mark this process's death in the header (coordinator, at its start); False if it cannot."""
        self._life = DeathMark(self.address + layout.H_OWNER * 8)
        self._life.show()
        owner = self.running_header[layout.H_OWNER] = self.words[layout.H_OWNER]
        self.has_mark = bool(owner)
        return bool(owner)

    @property
    def coordinator_is_over(self) -> bool:
        return self.words[layout.H_STATE] == layout.STOPPED or self.words[layout.H_OWNER] == OWNER_DIED

    def session(self, index: int) -> SessionLine:
        if not 0 <= index < self.sessions:
            raise ProtocolError(f"no session line {index} on a board of {self.sessions}", code="board")
        label = self.layout.labels + index * layout.LABEL
        return SessionLine(self.words, self.address, layout.HEADER + index * layout.LINE, label)

    def slot(self, index: int) -> SlotLine:
        if not 0 <= index < self.slots:
            raise ProtocolError(f"no slot {index} on a board of {self.slots}", code="board")
        return SlotLine(self.words, self.address, self._bytes, self.layout, index)

    def end_visits(self, session: int) -> None:
        """Retract all hazards of the session that had that line, and is gone (coordinator)."""
        row, first = self.layout.hazards_row, self.layout.hazards
        column = self._bytes[first + session : first + self.slots * row : row]
        if any(column.tobytes()):
            column[:] = bytes(len(column))

    def stop(self) -> None:
        """Store that the coordinator ends, and wake every waiter (coordinator)."""
        self.words[layout.H_STATE] = layout.STOPPED
        first = self.layout.slots // 8 + layout.L_STATE
        states = self.words[first : first + self.slots * layout.WORDS : layout.WORDS]
        for index, state in enumerate(states):  # many: no line is made for a free slot
            if state != layout.FREE:
                self.slot(index).futex.wake()

    def hold_lifeline(self, line: SessionLine) -> bool:
        """Take the lock that shows that this session's process lives; False if another process has it (client)."""
        if not files.try_lock(self.descriptor, line.offset):
            return False
        self._lifeline = line.offset
        return True

    def has_lifeline(self, line: SessionLine) -> bool:
        """Whether another process holds the lifeline of `line`; False once this board was closed."""
        return self.descriptor >= 0 and files.is_locked(self.descriptor, line.offset)

    @property
    def file(self) -> str:
        """A path to the board's own file, whatever is at `path` by now."""
        return f"/proc/self/fd/{self.descriptor}"

    def show_end(self, serial: int, *, by_exec: bool = False) -> None:
        """Show the end of this process, whose session has `serial`, to others; `by_exec`: also across exec (client).

        The lock is kept while the coordinator lives, also when the session ends: its work may still be under way.
        """
        try:
            lock = under(_lock, self._show_end, serial, by_exec)
        except OSError as error:
            log.debug("the end of this process will not be seen on %s: %s", self.path, error)
            return
        if (line := self.session(serial & 0xFFFF)).serial == serial:  # not another one's by now
            line.shows_end(lock)

    def _show_end(self, serial: int, by_exec: bool) -> int:
        held = _held.get(self.epoch)
        if held is None:
            for epoch, other in _held.copy().items():
                if not other.is_held_by_others(_LIFELINE):  # its coordinator is dead, so its board is not used any more
                    del _held[epoch]
                    other.drop()
            held = LastLock(self.file)
            _held.setdefault(self.epoch, held)
        if by_exec:
            held.survive_exec()
        held.hold(_LAST_LOCKS + (serial >> 16))
        return held.inode

    def is_over(self, serial: int) -> bool:
        """Whether the process of session `serial`, which took its lock, is over; False once this board was closed.

        It counts only if the coordinator is found alive afterwards: the lock is released with it.
        """
        return self.descriptor >= 0 and not files.is_locked(self.descriptor, _LAST_LOCKS + (serial >> 16))

    @property
    def coordinator_holds_lifeline(self) -> bool:
        """Whether the coordinator's process lives, by its lock on the header; False once this board was closed."""
        return self.descriptor >= 0 and files.is_locked(self.descriptor, _LIFELINE)

    def drop_descriptor(self) -> None:
        """Close the file in a forked child: the child's copy would keep the parent's lifeline."""
        # First: another thread may ask, and the number be another file's by then.
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def close(self) -> None:
        """Release the lifeline and close the descriptor. The mapping stays while this or lines of it are in use."""
        try:
            if self._lifeline is not None and self.descriptor >= 0:
                files.unlock(self.descriptor, self._lifeline)  # a child forked just here may keep the file open
        finally:
            self.drop_descriptor()
        if self._life is not None:
            self._life.end()

    def unlink(self) -> None:
        with contextlib.suppress(FileNotFoundError):  # one that is found abandoned may be removed already
            os.unlink(self.path)


# --- the processes behind sessions ------------------------------------------------------------------------------------


class Peer:
    """The process behind one session serial; `label` is the session's name or id, `pid` as the coordinator sees it.

    A thread of the process holds a word of the session's line, which the kernel marks when the thread ends. While the
    word is not held (before the session has started, or if the kernel has no robust futexes), the kernel is asked: in
    this pid namespace by (pid, start time), elsewhere by the lifeline, the lock that the process holds on its line.
    """

    __slots__ = ("_board", "_is_own", "_process", "_shows_end", "label", "line", "lock", "pid", "serial")

    def __init__(self, board: Board, serial: int, *, is_own: bool = False) -> None:
        self.serial = serial
        self._is_own = is_own  # of this process, which is alive whenever it asks
        self._board = board
        self.line: SessionLine = board.session(serial & 0xFFFF)
        self._process: Process | None = None
        # Kept, since the line may be another session's later; ("", 0) if it is already.
        self._shows_end = self.line.end_is_shown
        self.lock = self.line.lock if self._shows_end else 0  # of what shows the process's end; 0: nothing
        self.label, self.pid = board.who(serial)  # after the process: the line was this session's then
        self._shows_end = self._shows_end and self.line.serial == serial

    def is_alive(self) -> bool:
        """Whether the process still runs and still has its session's line. Costs about 0.2 µs."""
        owner = self.line.owner  # before the serial, which another session changes later
        if self.line.serial != self.serial:
            return False
        if self._is_own:
            return True
        return not owner & OWNER_DIED if owner else self._ask_the_kernel()

    def is_over(self) -> bool | None:
        """As `Board.is_over`, of every child forked from it too; None if that is never known. Costs about 2 µs."""
        return self._board.is_over(self.serial) if self._shows_end and not self._is_own else None

    def _ask_the_kernel(self) -> bool:
        pid, started, namespace = self.line.process
        if not pid or namespace != pid_namespace():
            return self._board.has_lifeline(self.line)
        if self._process is None:
            self._process = Process(pid, started)
        return self._process.is_alive() and self.line.serial == self.serial


def peer_of(board: Board, serial: int) -> Peer:
    """The peer with that serial; this process's own session is known to live."""
    return Peer(board, serial, is_own=board.session(serial & 0xFFFF).process == board.process)


def is_abandoned(path: str) -> bool:
    """Whether `path`, which others may have made, is a board of this user without a living coordinator."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False  # gone, or another user's
    try:
        status = os.fstat(fd)
        is_own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        return is_own and not files.is_locked(fd, _LIFELINE)
    finally:
        os.close(fd)
