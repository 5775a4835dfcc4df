"""What peers of the GPU tests do with torch. Objects stay in the peer, under names."""

from __future__ import annotations

from typing import Any

_named: dict[str, Any] = {}


def make_torch_event() -> bytes:
    """A torch event, created in this process; its handle."""
    import torch

    torch.cuda.init()
    _named["event"] = torch.cuda.Event(interprocess=True)
    handle: bytes = _named["event"].ipc_handle()
    return handle


def open_with_torch(handle: bytes) -> None:
    """Open a handle as a torch event on device 0."""
    import torch

    torch.cuda.init()
    _named["event"] = torch.cuda.Event.from_ipc_handle(torch.device("cuda", 0), handle)


def torch_query() -> bool:
    """Whether torch says that the event is complete."""
    return bool(_named["event"].query())


def torch_record() -> None:
    """Record the event on torch's current stream, behind real work, and wait for it."""
    import torch

    square = torch.ones(256, 256, device="cuda")
    for _ in range(16):
        square = square @ square / 256
    _named["event"].record()
    _named["event"].synchronize()


def torch_wait_then_sum(size: int) -> float:
    """Make torch's current stream wait for the event, then compute on it."""
    import torch

    torch.cuda.current_stream().wait_event(_named["event"])
    return float(torch.ones(size, device="cuda").sum().item())
