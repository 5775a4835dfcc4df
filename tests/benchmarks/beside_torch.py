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
from ipcsync_bench.calls import BURST, in_bursts, time_call
from ipcsync_bench.rows import Row, compare, interleave, percentile
from tests.benchmarks.workers import Worker

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
    many = max(5 * BURST, int(20_000 * scale))
    with ExitStack() as stack:
        coordinator = stack.enter_context(ipcsync.launch(log_level="error"))
        client = stack.enter_context(ipcsync.connect(coordinator.endpoint))
        stream, waiting = torch.cuda.Stream(), torch.cuda.Stream()
        theirs = {
            "torch.cuda.Event": torch.cuda.Event(),
            "torch.cuda.Event(interprocess=True)": torch.cuda.Event(interprocess=True),
        }

        def beside(what: str, measured: dict[str, Callable[[], float]]) -> Iterator[Row]:
            yield from compare(f"{what}, on torch's streams ({engine})", interleave(measured, rounds), "µs", {})

        def timed(ours: Callable[[], object], call: str, *arguments: object) -> dict[str, Callable[[], float]]:
            calls = {"ipcsync": ours}
            calls |= {name: partial(getattr(event, call), *arguments) for name, event in theirs.items()}
            return {name: partial(in_bursts, each, torch.cuda.synchronize, many) for name, each in calls.items()}

        def time_waits(record: Callable[[Any], Any], wait: Callable[[Any], object]) -> float:
            with StreamGate(stream) as gate:
                recorded = record(stream)
                figure = time_call(partial(wait, recorded), BURST)
                gate.open()
            torch.cuda.synchronize()
            return figure

        for engine in _ENGINES:
            event = client.event(f"bench/torch/{engine}", recorder=True, engine=engine)
            yield from beside("record", timed(partial(event.record, stream), "record", stream))
            waits: dict[str, Callable[[], float]] = {}
            waits["ipcsync"] = partial(time_waits, event.record, lambda point: point.wait(waiting))
            for name, each in theirs.items():
                waits[name] = partial(time_waits, each.record, lambda _, each=each: each.wait(waiting))  # type: ignore[misc]
            yield from beside("wait for a pending record", waits)
            point = event.record(stream)
            torch.cuda.synchronize()
            yield from beside("synchronize with a complete record", timed(point.synchronize, "synchronize"))


# --- a tensor to another process --------------------------------------------------------------------------------------
#
# In one turn a stream fills the tensor, the other process is told, its stream copies the tensor, and it answers once
# the copy is done. With torch the tensor itself is sent each time, whose import waits for the sender's event on the
# current stream; it keeps nothing of it, since torch waits only where it has to open the memory. With ipcsync the
# tensor is sent once, and then a point each time.


def _begin(state: dict[str, Any], endpoint: str, size: int) -> None:
    """In a worker: get ready to copy tensors of that size."""
    torch = _torch()
    state["client"] = ipcsync.connect(endpoint)
    state["stream"] = torch.cuda.Stream()
    state["copy"] = torch.empty(size, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()


def _keep(state: dict[str, Any], tensor: Any) -> None:
    """In a worker: copy this tensor from now on; None: forget it."""
    state["shared"] = tensor


def _copy(state: dict[str, Any], told: Any) -> bool:
    """In a worker: copy the tensor once it may be read; whether the copy ends as the tensor did then."""
    torch, stream, copy = _torch(), state["stream"], state["copy"]
    with torch.cuda.stream(stream):
        value, what = told
        if isinstance(what, bytes):
            state["client"].point(what).wait(stream)
            what = state["shared"]
        else:
            stream.wait_stream(torch.cuda.default_stream())  # on which torch's import waits
        copy.copy_(what, non_blocking=True)
    stream.synchronize()
    return bool(copy[-1].item() == value)


def _hand_over(torch: Any, rounds: int, scale: float) -> Iterator[Row]:
    count = max(20, int(200 * scale))
    with ExitStack() as stack:
        coordinator = stack.enter_context(ipcsync.launch(log_level="error"))
        client = stack.enter_context(ipcsync.connect(coordinator.endpoint))
        worker = stack.enter_context(closing(Worker()))
        stream = torch.cuda.Stream()
        tensor = torch.zeros(_TENSOR, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        worker.call(_begin, coordinator.endpoint, _TENSOR)

        def turns(tell: Callable[[], Any], kept: Any) -> float:
            worker.call(_keep, kept)
            times = []
            for number in range(count):
                began = time.perf_counter()
                with torch.cuda.stream(stream):
                    tensor.fill_(number % 251)
                    is_right = worker.call(_copy, (number % 251, tell()))
                times.append((time.perf_counter() - began) * 1e6)
                if kept is None:
                    worker.call(_keep, None)  # else it has the last tensor while it opens the next
                if not is_right:
                    raise RuntimeError("the other process copied the tensor before it was filled")
            return percentile(times, 50)

        for engine in _ENGINES:
            event = client.event(f"bench/tensor/{engine}", recorder=True, engine=engine)
            contest: dict[str, Callable[[], float]] = {
                "ipcsync": partial(turns, lambda event=event: bytes(event.record(stream)), tensor),  # type: ignore[misc]
                "torch.multiprocessing": partial(turns, lambda: tensor, None),
            }
            what = f"hand-over of a tensor of {_TENSOR // _MIB} MiB, filled and copied ({engine}), p50"
            yield from compare(what, interleave(contest, rounds), "µs", {})
