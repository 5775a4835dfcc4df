"""Two torch processes: a prefill hands layers to a decode that replays one graph of torch's, which waits for each.

    IPCSYNC_DRIVER=cuda python -m tests.gpu.torch_layers                  # each replay reads its own request's layers
    IPCSYNC_DRIVER=cuda python -m tests.gpu.torch_layers --break          # no waits in the graph: it must fail
    IPCSYNC_DRIVER=cuda python -m tests.gpu.torch_layers --kill prefill   # or decode: the other one must learn of it

The tensor goes by torch.multiprocessing, the points as integers in the processes' own messages. A layer is a product of
matrices and a fill, so work is under way at any moment. Exit status 0 if all was as it should be.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import signal
import statistics
import sys
import time
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any

import ipcsync
from tests.kit import driver_kit as kit

LAYERS, SIZE, REQUESTS = 8, 1 << 20, 200
_LIMIT_S = 15.0
_KILLED_IN = 40
_LOST, _WRONG = 3, 4  # exit statuses


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _torch() -> Any:
    import torch
    import torch.multiprocessing  # so that tensors can be sent

    torch.cuda.init()
    kit.use_device(0)
    return torch


class Work:
    """Some kernels of torch's, the same each time."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._square = torch.ones(1024, 1024, device="cuda") / 1024

    def __call__(self) -> None:
        for _ in range(4):
            self._torch.mm(self._square, self._square)


def _die(who: str, request: int) -> None:
    if request == _KILLED_IN:
        _say(f"{who}: killed in request {request}")
        os.kill(os.getpid(), signal.SIGKILL)


def _end_lost(who: str, error: ipcsync.RecorderLost, request: int, stream: Any) -> None:
    """Say that a point was lost, and how soon the stream that waited for it, or stood behind it, was through."""
    began = time.perf_counter()
    stream.synchronize()
    after = 1e3 * (time.perf_counter() - began)
    _say(f"{who}: {type(error).__name__} in request {request}; its stream ended {after:.1f} ms later")
    os._exit(_LOST)


def prefill(endpoint: str, decode: Connection, dies: bool) -> None:
    """Fill the layers for each request, each once the decode is done with that layer of the request before."""
    torch = _torch()
    with (
        ipcsync.connect(endpoint, name="prefill", engine="timeline") as client,
        client.event("torch/layers", recorder=True) as written,
        client.event("torch/read") as read,
    ):
        stream, cache, work = torch.cuda.Stream(), torch.zeros(LAYERS, SIZE, device="cuda"), Work(torch)
        work()  # kernels are loaded before streams are held back: loading one waits for all streams
        cache.fill_(0.0)
        cache[0].fill_(0.0)
        torch.cuda.synchronize()
        decode.send(cache)
        for request in range(1, REQUESTS + 1):
            latch = kit.Latch(stream.cuda_stream)  # until the decode has launched its graph
            try:
                with torch.cuda.stream(stream):
                    for layer in range(LAYERS):
                        if request > 1:
                            read.at((request - 2) * LAYERS + layer + 1).wait(stream, timeout=_LIMIT_S)
                        work()
                        cache[layer].fill_(float(request))
                        point = written.record(stream)
                decode.send(point.generation - LAYERS + 1)
                decode.recv()
                if dies:
                    _die("prefill", request)
                latch.open()
                if request == REQUESTS:
                    read.at(REQUESTS * LAYERS).synchronize(_LIMIT_S)
            except (EOFError, OSError):  # the decode has died
                latch.open()
                try:
                    read.at((request - 1) * LAYERS).synchronize(_LIMIT_S)
                except ipcsync.RecorderLost as error:
                    _end_lost("prefill", error, request, stream)
                raise
            except ipcsync.RecorderLost as error:
                latch.open()
                _end_lost("prefill", error, request, stream)


