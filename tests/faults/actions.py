"""What a peer of these tests does on its side: module-level functions, run there by `Peer.call`."""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import ipcsync
from ipcsync._board import SessionLine
from ipcsync._engines import core
from ipcsync._linux import futex
from ipcsync._linux.process import start_time
from ipcsync._session import handshake
from ipcsync.typing import EngineName, Stats
from tests.kit import remote
from tests.kit.remote import client, event, stream
from tests.kit.until import DEADLINE_S

_points: dict[str, ipcsync.Point] = {}
_kept: list[ipcsync.Coordinator] = []
_hooks: list[Any] = []  # C callbacks, which must outlive their use

STEPS = ("before the driver's call", "before it is published", "before the wake")


def connect(endpoint: str, name: str, lease_ttl: float | None = None) -> int:
    """Connect; which line of the board the session has."""
    return remote.connect(endpoint, name, {"lease_ttl": lease_ttl})


def open_event(name: str, engine: EngineName, recorder: bool = True, depth: int = 4) -> None:
    remote.open_event(name, {"recorder": recorder, "engine": engine, "depth": depth})


def open_recorder(endpoint: str, name: str, engine: EngineName, lease_ttl: float | None = None) -> None:
    """Connect and open one event as its recorder."""
    connect(endpoint, "recorder", lease_ttl)
    open_event(name, engine)


def record(name: str) -> bytes:
    return bytes(event(name).record(stream()))


def record_complete(name: str) -> bytes:
    """Record, and wait until the board says that it is complete."""
    point = event(name).record(stream())
    point.synchronize(20)
    while event(name).completed < point.generation:
        event(name)._engine.publish_completed()
    return bytes(point)


def take(data: bytes, as_name: str) -> None:
    """Keep a point of another process."""
    _points[as_name] = client().point(data)


def engine_of(point: str) -> Any:
    return _points[point]._bound().engine


def wait_on_stream(point: str) -> None:
    """Queue a wait on this peer's stream."""
    _points[point].wait(stream(), timeout=20)


def error_of(fn: Callable[..., Any], *args: Any) -> str:
    """The name of the ipcsync error that a call here raises, empty if it raises none."""
    try:
        fn(*args)
    except ipcsync.IpcSyncError as error:
        return type(error).__name__
    return ""


def query(point: str) -> bool:
    return _points[point].query()


def synchronize(point: str, timeout: float | None = None) -> None:
    _points[point].synchronize(timeout)


def synchronize_at(name: str, generation: int, timeout: float | None = None) -> None:
    event(name).at(generation).synchronize(timeout)


def stats() -> Stats:
    return client().stats()


def be_marked_as_dead() -> None:
    """Have the kernel mark this process's death, though it lives on: one that is torn down late looks so to others."""
    client()._session.lease.mark.give_up()


def errors_of_every_use(name: str) -> dict[str, str]:
    """What each use of the client and of one event raises."""
    opened = event(name)
    uses: dict[str, Callable[[], Any]] = {
        "record": lambda: opened.record(stream()),
        "at": lambda: opened.at(1),
        "open": lambda: client().event("another"),
        "open again": lambda: client().event(name, recorder=True),
        "stats": lambda: client().stats(),
        "unnamed": lambda: client().record(stream()),
    }
    return {use: error_of(fn) for use, fn in uses.items()}


# --- faults -----------------------------------------------------------------------------------------------------------


def _signal_at(step: str, event: ipcsync.SharedEvent, number: int) -> None:
    """Have this process signal itself, once, at a step of its next record of `event`."""
    engine: Any = event._engine
    engine.line.awaited = 1  # as by one who sleeps: else nobody is woken
    signal_at_step(
        {
            "before the driver's call": ("cuEventRecord", "cuStreamWriteValue64"),
            "before it is published": ("store recorded",),
            "before the wake": ("wake",),
        }[step],
        [number],
    )


def signal_at_step(names: Sequence[str], left: list[int], at: int = 0) -> None:
    """Have this process send itself the signal in `left` before the compiled core takes such a step, after `at`; of no
    names: any."""
    passed = itertools.count()

    def step(name: bytes) -> None:
        if (not names or name.decode() in names) and next(passed) >= at and left:
            os.kill(os.getpid(), left.pop())

    _hooks.append(ctypes.CFUNCTYPE(None, ctypes.c_char_p)(step))
    core.set_hook(ctypes.cast(_hooks[-1], ctypes.c_void_p).value)


