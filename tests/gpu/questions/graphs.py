"""Waits, writes and events in CUDA graphs: what can be captured, what passes what, and what a death leaves."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ipcsync._drivers import load
from tests.contract import actions
from tests.contract.probes import say
from tests.contract.sharing import share
from tests.gpu.questions import peers as asked
from tests.kit import driver_kit as kit
from tests.kit.driver_kit import code, ok

_SOON_S = 0.5
_OTHERS = 32
_GATES, _NODES = 80, 800
_STEPS = 30
_FREED = 4 << 20


def captured(stream: Any, queue: Callable[[], None]) -> Any:
    """What `queue` puts on the stream, as a graph that can be launched."""
    drv = load()
    ok(drv.cuStreamBeginCapture(stream, drv.CUstreamCaptureMode(kit.RELAXED)))
    try:
        queue()
    finally:
        ended = drv.cuStreamEndCapture(stream)
    return ok(drv.cuGraphInstantiate(ok(ended), 0))


def _write(stream: Any, address: int, number: int, value: int = 1) -> None:
    ok(load().cuStreamWriteValue64(stream, asked.word(address, number), value, 0))


def _wait(stream: Any, address: int, number: int, value: int = 1) -> None:
    ok(load().cuStreamWaitValue64(stream, asked.word(address, number), value, kit.GEQ))


def capture_of_words() -> Iterator[tuple[str, str]]:
    """Can a wait for a word, and a write of one, be captured, in device memory and in registered host memory?"""
    drv = load()
    stream, side = asked.new_stream(), asked.new_stream()
    with asked.shared_page() as (_, page):
        for where, address in (("device memory", asked.device_words(4)), ("a registered page", page.register())):

            def queue(address: int = address) -> None:
                _wait(stream, address, 0)
                _write(stream, address, 1)

            row = f"a graph that waits for a word and writes another, {where}"
            graph = captured(stream, queue)
            for launch in ("first", "second"):
                _write(side, address, 0, 0)
                _write(side, address, 1, 0)
                kit.finish(side)
                began = time.perf_counter()
                ok(drv.cuGraphLaunch(graph, stream))
                took = 1e6 * (time.perf_counter() - began)
                waits = asked.milliseconds(lambda: asked.is_done(stream), 0.05) is None
                _write(side, address, 0)
                ended = asked.milliseconds(lambda: asked.is_done(stream), _SOON_S)
                said = f"launched in {took:.1f} µs, {'waits' if waits else 'does not wait'}, "
                yield f"{row}, {launch} launch", said + f"ends {asked.when(ended, _SOON_S)} of the write"
        batch = _batch(asked.device_words(8), 4)
        answer = drv.cuStreamBatchMemOp(stream, len(batch), batch, 0)
        yield "a batch of waits and writes", say(code(answer))
        row = "a batch, captured"
        captured(stream, lambda: ok(drv.cuStreamBatchMemOp(stream, len(batch), batch, 0)))
        yield row, "is captured"


def _batch(address: int, count: int, kind: str = "WRITE") -> list[Any]:
    drv = load()
    made = []
    for number in range(count):
        each = drv.CUstreamBatchMemOpParams()
        each.operation = getattr(drv.CUstreamBatchMemOpType, f"CU_STREAM_MEM_OP_{kind}_VALUE_64")
        part = each.writeValue if kind == "WRITE" else each.waitValue
        part.address, part.value64 = asked.word(address, number), drv.cuuint64_t(1)
        made.append(each)
    return made


def copies_end_waits() -> Iterator[tuple[str, str]]:
    """Does a word that a copy, or a set of memory, lowers or raises end a stream's wait for it?"""
    drv = load()
    stream, side = asked.new_stream(), asked.new_stream()
    words = asked.device_words(4)
    source = asked.device_words(1)
    ok(drv.cuMemsetD8(asked.word(source), 1, 8))
    works: dict[str, Callable[[], Any]] = {
        "a copy": lambda: drv.cuMemcpyDtoDAsync(asked.word(words, 0), asked.word(source), 8, side),
        "a set of bytes": lambda: drv.cuMemsetD8Async(asked.word(words, 1), 1, 8, side),
    }
    for number, (what, work) in enumerate(works.items()):
        ok(work())  # its kernel is loaded before a stream is held back
        kit.finish(side)
        _write(side, words, number, 0)
        kit.finish(side)
        _wait(stream, words, number)
        ok(work())
        took = asked.milliseconds(lambda: asked.is_done(stream), _SOON_S)
        yield f"a stream's wait for a word of device memory, ended by {what}", asked.when(took, _SOON_S)
        if took is None:
            _write(side, words, number)
    graph = captured(side, lambda: ok(drv.cuMemcpyDtoDAsync(asked.word(words, 2), asked.word(source), 8, side)))
    ok(drv.cuGraphLaunch(graph, side))
    kit.finish(side)
    _write(side, words, 2, 0)
    kit.finish(side)
    _wait(stream, words, 2)
    ok(drv.cuGraphLaunch(graph, side))
    took = asked.milliseconds(lambda: asked.is_done(stream), _SOON_S)
    yield "a stream's wait for a word of device memory, ended by a graph's copy", asked.when(took, _SOON_S)


