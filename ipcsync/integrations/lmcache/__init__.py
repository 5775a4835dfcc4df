"""LMCache's events between processes, as points: `LMCACHE_DEVICE_BACKEND=ipcsync`."""

from __future__ import annotations

from ipcsync.integrations.lmcache.events import IpcSyncEvent, IpcSyncEventBackend

__all__ = ["IpcSyncEvent", "IpcSyncEventBackend"]
