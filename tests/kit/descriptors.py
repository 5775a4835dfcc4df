"""What a process has open."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
from collections.abc import Iterator


def descriptors(pid: int | None = None) -> dict[int, str]:
    """What each file descriptor of a process (None: this one) leads to, without those that are closed meanwhile.

    Of this one without what is garbage, as earlier tests leave it: it might be collected at any time.
    """
    if pid is None:
        gc.collect()
    directory = f"/proc/{pid or 'self'}/fd"
    found = {}
    for number in os.listdir(directory):
        with contextlib.suppress(FileNotFoundError):  # that of the listing is one
            found[int(number)] = os.readlink(f"{directory}/{number}")
    return found


@contextlib.contextmanager
def none_left() -> Iterator[None]:
    """In the block, this process gets no further file descriptor, as if others took each that it closes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
