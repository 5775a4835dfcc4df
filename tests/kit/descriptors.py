"""What a process has open."""

from __future__ import annotations

import contextlib
import os


def descriptors(pid: int | None = None) -> dict[int, str]:
    """What each file descriptor of a process (None: this one) leads to, without those that are closed meanwhile."""
    directory = f"/proc/{pid or 'self'}/fd"
    found = {}
    for number in os.listdir(directory):
        with contextlib.suppress(FileNotFoundError):  # that of the listing is one
            found[int(number)] = os.readlink(f"{directory}/{number}")
    return found