def decode(endpoint: str, prefill: Connection, has_waits: bool, dies: bool) -> None:
    """Replay one graph for each request, and check that it read that request's layers."""
    torch = _torch()
    with (
        ipcsync.connect(endpoint, name="decode", engine="timeline") as client,
        client.event("torch/layers") as written,
        client.event("torch/read", recorder=True) as read,
    ):
        stream, cache, work = torch.cuda.Stream(), prefill.recv(), Work(torch)
        mine = torch.zeros_like(cache)
        mine.copy_(cache)
        work()
        (mine == 0.0).all().item()  # kernels are loaded before streams are held back
        waits = [ipcsync.GraphWait() for _ in range(LAYERS)]
        records = [ipcsync.GraphRecord() for _ in range(LAYERS)]
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for layer, (wait, record) in enumerate(zip(waits, records, strict=True)):
                if has_waits:
                    wait.capture()
                mine[layer].copy_(cache[layer])
                record.capture()
                work()
        took = []
        for request in range(1, REQUESTS + 1):
            first = prefill.recv()
            points = {wait: written.at(first + layer) for layer, wait in enumerate(waits)} if has_waits else {}
            times = [time.perf_counter()]
            with (
                torch.cuda.stream(stream),
                client.replay(points, dict.fromkeys(records, read), timeout=_LIMIT_S) as replay,
            ):
                times.append(time.perf_counter())
                graph.replay()
                times.append(time.perf_counter())
            times.append(time.perf_counter())
            took.append([1e6 * (later - earlier) for earlier, later in pairwise(times)])
            if not has_waits:
                stream.synchronize()  # so that it shows what it has read, every time
            prefill.send("launched")
            if dies:
                _die("decode", request)
            try:
                replay[records[-1]].synchronize(_LIMIT_S)
            except ipcsync.RecorderLost as error:
                _end_lost("decode", error, request, stream)
            torch.cuda.current_stream().wait_stream(stream)
            if not bool((mine == float(request)).all().item()):
                _say(f"decode: request {request} was read before it was written")
                os._exit(_WRONG)
        entering, launching, leaving = (f"{statistics.median(part):.1f}" for part in zip(*took, strict=True))
        _say(
            f"decode: {REQUESTS} requests, each with its own {LAYERS} layers; of a replay, entering takes the host "
            f"{entering} µs, the launch {launching}, leaving {leaving}"
        )


def main() -> int:
    """0 if what happened is what should."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--break", action="store_true", dest="is_broken", help="capture no waits, and fail")
    parser.add_argument("--kill", choices=["prefill", "decode"], help="that process dies amid its work")
    chosen = parser.parse_args()
    module = importlib.import_module("tests.gpu.torch_layers")  # by its own name in the processes that are spawned
    spawn = multiprocessing.get_context("spawn")
    to_decode, to_prefill = spawn.Pipe()
    with ipcsync.launch(log_level="error") as coordinator:
        arguments = {
            "prefill": (coordinator.endpoint, to_decode, chosen.kill == "prefill"),
            "decode": (coordinator.endpoint, to_prefill, not chosen.is_broken, chosen.kill == "decode"),
        }
        processes = {each: spawn.Process(target=getattr(module, each), args=arguments[each]) for each in arguments}
        for each in processes.values():
            each.start()
        to_decode.close()
        to_prefill.close()
        ends = time.monotonic() + 2 * _LIMIT_S
        for each in processes.values():
            each.join(max(0.1, ends - time.monotonic()))
            if each.is_alive() or chosen.is_broken:
                each.kill()
                each.join()
        codes = {name: each.exitcode for name, each in processes.items()}
    _say(f"exit status: {codes}")
    if chosen.kill:
        expected = {name: -signal.SIGKILL if name == chosen.kill else _LOST for name in codes}
    else:
        expected = {"prefill": 0, "decode": _WRONG if chosen.is_broken else 0}
    return 0 if codes["decode"] == expected["decode"] and (chosen.is_broken or codes == expected) else 1


if __name__ == "__main__":
    sys.exit(main())
