"""The runtime directory: private, locked before anything is bound in it, and cleaned of what a dead one left."""

from __future__ import annotations

import fcntl
import glob
import os
import stat

from ipcsync._board.board import is_abandoned, is_tmpfs
from ipcsync._wire import endpoints


class RuntimeDirError(Exception):
    """The runtime directory cannot be used; the message says why and what to do."""


class RuntimeDir:
    """A directory of mode 0700 that this process alone serves.

    Raises RuntimeDirError if it belongs to somebody else, has another mode, holds something that is no socket where a
    socket must be, gives too long a path, or is served by another coordinator. Nothing is touched then.
    """

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        try:
            self.endpoint = endpoints.endpoint_in(self.path)
            self.feed = endpoints.endpoint_in(self.path, endpoints.FEED)
        except ValueError as error:
            raise RuntimeDirError(str(error)) from None
        self.made = self._prepare()
        self._fd = self._lock()
        self.sockets = [endpoints.socket_path(self.endpoint), endpoints.socket_path(self.feed)]
        try:
            for socket in self.sockets:
                self._check_socket(socket)
        except RuntimeDirError:
            self._unlock()
            raise
        for socket in self.sockets:
            if os.path.lexists(socket):
                os.unlink(socket)  # a dead coordinator's: we hold the lock
        self._remove_abandoned_boards()

    def _prepare(self) -> bool:
        made = False
        if not os.path.lexists(self.path):
            try:
                os.makedirs(self.path, mode=0o700)
            except OSError as error:
                raise RuntimeDirError(f"cannot make the runtime directory {self.path}: {error.strerror}") from None
            os.chmod(self.path, 0o700)
            made = True
        status = os.lstat(self.path)
        if not stat.S_ISDIR(status.st_mode):
            raise RuntimeDirError(f"the runtime directory {self.path} is no directory (a link is refused too)")
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

    def _lock(self) -> int:
        self._lock_path = os.path.join(self.path, "lock")
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(self._lock_path, flags, 0o600)
        except OSError as error:
            raise RuntimeDirError(f"cannot open {self._lock_path}: {error.strerror}") from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(fd)
            raise RuntimeDirError(f"another coordinator (pid {pid}) serves {self.path}") from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        return fd

    def _check_socket(self, path: str) -> None:
        if os.path.lexists(path) and not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise RuntimeDirError(f"{path} is not a socket, and is left untouched: remove it first")

    def board_path(self, epoch: bytes) -> str:
        """Where the board of this epoch goes: here if this is tmpfs, else on /dev/shm under a random name."""
        if is_tmpfs(self.path):
            return os.path.join(self.path, f"board-{epoch.hex()}")
        return os.path.join("/dev/shm", f"ipcsync-board-{os.getuid()}-{epoch.hex()}")  # noqa: S108 - O_EXCL, mode 0600

    def _remove_abandoned_boards(self) -> None:
        patterns = [os.path.join(self.path, "board-*"), f"/dev/shm/ipcsync-board-{os.getuid()}-*"]
        for pattern in patterns:
            for board in glob.glob(pattern):
                if is_abandoned(board):
                    with _gone_is_fine():
                        os.unlink(board)

    def _unlock(self) -> None:
        os.close(self._fd)

    def close(self) -> None:
        """Remove the sockets and the lock file, and the directory itself if it was made here and is empty."""
        for path in [*self.sockets, self._lock_path]:
            with _gone_is_fine():
                os.unlink(path)
        self._unlock()
        if self.made and not os.listdir(self.path):
            os.rmdir(self.path)


class _gone_is_fine:  # noqa: N801 - reads as a phrase
    """Two coordinators that start at once may remove the same leftover."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        return kind is not None and issubclass(kind, FileNotFoundError)
