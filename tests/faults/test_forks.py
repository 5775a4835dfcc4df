"""Row 31: in a child forked after use nothing works, nothing is touched, whoever forked; the parent does not notice."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import ipcsync
from ipcsync import _drivers
from ipcsync._board import Board
from ipcsync._linux import files
from ipcsync._session import handshake
from ipcsync.testing import StreamGate
from ipcsync.typing import EngineName
from tests.faults.forking import FORKS as FORK_BY
from tests.faults.forking import Child, collect_everything, forbid_touching, not_refused, thread_forked
from tests.kit import driver_functions
from tests.kit.package_locks import locks_of, module_locks, reservation_locks
from tests.kit.peer import Peer
from tests.kit.scripts import run
from tests.kit.until import DEADLINE_S, until

pytestmark = [pytest.mark.core, pytest.mark.driver, pytest.mark.keeper]

FORKS = ("os.fork", "PyDLL", "CDLL")
ENGINES: tuple[EngineName, ...] = ("event", "timeline")
# No heartbeat is due while a test forks: of CDLL's fork, a thread that holds the GIL in that instant leaves a child
# without one, which is between C and Python.
TTL = 60

kept: dict[str, Any] = {}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """One coordinator for all of these tests."""
    with ipcsync.launch(lease_ttl=TTL) as coordinator:
        yield coordinator.endpoint


# --- in a peer, which is the parent -----------------------------------------------------------------------------------


def _use_everything(endpoint: str) -> None:
    """One of each: events recorded on and waited for, on both engines, a closed gate, native objects."""
    client = ipcsync.connect(endpoint, name=f"parent-{os.getpid()}")
    stream, event = ipcsync.Stream(), ipcsync.Event(interprocess=True)
    stream.record_event(event)
    kept.update(client=client, stream=stream, event=event, held=ipcsync.Stream())
    for engine in ENGINES:
        shared = client.event(f"{engine}-{os.getpid()}", recorder=True, engine=engine)
        point = shared.record(stream)
        point.synchronize(10)
        kept.update({engine: shared, f"{engine} point": point, f"{engine} next": shared.at(2)})
    kept["watch"] = client.watch(timeout=0.1)
    next(kept["watch"])  # of several: this client, its events
    kept["unpickled"] = pickle.loads(pickle.dumps(kept["event point"]))
    kept["reservation"] = client.reserve()
    kept["gate"] = StreamGate(kept["held"])
    kept["gated"] = client.event(f"gated-{os.getpid()}", recorder=True)
    kept["pending"] = kept["gated"].record(kept["held"])


def _calls() -> dict[str, Callable[[], Any]]:
    client, stream, data = kept["client"], kept["stream"], bytes(kept["event point"])
    calls: dict[str, Callable[[], Any]] = {
        "connect": lambda: ipcsync.connect(client.endpoint),
        "client.event": lambda: client.event("another"),
        "default_client": ipcsync.default_client,
        "client.reserve": client.reserve,
        "reservation.record": kept["reservation"].record,
        "client.record": client.record,
        "client.record(stream)": lambda: client.record(stream),
        "client.point": lambda: client.point(data),
        "client.stream": lambda: client.stream("s"),
        "client.list_events": client.list_events,
        "client.list_sessions": client.list_sessions,
        "client.stats": client.stats,
        "client.check": client.check,
        "client.watch": lambda: next(client.watch(timeout=0.1)),
        "what a watch has read": lambda: next(kept["watch"]),
        "StreamGate": lambda: StreamGate(stream),
        "gate.open": kept["gate"].open,
        "gate.is_open": lambda: kept["gate"].is_open,
        "Stream": ipcsync.Stream,
        "Event": ipcsync.Event,
        "stream.query": stream.query,
        "unpickled.query": kept["unpickled"].query,
    }
    for engine in ENGINES:
        calls |= _event_calls(engine, kept[engine])
        for which in (f"{engine} point", f"{engine} next"):
            calls |= _point_calls(which, kept[which])
    return calls


def _event_calls(which: str, shared: ipcsync.SharedEvent) -> dict[str, Callable[[], Any]]:
    return {
        f"{which}.record": shared.record,
        f"{which}.record(stream)": lambda: shared.record(kept["stream"]),
        f"{which}.at": lambda: shared.at(1),
        f"{which}.latest": lambda: shared.latest,
        f"{which}.generation": lambda: shared.generation,
        f"{which}.completed": lambda: shared.completed,
        f"{which}.state": lambda: shared.state,
        f"{which}.is_lost": lambda: shared.is_lost,
        f"{which}.handles": lambda: shared.handles,
    }


def _point_calls(which: str, point: ipcsync.Point) -> dict[str, Callable[[], Any]]:
    return {
        f"{which}.query": point.query,
        f"{which}.wait": point.wait,
        f"{which}.wait(stream)": lambda: point.wait(kept["stream"], timeout=0.1),
        f"{which}.synchronize": lambda: point.synchronize(0.1),
        f"{which}.is_recorded": lambda: point.is_recorded,
        f"{which}.exception": point.exception,
        f"{which}.add_done_callback": lambda: point.add_done_callback(print),
        f"{which} bytes": lambda: bytes(point),
        f"{which} pickle": lambda: pickle.dumps(point),
    }


def _refuse_everything() -> dict[str, str]:
    """In the child: what was not refused, or touched the driver."""
    calls = _calls_of_parent
    driver = forbid_touching(kept["client"]._session.lease.board)
    wrong = not_refused(calls)
    for name in ("client", "reservation", *ENGINES):
        kept[name].close()
        kept[name].close()
    for name in ("client", "reservation", "gate", *ENGINES):
        with contextlib.ExitStack() as stack:
            stack.push(kept[name].__exit__)
    assert not kept["client"].is_connected
    assert ipcsync.is_in_bad_fork()
    assert [repr(each) for each in kept.values()], "a look at them in a debugger or a log touches nothing"
    return wrong | dict.fromkeys(driver.asked, "asked of the driver")


_calls_of_parent: dict[str, Callable[[], Any]] = {}


def _everything_is_refused(endpoint: str, kind: str) -> dict[str, str]:
    _use_everything(endpoint)
    _calls_of_parent.update(_calls())
    wrong: dict[str, str]
    if kind == "multiprocessing":
        wrong = _in_multiprocessing(_refuse_everything)
    elif kind == "thread":
        wrong = thread_forked(_refuse_everything)
    else:
        wrong = Child(kind, _refuse_everything).result()
    return wrong


def _send(pipe: Any, body: Callable[[], Any]) -> None:
    pipe.send(body())


def _in_multiprocessing(body: Callable[[], Any], method: str = "fork", *args: Any) -> Any:
    context: Any = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    child = context.Process(target=_send, args=(theirs, body), daemon=True)
    child.start()
    theirs.close()
    assert ours.poll(30), "the child hangs"
    result = ours.recv()
    child.join(30)
    assert child.exitcode == 0
    return result


def _parent_goes_on() -> None:
    """All of it still works, over the same session."""
    client, stream = kept["client"], kept["stream"]
    assert client.is_connected
    assert client.session_id in [session.id for session in client.list_sessions()]
    assert client._session.lease.board.session(client._session.lease.welcome.line).heartbeat
    assert not kept["pending"].query()
    kept["gate"].open()
    kept["pending"].synchronize(10)
    for engine in ENGINES:
        other = ipcsync.Stream()
        point = kept[engine].record(stream)
        client.point(bytes(point)).wait(other)
        point.synchronize(10)
        other.synchronize()
        assert kept[engine].state == "open"
    kept["gate"].__exit__(None, None, None)
    kept["reservation"].record(stream).synchronize(10)
    kept["reservation"].close()
    client.event("after").close()
    client.close()


@pytest.mark.parametrize("kind", [*FORKS, "thread", "multiprocessing"])
def test_row_31_everything_is_refused_in_a_child_and_the_parent_goes_on(endpoint: str, peer: Peer, kind: str) -> None:
    assert peer.call(_everything_is_refused, endpoint, kind) == {}
    peer.call(_parent_goes_on)


def _refused_with_all_locks_held(endpoint: str, kind: str) -> dict[str, str]:
    """The same in the child of a fork that comes while another thread, which is not there, has every lock of ours."""
    _use_everything(endpoint)
    _calls_of_parent.update(_calls())
    locks: list[Any] = [*module_locks(), *locks_of(kept["client"]), *reservation_locks([kept["reservation"]])]
    assert len(locks) > 5
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with contextlib.ExitStack() as stack:
            for _, lock in locks:
                lock.acquire()
                stack.callback(lock.release)
            held.set()
            done.wait(DEADLINE_S)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert held.wait(DEADLINE_S)
        wrong: dict[str, str] = Child(kind, _refuse_everything).result()
    finally:
        done.set()
        thread.join()
    return wrong


@pytest.mark.parametrize("kind", FORKS)
def test_row_31_everything_is_refused_in_a_child_that_forked_while_a_thread_had_our_locks(
    endpoint: str, peer: Peer, kind: str
) -> None:
    assert peer.call(_refused_with_all_locks_held, endpoint, kind) == {}
    peer.call(_parent_goes_on)


# --- what goes without a call -----------------------------------------------------------------------------------------


def _finalize_everything() -> list[str]:
    driver = forbid_touching(kept["client"]._session.lease.board)
    collect_everything(kept)
    return driver.asked


def _finalizers_do_nothing(endpoint: str, kind: str) -> list[str]:
    _use_everything(endpoint)
    asked: list[str] = Child(kind, _finalize_everything).result()
    return asked


@pytest.mark.parametrize("kind", FORKS)
def test_row_31_finalizers_do_nothing_in_a_child(endpoint: str, peer: Peer, kind: str) -> None:
    assert peer.call(_finalizers_do_nothing, endpoint, kind) == []
    peer.call(_parent_goes_on)


# A child that C forks inherits the GIL as it is, without a word to CPython, and waits for ever if another thread
# was just about to take it over. That is no doing of ours, so such a child is repeated.
@pytest.mark.process
@pytest.mark.timeout(150)
@pytest.mark.parametrize(("fork", "tries"), [("os.fork()", 1), ("ctypes.PyDLL(None).fork()", 3)])
@pytest.mark.parametrize("end", ["sys.exit(0)", "os._exit(0)", "del client, events, points, gate; sys.exit(0)"])
def test_row_31_a_child_ends_like_any_process(endpoint: str, fork: str, tries: int, end: str) -> None:
    script = f"""
        import ctypes, os, select, signal, sys
        import ipcsync
        from ipcsync.testing import StreamGate
        client = ipcsync.connect({endpoint!r})
        held = ipcsync.Stream()
        events = [client.event(f"{{engine}}-{{os.getpid()}}", recorder=True, engine=engine)
                  for engine in ("event", "timeline")]
        points = [event.record() for event in events]
        gate = StreamGate(held)
        points.append(events[0].record(held))
        statuses = []
        while len(statuses) < {tries} and 0 not in statuses:
            with held, ipcsync.device(0), StreamGate(ipcsync.Stream()):
                pid = {fork}
                if pid == 0:
                    {end}
            pidfd = os.pidfd_open(pid)
            if not select.select([pidfd], [], [], {DEADLINE_S / 2})[0]:
                os.kill(pid, signal.SIGKILL)
            os.close(pidfd)
            statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        assert statuses[-1] == 0 and set(statuses[:-1]) <= {{-signal.SIGKILL}}, statuses
        gate.open()
        points[-1].synchronize(10)
        client.event("after").close()
        gate.__exit__(None, None, None)
        client.close()
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=4 * DEADLINE_S,
        check=False,
        env=os.environ,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# --- while other threads are at work ----------------------------------------------------------------------------------


