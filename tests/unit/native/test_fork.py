"""The fork guard: in a child forked after first use nothing works and nothing is touched; before it, all works."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

pytestmark = [pytest.mark.driver, pytest.mark.process]

PRELUDE = """
import ctypes, os, sys
import ipcsync
from ipcsync.errors import ForkedProcessError

def status_of(body, fork=os.fork):
    '''The exit status of a forked child that ran body(): 0 if it returned.'''
    pid = fork()
    if pid == 0:
        status = 1
        try:
            body()
            status = 0
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def refused(call):
    '''None if call() raised ForkedProcessError, else what happened.'''
    try:
        return call()
    except ForkedProcessError:
        return None

c_fork = ctypes.PyDLL(None).fork
"""


def run(script: str) -> str:
    """What a fresh interpreter printed that ran `script`, and ended well."""
    code = PRELUDE + textwrap.dedent(script)
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


EVERY_CALL = """
stream, event, timed = ipcsync.Stream(), ipcsync.Event(interprocess=True), ipcsync.Event(True)
stream.record_event(event)
stream.record_event(timed)
blank = ipcsync.Event()
handle = event.ipc_handle()
pointer = stream.cuda_stream
calls = {name: getattr(ipcsync, name) for name in (
    "driver_version", "device_count", "current_device", "get_device_properties", "synchronize", "current_stream",
    "default_stream", "is_current_stream_capturing", "ipc_collect", "Stream", "Event", "device")}
calls |= {name: (lambda name=name: getattr(ipcsync, name)(0)) for name in (
    "set_device", "exchange_device", "maybe_exchange_device", "has_primary_context")}
calls |= {name + " of -1": (lambda name=name: getattr(ipcsync, name)(-1)) for name in (
    "set_device", "exchange_device", "maybe_exchange_device")}
calls |= {
    "can_device_access_peer": lambda: ipcsync.can_device_access_peer(0, 0),
    "set_stream": lambda: ipcsync.set_stream(stream),
    "stream": lambda: ipcsync.stream(stream).__enter__(),
    "with stream": stream.__enter__,
    "ExternalStream": lambda: ipcsync.ExternalStream(pointer),
    "Stream of a triple": lambda: ipcsync.Stream(stream_id=pointer, device_index=0, device_type=1),
    "from_ipc_handle": lambda: ipcsync.Event.from_ipc_handle(0, handle),
    "priority_range": ipcsync.Stream.priority_range,
    "wait_event": lambda: stream.wait_event(event),
    "wait_stream": lambda: stream.wait_stream(stream),
    "cuda_stream": lambda: stream.cuda_stream,
    "__cuda_stream__": stream.__cuda_stream__,
    "stream._as_parameter_": lambda: stream._as_parameter_,
    "priority": lambda: stream.priority,
    "elapsed_time": lambda: timed.elapsed_time(timed),
    "cuda_event": lambda: event.cuda_event,
    "event_id": lambda: event.event_id,
    "event._as_parameter_": lambda: event._as_parameter_,
    "pickle": event.__reduce__,
}
calls |= {"stream." + name: getattr(stream, name) for name in (
    "query", "synchronize", "record_event", "is_capturing")}
calls |= {"event." + name: getattr(event, name) for name in ("record", "wait", "query", "synchronize", "ipc_handle")}
calls |= {"blank." + name: getattr(blank, name) for name in ("record", "wait", "query", "synchronize", "ipc_handle")}

def all_refused():
    done = {name: refused(call) for name, call in calls.items()}
    assert not any(value is not None for value in done.values()), done
"""


@pytest.mark.parametrize("fork", ["os.fork", "c_fork"])
def test_every_call_raises_in_a_child_forked_after_use_whoever_forked(fork: str) -> None:
    run(
        EVERY_CALL
        + f"""
assert status_of(all_refused, {fork}) == 0
event.record(stream)
event.synchronize()
assert event.query()
"""
    )


def test_every_call_raises_in_a_multiprocessing_child() -> None:
    run(
        EVERY_CALL
        + """
