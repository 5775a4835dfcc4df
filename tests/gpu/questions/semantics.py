"""Handles, slots, replaced records, and what captures refuse: what a software driver has to answer as the GPU does."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

from ipcsync._drivers import handle_bytes, load
from tests.contract import actions
from tests.contract.probes import say
from tests.contract.sharing import share
from tests.gpu.questions import peers as asked
from tests.kit import driver_kit as kit
from tests.kit.driver_kit import code, ok
from tests.kit.peer import Peer, PeerError

_BLINK_S = 0.3
_NO_MEMORY_BARRIER = 1
_EXTERNAL = 1


def _shared(drv: Any) -> tuple[Any, bytes]:
    event = ok(drv.cuEventCreate(kit.SHAREABLE))
    return event, handle_bytes(ok(drv.cuIpcGetEventHandle(event)))


def _opened(peer: Peer, handle: bytes) -> str:
    try:
        return say(peer.call(actions.open_event, "e", handle))
    except PeerError as error:
        return f"the process ended: {error}"[:120]


def odd_handles() -> Iterator[tuple[str, str]]:
    """What says the driver to handles of processes and files that are not there, and to noise?"""
    _, handle = _shared(load())
    yield "the bytes of a handle that are not 0", f"{len(handle.rstrip(bytes(1)))} of 64"
    odd = {
        "of a process that is not there": b"\xff\xff\x3f\x00" + handle[4:],
        "with another second number": handle[:4] + bytes([handle[4] ^ 0x55]) + handle[5:],
        "with another third number": handle[:8] + b"\xff\xff\x00\x00" + handle[12:],
        "that is noise": bytes((37 * each + 11) % 256 for each in range(64)),
    }
    for what, data in odd.items():
        with asked.peers() as (peer,):
            yield f"open a handle {what}", _opened(peer, data)


def slot_order() -> Iterator[tuple[str, str]]:
    """In which order are slots used again, and what is seen of an event that was destroyed?"""
    drv = load()
    made = [_shared(drv) for _ in range(4)]
    for event, _ in made[:3]:
        ok(drv.cuEventDestroy(event))
    names = {handle: f"number {number}" for number, (_, handle) in enumerate(made, 1)}
    order = [names.get(_shared(drv)[1], "a new one") for _ in range(3)]
    yield "events 1, 2, 3 are destroyed: the slots of the next three", ", ".join(order)
    for was_pending in (False, True):
        event, handle = _shared(drv)
        stream, held = asked.new_stream(), "pending" if was_pending else "complete"
        latch = kit.Latch(stream)
        ok(drv.cuEventRecord(event, stream))
        if not was_pending:
            latch.open()
            kit.finish(stream)
        with asked.peers(2) as (before, after):
            share(drv, event, before)
            ok(drv.cuEventDestroy(event))
            opened = after.call(actions.open_event, "e", handle)
            seen = after.call(actions.query, "e") if opened == kit.SUCCESS else opened
            yield f"an event destroyed with a {held} record: opened then, its query", say(seen)
            yield (
                f"an event destroyed with a {held} record: the query of an earlier import",
                say(before.call(actions.query, "e")),
            )
            latch.open()
            kit.finish(stream)
            yield (
                f"an event destroyed with a {held} record, which is over: the query of an earlier import",
                say(before.call(actions.query, "e")),
            )
            following, same = _shared(drv)
            if same != handle:
                yield "an import whose slot has another event", "not asked: no event got the slot"
                continue
            latch = kit.Latch(stream)
            ok(drv.cuEventRecord(following, stream))
            seen = before.call(actions.query, "e")
            latch.open()
            kit.finish(stream)
            said = f"{say(seen)} while that is pending, {say(before.call(actions.query, 'e'))} when it is over"
            yield f"an import whose slot has another event, once {held}: its query", said


def replaced_records() -> Iterator[tuple[str, str]]:
    """An event is recorded again while its record is pending, in one process: does the new record complete?"""
    drv = load()
    for what, flags in (("plain", kit.DISABLE_TIMING), ("with timing", 0), ("interprocess", kit.SHAREABLE)):
        event, held, free = ok(drv.cuEventCreate(flags)), asked.new_stream(), asked.new_stream()
        latch = kit.Latch(held)
        ok(drv.cuEventRecord(event, held))
        ok(drv.cuEventRecord(event, free))
        took = asked.milliseconds(lambda e=event: code(drv.cuEventQuery(e)) == kit.SUCCESS, _BLINK_S)  # type: ignore[misc]
        went = asked.milliseconds(lambda s=free: asked.is_done(s), _BLINK_S)  # type: ignore[misc]
        said = f"complete {asked.when(took, _BLINK_S)}; its stream goes on {asked.when(went, _BLINK_S)}"
        yield f"an event, {what}, recorded again on a free stream while held back on another", said
        latch.open()
        kit.finish(held)
        kit.finish(free)


def captured_events() -> Iterator[tuple[str, str]]:
    """Result codes of what is asked of events that captures recorded, and of waits that captures refuse."""
    drv = load()
    stream, other = asked.new_stream(), asked.new_stream()
    mode = drv.CUstreamCaptureMode(kit.RELAXED)

    def within(ask: Callable[[], Any]) -> str:
        ok(drv.cuStreamBeginCapture(stream, mode))
        answer = code(ask())
        status = kit.capture_status(drv, stream)
        kit.end_capture(drv, stream)
        return f"{say(answer)}; the capture is {'invalidated' if status == kit.INVALIDATED else 'active'}"

    captured, timed, before = (ok(drv.cuEventCreate(flags)) for flags in (kit.DISABLE_TIMING, 0, 0))
    ok(drv.cuEventRecord(before, other))
    kit.finish(other)
    yield "record an event in a capture", within(lambda: drv.cuEventRecord(captured, stream))
    yield "synchronize with an event recorded in a capture", say(code(drv.cuEventSynchronize(captured)))
    within(lambda: drv.cuEventRecord(timed, stream))
    yield "elapsed time with an event recorded in a capture", say(code(drv.cuEventElapsedTime(before, timed)))
    yield "another stream waits for it after the capture", say(code(drv.cuStreamWaitEvent(other, captured, 0)))
    fresh = ok(drv.cuEventCreate(kit.DISABLE_TIMING))
    yield (
        "a capturing stream waits for an event that was never recorded",
        within(lambda: drv.cuStreamWaitEvent(stream, fresh, 0)),
    )
    yield (
        "a capturing stream waits for a record outside that is complete",
        within(lambda: drv.cuStreamWaitEvent(stream, before, 0)),
    )
    yield (
        "a capturing stream waits for a complete record outside, EXTERNAL",
        within(lambda: drv.cuStreamWaitEvent(stream, before, _EXTERNAL)),
    )


def writes_without_barrier() -> Iterator[tuple[str, str]]:
    """Are writes with NO_MEMORY_BARRIER taken, of 32 and of 64 bits?"""
    drv, stream, words = load(), asked.new_stream(), asked.device_words(2)
    for bits, write in ((32, drv.cuStreamWriteValue32), (64, drv.cuStreamWriteValue64)):
        answer = code(write(stream, asked.word(words), 1, _NO_MEMORY_BARRIER))
        yield f"a {bits}-bit write with NO_MEMORY_BARRIER", say(answer)


def forbidden_calls() -> Iterator[tuple[str, str]]:
    """Which calls does a capture refuse, on the thread where it began, and which does it not survive?"""
    drv = load()
    stream, other, words = asked.new_stream(), asked.new_stream(), asked.device_words(2)
    event, timed = ok(drv.cuEventCreate(kit.SHAREABLE)), [ok(drv.cuEventCreate(0)) for _ in range(2)]
    for each in (event, *timed):
        ok(drv.cuEventRecord(each, other))
    kit.finish(other)
    page = (ctypes.c_char * (3 * 4096))()
    aligned = (ctypes.addressof(page) + 4095) & ~4095
    context = ok(drv.cuCtxGetCurrent())
    calls: dict[str, Callable[[], Any]] = {
        "cuEventQuery": lambda: drv.cuEventQuery(event),
        "cuEventSynchronize": lambda: drv.cuEventSynchronize(event),
        "cuEventElapsedTime": lambda: drv.cuEventElapsedTime(*timed),
        "cuEventCreate": lambda: drv.cuEventCreate(kit.SHAREABLE),
        "cuIpcGetEventHandle": lambda: drv.cuIpcGetEventHandle(event),
        "cuEventRecord on another stream": lambda: drv.cuEventRecord(timed[0], other),
        "cuStreamWaitEvent on another stream": lambda: drv.cuStreamWaitEvent(other, timed[1], 0),
        "cuStreamWriteValue64 on another stream": lambda: drv.cuStreamWriteValue64(other, asked.word(words), 1, 0),
        "cuStreamQuery of another stream": lambda: drv.cuStreamQuery(other),
        "cuStreamSynchronize of another stream": lambda: drv.cuStreamSynchronize(other),
        "cuStreamGetId of another stream": lambda: drv.cuStreamGetId(other),
        "cuStreamGetCtx of the capturing stream": lambda: drv.cuStreamGetCtx(stream),
        "cuStreamCreate": lambda: drv.cuStreamCreate(kit.NON_BLOCKING),
        "cuCtxSynchronize": drv.cuCtxSynchronize,
        "cuCtxGetCurrent": drv.cuCtxGetCurrent,
        "cuCtxSetCurrent": lambda: drv.cuCtxSetCurrent(context),
        "cuMemAlloc": lambda: drv.cuMemAlloc(4096),
        "cuMemAllocHost": lambda: drv.cuMemAllocHost(4096),
        "cuMemHostRegister": lambda: drv.cuMemHostRegister(aligned, 4096, 3),
        "cuMemHostGetDevicePointer": lambda: drv.cuMemHostGetDevicePointer(aligned, 0),
        "cuMemsetD8": lambda: drv.cuMemsetD8(asked.word(words), 0, 64),
        "cuMemsetD8Async on another stream": lambda: drv.cuMemsetD8Async(asked.word(words), 0, 64, other),
        "cuDeviceGetAttribute": lambda: drv.cuDeviceGetAttribute(drv.CUdevice_attribute(1), 0),
    }
    for what, call in calls.items():
        said = []
        for how, mode in (("global", kit.GLOBAL), ("relaxed", kit.RELAXED)):
            ok(drv.cuStreamBeginCapture(stream, drv.CUstreamCaptureMode(mode)))
            answer = code(call())
            is_invalid = kit.capture_status(drv, stream) == kit.INVALIDATED
            kit.end_capture(drv, stream)
            said.append(f"{how}: {say(answer)}{', invalidated' if is_invalid else ''}")
        yield f"in a capture: {what}", "; ".join(said)


def graph_records() -> Iterator[tuple[str, str]]:
    """When does an event node of a graph record: as the launch is called, or as the node is reached?"""
    drv = load()
    stream, other = asked.new_stream(), asked.new_stream()
    event = ok(drv.cuEventCreate(kit.DISABLE_TIMING))
    ok(drv.cuStreamBeginCapture(stream, drv.CUstreamCaptureMode(kit.RELAXED)))
    ok(drv.cuEventRecordWithFlags(event, stream, _EXTERNAL))
    graph = ok(drv.cuGraphInstantiate(ok(drv.cuStreamEndCapture(stream)), 0))
    latch = kit.Latch(stream)
    ok(drv.cuGraphLaunch(graph, stream))
    pending = code(drv.cuEventQuery(event))
    ok(drv.cuStreamWaitEvent(other, event, 0))
    went = asked.milliseconds(lambda: asked.is_done(other), 0.05)
    latch.open()
    kit.finish(stream)
    kit.finish(other)
    yield "a plain event of a graph whose launch is held back: its query", say(pending)
    yield "a stream that waits for it then", "goes on at once" if went is not None else "waits for the graph"