def external_events() -> Iterator[tuple[str, str]]:
    """Records of, and waits for, interprocess events as external nodes of a graph."""
    drv = load()
    stream, event = asked.new_stream(), ok(drv.cuEventCreate(kit.SHAREABLE))
    ok(drv.cuEventRecord(event, stream))
    kit.finish(stream)
    with asked.peers() as (other,):
        share(drv, event, other)
        graph = captured(stream, lambda: ok(drv.cuEventRecordWithFlags(event, stream, 1)))
        yield "an external record of an interprocess event", "is captured"
        latch = kit.Latch(stream)
        ok(drv.cuGraphLaunch(graph, stream))
        seen = other.call(actions.query, "e")
        row = "a graph with an external record is held back"
        yield f"{row}: an importer's query", say(seen)
        assert other.call(actions.wait, "s", "e") == kit.SUCCESS
        before = other.call(actions.query_stream, "s")
        latch.open()
        kit.finish(stream)
        after = asked.milliseconds(lambda: other.call(actions.query_stream, "s") == kit.SUCCESS, _SOON_S)
        yield f"{row}: an importer's stream that waits", f"{say(before)}, then goes on {asked.when(after, _SOON_S)}"
        waits = captured(stream, lambda: ok(drv.cuStreamWaitEvent(stream, event, 1)))
        other.call(actions.hold, "s")
        assert other.call(actions.record, "e", "s") == kit.SUCCESS
        ok(drv.cuGraphLaunch(waits, stream))
        held = asked.milliseconds(lambda: asked.is_done(stream), 0.05) is None
        other.call(actions.release, "s")
        took = asked.milliseconds(lambda: asked.is_done(stream), _SOON_S)
        said = f"{'waits' if held else 'does not wait'}, then goes on {asked.when(took, _SOON_S)}"
        yield "a graph with an external wait for another process's record", said


@contextmanager
def _queues(count: int) -> Iterator[Any]:
    with asked.peers(1, CUDA_DEVICE_MAX_CONNECTIONS=str(count)) as (peer,):
        yield peer