import multiprocessing
child = multiprocessing.get_context("fork").Process(target=all_refused)
child.start()
child.join(30)
assert child.exitcode == 0
"""
    )


def test_a_child_of_the_child_is_refused_too() -> None:
    run(
        """
        ipcsync.device_count()
        def grandchild():
            assert ipcsync.is_in_bad_fork()
            assert refused(ipcsync.device_count) is None
        def child():
            assert status_of(grandchild) == 0
        assert status_of(child) == 0
        """
    )


def test_device_count_alone_arms_the_guard() -> None:
    run(
        """
        assert not ipcsync.is_in_bad_fork()
        ipcsync.device_count()
        assert not ipcsync.is_in_bad_fork()
        def child():
            assert ipcsync.is_in_bad_fork()
            assert refused(ipcsync.Stream) is None
        assert status_of(child) == 0
        """
    )


def test_what_may_be_asked_in_a_child_answers() -> None:
    run(
        """
        name = ipcsync.driver_name()
        assert ipcsync.is_available()
        def child():
            assert ipcsync.is_in_bad_fork()
            assert ipcsync.driver_name() == name
            assert ipcsync.is_available() is False
        assert status_of(child) == 0
        assert ipcsync.is_available()
        """
    )


@pytest.mark.parametrize("fork", ["os.fork", "c_fork"])
def test_a_child_forked_before_first_use_works(fork: str) -> None:
    run(
        f"""
        import ipcsync._native
        def work():
            stream = ipcsync.Stream()
            event = stream.record_event()
            event.synchronize()
            assert event.query() and not ipcsync.is_in_bad_fork()
        assert status_of(work, {fork}) == 0
        work()
        """
    )


@pytest.mark.parametrize("fork", ["os.fork", "c_fork"])
def test_a_child_forked_while_another_thread_loads_a_name_is_refused(fork: str) -> None:
    """Its own import would wait for that thread, which it has not."""
    run(
        f"""
        import signal, threading
        is_within, go_on = threading.Event(), threading.Event()
        def stop(event, arguments):  # within the module that names it, whose import's lock is held
            if event == "import" and arguments[0] == "ipcsync.client.client":
                is_within.set()
                assert go_on.wait(50)
        sys.addaudithook(stop)
        thread = threading.Thread(target=lambda: ipcsync.connect)
        thread.start()
        assert is_within.wait(50)
        def child():
            signal.alarm(30)
            for name in ("connect", "wait_all", "Stream"):
                assert refused(lambda: getattr(ipcsync, name)) is None, name
        status = status_of(child, {fork})
        go_on.set()
        thread.join()
        assert status == 0
        assert callable(ipcsync.connect)
        assert status_of(lambda: ipcsync.wait_all, {fork}) == 0
        """
    )


def test_a_child_that_used_it_is_the_parent_of_bad_children() -> None:
    run(
        """
        def grandchild():
            assert refused(ipcsync.Event) is None
        def child():
            ipcsync.device_count()
            assert status_of(grandchild) == 0
        assert status_of(child) == 0
        ipcsync.device_count()
        """
    )


def test_finalizers_in_the_child_leave_the_parents_objects_alone() -> None:
    run(
        """
        import gc
        streams = [ipcsync.Stream() for _ in range(4)]
        events = [stream.record_event(ipcsync.Event(interprocess=True)) for stream in streams]
        def child():
            streams.clear()
            events.clear()
            gc.collect()
        assert status_of(child) == 0
        for stream, event in zip(streams, events):
            event.record(stream)
            stream.synchronize()
            assert event.query()
        """
    )


def test_no_driver_function_is_called_in_the_child() -> None:
    run(
        EVERY_CALL
        + """
import types
from ipcsync import _drivers
real = _drivers.load()
called = []
class Watched(types.ModuleType):
    def __getattr__(self, name):
        called.append(name)
        return getattr(real, name)
def child():
    global stream, event, timed, blank
    _drivers._chosen = Watched("watched")
    all_refused()
    calls.clear()
    del stream, event, timed, blank
    assert called == [], called
assert status_of(child) == 0
"""
    )


def test_functions_asked_for_are_called_in_the_child_once_and_one_that_fails_stops_none() -> None:
    out = run(
        """
        import functools, logging
        logging.disable()
        from ipcsync._native import fork
        def fails(_):
            raise RuntimeError("on purpose")
        fork.keep_from_children(int, fails)
        _, forget = fork.keep_from_children(lambda: "forgotten", functools.partial(print, flush=True))
        fork.keep_from_children(lambda: "called", functools.partial(print, flush=True))
        forget()
        forget()
        assert status_of(lambda: None) == 0
        """
    )
    assert out == "called\n"


def test_what_was_made_amid_a_fork_is_made_anew() -> None:
    out = run(
        """
        from ipcsync._native import fork
        made, dropped = [], []
        def make():
            made.append(len(made) + 1)
            if made[-1] < 3:
                assert status_of(lambda: None) == 0
            return made[-1]
        kept, forget = fork.keep_from_children(make, dropped.append)
        print(kept, made, dropped, flush=True)
        def child():
            assert dropped == [1, 2, 3], dropped
        assert status_of(child) == 0
        forget()
        def later():
            assert dropped == [1, 2], dropped
        assert status_of(later) == 0
        """
    )
    assert out == "3 [1, 2, 3] [1, 2]\n"


def test_what_was_made_amid_forks_that_never_end_stays() -> None:
    out = run(
        """
        import threading, time
        held, under_way = threading.Event(), threading.Event()
        def wait_for_who_makes():
            under_way.set()
            held.wait(50)
        os.register_at_fork(before=wait_for_who_makes)
        from ipcsync._native import fork
        fork._PATIENCE_S = 0.05
        # The last one registered is called first: that of this package, then the one that waits.
        forking = threading.Thread(target=lambda: status_of(lambda: None))
        forking.start()
        assert under_way.wait(50)
        dropped = []
        kept, forget = fork.keep_from_children(lambda: object(), dropped.append)
        assert dropped and kept not in dropped, dropped
        held.set()
        forking.join()
        seen = []
        kept, _ = fork.keep_from_children(lambda: seen.append(1), seen.append)
        print(seen)
        """
    )
    assert out == "[1]\n"


@pytest.mark.parametrize("where", ["before", "after_in_parent"])
def test_an_exception_amid_a_fork_costs_one_board_at_most(where: str) -> None:
    """CPython prints and drops what a function raises that is called around a fork."""
    out = run(
        f"""
        import signal, itertools
        from ipcsync._native import fork
        class Raised(Exception):
            pass
        def handler(*_):
            raise Raised
        signal.signal(signal.SIGUSR1, handler)
        os.register_at_fork({where}=lambda: os.kill(os.getpid(), signal.SIGUSR1))
        sys.unraisablehook = lambda _: None
        for _ in range(20):
            try:
                assert status_of(lambda: None) == 0
            except Raised:
                os.wait()
        seen = []
        fork.keep_from_children(lambda: seen.append(1), seen.append)
        print(seen)
        """
    )
    assert out == "[1]\n"


def test_an_exec_of_the_same_program_is_no_bad_fork() -> None:
    run(
        """
        import subprocess
        ipcsync.device_count()
        code = "import ipcsync; ipcsync.device_count(); assert not ipcsync.is_in_bad_fork()"
        subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
        """
    )
