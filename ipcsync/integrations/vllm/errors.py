"""The errors of the plugin for vLLM; it needs neither torch nor vLLM."""

from __future__ import annotations

from ipcsync.errors import IpcSyncError


class WorkerAsleep(IpcSyncError):  # noqa: N818 - as the errors of ipcsync are named
    """An update came while the worker sleeps (vLLM's sleep mode), so that its weights have no memory."""


class RankFailed(IpcSyncError):  # noqa: N818 - as the errors of ipcsync are named
    """Another rank of the trainer, `rank`, failed in this update: no rank waits for it."""

    rank: int = -1
