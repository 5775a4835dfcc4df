"""A driver's call may block while a stream's queue is full: then the compiled core must let other threads run.

What would make room may be one of them: a host function in Python, or a record that the stream waits for. And without
the heartbeat's thread the session expires.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ipcsync.typing import EngineName
from tests.faults.compiled_rig import _POINTER, _SIGNATURES, NotMeError, Rig, _point_of, end
from tests.faults.test_board_order import Case
from tests.faults.test_compiled_order import core
from tests.kit.scripts import run
from tests.kit.until import until

_TOO_LONG_S = 5
_libc = ctypes.CDLL(None)


class _Semaphore:
    """A semaphore of the C library's, and until when one waits for it: the two arguments of sem_timedwait."""

    def __init__(self) -> None:
        self._bytes = ctypes.create_string_buffer(32)
        assert _libc.sem_init(self._bytes, 0, 0) == 0
        self._until = (ctypes.c_int64 * 2)(int(time.time()) + _TOO_LONG_S, 0)
        self.address, self.until = ctypes.addressof(self._bytes), ctypes.addressof(self._until)

    def is_awaited_by(self, thread: int) -> bool:
        """Whether that thread is in the kernel's wait for it."""
        return f"{self.address:#x} " in Path(f"/proc/self/task/{thread}/syscall").read_text()

    def post(self) -> None:
        """Let one waiter go on."""
        _libc.sem_post(self._bytes)


@pytest.fixture
def rig(tmp_path: Path, engine: EngineName, call: str) -> Iterator[Rig]:
    made = Rig(core, tmp_path, Case(call, engine=engine, recorded=int(call == "wait"), depth=4))
    yield made
    end(core, [made])


_BLOCKING = {
    ("record", "event"): "cuEventRecord",
    ("record", "timeline"): "cuStreamWriteValue64",
    ("wait", "event"): "cuStreamWaitEvent",
    ("wait", "timeline"): "cuStreamWaitValue64",
}


@pytest.mark.parametrize("engine", ["event", "timeline"])
@pytest.mark.parametrize("call", ["record", "wait"])
def test_other_threads_run_while_a_drivers_call_blocks(rig: Rig, engine: EngineName, call: str) -> None:
    if not Path("/proc/self/syscall").exists():
        pytest.skip("this kernel does not say what a thread waits for")
    semaphore = _Semaphore()
    functions = dict(zip(_SIGNATURES, rig._functions, strict=True))
    addresses = {name: ctypes.cast(function, _POINTER).value for name, function in functions.items()}
    core.bind_functions({**addresses, _BLOCKING[call, engine]: ctypes.cast(_libc.sem_timedwait, _POINTER).value})
    # Its first argument is the stream, or of a record of a CUDA event that event; its second one the other of them, or
    # the timeline's address.
    is_event_first = (call, engine) == ("record", "event")
    stream = semaphore.until if is_event_first else semaphore.address
    rig.engine._address = semaphore.until
    for index in range(rig.case.depth):
        rig.engine._keep_event(index, semaphore.address if is_event_first else semaphore.until)
    outcome: list[Any] = []

    def work() -> None:
        try:
            if call == "record":
                rig.event.record(stream)
            else:
                _point_of(core)(type("Attached", (), {"engine": rig.engine}), 1).wait(stream)
            outcome.append("done")
        except NotMeError:
            outcome.append("the driver's call was over only after its time")

    thread = threading.Thread(target=work)
    thread.start()
    assert thread.native_id is not None
    until(lambda: not thread.is_alive() or semaphore.is_awaited_by(thread.native_id or 0), "the driver's call blocks")
    semaphore.post()
    thread.join()
    assert outcome == ["done"]


_AMONG_WAITS = """
import ctypes, os, signal, threading
from pathlib import Path
from tests.faults.compiled_rig import _POINTER, _SIGNATURES
from tests.faults.test_board_order import Case
from tests.faults.test_compiled_blocking import _Semaphore, _libc
from tests.faults.test_compiled_chains import Chain
from tests.faults.test_compiled_order import core
from tests.kit.until import until

signal.alarm(20)  # a call with the GIL that waits for another thread ends with no exception
function = os.environ["FUNCTION"]
rig = Chain(core, Path(os.environ["DIRECTORY"]), Case("record", recorded=1, made=1))  # a full ring
semaphore = _Semaphore()
addresses = {
    name: ctypes.cast(call, _POINTER).value for name, call in zip(_SIGNATURES, rig._functions, strict=True)
}
core.bind_functions({**addresses, function: ctypes.cast(_libc.sem_wait, _POINTER).value})
rig.engine._keep_event(0, semaphore.address)
thread = threading.Thread(target=rig.event.record, args=[semaphore.address], daemon=True)
thread.start()
until(lambda: semaphore.is_awaited_by(thread.native_id), "the driver's call blocks")
os._exit(0)  # the thread goes on waiting
"""


@pytest.mark.process
@pytest.mark.parametrize("function", ["cuEventQuery", "cuStreamGetId"])
def test_other_threads_run_while_the_driver_is_asked_for_a_record_among_waits(tmp_path: Path, function: str) -> None:
    run(_AMONG_WAITS, FUNCTION=function, DIRECTORY=str(tmp_path))


_ASKED_UNLOCKED = """
import ctypes, os, signal
from ipcsync._engines import core
from tests.faults.compiled_rig import _SIGNATURES
from tests.kit.until import until

signal.alarm(30)  # a call that waits for itself ends with no exception
asked = []

def ask(place):
    asked.append(core.parked())  # takes the lock
    return 0

calls = {
    name: ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(ask if name == "cuCtxGetCurrent" else lambda *_: 0)
    for name, kinds in _SIGNATURES.items()
}
core.bind_functions({name: ctypes.cast(call, ctypes.c_void_p).value for name, call in calls.items()})
word = ctypes.c_uint64()
assert core.park([1], ctypes.addressof(word))
assert asked == [(0, 0)]
until(lambda: core.parked() == (0, 1), "the thread is idle")
os._exit(0)
"""


@pytest.mark.process
def test_no_call_of_the_driver_is_made_with_the_lock_of_what_is_parked() -> None:
    run(_ASKED_UNLOCKED)
