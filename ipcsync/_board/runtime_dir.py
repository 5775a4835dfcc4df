"""The runtime directory: private, locked before a socket is bound in it, and cleaned after a dead coordinator.

The lock is the directory's own (flock(2)), so no cleaner of /tmp can remove it without the directory, and that of
systemd passes over a directory that is locked. A file in it says who serves.
"""

from __future__ import annotations

import ctypes
import fcntl
import glob
import os
import signal
import stat
import time
from contextlib import suppress
from typing import Annotated, TypeVar

import msgspec

from ipcsync._board.board import is_abandoned
from ipcsync._linux.process import pid_namespace
from ipcsync._wire import endpoints
from ipcsync._wire.codec import UNREADABLE

SERVING = "lock"  # who has locked the directory, and so serves; and the marks of the sockets
KEEPER = "keeper"  # the role of a coordinator's process that has one
RELOAD = signal.SIGUSR2  # asks a keeper to load the code on disk
OUTCOME = "reload.json"  # the result of the last reload
_NEW = ".new"  # after a file's name while it is written
_MOST_BYTES = 1 << 16  # of such a file
SHUT = ".full"  # after the name of a socket while no client may connect to it
_SHARED_BOARDS = "/dev/shm/ipcsync-board"  # noqa: S108 - made with O_EXCL, mode 0600, under a random name
_LONGEST_LOOK_S = 5.0  # for which a coordinator that starts waits for processes that only look into the directory

_T = TypeVar("_T")


class RuntimeDirError(Exception):
    """The runtime directory cannot be used; the message says why and what to do."""


class Serving(msgspec.Struct, frozen=True):
    """The process that serves a runtime directory."""

    pid: Annotated[int, msgspec.Meta(gt=0, lt=1 << 31)]  # valid in its pid namespace; 0: it is not known
    role: str
    namespace: int
    sockets: tuple[str, str] = ("", "")  # the marks of those that it bound, unlike others made later at their paths


class Outcome(msgspec.Struct, frozen=True):
    """The result of the reload that began at `began_ns`; `why_not` is empty if the new code serves."""

    began_ns: int = 0
    why_not: str = ""
    note: str = ""


class Place:
    """A coordinator's place: the runtime directory `path`, as long as that leads to the locked directory `lock`.

    `pid` serves there, in `role`. A user, or a cleaner of /tmp, may remove the directory, and another coordinator may
    start at the same path: then nothing there is renamed or removed any more. If single files are removed, `mend` makes
    the one that says who serves anew, and who bound a socket, that.
    """

    def __init__(self, path: str, lock: int, pid: int, role: str = "") -> None:
        self.path = path
        self.lock = lock
        self.sockets = [
            endpoints.socket_path(endpoints.endpoint_in(path, name)) for name in (endpoints.SOCKET, endpoints.FEED)
        ]
        # The keeper made the sockets, also those of a coordinator that follows another one.
        self._serving = Serving(pid, role, pid_namespace(), _serving_in(path).sockets)
        self._marks = dict(zip(self.sockets, self._serving.sockets, strict=True))

    @property
    def is_own(self) -> bool:
        """Whether the path still leads here. If not, clients cannot find this coordinator, but perhaps another one."""
        return _is_still_at(self.lock, self.path)

    def mend(self) -> bool:
        """Say anew who serves, if that file was removed; whether it was. OSError if that fails."""
        if not self.is_own or os.path.lexists(os.path.join(self.path, SERVING)):
            return False
        _write(self.path, SERVING, self._serving)
        return True

    def lost_sockets(self) -> list[str]:
        """The paths of the sockets that were removed, or replaced, since they were bound for this coordinator."""
        return [
            path for path, mark in self._marks.items() if mark not in {_mark_of(path), _mark_of(path + SHUT)} - {""}
        ]

    def saw_bound(self, path: str) -> None:
        self._marks[path] = _mark_of(path) or _mark_of(path + SHUT)

    def shut(self) -> None:
        """Refuse new connections: the sockets get other names."""
        self._rename("", SHUT)

    def reopen(self) -> None:
        self._rename(SHUT, "")

    def _rename(self, before: str, after: str) -> None:
        for path in self.sockets if self.is_own else ():
            with suppress(FileNotFoundError):
                os.rename(path + before, path + after)


