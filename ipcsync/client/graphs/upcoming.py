"""A replay that somebody else launches within a block: torch's hooks say when."""

from __future__ import annotations

import sys
import threading
from types import TracebackType

from ipcsync._native import foreign
from ipcsync.client.graphs.replay import Replay, Replaying
from ipcsync.errors import CaptureError, IpcSyncError

has_hooks: bool = False
"""Whether `begins` and `ends` are called around each replay of torch's; set by what installs them."""


class _Thread(threading.local):
    """The open blocks of a thread, the innermost last."""

    def __init__(self) -> None:
        self.open: list[Upcoming] = []


_thread = _Thread()


class Upcoming:
    """A block whose first replay by torch, on this thread, waits and records. Made by `Client.next`; used once.

    What torch replays later in the block belongs to the same replay, on the same stream.
    """

    def __init__(self, replaying: Replaying) -> None:
        self._replaying = replaying
        self._is_used = False
        self._stream = 0
        self._outer: BaseException | None = None  # an exception that is being handled around the launch
        self._error: BaseException | None = None

    def __enter__(self) -> Replay:
        if not has_hooks:
            raise IpcSyncError(
                "nothing tells ipcsync of torch's replays: call ipcsync.integrations.torch.install() once, or put the "
                "launch in a block of Client.replay"
            )
        _thread.open.append(self)
        return self._replaying._replay

    def begin(self) -> None:
        """Torch is about to launch a graph on its current stream."""
        self._outer = sys.exc_info()[1]
        if not self._is_used:
            self._replaying.__enter__()
            self._is_used = True
            self._stream = self._replaying._address
            return
        current = foreign.torch_stream(None)
        if current is not None and foreign.stream_pointer(current) != self._stream:
            # Caught within the block, it makes no record: the one in the graph that is not launched would be complete.
            self._error = CaptureError("this block has replays on another stream: one block for each stream")
            raise self._error

    def end(self) -> None:
        """Torch has launched it, or failed to."""
        error = sys.exc_info()[1]
        if error is not self._outer:
            self._error = error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self in _thread.open:
            _thread.open.remove(self)
        if self._is_used:
            self._replaying._leave(error or self._error)
        else:
            self._replaying._replay._is_over = True


def begins(_graph: object) -> None:
    """A hook: a graph is about to be launched on torch's current stream."""
    if _thread.open:
        _thread.open[-1].begin()


def ends(_graph: object) -> None:
    """A hook: it was launched, or that raised."""
    if _thread.open:
        _thread.open[-1].end()
