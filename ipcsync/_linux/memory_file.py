"""Files without a name that live in memory, and as long as a process has them open."""

from __future__ import annotations

import os

_TMPFS = "/dev/shm"  # noqa: S108 - a file there that has no name


def memory_file(name: str) -> int:
    """The descriptor of an empty one, closed by exec. `name` is for those who look at /proc. OSError if there is none.

    Where a sandbox refuses memfd_create(2), it is on /dev/shm, whose room it takes.
    """
    try:
        return os.memfd_create(name)
    except OSError as refused:
        try:
            return os.open(_TMPFS, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
        except OSError:
            raise refused from None