def feed_and_drain(order: str) -> list[str]:
    """In a peer: a feeder waits for a word and opens a graph's gate, a drainer waits for its tap; who passes whom?"""
    drv = load()
    streams = {name: asked.new_stream() for name in "FLD"}
    words = asked.device_words(4)  # the gate is 1, the tap 2, what was drained 3
    point = int(ok(drv.cuMemAllocHost(4096)))  # of the host: any further stream may be behind one of these
    ctypes.memset(point, 0, 8)
    launch = streams["L"]

    def nodes() -> None:
        _wait(launch, words, 1)
        _write(launch, words, 2)

    graph = captured(launch, nodes)
    for each in streams.values():
        _write(each, words, 3, 0)
        kit.finish(each)

    def feed() -> None:
        _wait(streams["F"], point, 0)
        _write(streams["F"], words, 1)

    def drain() -> None:
        _wait(streams["D"], words, 2)
        _write(streams["D"], words, 3)

    works: dict[str, Callable[[], None]] = {"F": feed, "L": lambda: ok(drv.cuGraphLaunch(graph, launch)), "D": drain}
    for name in order:
        works[name]()
    ctypes.c_uint64.from_address(point).value = 1
    asked.milliseconds(lambda: all(map(asked.is_done, streams.values())), 1.0)
    return [name for name, stream in streams.items() if asked.is_done(stream)]


def feeder_and_drainer() -> Iterator[tuple[str, str]]:
    """Do three streams pass each other, in each order of queueing, with 1 hardware queue and with 8?"""
    for queues in (8, 1):
        for order in ("FLD", "DLF"):
            with _queues(queues) as peer:
                done = peer.call(feed_and_drain, order)
                said = "all end" if len(done) == 3 else f"{', '.join(done) or 'none'} of F, L and D end within 1 s"
                yield f"a feeder, a graph and a drainer, queued {order}, {queues} hardware queues", said


def go_on_beside_a_gate() -> str:
    """In a peer: how many of 32 streams, and whether a second graph, go on while a graph waits at its gate."""
    drv = load()
    first, second, *rest = [asked.new_stream() for _ in range(_OTHERS + 2)]
    words, memory = asked.device_words(2), ok(drv.cuMemAlloc(4096))
    graph = captured(first, lambda: _wait(first, words, 0))
    other = captured(second, lambda: ok(drv.cuMemsetD8Async(memory, 2, 4096, second)))
    for each in (first, second, *rest):
        ok(drv.cuMemsetD8Async(memory, 0, 4096, each))
        kit.finish(each)
    ok(drv.cuGraphLaunch(graph, first))
    ok(drv.cuGraphLaunch(other, second))
    for each in rest:
        ok(drv.cuMemsetD8Async(memory, 3, 4096, each))
    asked.milliseconds(lambda: all(map(asked.is_done, [second, *rest])), 1.0)
    went_on = sum(map(asked.is_done, rest))
    return f"{went_on} of {_OTHERS} streams, the second graph {'too' if asked.is_done(second) else 'not'}"


def pass_each_other(most: int) -> int:
    """In a peer: so many streams, at most, pass each other: each waits for a word that the next one writes."""
    page = int(ok(load().cuMemAllocHost(64 * 2 * most)))
    passed = 0
    for count in range(2, most + 1):
        ctypes.memset(page, 0, 64 * 2 * most)
        streams = [asked.new_stream() for _ in range(count)]
        for number, stream in enumerate(streams):
            if number < count - 1:
                _wait(stream, page, number + 1)
            _write(stream, page, number)
        first = ctypes.c_uint64.from_address(page)
        if asked.milliseconds(lambda first=first: first.value, 0.2) is None:  # type: ignore[misc]
            break
        passed = count
    ctypes.memset(page, 1, 64 * 2 * most)
    return passed


def hardware_queues() -> Iterator[tuple[str, str]]:
    """How many streams pass each other, by CUDA_DEVICE_MAX_CONNECTIONS?"""
    for queues in ("", "1", "2", "8", "32"):
        with asked.peers(1, **({"CUDA_DEVICE_MAX_CONNECTIONS": queues} if queues else {})) as (peer,):
            said = f"{peer.call(pass_each_other, 12)} of 12"
            yield f"streams that pass each other in a row, CUDA_DEVICE_MAX_CONNECTIONS {queues or 'not set'}", said