class RuntimeDir(Place):
    """A directory of mode 0700 that this process alone serves.

    Raises RuntimeDirError if it belongs to another user, has another mode, has a file other than a socket at a socket's
    name, makes a socket's path too long, or is served by another coordinator. Nothing is touched then.
    """

    def __init__(self, path: str) -> None:
        path = os.path.abspath(path)
        try:
            self.endpoint = endpoints.endpoint_in(path)  # the feed's is shorter
        except ValueError as error:
            raise RuntimeDirError(str(error)) from None
        self.made, lock = _take(path)
        super().__init__(path, lock, os.getpid())
        try:
            for file in self._socket_files():
                if os.path.lexists(file) and not stat.S_ISSOCK(os.lstat(file).st_mode):
                    raise RuntimeDirError(f"{file} is not a socket, and is left untouched: remove it first")
            self._remove_files()  # of a dead coordinator: we hold the lock
            self.sign()
        except RuntimeDirError:
            self._leave()
            raise
        for start in (os.path.join(path, "board"), f"{_SHARED_BOARDS}-{os.getuid()}"):
            for board in filter(is_abandoned, glob.glob(f"{glob.escape(start)}-*")):
                with suppress(FileNotFoundError):
                    os.unlink(board)

    def sign(self, role: str = "") -> None:
        """Say who serves here, in which role, and by which sockets, which are bound by now."""
        self._marks = {path: _mark_of(path) for path in self.sockets}
        requests, feed = self._marks.values()
        self._serving = msgspec.structs.replace(self._serving, role=role, sockets=(requests, feed))
        try:
            _write(self.path, SERVING, self._serving)
        except OSError as error:
            raise RuntimeDirError(f"cannot write {self.path}/{SERVING}: {error.strerror}") from None

    def board_path(self, epoch: bytes) -> str:
        """Where the board of this epoch goes: here if this is tmpfs, else on /dev/shm under a random name."""
        if is_tmpfs(self.path):
            return os.path.join(self.path, f"board-{epoch.hex()}")
        return f"{_SHARED_BOARDS}-{os.getuid()}-{epoch.hex()}"

    def close(self) -> None:
        """Remove all files that were made here, and the directory itself if it was made here and is empty."""
        if self.is_own:
            self._remove_files()
        self._leave()

    def _socket_files(self) -> list[str]:
        return [*self.sockets, *(socket + SHUT for socket in self.sockets)]

    def _remove_files(self) -> None:
        for path in self._socket_files():
            with suppress(FileNotFoundError):
                os.unlink(path)
        for name in (SERVING, SERVING + _NEW, OUTCOME, OUTCOME + _NEW):
            with suppress(OSError):  # it may be anything: no other file depends on it
                os.unlink(os.path.join(self.path, name))

    def _leave(self) -> None:
        if self.is_own and self.made:
            with suppress(OSError):  # not empty: others put something in it
                os.rmdir(self.path)
        os.close(self.lock)  # last: who locks it from here on sees that it is not there any more


def _take(path: str) -> tuple[bool, int]:
    """Whether the directory was made here, and a descriptor of it that has the lock."""
    while True:
        made = _prepare(path)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # a coordinator that ends has removed it
        try:
            _lock(fd, path)
        except BaseException:
            os.close(fd)
            raise
        if _is_still_at(fd, path):
            return made, fd
        os.close(fd)


