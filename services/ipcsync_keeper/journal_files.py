"""The memory of a coordinator's journal, which the keeper holds: two logs, and a page of words about them.

Stores of a killed process survive, and are visible in order. So one store of a word makes a record valid, and one makes
a new log the current one.
"""

from __future__ import annotations

import mmap
import os
import time

from ipcsync._linux.files import memory_file

VERSION = 6
UNREADABLE = 3
"""The exit status of a coordinator that cannot read the journal."""

# Words of 8 bytes: which log is the current one (0 or 1); for each log, how many bytes are valid, and up to which byte
# the effects of its records have been carried out.
CURRENT, VALID, CARRIED_OUT = 0, 1, 3
# The fingerprint of the current request, 0: none; how many replies this start has sent; whether it is about to end.
CURRENT_REQUEST, REPLIES, IS_ENDING = 5, 6, 7
# Requests during which coordinators died: pairs of fingerprint and suspicion.
CRASHES, CRASH_COUNTERS = 8, 8
# Whether the last coordinator was killed by another process than the keeper.
KILLED_FROM_OUTSIDE = CRASHES + 2 * CRASH_COUNTERS
# How many replies of a session are kept: the most that any coordinator was set to.
MOST_REPLIES = KILLED_FROM_OUTSIDE + 1


class JournalFiles:
    """The descriptors of the page of words and of both logs."""

    def __init__(self, words: int, logs: tuple[int, int]) -> None:
        self.descriptors = (words, *logs)
        self.logs = logs
        self.words = memoryview(mmap.mmap(words, mmap.PAGESIZE)).cast("Q")

    @classmethod
    def create(cls) -> JournalFiles:
        """Create empty ones."""
        words, *logs = (memory_file(f"ipcsync-journal-{part}") for part in ("words", "0", "1"))
        os.posix_fallocate(words, 0, mmap.PAGESIZE)
        return cls(words, (logs[0], logs[1]))

    def save(self, directory: str) -> str:
        """Write the valid records to a file for inspection, for this user only; its path, or why there is none."""
        which = self.words[CURRENT] & 1
        path = os.path.join(directory, f"journal-{time.time_ns()}")
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(os.pread(self.logs[which], self.words[VALID + which], 0))
        except OSError as error:
            return f"not kept: {error}"
        return path
