"""The runtime directory: private, locked before a socket is bound in it, and cleaned after a dead coordinator."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import glob
import json
import os
import signal
import stat
import time
from typing import NamedTuple

from ipcsync._board.board import is_abandoned
from ipcsync._linux.process import pid_namespace
from ipcsync._wire import endpoints

LOCK = "lock"
KEEPER = "keeper"  # behind the pid in the lock file of a coordinator that has one
RELOAD = signal.SIGUSR2  # asks a keeper to load the code on disk
OUTCOME = "reload.json"  # the result of the last reload, in the directory
_NEW = ".new"  # after its name while it is written
_SIGNED_LINES, _SIGNED = 5, 512  # of a signed lock file, and the most bytes
SHUT = ".full"  # after the name of a socket while no client may connect to it
_SHARED_BOARDS = "/dev/shm/ipcsync-board"  # noqa: S108 - made with O_EXCL, mode 0600, under a random name
_LONGEST_LOOK_S = 5.0  # for which a coordinator that starts waits for processes that only look who serves


class RuntimeDirError(Exception):
    """The runtime directory cannot be used; the message says why and what to do."""


class RuntimeDir:
    """A directory of mode 0700 that this process alone serves.

    Raises RuntimeDirError if it belongs to another user, has another mode, has a file other than a socket at a socket's
    name, makes a socket's path too long, or is served by another coordinator. Nothing is touched then.

    A user, or a cleaner of /tmp, may remove it, and another coordinator may start at the same path. The directory is
    then no longer this process's, which renames and removes nothing in it any more.
    """

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        try:
            self.endpoint = endpoints.endpoint_in(self.path)
            self.feed = endpoints.endpoint_in(self.path, endpoints.FEED)
        except ValueError as error:
            raise RuntimeDirError(str(error)) from None
        self.made = self._prepare()
        self.lock = self._take_lock()
        self.place = Place(self.path, self.lock)
        self.sockets = self.place.sockets
        try:
            for socket in self.sockets:
                self._check_socket(socket)
                self._check_socket(socket + SHUT)
        except RuntimeDirError:
            self._leave()
            raise
        self._remove_files()  # of a dead coordinator: we hold the lock
        self._remove_abandoned_boards()

    def _prepare(self) -> bool:
        made = False
        if not os.path.lexists(self.path):
            try:
                os.makedirs(os.path.dirname(self.path), exist_ok=True)
                made = self._make()
            except OSError as error:
                raise RuntimeDirError(f"cannot make the runtime directory {self.path}: {error.strerror}") from None
        status = os.lstat(self.path)
        if not stat.S_ISDIR(status.st_mode):
            raise RuntimeDirError(f"the runtime directory {self.path} is not a directory (a link is refused too)")
        if status.st_uid != os.geteuid():
            raise RuntimeDirError(
                f"the runtime directory {self.path} belongs to uid {status.st_uid}, not to {os.geteuid()}"
            )
        if stat.S_IMODE(status.st_mode) != 0o700:
            raise RuntimeDirError(
                f"the runtime directory {self.path} has mode {stat.S_IMODE(status.st_mode):04o}; "
                f"it must be 0700 (chmod 0700 {self.path})"
            )
        return made

    def _make(self) -> bool:
        try:
            os.mkdir(self.path, mode=0o700)
        except FileExistsError:
            return False  # another coordinator starts at the same time: the lock decides
        os.chmod(self.path, 0o700)  # whatever the umask took away
        return True

    def _take_lock(self) -> int:
        self._lock_path = os.path.join(self.path, LOCK)
        while True:
            fd = self._try_lock()
            # A coordinator that ends removes its lock file, and a lock of a removed file excludes no process.
            if _is_still_at(fd, self._lock_path):
                break
            os.close(fd)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        return fd

    def sign(self, role: str = "") -> None:
        """Write into the lock file who serves here, in which role, and by which sockets, which are bound by now."""
        sockets = " ".join(map(_mark_of, self.sockets))
        namespace = pid_namespace() if role else ""  # for those who signal it by its pid
        signed = f"{os.getpid()}\n{role}\n{namespace}\n{os.urandom(8).hex()}\n{sockets}\n".encode()
        os.pwrite(self.lock, signed, 0)
        os.ftruncate(self.lock, len(signed))

    def _try_lock(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(self._lock_path, flags, 0o600)
        except OSError as error:
            raise RuntimeDirError(f"cannot open {self._lock_path}: {error.strerror}") from None
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise RuntimeDirError(f"{self._lock_path} is not a regular file, and is left untouched: remove it first")
        until = time.monotonic() + _LONGEST_LOOK_S
        while not _locks(fd, fcntl.LOCK_EX):
            if not _locks(fd, fcntl.LOCK_SH):
                pid = os.pread(fd, 32, 0).decode(errors="replace").partition("\n")[0] or "unknown"
                os.close(fd)
                raise RuntimeDirError(f"another coordinator (pid {pid}) serves {self.path}")
            fcntl.flock(fd, fcntl.LOCK_UN)  # only `who_serves` of other processes has it, for a moment
            if time.monotonic() >= until:
                os.close(fd)
                raise RuntimeDirError(
                    f"no coordinator serves {self.path}, but a process locks {self._lock_path}: end it"
                )
            time.sleep(0.001)
        return fd

    def _check_socket(self, path: str) -> None:
        if os.path.lexists(path) and not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise RuntimeDirError(f"{path} is not a socket, and is left untouched: remove it first")

    def board_path(self, epoch: bytes) -> str:
        """Where the board of this epoch goes: here if this is tmpfs, else on /dev/shm under a random name."""
        if is_tmpfs(self.path):
            return os.path.join(self.path, f"board-{epoch.hex()}")
        return f"{_SHARED_BOARDS}-{os.getuid()}-{epoch.hex()}"

    def _remove_abandoned_boards(self) -> None:
        for start in (os.path.join(self.path, "board"), f"{_SHARED_BOARDS}-{os.getuid()}"):
            for board in glob.glob(f"{glob.escape(start)}-*"):
                if is_abandoned(board):
                    with _gone_is_fine():
                        os.unlink(board)

    def close(self) -> None:
        """Remove all files that were made here, and the directory itself if it was made here and is empty."""
        if self.place.is_own:
            self._remove_files()
        self._leave()

    def _remove_files(self) -> None:
        for path in (*self.sockets, *(socket + SHUT for socket in self.sockets)):
            with _gone_is_fine():
                os.unlink(path)
        for name in (OUTCOME, OUTCOME + _NEW):
            with contextlib.suppress(OSError):  # it may be anything: no other file depends on it
                os.unlink(os.path.join(self.path, name))

    def _leave(self) -> None:
        is_own = self.place.is_own
        if is_own:
            with _gone_is_fine():
                os.unlink(os.path.join(self.path, LOCK))
        os.close(self.lock)
        if is_own and self.made:
            with contextlib.suppress(OSError):  # not empty: others put something in it, or serve it by now
                os.rmdir(self.path)


class Place:
    """A coordinator's place: the runtime directory `path`, while its lock file is the open file `lock`, or says that.

    A cleaner of /tmp may remove some of the files only: `mend` makes a lock file anew, and who bound a socket, that.
    """

    def __init__(self, path: str, lock: int) -> None:
        self.path = path
        self.sockets = [
            endpoints.socket_path(endpoints.endpoint_in(path, name)) for name in (endpoints.SOCKET, endpoints.FEED)
        ]
        self._lock = lock
        self._lock_path = os.path.join(path, LOCK)
        self._new_lock = -1  # the one that was made anew, locked by this process
        self._new_marks: dict[str, str] = {}  # of the sockets that this process bound anew

    @property
    def is_own(self) -> bool:
        """Whether the path still leads here. If not, clients cannot find this coordinator, but perhaps another one."""
        return _is_still_at(self._lock, self._lock_path) or self._says_the_same()

    def _says_the_same(self) -> bool:
        signed = os.pread(self._lock, _SIGNED, 0)
        try:
            with open(self._lock_path, "rb", opener=_at_once) as file:
                return signed.count(b"\n") > _SIGNED_LINES - 1 and file.read(_SIGNED + 1) == signed
        except OSError:
            return False

    def mend(self) -> bool:
        """Lock a lock file here that says what the removed one said; whether one had to be made. OSError if that fails.

        Nothing is done if the removed one was never signed, or the directory, or the lock file, is another's by now.
        """
        if _is_still_at(self._lock, self._lock_path):
            return False
        if self._new_lock >= 0 and _is_still_at(self._new_lock, self._lock_path):
            return False
        made = not os.path.lexists(self._lock_path)
        if made and not self._make_lock():
            return False
        if self._says_the_same():  # made here, or by a coordinator before this one
            fd = os.open(self._lock_path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            self._drop_new_lock()
            self._new_lock = fd
            if not _locks(fd, fcntl.LOCK_EX):
                self._drop_new_lock()  # a coordinator that is about to end has it: again at the next look
        return made

    def _make_lock(self) -> bool:
        status = os.stat(self.path)  # FileNotFoundError: all was removed
        signed = os.pread(self._lock, _SIGNED, 0)
        if (status.st_uid, stat.S_IMODE(status.st_mode)) != (os.geteuid(), 0o700) or signed.count(
            b"\n"
        ) < _SIGNED_LINES:
            return False
        written = f"{self._lock_path}{_NEW}{os.getpid()}"
        with open(written, "wb", opener=_private) as file:
            file.write(signed)
        try:
            os.link(written, self._lock_path)  # unless another coordinator was quicker
        except FileExistsError:
            return False
        finally:
            os.unlink(written)
        return True

    def _drop_new_lock(self) -> None:
        if self._new_lock >= 0:
            os.close(self._new_lock)
            self._new_lock = -1

    def lost_sockets(self) -> list[str]:
        """The paths of the sockets that were removed, or replaced, since they were bound for this coordinator."""
        *_, signed = os.pread(self._lock, _SIGNED, 0).decode(errors="replace").split("\n")[:_SIGNED_LINES]
        marks = dict(zip(self.sockets, signed.split(" "), strict=False))
        marks.update(self._new_marks)
        return [path for path in self.sockets if marks.get(path) not in (_mark_of(path), _mark_of(path + SHUT))]

    def saw_bound(self, path: str) -> None:
        """Note that this process has just bound a new socket at `path`."""
        self._new_marks[path] = _mark_of(path)

    def shut(self) -> None:
        """Refuse new connections: the sockets get other names."""
        self._rename([(path, path + SHUT) for path in self.sockets])

    def reopen(self) -> None:
        """Allow new connections again."""
        self._rename([(path + SHUT, path) for path in self.sockets])

    def _rename(self, names: list[tuple[str, str]]) -> None:
        if self.is_own:
            for old, new in names:
                with _gone_is_fine():
                    os.rename(old, new)


def write_outcome(path: str, began_ns: int, why_not: str | None, note: str = "") -> None:
    """Write the result of the reload that began at `began_ns` into the directory `path`. OSError if that fails."""
    name = os.path.join(path, OUTCOME)
    with open(name + _NEW, "w", opener=_private) as file:
        json.dump({"began_ns": began_ns, "why_not": why_not or "", "note": note}, file)
    os.rename(name + _NEW, name)


def read_outcome(path: str) -> tuple[int, str | None, str]:
    """(when the last finished reload began, why it failed or None, what it changed); (0, None, "") without one."""
    try:
        with open(os.path.join(path, OUTCOME), "rb", opener=_at_once) as file:
            found = json.load(file)
        return int(found["began_ns"]), str(found["why_not"]) or None, str(found["note"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0, None, ""


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _at_once(path: str, flags: int) -> int:
    """Open a file for reading, which may be anything: no link is followed, and no writer of a pipe is waited for."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def _mark_of(path: str) -> str:
    """What tells a file from one that is made later at its path; empty if there is none."""
    try:
        status = os.lstat(path)
    except OSError:
        return ""
    return f"{status.st_ino}-{status.st_mtime_ns}"  # numbers alone are used again