def beside_a_gate() -> Iterator[tuple[str, str]]:
    """What goes on beside a graph that waits at a gate, with 1, 8 and 32 hardware queues?"""
    for queues in (8, 32, 1):
        with _queues(queues) as peer:
            yield f"what goes on beside a graph at its gate, {queues} hardware queues", peer.call(go_on_beside_a_gate)


def launch_steps(page: str) -> None:
    """In a peer: launch a graph of steps, some milliseconds of work and a word each."""
    drv = load()
    size, sets = asked.LONG[kit.driver_kind()]
    memory, stream = ok(drv.cuMemAlloc(size)), actions._named["s"]

    def queue() -> None:
        for number in range(1, _STEPS + 1):
            for value in range(sets):
                ok(drv.cuMemsetD8Async(memory, value, size, stream))
            assert actions.write_word("s", page, 0, number) == kit.SUCCESS

    ok(drv.cuGraphLaunch(captured(stream, queue), stream))


def death_amid_a_graph() -> Iterator[tuple[str, str]]:
    """A process is killed amid a graph of 30 steps, each with a word behind it: which words are written yet?"""
    with asked.shared_page() as (path, page), asked.peers() as (peer,):
        peer.call(actions.create_stream, "s")
        peer.call(actions.register_page, "page", path)
        peer.call(launch_steps, "page")
        if asked.milliseconds(lambda: page.words[0] >= 3, 3.0) is None:
            yield "a process is killed amid a graph", "not asked: its steps did not begin"
            return
        before, began = page.words[0], time.perf_counter()
        os.kill(peer.pid, signal.SIGKILL)
        last, took = before, 0.0
        while (now := time.perf_counter()) - began < 1.5:
            if page.words[0] != last:
                last, took = page.words[0], 1e3 * (now - began)
        said = f"the last of {_STEPS} words is {last}, after {took:.1f} ms; it was {before} at the kill"
        yield "a process is killed amid a graph", said


def wait_in_memory(page: str) -> None:
    """In a peer: a stream waits for a word of device memory, and another for one of a graph; behind each is a word."""
    drv = load()
    memory = ok(drv.cuMemAlloc(_FREED))
    ok(drv.cuMemsetD8(memory, 0, _FREED))
    for number, name in enumerate(("s", "t")):
        actions.create_stream(name)
        stream = actions._named[name]

        def queue(number: int = number, name: str = name, stream: Any = stream) -> None:
            _wait(stream, int(memory), number)
            assert actions.write_word(name, page, number, 1) == kit.SUCCESS

        if name == "s":
            queue()
        else:
            ok(drv.cuGraphLaunch(captured(stream, queue), stream))


def fill_with_ones() -> None:
    """In a peer: have memory that was freed lately, full of ones."""
    drv = load()
    for _ in range(32):
        memory = ok(drv.cuMemAlloc(_FREED))
        ok(drv.cuMemsetD8(memory, 1, _FREED))
    ok(drv.cuCtxSynchronize())


def memory_of_the_dead() -> Iterator[tuple[str, str]]:
    """A process is killed while a stream and a graph wait for device memory, and another one fills memory with ones.

    Do the dead process's waits pass, so that what it queued behind them is written?
    """
    with asked.shared_page() as (path, page), asked.peers(2) as (peer, other):
        peer.call(actions.register_page, "page", path)
        peer.call(wait_in_memory, "page")
        waits = asked.milliseconds(lambda: page.words[0] or page.words[1], 0.1) is None
        os.kill(peer.pid, signal.SIGKILL)
        other.call(fill_with_ones)
        asked.milliseconds(lambda: page.words[0] and page.words[1], 1.5)
        for number, what in enumerate(("a stream", "a graph")):
            passed = "passes, and writes" if page.words[number] else "writes nothing"
            yield (
                f"{what} of a killed process, at a word of memory that another fills with ones",
                f"{'waits' if waits else 'does not wait'}, {passed}",
            )


