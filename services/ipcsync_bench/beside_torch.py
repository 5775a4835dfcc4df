"""torch's own events and queues beside ipcsync, on a GPU with torch: calls, and a tensor handed to another process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import ipcsync
from ipcsync.testing import StreamGate
from ipcsync.typing import EngineName
from ipcsync_bench.calls import time_call
from ipcsync_bench.rows import Row, compare, interleave, percentile
from ipcsync_bench.workers import Worker

_MIB = 1 << 20
_TENSOR = 64 * _MIB
_ENGINES: tuple[EngineName, ...] = ("event", "timeline")


def _torch() -> Any:
    """torch, if it can be imported; it then has taught pickle how to send tensors."""
    try:
        import torch.multiprocessing
    except ImportError:
        return None
    return torch


def beside_torch(rounds: int, scale: float) -> Iterator[Row]:
    """record, wait, synchronize, and a tensor's hand-over."""
    torch = _torch() if ipcsync.driver_name() == "cuda" else None
    if torch is not None and torch.cuda.is_available():
        yield from _calls(torch, rounds, scale)
        yield from _hand_over(torch, rounds, scale)


def _calls(torch: Any, rounds: int, scale: float) -> Iterator[Row]:
    """On torch's streams: record; wait for what is pending; synchronize with what is complete."""
    many, few = max(500, int(20_000 * scale)), max(100, int(500 * scale))
    with ExitStack() as stack:
        coordinator = stack.enter_context(ipcsync.launch(log_level="warning"))
        client = stack.enter_context(ipcsync.connect(coordinator.endpoint))
        stream, waiting = torch.cuda.Stream(), torch.cuda.Stream()
        theirs = {
            "torch.cuda.Event": torch.cuda.Event(),
            "torch.cuda.Event(interprocess=True)": torch.cuda.Event(interprocess=True),
        }

        def beside(what: str, ours: Callable[[], object], call: str, *arguments: object, count: int) -> Iterator[Row]:
            calls = {"ipcsync": ours}
            calls |= {name: partial(getattr(event, call), *arguments) for name, event in theirs.items()}
            contest = {name: partial(time_call, each, count) for name, each in calls.items()}
            yield from compare(f"{what}, on torch's streams ({engine})", interleave(contest, rounds), "µs", {})

        for engine in _ENGINES:
            event = client.event(f"bench/torch/{engine}", recorder=True, engine=engine)
            yield from beside("record", partial(event.record, stream), "record", stream, count=many)
            with StreamGate(stream) as gate:
                point = event.record(stream)
                for each in theirs.values():
                    each.record(stream)
                yield from beside("wait for a pending record", partial(point.wait, waiting), "wait", waiting, count=few)
                gate.open()
            torch.cuda.synchronize()
            yield from beside("synchronize with a complete record", point.synchronize, "synchronize", count=many)


# --- a tensor to another process --------------------------------------------------------------------------------------
#
# In one turn a stream fills the tensor, the other process is told, its stream copies the tensor, and it answers once
# the copy is done. torch sends the tensor itself, with an event that it makes for that; ipcsync a point, for a tensor
# that was sent once.


def _begin(state: dict[str, Any], endpoint: str, tensor: Any) -> None:
    """In a worker: get ready to copy that tensor."""
    torch = _torch()
    state["client"] = ipcsync.connect(endpoint)
    state["shared"], state["copy"] = tensor, torch.empty_like(tensor)
    state["stream"] = torch.cuda.Stream()
    torch.cuda.synchronize()


def _copy(state: dict[str, Any], told: Any) -> None:
    """In a worker: copy the tensor once it may be read."""
    stream = state["stream"]
    if isinstance(told, bytes):
        state["client"].point(told).wait(stream)
        told = state["shared"]
    with _torch().cuda.stream(stream):
        state["copy"].copy_(told, non_blocking=True)
    stream.synchronize()


def _hand_over(torch: Any, rounds: int, scale: float) -> Iterator[Row]:
    count = max(20, int(200 * scale))
    with ExitStack() as stack:
        coordinator = stack.enter_context(ipcsync.launch(log_level="warning"))
        client = stack.enter_context(ipcsync.connect(coordinator.endpoint))
        worker = stack.enter_context(closing(Worker()))
        stream = torch.cuda.Stream()
        tensor = torch.zeros(_TENSOR, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        worker.call(_begin, coordinator.endpoint, tensor)

        def turns(tell: Callable[[], Any]) -> float:
            times = []
            for number in range(count):
                began = time.perf_counter()
                with torch.cuda.stream(stream):
                    tensor.fill_(number % 251)
                    worker.call(_copy, tell())
                times.append((time.perf_counter() - began) * 1e6)
            return percentile(times, 50)

        for engine in _ENGINES:
            event = client.event(f"bench/tensor/{engine}", recorder=True, engine=engine)
            contest: dict[str, Callable[[], float]] = {
                "ipcsync": partial(turns, lambda event=event: bytes(event.record(stream))),  # type: ignore[misc]
                "torch.multiprocessing": partial(turns, lambda: tensor),
            }
            what = f"hand-over of a tensor of {_TENSOR // _MIB} MiB, filled and copied ({engine}), p50"
            yield from compare(what, interleave(contest, rounds), "µs", {})
