"""What ipcsync uses of torch, without torch: a current stream, and graphs whose replays call hooks as torch's do.

The hooks are as in torch 2.14.1. What a hook for every graph raises is ignored. A graph's own start hook that raises
prevents the launch and the end hook; the end hook runs also when the launch raised.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import ipcsync
from tests.graphs.layers import call

Hook = Callable[[Any], object]


class Stream:
    """A stream that is torch's: it has `cuda_stream`, and its `wait_event` calls the event's `wait`."""

    def __init__(self) -> None:
        self._own = ipcsync.Stream()
        self.cuda_stream = self._own.cuda_stream

    def wait_event(self, event: Any) -> None:
        """As torch's."""
        event.wait(self)


class CUDAGraph:
    """Hooks of one graph."""

    def __init__(self) -> None:
        self.starts: list[Hook] = []
        self.ends: list[Hook] = []

    def register_replay_start_hook(self, hook: Hook) -> None:
        """As torch's."""
        self.starts.append(hook)

    def register_replay_end_hook(self, hook: Hook) -> None:
        """As torch's."""
        self.ends.append(hook)


class Torch(SimpleNamespace):
    """The module."""

    def __init__(self, *, has_hooks: bool = True) -> None:
        self.stream = Stream()
        self.starts: list[Hook] = []  # for every graph
        self.graphs: defaultdict[Any, CUDAGraph] = defaultdict(CUDAGraph)
        graphs = SimpleNamespace(CUDAGraph=CUDAGraph)
        if has_hooks:
            graphs.register_graph_replay_start_hook = self.starts.append
        self.cuda = SimpleNamespace(
            graphs=graphs, is_initialized=lambda: True, current_stream=lambda _device=None: self.stream
        )

    def replay(self, graph: Any) -> None:
        """What `CUDAGraph.replay` does: launch on the current stream."""
        own = self.graphs[graph]
        for hook in self.starts:
            with contextlib.suppress(Exception):
                hook(own)
        for hook in list(own.starts):
            hook(own)
        try:
            call("cuGraphLaunch", graph, self.stream._own._handle)
        finally:
            for hook in list(own.ends):
                hook(own)
