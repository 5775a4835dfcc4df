"""The memory that a coordinator's journal lies in, which the keeper holds: two logs, and a page of words about them.

A killed process loses nothing that it stored there, and its stores come in order. So one store of a word makes a record
count, and one makes a new log count.
"""

from __future__ import annotations

import mmap
import os
import time

VERSION = 1
UNREADABLE = 3
"""The exit status of a coordinator that cannot read it."""

# Words of 8 bytes. Which log counts (0 or 1); of each, how many bytes are valid, and up to which one all that follows
# from its records has been carried out.
CURRENT, VALID, CARRIED_OUT = 0, 1, 3
# What the request in hand looks like, 0: none; how many replies this start has sent; whether it is about to end.
IN_HAND, REPLIES, IS_ENDING = 5, 6, 7
# Requests in whose hands coordinators died: pairs of what it looks like, and how many did.
SUSPECTS, SUSPECT_COUNT = 8, 8


class JournalFiles:
    """The descriptors of the page of words and of both logs."""

    def __init__(self, words: int, logs: tuple[int, int]) -> None:
        self.descriptors = (words, *logs)
        self.logs = logs
        self.words = memoryview(mmap.mmap(words, mmap.PAGESIZE)).cast("Q")

    @classmethod
    def create(cls) -> JournalFiles:
        """New and empty ones."""
        words, *logs = (os.memfd_create(f"ipcsync-journal-{part}") for part in ("words", "0", "1"))
        os.posix_fallocate(words, 0, mmap.PAGESIZE)
        return cls(words, (logs[0], logs[1]))

    def close(self) -> None:
        """Give the descriptors back."""
        for descriptor in self.descriptors:
            os.close(descriptor)

    def save(self, directory: str) -> str:
        """Write what counts to a file that only this user reads, for inspection; its path, or why there is none."""
        which = self.words[CURRENT] & 1
        path = os.path.join(directory, f"journal-{time.time_ns()}")
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(os.pread(self.logs[which], self.words[VALID + which], 0))
        except OSError as error:
            return f"not kept: {error}"
        return path
