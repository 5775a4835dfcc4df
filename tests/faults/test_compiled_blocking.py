"""A driver's call may block while a stream's queue is full: then the compiled core must let other threads run.

What would make room may be one of them: a host function in Python, or a record that the stream waits for. And without
the heartbeat's thread the session expires.
"""

from __future__ import annotations

import ctypes
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ipcsync.errors import WaitTimeout
from ipcsync.typing import EngineName
from tests.faults.compiled_rig import Case, Rig, end
from tests.faults.test_chain_order import Chain
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


_BLOCKING = {
    ("record", "event"): "cuEventRecord",
    ("record", "timeline"): "cuStreamWriteValue64",
    ("wait", "event"): "cuStreamWaitEvent",
    ("wait", "timeline"): "cuStreamWaitValue64",
}


def _others(made: Rig) -> None:
    """What goes on meanwhile: questions, waits of the host, a beat, and the close of another use."""
    engine: Any = made.engine
    assert not engine.query(2)
    with pytest.raises(WaitTimeout):
        engine.synchronize(2, 0)
    engine.publish_completed()
    assert not engine.await_calls(0)
    other = made.made(1, recorder=False)
    other.close()
    assert other.try_release()
    assert not engine.try_release()


@pytest.mark.parametrize("is_chained", [False, True])
@pytest.mark.parametrize("engine", ["event", "timeline"])
@pytest.mark.parametrize("call", ["record", "wait"])
def test_other_threads_and_calls_go_on_while_a_drivers_call_blocks(
    tmp_path: Path, engine: EngineName, call: str, is_chained: bool
) -> None:
    if not Path("/proc/self/syscall").exists():
        pytest.skip("this kernel does not say what a thread waits for")
    semaphore = _Semaphore()
    # Its first argument is the stream, or of a record of a CUDA event that event; its second one the other of them, or
    # the timeline's address.
    is_event_first = (call, engine) == ("record", "event")
    case = Case(call, engine=engine, recorded=int(call == "wait"), depth=4)
    handle = semaphore.address if is_event_first else semaphore.until
    made = (Chain if is_chained else Rig)(case, tmp_path, handle=handle)
    made.engine._address = semaphore.until
    made.stream_handle = semaphore.until if is_event_first else semaphore.address
    made.bind(**{_BLOCKING[call, engine]: ctypes.cast(_libc.sem_timedwait, ctypes.c_void_p).value or 0})
    results: list[str] = []
    thread = threading.Thread(target=lambda: results.append(made.call()[1]))
    thread.start()
    assert thread.native_id is not None
    until(lambda: not thread.is_alive() or semaphore.is_awaited_by(thread.native_id or 0), "the driver's call blocks")
    try:
        _others(made)
    finally:
        semaphore.post()
        thread.join()
        end([made])
    assert results == ["" if call == "record" else "ok"], "the driver's call was over only after its time"


_AMONG_WAITS = """
import ctypes, os, signal, threading
from pathlib import Path
from tests.faults.compiled_rig import Case
from tests.faults.test_compiled_blocking import _Semaphore, _libc
from tests.faults.test_chain_order import Chain
from tests.kit.until import until

signal.alarm(20)  # a call with the GIL that waits for another thread ends with no exception
semaphore = _Semaphore()
call = os.environ["CALL"]
is_full = os.environ["FUNCTION"] == "cuEventQuery"
case = Case(call, depth=1 if is_full else 4, recorded=1, made=int(call in ("record", "let go")))
made = Chain(case, Path(os.environ["DIRECTORY"]), handle=semaphore.address)
made.stream_handle = semaphore.address
made.is_users = os.environ["USERS"] == "1"
made.bind(**{os.environ["FUNCTION"]: ctypes.cast(_libc.sem_wait, ctypes.c_void_p).value})
thread = threading.Thread(target=made.call, daemon=True)
thread.start()
until(lambda: semaphore.is_awaited_by(thread.native_id), "the driver's call blocks")
os._exit(0)  # the thread goes on waiting
"""


@pytest.mark.process
@pytest.mark.parametrize("is_users", [False, True])
@pytest.mark.parametrize(
    ("call", "function"),
    [
        ("record", "cuEventQuery"),
        ("record", "cuStreamGetId"),
        ("wait", "cuEventQuery"),
        ("wait", "cuStreamGetId"),
        ("query", "cuEventQuery"),
        ("let go", "cuEventQuery"),
    ],
)
def test_other_threads_run_while_the_driver_is_asked(tmp_path: Path, call: str, function: str, is_users: bool) -> None:
    run(_AMONG_WAITS, FUNCTION=function, CALL=call, USERS=str(int(is_users)), DIRECTORY=str(tmp_path))


_AMONG_LOST = """
import ctypes, os, signal, threading
from pathlib import Path
from ipcsync._engines import core
from ipcsync._engines.loss import Loss
from tests.faults.compiled_rig import NOT_READY, Case, Rig
from tests.faults.test_compiled_blocking import _Semaphore, _libc
from tests.kit.until import until

signal.alarm(20)
semaphore = _Semaphore()
made = Rig(Case("wait", recorded=1), Path(os.environ["DIRECTORY"]), handle=semaphore.address)
made.results["cuEventQuery"] = NOT_READY
assert made.call()[1] == "ok"
(wait,) = core.of(None)
wait.outcome = Loss("died", 0, "r", 7)
if os.environ["CALL"] == "is passed":
    core.release(made.engine)
    (wait,) = core.of(None)
    ask = lambda: wait.view.has_passed(wait.stream)
else:
    ask = lambda: core.release(made.engine)
made.bind(cuEventQuery=ctypes.cast(_libc.sem_wait, ctypes.c_void_p).value)
thread = threading.Thread(target=ask, daemon=True)
thread.start()
until(lambda: semaphore.is_awaited_by(thread.native_id), "the driver's call blocks")
os._exit(0)  # the thread goes on waiting
"""


@pytest.mark.process
@pytest.mark.parametrize("call", ["is passed", "is made"])
def test_other_threads_run_while_the_driver_is_asked_about_a_lost_wait(tmp_path: Path, call: str) -> None:
    run(_AMONG_LOST, CALL=call, DIRECTORY=str(tmp_path))


def test_a_wait_sleeps_though_the_capture_mode_of_its_thread_cannot_be_changed(tmp_path: Path) -> None:
    made = Rig(Case("synchronize", recorded=1), tmp_path)
    made.results["cuThreadExchangeStreamCaptureMode"] = 1
    with made.hooked(), pytest.raises(WaitTimeout):
        made.engine.synchronize(1, 0.2)
    end([made])
    assert made.log.count("await work") <= 5, "it sleeps in slices of 50 ms"