class Serving(NamedTuple):
    """The process that serves a runtime directory. `pid` is valid in its pid namespace; 0: it does not say which."""

    pid: int
    role: str
    namespace: int


def who_serves(path: str) -> Serving | None:
    """What serves a runtime directory, None if nothing does. The role may be empty."""
    try:
        fd = _at_once(os.path.join(path, LOCK), os.O_RDONLY)
    except OSError:
        return None
    try:
        if _locks(fd, fcntl.LOCK_SH):
            return None
        pid, role, namespace, *_ = [*os.pread(fd, 64, 0).decode(errors="replace").split("\n"), "", ""]
        return Serving(int(pid), role, int(namespace) if namespace.isdigit() else 0) if pid.isdigit() else None
    except RuntimeDirError:
        return None  # where nothing can be locked, no coordinator starts
    finally:
        os.close(fd)


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


def _gone_is_fine() -> contextlib.suppress:
    """Another coordinator that starts, or a user, may remove the same file."""
    return contextlib.suppress(FileNotFoundError)


def _is_still_at(fd: int, path: str) -> bool:
    """Whether the path names this open file."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


def is_tmpfs(path: str) -> bool:
    """Whether `path` lies on tmpfs, whose pages CUDA can register (it refuses those of a file on disk)."""
    return _filesystem(path) == 0x01021994


def _filesystem(path: str) -> int:
    buffer = ctypes.create_string_buffer(256)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.statfs(os.fsencode(path), buffer) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), path)
    return int(ctypes.c_long.from_buffer(buffer).value)
