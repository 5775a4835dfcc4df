"""Streams that serve many peers, of which one may die."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import ipcsync
from ipcsync.errors import IpcSyncError, RecorderLost
from ipcsync.typing import StreamLike

_RESUME_S = 1.0


@contextmanager
def failing_once(stream: StreamLike | None) -> Iterator[None]:
    """Have a lost wait on `stream` fail the call that meets it, and no later one: other peers are served there too."""
    try:
        yield
    except RecorderLost:
        with suppress(IpcSyncError):  # WaitTimeout: the stream may never get past that wait
            ipcsync.default_client().resume(stream, _RESUME_S)
        raise