def _prepare(path: str) -> bool:
    """Make the directory if there is none; whether it was made here."""
    made = False
    try:
        if not os.path.lexists(path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with suppress(FileExistsError):  # another coordinator starts at the same time: the lock decides
                os.mkdir(path, mode=0o700)
                os.chmod(path, 0o700)  # whatever the umask took away
                made = True
        status = os.lstat(path)
    except OSError as error:
        raise RuntimeDirError(f"cannot make the runtime directory {path}: {error.strerror}") from None
    if not stat.S_ISDIR(status.st_mode):
        raise RuntimeDirError(f"the runtime directory {path} is not a directory (a link is refused too)")
    if status.st_uid != os.geteuid():
        raise RuntimeDirError(f"the runtime directory {path} belongs to uid {status.st_uid}, not to {os.geteuid()}")
    if stat.S_IMODE(status.st_mode) != 0o700:
        raise RuntimeDirError(
            f"the runtime directory {path} has mode {stat.S_IMODE(status.st_mode):04o}; "
            f"it must be 0700 (chmod 0700 {path})"
        )
    return made


def _lock(fd: int, path: str) -> None:
    until = time.monotonic() + _LONGEST_LOOK_S
    while not _locks(fd, fcntl.LOCK_EX):
        is_shared = _locks(fd, fcntl.LOCK_SH)
        if is_shared:
            fcntl.flock(fd, fcntl.LOCK_UN)  # only `who_serves` of other processes has it, for a moment
        # One that starts has it before it says who it is, and systemd's cleaner has it while it looks at the files.
        pid = 0 if is_shared else _serving_in(path).pid
        is_late = time.monotonic() >= until
        if not is_shared and (is_late or os.path.exists(f"/proc/{pid or -1}")):
            raise RuntimeDirError(f"another coordinator (pid {pid or 'unknown'}) serves {path}")
        if is_late:
            raise RuntimeDirError(f"no coordinator serves {path}, but a process locks that directory: end it")
        time.sleep(0.001)


def write_outcome(path: str, outcome: Outcome) -> None:
    """Write the result of a reload into the directory `path`. OSError if that fails.

    Room is kept there for the next one, which may find the file system full.
    """
    _write(path, OUTCOME, outcome)
    with suppress(OSError), open(os.path.join(path, OUTCOME + _NEW), "wb", opener=_opened) as file:
        file.write(b" ")


def read_outcome(path: str) -> Outcome:
    """The result of the last finished reload; without one, it began at 0."""
    return _read(path, OUTCOME, Outcome) or Outcome()


def _write(directory: str, name: str, found: msgspec.Struct) -> None:
    path = os.path.join(directory, name)
    try:
        with open(path + _NEW, "wb", opener=_opened) as file:
            file.write(msgspec.json.encode(found))
            file.truncate()
        os.rename(path + _NEW, path)
    except OSError:  # the disk is full, or something else is there
        with suppress(OSError):
            os.unlink(path + _NEW)
        raise


def _read(directory: str, name: str, kind: type[_T]) -> _T | None:
    """What such a file says; None if there is none, or anything else in its place."""
    try:
        with open(os.path.join(directory, name), "rb", opener=_opened) as file:
            return msgspec.json.decode(file.read(_MOST_BYTES), type=kind)
    except (OSError, *UNREADABLE):
        return None


def _opened(path: str, flags: int) -> int:
    """Without following a link, waiting at a pipe that somebody made there, or giving a file's room back first."""
    return os.open(path, flags & ~os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)


def _mark_of(path: str) -> str:
    """What tells a file from one that is made later at its path; empty if there is none."""
    try:
        status = os.lstat(path)
    except OSError:
        return ""
    return f"{status.st_ino}-{status.st_mtime_ns}"  # numbers alone are used again


def _serving_in(path: str) -> Serving:
    return _read(path, SERVING, Serving) or Serving(0, "", 0)


def who_serves(path: str) -> Serving | None:
    """What serves a runtime directory, None if nothing does. The role may be empty."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if _locks(fd, fcntl.LOCK_SH):
            return None
    except RuntimeDirError:
        return None  # where nothing can be locked, no coordinator starts
    finally:
        os.close(fd)
    return _serving_in(path)


def _locks(fd: int, kind: int) -> bool:
    """Take that lock, unless another process has one that excludes it; whether it was taken."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        path = os.readlink(f"/proc/self/fd/{fd}")
        raise RuntimeDirError(
            f"{path} cannot be locked ({error.strerror}): choose a runtime directory on a file system with locks, and "
            "allow flock where a sandbox filters system calls"
        ) from None
    return True


def _is_still_at(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except (FileNotFoundError, NotADirectoryError):
        return False


def is_tmpfs(path: str) -> bool:
    """Whether `path` lies on tmpfs, whose pages CUDA can register (it refuses those of a file on disk)."""
    buffer = ctypes.create_string_buffer(256)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.statfs(os.fsencode(path), buffer) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), path)
    return ctypes.c_long.from_buffer(buffer).value == 0x01021994