def steps_of(call: str, name: str) -> int:
    """How many steps the compiled core takes for one more record of an event, or one more wait for a point."""
    if call == "record":
        _keep_the_heartbeat_out(event(name))
    taken: list[bytes] = []
    _hooks.append(ctypes.CFUNCTYPE(None, ctypes.c_char_p)(taken.append))
    core.set_hook(ctypes.cast(_hooks[-1], ctypes.c_void_p).value)
    _CALLS[call](name)
    core.set_hook(0)
    return len(taken)


def die_at_step(call: str, name: str, at: int) -> None:
    """SIGKILL before the compiled core's step number `at` of a call."""
    if call == "record":
        _keep_the_heartbeat_out(event(name))
    signal_at_step((), [signal.SIGKILL], at)
    _CALLS[call](name)


def _keep_the_heartbeat_out(event: ipcsync.SharedEvent) -> None:
    """Its steps would be counted too."""
    engine: Any = event._engine
    engine.publish_completed = lambda: None


def die_in_record(name: str, step: str) -> None:
    _signal_at(step, event(name), signal.SIGKILL)
    record(name)


def stop_before_queued(point: str, step: str = "cuStreamWaitEvent") -> None:
    """SIGSTOP inside a wait, right before the driver's call that queues it on this peer's stream, or another step."""
    signal_at_step((step,), [signal.SIGSTOP])
    wait_on_stream(point)


def stop_in_record(name: str, step: str) -> str:
    """SIGSTOP inside a record; how the record ended once the process went on."""
    _signal_at(step, event(name), signal.SIGSTOP)
    return error_of(record, name)


def stop_in_heartbeat() -> None:
    """SIGSTOP in the heartbeat's thread, just before it stores what it read from the clock."""
    session_line: Any = SessionLine
    word = vars(SessionLine)["heartbeat"]

    def stop_then_store(line: SessionLine, now_ns: int) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)
        word.__set__(line, now_ns)

    session_line.heartbeat = property(word.__get__, stop_then_store)


def stop_in_connect(endpoint: str, lease_ttl: float, at: str = "behind the lifeline") -> str:
    """SIGSTOP once the board is mapped, "before" the lifeline is taken, "behind" it, or both; how the connect ended.

    The coordinator has not heard of it by then.
    """
    hold = handshake.hold_lifeline

    def stop_if(step: str) -> None:
        if step in at:
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # not a step further, as another thread's would

    def hold_and_stop(*args: Any) -> None:
        stop_if("before")
        hold(*args)
        stop_if("behind")

    handshake.hold_lifeline = hold_and_stop  # type: ignore[assignment]
    return error_of(remote.connect, endpoint, "stopped", {"lease_ttl": lease_ttl, "timeout": DEADLINE_S})


def have_no_robust_futexes() -> None:
    """As on a kernel that refuses them: the system call has another number from now on."""
    futex._SYS_SET = -1


def hold_the_gil(seconds: float) -> None:
    """Sleep without giving the GIL away, as a badly written extension would."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def hold_the_gil_and_record(name: str, seconds: float) -> str:
    hold_the_gil(seconds)
    return error_of(record, name)


def jump_the_wall_clock() -> None:
    """From now on the wall clock of this process jumps about by years."""
    clock: Any = time
    real, jumps = time.time_ns, itertools.count()

    def jumping_ns() -> int:
        return real() + (10**17 if next(jumps) % 2 else -(10**17))

    clock.time_ns = jumping_ns
    clock.time = lambda: jumping_ns() / 1e9


def launch_coordinator() -> tuple[int, int]:
    """Start a coordinator from here; its pid and start time."""
    coordinator = ipcsync.launch()
    _kept.append(coordinator)
    started = start_time(coordinator.pid)
    assert started is not None
    return coordinator.pid, started


_CALLS: dict[str, Callable[[str], Any]] = {"record": record, "wait": wait_on_stream}
