"""Plugins for other projects, loaded by their plugin interfaces: `lmcache`, `ray`, `vllm`. And hooks for `torch`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import ipcsync
from ipcsync.errors import IpcSyncError, RecorderLost
from ipcsync.typing import StreamLike

_RESUME_S = 1.0


@contextmanager
def failing_once(stream: StreamLike | None) -> Iterator[None]:
    """Around a record on `stream`: have what is lost there fail this one, and no later one.

    Other peers are served on it too. Not around a wait, whose error tells of one point only, while all that is lost on
    the stream would be forgotten.
    """
    try:
        yield
    except RecorderLost:
        with suppress(IpcSyncError):  # WaitTimeout: the stream may never get past that wait
            ipcsync.default_client().resume(stream, _RESUME_S)
        raise