def _returns(call: Callable[[], Any], seconds: float) -> tuple[threading.Thread, str]:
    """A call on a thread of its own, and how soon it returned."""
    context = ok(load().cuCtxGetCurrent())
    took: list[float] = []

    def run() -> None:
        ok(load().cuCtxSetCurrent(context))
        began = time.perf_counter()
        ok(call())
        took.append(1e6 * (time.perf_counter() - began))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return thread, f"after {took[0]:.0f} µs" if took else f"not within {seconds:g} s"


def many_gates() -> Iterator[tuple[str, str]]:
    """Does the launch of a large graph behind closed gates return, and the next one's? How fast are its words?"""
    drv = load()
    stream, side = asked.new_stream(), asked.new_stream()
    event = ok(drv.cuEventCreate(kit.SHAREABLE))
    page, memory = int(ok(drv.cuMemAllocHost(64 * 2 * _GATES))), ok(drv.cuMemAlloc(4096))
    gates = (ctypes.c_uint64 * (16 * _GATES)).from_address(page)
    ctypes.memset(page, 0, 64 * 2 * _GATES)

    def graph_of(count: int) -> Any:
        def queue() -> None:
            for number in range(count):
                _wait(stream, page, number)
                for _ in range(_NODES // _GATES):
                    ok(drv.cuMemsetD8Async(memory, 1, 4096, stream))
                _write(stream, page, _GATES + number)

        return captured(stream, queue)

    def open_all() -> None:
        for number in range(_GATES):
            gates[8 * number] = 1

    def close_all() -> None:
        ctypes.memset(page, 0, 64 * _GATES)

    graph, small = graph_of(_GATES), graph_of(_GATES // 10)
    what, less = f"{_GATES} gates, {_NODES} sets, {_GATES} taps", f"{_GATES // 10} gates, {_NODES // 10} sets, 8 taps"
    open_all()
    for each in (graph, small):  # what a first launch costs besides is over
        ok(drv.cuGraphLaunch(each, stream))
        kit.finish(stream)
    began = time.perf_counter()
    ok(drv.cuGraphLaunch(graph, stream))
    kit.finish(stream)
    yield f"{what}, all gates open: a launch to its end", f"{1e6 * (time.perf_counter() - began):.0f} µs"
    close_all()
    threads = []
    for which in ("first", "second", "third"):
        thread, said = _returns(lambda: drv.cuGraphLaunch(graph, stream), 0.4)
        threads.append(thread)
        yield f"{what}, all gates closed: the {which} launch returns", said
        if thread.is_alive():
            thread, said = _returns(lambda: drv.cuEventRecord(event, side), 0.4)
            threads.append(thread)
            yield "a record on another stream, while a launch stands still: returns", said
            break
    open_all()
    for thread in threads:
        thread.join(3.0)
    ended = asked.milliseconds(lambda: asked.is_done(stream), 2.0)
    yield f"{what}, all gates opened: all launches end", asked.when(ended, 2.0)
    close_all()
    launched: list[int] = []

    def launch_many() -> tuple[Any]:
        for number in range(40):
            ok(drv.cuGraphLaunch(small, stream))
            launched.append(number)
        return (drv.CUresult(0),)

    thread, _ = _returns(launch_many, 0.8)
    yield f"{less}, all gates closed: so many launches of 40 return", str(len(launched))
    open_all()
    thread.join(3.0)
    asked.milliseconds(lambda: asked.is_done(stream), 2.0)
    latch = kit.Latch(stream)
    batch = _batch(page, 100)
    for _ in range(8):
        ok(drv.cuStreamBatchMemOp(stream, len(batch), batch, 0))
    began = time.perf_counter()
    latch.open()
    asked.milliseconds(lambda: asked.is_done(stream), 2.0)
    yield "writes of batches of 100", f"{1e6 * (time.perf_counter() - began) / 800:.2f} µs each"