def _fork_amid_work(endpoint: str, engine: EngineName) -> int:
    """Forks while one thread records as fast as it can, another is blocked in a wait, a third in a synchronize."""
    _use_everything(endpoint)
    _calls_of_parent.update(_calls())
    client, shared = kept["client"], kept[engine]
    ending = threading.Event()
    problems: list[BaseException] = []

    def guarded(work: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - it is raised below
                problems.append(error)

        return run

    def record() -> None:
        while not ending.is_set():
            shared.record(kept["stream"]).synchronize(10)

    never = client.event(f"never-{os.getpid()}", engine=engine).at(1)
    works = [record, lambda: never.wait(ipcsync.Stream()), never.synchronize, client.list_events]
    threads = [threading.Thread(target=guarded(work)) for work in works]
    for thread in threads:
        thread.start()
    for _ in range(10):
        wrong = Child("os.fork", _refuse_everything).result()
        assert wrong == {}, wrong
    ending.set()
    client.event(f"never-{os.getpid()}", recorder=True, engine=engine).record()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert problems == [], [repr(problem) for problem in problems]
    return int(shared.generation)


@pytest.mark.parametrize("engine", ENGINES)
def test_row_31_a_fork_amid_records_and_blocked_waits_hurts_nobody(
    endpoint: str, peer: Peer, engine: EngineName
) -> None:
    assert peer.call(_fork_amid_work, endpoint, engine) > 1
    peer.call(_parent_goes_on)


def _fork_within(endpoint: str, engine: EngineName, call: str, step: str) -> tuple[str, bool]:
    """What a call raises in a child forked right before one of its steps, and whether the child has announced a hazard.

    The child goes on once the parent has done that call.
    """
    recorder, waiter = (ipcsync.connect(endpoint, name=name) for name in ("recorder", "waiter"))
    stream, other, third = ipcsync.Stream(), ipcsync.Stream(), ipcsync.Stream()
    reading, writing = os.pipe()
    is_done, say_done = os.pipe()
    pids: list[int] = []
    with recorder, waiter, recorder.event(f"{call}-{os.getpid()}", recorder=True, engine=engine) as event:
        with StreamGate(stream):
            first, waited = (waiter.point(bytes(event.record(stream))) for _ in range(2))
            first.wait(other)  # what is asked at the first wait is known at the next
            waited.wait(third)  # on which the compiled core expects the next one to be too
            used: Any = event._engine if call == "record" else waited._bound().engine

            def hazard() -> int:
                return int(used.line._hazards[used.guard.line_index])

            def fork() -> None:
                pids.append(FORK_BY["os.fork"]())
                if pids == [0]:
                    os.close(say_done)
                    os.read(is_done, 1)

            driver_functions.replace(driver_functions.amid(step, fork))
            try:
                event.record(stream) if call == "record" else waited.wait(other)
                said = "nothing"
            except BaseException as error:  # noqa: BLE001 - it is told
                said = type(error).__name__
            if pids == [0]:
                os.write(writing, said.encode())
                os._exit(0)
            driver_functions.restore()
            before = hazard()
            for fd in (writing, say_done):
                os.close(fd)
            answer = os.read(reading, 1000).decode()
            for fd in (reading, is_done):
                os.close(fd)
            os.waitpid(pids[0], 0)
            assert said == "nothing"
            has_announced = hazard() != before
        other.synchronize()
        return answer, has_announced


_STEPS = {
    "wait": ["cuStreamIsCapturing", "cuStreamGetId", "the wait", "cuEventRecord"],  # the last one is its marker's
    "record": ["cuStreamIsCapturing", "cuStreamGetId", "the record"],
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("call", "step"), [(call, step) for call, steps in _STEPS.items() for step in steps])
def test_row_31_a_fork_in_the_middle_of_a_call_is_told_in_the_child_and_leaves_no_visit(
    endpoint: str, peer: Peer, engine: EngineName, call: str, step: str
) -> None:
    function = {"the wait": driver_functions.WAIT[engine], "the record": driver_functions.RECORD[engine]}.get(
        step, step
    )
    assert peer.call(_fork_within, endpoint, engine, call, function) == ("ForkedProcessError", False)


@pytest.mark.process
@pytest.mark.parametrize(
    ("call", "amid"),
    [
        ("ipcsync.connect('ipc:///nowhere/none.sock', timeout=60)", "Job.wait"),
        ("errand(lambda: time.sleep(60), print)", "Job.wait"),  # as a launch of what takes long
        ("list(ipcsync.connect({endpoint!r}).watch(timeout=60))", "feed._receive"),
    ],
    ids=["connect", "errand", "watch"],
)
def test_row_31_a_signals_handler_that_forks_amid_a_call_is_told_in_the_child(
    endpoint: str, call: str, amid: str
) -> None:
    """The thread that does it is not in the child, which would wait for it, nor does libzmq wait there."""
    run(
        f"""
        import os, signal, sys, threading, time
        import ipcsync
        from ipcsync._session import feed
        from ipcsync._threads import Job, errand
        from tests.kit.until import until

        class Forked(Exception): ...

        def fork(*_):
            children.append(os.fork())
            if children[0]:
                raise Forked

        def waits():
            frame = sys._current_frames()[threading.main_thread().ident]
            return frame.f_code is {amid}.__code__

        def send():
            until(waits, "the call waits")
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

        children = []
        signal.signal(signal.SIGUSR1, fork)
        threading.Thread(target=send, daemon=True).start()
        try:
            {call.format(endpoint=endpoint)}
        except ipcsync.ForkedProcessError:
            os._exit(7)
        except Forked:
            pass
        try:
            pid, status = until(lambda: any(found := os.waitpid(children[0], os.WNOHANG)) and found, "the child ends")
            assert os.waitstatus_to_exitcode(status) == 7
        except AssertionError:
            os.kill(children[0], signal.SIGKILL)
            raise
        """
    )


def _fork_in_a_callback(endpoint: str) -> tuple[bytes, int]:
    """Who calls the callbacks that are due while the first one forks, and how the child ends, which returns from it."""
    client, stream, pids = ipcsync.connect(endpoint), ipcsync.Stream(), list[int]()
    event, said = client.event(f"called-{os.getpid()}", recorder=True), list[bytes]()
    reading, writing = os.pipe()

    def fork(_: ipcsync.Point) -> None:
        until(lambda: len(client._session.waits._due) == 2, "the others are due")
        pids.append(FORK_BY["os.fork"]())

    def say(_: ipcsync.Point) -> None:
        said.append(b"parent " if pids[0] else b"child ")
        os.write(writing, said[-1])

    with client:
        with StreamGate(stream):
            for call in (fork, say, say):
                event.record(stream).add_done_callback(call)
        until(lambda: len(said) == 2, "the parent calls them")
        _, status = until(lambda: any(found := os.waitpid(pids[0], os.WNOHANG)) and found, "the child ends")
    return os.read(reading, 100), os.waitstatus_to_exitcode(status)


def test_row_31_a_child_that_a_callback_forks_calls_no_other_one(endpoint: str, peer: Peer) -> None:
    assert peer.call(_fork_in_a_callback, endpoint) == (b"parent parent ", 0)


# --- before first use -------------------------------------------------------------------------------------------------


def _works_fully() -> tuple[int, bool]:
    """Connect, record, wait; the endpoint comes by the environment, as the child has it from its parent."""
    with ipcsync.connect() as client, client.event(f"own-{os.getpid()}", recorder=True) as event:
        stream, other = ipcsync.Stream(), ipcsync.Stream()
        point = event.record(stream)
        client.point(bytes(point)).wait(other)
        other.synchronize()
        point.synchronize(10)
        return point.generation, ipcsync.is_in_bad_fork()


def _fork_before_use(endpoint: str, kind: str) -> tuple[Any, Any]:
    os.environ["IPCSYNC_ENDPOINT"] = endpoint
    if kind in ("fork", "forkserver", "spawn"):
        child = _in_multiprocessing(_works_fully, kind)
    else:
        child = Child(kind, _works_fully).result()
    return child, _works_fully()


@pytest.mark.parametrize("kind", [*FORKS, "fork", "forkserver", "spawn"])
def test_row_31_a_child_forked_before_first_use_works(endpoint: str, peer: Peer, kind: str) -> None:
    assert peer.call(_fork_before_use, endpoint, kind) == ((1, False), (1, False))


def _fork_amid_load(endpoint: str, kind: str, first: str) -> Any:
    """What a child gets that is forked while another thread loads the driver, for the first time; then the parent."""
    os.environ["IPCSYNC_ENDPOINT"] = endpoint
    is_within, go_on, real = threading.Event(), threading.Event(), _drivers._choose

    def choose_late(wanted: str) -> str:
        is_within.set()
        assert go_on.wait(DEADLINE_S)
        return real(wanted)

    def ask() -> Any:
        _drivers._choose = real
        return (
            _works_fully() if first == "load" else (not_refused({first: ipcsync.driver_name}), ipcsync.is_available())
        )

    _drivers._choose = choose_late
    thread = threading.Thread(target=_drivers.load if first == "load" else ipcsync.driver_name)
    thread.start()
    assert is_within.wait(DEADLINE_S)
    child = Child(kind, ask).result()
    go_on.set()
    thread.join()
    return child, _works_fully()


@pytest.mark.parametrize("kind", FORKS)
def test_row_31_a_child_forked_while_another_thread_loads_the_driver_is_refused(
    endpoint: str, peer: Peer, kind: str
) -> None:
    assert peer.call(_fork_amid_load, endpoint, kind, "driver_name") == (({}, False), (1, False))


def test_row_31_a_child_forked_before_first_use_works_though_the_driver_was_being_loaded(
    endpoint: str, peer: Peer
) -> None:
    assert peer.call(_fork_amid_load, endpoint, "os.fork", "load") == ((1, False), (1, False))


# A spawned child, and one of a fork server, share nothing with their parent: they work after its use too.


def _spawn_after_use(endpoint: str, method: str) -> Any:
    os.environ["IPCSYNC_ENDPOINT"] = endpoint
    _works_fully()
    return _in_multiprocessing(_works_fully, method)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_row_31_a_spawned_child_works_after_use(endpoint: str, peer: Peer, method: str) -> None:
    assert peer.call(_spawn_after_use, endpoint, method) == (1, False)


# --- the lifeline -----------------------------------------------------------------------------------------------------


def _wait_for_signals() -> None:
    signal.pause()


def _fork_and_stay(endpoint: str, kind: str) -> tuple[str, str, int, int]:
    client = ipcsync.connect(endpoint, name=f"dies-{os.getpid()}")
    kept["client"] = client
    child = Child(kind, _wait_for_signals)
    board = client._session.lease.board
    return client.session_id, board.path, board.session(client._session.lease.welcome.line).offset, child.pid


def _has_lock(path: str, offset: int) -> bool:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return files.is_locked(fd, offset)
    finally:
        os.close(fd)


@pytest.mark.parametrize("kind", ["os.fork", "PyDLL"])
def test_row_31_a_living_child_does_not_hide_its_parents_death(
    endpoint: str, new_peer: Callable[..., Peer], kind: str
) -> None:
    parent = new_peer()
    session, path, offset, child = parent.call(_fork_and_stay, endpoint, kind)
    try:
        assert _has_lock(path, offset)
        with ipcsync.connect(endpoint) as client:
            deaths = client.stats()["deaths"]["pidfd"]
            parent.kill()
            os.kill(child, 0)  # it lives on
            until(lambda: session not in [each.id for each in client.list_sessions()], "the session has ended")
            assert client.stats()["deaths"]["pidfd"] == deaths + 1
        # Only of a fork that Python makes do we hear in the child.
        assert _has_lock(path, offset) == (kind == "PyDLL")
        with ipcsync.connect(endpoint) as another, ipcsync.connect(endpoint) as third:
            assert {another.session_id, third.session_id} <= {each.id for each in another.list_sessions()}
    finally:
        os.kill(child, signal.SIGKILL)


def _fork_while_another_thread_connects(endpoint: str, step: str) -> tuple[int, str, int]:
    """A child forked right behind a step of `connect`, which goes on; and where the session's lifeline is."""
    real, children, lifelines = getattr(handshake, step), list[Child](), list[int]()
    hold = Board.hold_lifeline

    def step_and_fork(*args: Any) -> Any:
        result = real(*args)
        if not children:
            children.append(Child("os.fork", _wait_for_signals))
        return result

    def hold_and_note(board: Board, line: Any) -> bool:
        lifelines.append(line.offset)
        return hold(board, line)

    setattr(handshake, step, step_and_fork)
    Board.hold_lifeline = hold_and_note  # type: ignore[method-assign,assignment]
    kept["client"] = client = ipcsync.connect(endpoint)
    return children[0].pid, client._session.lease.board.path, lifelines[-1]


def _close_kept() -> None:
    kept.pop("client").close()


@pytest.mark.parametrize("end", ["close", "kill"])
@pytest.mark.parametrize("step", ["open_board", "hold_lifeline"])
def test_row_31_a_child_forked_while_another_thread_connects_keeps_no_lifeline(
    endpoint: str, new_peer: Callable[..., Peer], step: str, end: str
) -> None:
    parent = new_peer()
    child, path, offset = parent.call(_fork_while_another_thread_connects, endpoint, step)
    try:
        assert _has_lock(path, offset)
        if end == "close":
            parent.call(_close_kept)
        else:
            parent.kill()
        os.kill(child, 0)  # it lives on
        until(lambda: not _has_lock(path, offset), "the lifeline is released")
    finally:
        os.kill(child, signal.SIGKILL)


def test_row_31_the_board_is_another_open_file_than_the_lifeline(tmp_path: Any) -> None:
    board = Board.create(str(tmp_path / "board"), b"e" * 16, 1, 1)
    try:
        assert _has_lock(board.path, 0)
        board.drop_descriptor()
        assert not _has_lock(board.path, 0), "the mapping, which a child inherits, holds no lock"
    finally:
        board.unlink()


_FORKED_AFTER_ANOTHERS_USE = """
import os, sys
import ctypes
from cuda.bindings import driver
if len(sys.argv) > 2:  # the software driver, by its path
    ctypes.CDLL(sys.argv[2])
assert int(driver.cuInit(0)[0]) == 0
pid = os.fork()
if pid == 0:
    import ipcsync
    assert not ipcsync.is_available()
    assert ipcsync.driver_name() == sys.argv[1]
    for use in (ipcsync.Stream, ipcsync.Event(interprocess=True).ipc_handle, ipcsync.current_device):
        try:
            use()
        except ipcsync.ForkedProcessError:
            continue
        os._exit(2)
    os._exit(3)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.process
def test_row_31_a_child_forked_after_another_librarys_use_is_refused_and_not_given_the_host_driver() -> None:
    driver = ipcsync.driver_name()
    library = [str(_drivers.LIBRARY)] if driver == "host" else []
    env = {name: value for name, value in os.environ.items() if name != "IPCSYNC_DRIVER"}
    done = subprocess.run(
        [sys.executable, "-c", _FORKED_AFTER_ANOTHERS_USE, driver, *library],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (3, "")
