"""Hooks for torch's CUDA graphs, so that `Client.next` can name the points of replays that are launched deep within.

ipcsync.integrations.torch.install()
with client.next({kv: point}, {done: event}) as replay:
    engine.step()
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

from ipcsync.client import graphs as replays
from ipcsync.errors import IpcSyncError

__all__ = ["install"]

_hooked: weakref.WeakSet[Any] = weakref.WeakSet()  # graphs


def install() -> None:
    """Have torch tell ipcsync of every replay of a graph, from now on; a second call does nothing.

    Costs a replay three calls of Python. Raises IpcSyncError if torch is not imported, or is one without these hooks
    (they came after 2.13): then put launches in blocks of `Client.replay`.
    """
    if replays.has_hooks:
        return
    graphs: Any = getattr(getattr(sys.modules.get("torch"), "cuda", None), "graphs", None)
    if graphs is None:
        raise IpcSyncError("torch is not imported: import it first")
    names = {"register_graph_replay_start_hook": graphs, "register_replay_start_hook": graphs.CUDAGraph}
    if missing := [name for name, there in names.items() if not hasattr(there, name)]:
        raise IpcSyncError(f"this torch has no {missing[0]}, which came after 2.13: use a block of Client.replay")
    graphs.register_graph_replay_start_hook(_begins_first)
    replays.has_hooks = True


def _begins_first(graph: Any) -> None:  # noqa: ANN401 - torch is not imported here
    """A hook for all graphs, whose exceptions torch ignores: those of a graph's own hooks prevent its launch."""
    if graph not in _hooked:
        graph.register_replay_start_hook(replays.begins)
        graph.register_replay_end_hook(replays.ends)
        _hooked.add(graph)
