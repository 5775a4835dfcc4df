"""Hooks for torch's CUDA graphs, so that `Client.next` can name the points of replays that are launched deep within.

ipcsync.integrations.torch.install()
with client.next({kv: point}, {done: event}) as replay:
    engine.step()
"""

from __future__ import annotations

import sys
from typing import Any

from ipcsync.client import graphs as replays
from ipcsync.errors import IpcSyncError

__all__ = ["install"]

_HOOKS = {"register_graph_replay_start_hook": replays.begins, "register_graph_replay_end_hook": replays.ends}


def install() -> None:
    """Have torch tell ipcsync of every replay of a graph, from now on; a second call does nothing.

    Costs a replay two calls of Python. Raises IpcSyncError if torch is not imported, or is one without these hooks
    (they came after 2.13): then put launches in blocks of `Client.replay`.
    """
    if replays.has_hooks:
        return
    graphs: Any = getattr(getattr(sys.modules.get("torch"), "cuda", None), "graphs", None)
    if graphs is None:
        raise IpcSyncError("torch is not imported: import it first")
    missing = [name for name in _HOOKS if not hasattr(graphs, name)]
    if missing:
        raise IpcSyncError(
            f"this torch has no {missing[0]}, which came after 2.13: put the launch in a block of Client.replay"
        )
    for name, hook in _HOOKS.items():
        getattr(graphs, name)(hook)
    replays.has_hooks = True
