"""The slots of interprocess events: what a dead process leaves in one, and the files that they lie in."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from ipcsync._drivers import handle_bytes, load
from ipcsync._linux.process import PidFd
from tests.contract import actions, probe_actions
from tests.contract.sharing import share
from tests.gpu.questions import peers as asked
from tests.kit import driver_kit as kit
from tests.kit.driver_kit import code, ok

_BLINK_S = 0.5
_GONE_S = 4.0
_SIZE = {"gpu": (2 << 30, 600), "software": (64 << 20, 40)}  # about 0.45 s


def _is_pending(event: Any) -> bool:
    return code(load().cuEventQuery(event)) == kit.NOT_READY


def _kill(pid: int) -> float | None:
    """Milliseconds until its pidfd says so."""
    with closing(PidFd(pid)) as pidfd:
        os.kill(pid, signal.SIGKILL)
        return asked.milliseconds(pidfd.has_ended, _GONE_S)


def _again(handle: bytes) -> tuple[Any, bool]:
    """A new event, and whether it has the slot of the one with that handle."""
    drv = load()
    for _ in range(64):
        event = ok(drv.cuEventCreate(kit.SHAREABLE))
        if handle_bytes(ok(drv.cuIpcGetEventHandle(event))) == handle:
            return event, True
    return event, False


def poisoned_slot() -> Iterator[tuple[str, str]]:
    """An event that a dead process left pending is destroyed: is the next event of its slot usable?"""
    drv = load()
    event = ok(drv.cuEventCreate(kit.SHAREABLE))
    handle = handle_bytes(ok(drv.cuIpcGetEventHandle(event)))
    with asked.peers(2) as (recorder, other):
        share(drv, event, recorder)
        recorder.call(actions.hold, "s")
        assert recorder.call(actions.record, "e", "s") == kit.SUCCESS
        took = _kill(recorder.pid)
        yield "a recorder with a held stream is killed: its pidfd", asked.when(took, _GONE_S)
        yield "a poisoned event, before it is destroyed", "pending" if _is_pending(event) else "complete"
        ok(drv.cuEventDestroy(event))
        following, is_same = _again(handle)
        yield "the next event after a poisoned one", "has the same 64 bytes" if is_same else "has other bytes"
        yield "a new event in a poisoned slot, never recorded", "pending" if _is_pending(following) else "complete"
        stream = asked.new_stream()
        ok(drv.cuEventRecord(following, stream))
        took = asked.milliseconds(lambda: not _is_pending(following), _BLINK_S)
        yield "a new event in a poisoned slot: its first record completes", asked.when(took, _BLINK_S)
        took = asked.milliseconds(lambda: asked.is_done(stream), _BLINK_S)
        yield "a new event in a poisoned slot: its stream goes on", asked.when(took, _BLINK_S)
        answer = other.call(actions.open_event, "e", handle_bytes(ok(drv.cuIpcGetEventHandle(following))))
        seen = other.call(actions.query, "e") if answer == kit.SUCCESS else answer
        yield "a new event in a poisoned slot, seen by an importer", f"result {seen}"


def late_signals() -> Iterator[tuple[str, str]]:
    """A killed recorder's work goes on: does its record reach the event that has the slot by then?"""
    drv = load()
    for child in (False, True):
        beside = ", a forked child of the dead lives" if child else ""
        event = ok(drv.cuEventCreate(kit.SHAREABLE))
        handle = handle_bytes(ok(drv.cuIpcGetEventHandle(event)))
        with asked.peers() as (recorder,):
            share(drv, event, recorder)
            sleeper = recorder.call(asked.fork_a_sleeper, 8.0) if child else 0
            recorder.call(probe_actions.submit_long_work, "s", *_SIZE[kit.driver_kind()])
            assert recorder.call(actions.record, "e", "s") == kit.SUCCESS
            was_pending = _is_pending(event)
            os.kill(recorder.pid, signal.SIGKILL)
            ok(drv.cuEventDestroy(event))
            following, is_same = _again(handle)
            stream = asked.new_stream()
            latch = kit.Latch(stream)
            ok(drv.cuEventRecord(following, stream))
            took = asked.milliseconds(lambda event=following: not _is_pending(event), 1.5)  # type: ignore[misc]
            if not was_pending:
                answer = "not asked: the work was done before"
            elif not is_same:
                answer = "not asked: no event got the slot"
            else:
                answer = f"complete {asked.when(took, 1.5)}, with its own stream held back"
            yield f"a late signal to the slot's next event{beside}", answer
            latch.open()
            if child:
                with suppress(ProcessLookupError):
                    os.kill(sleeper, signal.SIGKILL)
    yield from _held_beside_a_child()


def _held_beside_a_child() -> Iterator[tuple[str, str]]:
    """A killed recorder's stream waits for a word that others can store: does it go on while a child has the files?"""
    drv = load()
    for child in (False, True):
        event = ok(drv.cuEventCreate(kit.SHAREABLE))
        with asked.shared_page() as (path, page), asked.peers() as (recorder,):
            share(drv, event, recorder)
            recorder.call(actions.register_page, "page", path)
            sleeper = recorder.call(asked.fork_a_sleeper, 8.0) if child else 0
            assert recorder.call(actions.wait_word, "s", "page", 0, 1) == kit.SUCCESS
            assert recorder.call(actions.record, "e", "s") == kit.SUCCESS
            with closing(PidFd(recorder.pid)) as pidfd:
                os.kill(recorder.pid, signal.SIGKILL)
                gone = asked.milliseconds(pidfd.has_ended, _GONE_S)
            page.words[0] = 1
            took = asked.milliseconds(lambda event=event: not _is_pending(event), 1.0)  # type: ignore[misc]
            beside = "a forked child of the dead lives" if child else "nobody else has its files"
            said = f"pidfd {asked.when(gone, _GONE_S)}; complete {asked.when(took, 1.0)} of the store"
            yield f"a dead process's record behind a word that is stored after its death, {beside}", said
            if child:
                with suppress(ProcessLookupError):
                    os.kill(sleeper, signal.SIGKILL)


def _files(pid: int) -> dict[str, int]:
    """The driver's files of a process in /dev/shm: kilobytes on tmpfs, by name without the uid and pid."""
    found = Path("/dev/shm").glob(f"cuda.shm.*.{pid:x}.*")
    found_too = Path("/dev/shm").glob(f"cuda.shm.*.{pid}.*")
    return {path.name.rpartition(".")[2]: path.stat().st_blocks // 2 for path in {*found, *found_too}}


def _in_words(files: dict[str, int]) -> str:
    return f"{len(files)} files, {sum(files.values())} KB" if files else "none"


def files() -> Iterator[tuple[str, str]]:
    """What the driver keeps in /dev/shm for events and memory, and what a killed process leaves there."""
    with asked.peers() as (exporter,):
        yield "files in /dev/shm: a context", _in_words(_files(exporter.pid))
        for count in (1, 99, 900, 3000):
            made = exporter.call(asked.share_events, count)
            yield f"files in /dev/shm: {made} exported events", _in_words(_files(exporter.pid))
        exporter.call(actions.share_memory, "m", 2 << 20)
        yield "files in /dev/shm: exported memory besides", _in_words(_files(exporter.pid))
        _kill(exporter.pid)
        yield "files in /dev/shm: the process was killed", _in_words(_files(exporter.pid))
    with asked.peers() as (exporter,):
        exporter.call(actions.share_event, "e")
        exporter.close()
        time.sleep(0.1)
        yield "files in /dev/shm: the process ended in order", _in_words(_files(exporter.pid))
