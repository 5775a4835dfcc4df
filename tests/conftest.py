"""What all tests share: the driver of the run, coordinators and processes of their own, and a look at what is left."""

from __future__ import annotations

import faulthandler
import gc
import glob
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import hypothesis
import pytest

# Before anything of ipcsync is imported. Each worker has a segment of its own: the software drivers' machine, as it
# were. Its processes share locks, and one that a test stops may hold one: then no other worker waits for it.
os.environ.setdefault("IPCSYNC_TEST_RUN", uuid.uuid4().hex[:8])
os.environ.setdefault("IPCSYNC_DRIVER", "host")
os.environ["IPCSYNC_HOST_SEGMENT"] = f"{os.environ['IPCSYNC_TEST_RUN']}-{os.environ.get('PYTEST_XDIST_WORKER', 'main')}"
# Streams that share a hardware queue wait for each other: with the default of 8, a stream held back by one test could
# hold back an unrelated one.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
os.environ.pop("IPCSYNC_ENDPOINT", None)
os.environ.pop("IPCSYNC_RUNTIME_DIR", None)

# A shell that runs the tests in the background has SIGINT ignored, nohup SIGHUP: what they start would ignore it too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

import ipcsync
from ipcsync._board.board import is_abandoned
from ipcsync._board.runtime_dir import is_tmpfs
from ipcsync._engines import queued
from ipcsync._session.handshake import Reader
from ipcsync.pytest_plugin import run
from ipcsync.typing import EngineName
from tests.kit import zygote
from tests.kit.driver_kit import streams_end
from tests.kit.examples import LONG
from tests.kit.machine import Machine
from tests.kit.peer import Peer, at_end
from tests.kit.until import DEADLINE_S

if os.environ.get("IPCSYNC_TEST_KEEPER"):  # the same tests, over coordinators that have a keeper
    (ipcsync.launch.__kwdefaults__ or {})["keeper"] = True

pytest_plugins = ("pytester",)

# On a busy machine an example may take a second. For `python -m tests.mutation`: the same examples for each mutant, and
# no time spent on making a failure small.
hypothesis.settings.register_profile(
    "tests", deadline=None, database=None, derandomize=False, suppress_health_check=list(hypothesis.HealthCheck)
)
hypothesis.settings.load_profile("tests")
hypothesis.settings.register_profile(
    "mutants", derandomize=True, phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate]
)

zygote.install()

ipcsync.Coordinator.stop.__defaults__ = (DEADLINE_S,)  # a busy machine may let it stand for some seconds

_BEFORE = pytest.StashKey[set[str]]()

_LEFT = pytest.StashKey[list[str]]()

_told: list[TextIO] = []  # where this worker's goes
_STANDS_S = 30  # after its time is out, a test that has not ended stands still
_LONG_S = 600  # for what takes its time: how long that is depends on the machine
_TRACEBACKS = os.path.join(tempfile.gettempdir(), f"ipcsync-crashes-{os.environ['IPCSYNC_TEST_RUN']}-")


@pytest.fixture(params=["event", "timeline"])
def engine(request: pytest.FixtureRequest) -> EngineName:
    """Each engine in turn."""
    name: EngineName = request.param
    return name


@pytest.fixture(autouse=True)
def _leaves_no_stream_that_stands(request: pytest.FixtureRequest) -> Iterator[None]:
    """What never ends is for a peer: behind a stream of this process each later test that frees memory would stand."""
    yield
    if not request.node.get_closest_marker("alone"):
        streams_end()


@pytest.fixture
def nothing_queued() -> None:
    """As in a new process: no stream stands behind a wait of an earlier test, which may be lost for good."""
    queued.drop(queued.of(None))


@pytest.fixture
def new_coordinator() -> Iterator[Callable[..., ipcsync.Coordinator]]:
    """Starts coordinators, with settings named like the flags; all are stopped after the test."""
    running: list[ipcsync.Coordinator] = []

    def start(**settings: Any) -> ipcsync.Coordinator:
        running.append(ipcsync.launch(**settings))
        return running[-1]

    yield start
    _end(running)


def _end(coordinators: list[ipcsync.Coordinator]) -> None:
    wrong, statuses = [], []
    for coordinator in coordinators:
        was_running, began = coordinator.is_running, time.monotonic()
        statuses.append(status := coordinator.stop())
        was_killed_by_test = status == -signal.SIGKILL and time.monotonic() - began < _STOP_S
        # A test may have sent SIGTERM too; the second one then comes when all is done, and nobody handles it any more.
        if was_running and status not in (0, -signal.SIGTERM) and not was_killed_by_test:
            wrong.append((coordinator.pid, status))
    if -signal.SIGKILL in statuses:
        # What a killed one leaves, the next one removes. Here there may be no next one.
        for board in filter(is_abandoned, _boards()):
            Path(board).unlink(missing_ok=True)
    assert not wrong, f"coordinators did not end in order (pid, status): {wrong}"


_Served = tuple[ipcsync.Coordinator, dict[str, str]]


@pytest.fixture(scope="session")
def served() -> Iterator[list[_Served]]:
    """The coordinator that the tests share, if there is one, and the settings that it was started with."""
    one: list[_Served] = []
    yield one
    _end([coordinator for coordinator, _ in one])


@pytest.fixture
def coordinator(
    request: pytest.FixtureRequest, served: list[_Served], new_coordinator: Callable[..., ipcsync.Coordinator]
) -> Iterator[ipcsync.Coordinator]:
    """The coordinator of earlier tests, or another one if they have left anything in it or it has other settings.

    A test marked `own_coordinator` has one of its own.
    """
    if request.node.get_closest_marker("own_coordinator"):
        yield new_coordinator(lease_ttl=_TTL_S)
        return
    settings = {name: value for name, value in os.environ.items() if name.startswith(_SETTINGS)}
    if served and (served[0][1] != settings or not _has_nothing_left(served[0][0])):
        _end([served.pop()[0]])
    if not served:
        served.append((ipcsync.launch(lease_ttl=_TTL_S), settings))
    yield served[0][0]
    if not served[0][0].is_running:
        _end([served.pop()[0]])


_SETTINGS = ("CUDA_", "IPCSYNC_")  # how those begin that a coordinator or its driver reads
_TTL_S = 30.0  # of the leases: a busy machine may let this process stand for some seconds
_STOP_S = DEADLINE_S - 0.1  # after which `Coordinator.stop` kills
_CRASHES = (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS, -signal.SIGILL, -signal.SIGFPE)
_LEAVE_S = 0.1  # in which the sessions of peers that have just ended end


def _has_nothing_left(coordinator: ipcsync.Coordinator) -> bool:
    try:
        with Reader(coordinator.endpoint, _LEAVE_S) as reader:  # which takes no session
            deadline = time.monotonic() + _LEAVE_S
            while (stats := reader.stats())["sessions"] or stats["pool_in_use"] or stats["quarantined"]:
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.005)
    except ipcsync.IpcSyncError:
        return False
    return not any(stats["deaths"].values())


@pytest.fixture
def shared_directory() -> Iterator[str]:
    """A directory on tmpfs that is not on /dev/shm, so that a process with another /dev/shm still has it."""
    if os.geteuid() != 0:
        pytest.skip("only root may give a process a /dev/shm of its own")
    if shutil.which("mount") is None:
        pytest.skip("there is no mount command to make a tmpfs with")
    directory = Path(tempfile.mkdtemp(prefix="ipcsync-shared-"))
    done = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", directory], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        directory.rmdir()
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
    directory.chmod(0o700)
    assert is_tmpfs(str(directory))
    yield str(directory)
    subprocess.run(["umount", "--lazy", directory], check=True)  # this process may have the board mapped still
    directory.rmdir()


@pytest.fixture
def new_client(coordinator: ipcsync.Coordinator) -> Iterator[Callable[..., ipcsync.Client]]:
    """Connects clients of this process to the test's coordinator; all are closed after the test."""
    clients: list[ipcsync.Client] = []
    numbers = itertools.count()

    def connect(name: str | None = None, **options: Any) -> ipcsync.Client:
        clients.append(ipcsync.connect(coordinator.endpoint, name=name or f"client-{next(numbers)}", **options))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()


@pytest.fixture
def client(new_client: Callable[..., ipcsync.Client]) -> ipcsync.Client:
    """One client of this process."""
    return new_client("main")


@pytest.fixture
def event(client: ipcsync.Client, engine: EngineName) -> ipcsync.SharedEvent:
    """An event of this process, which records on it."""
    return client.event("e", recorder=True, engine=engine)


@pytest.fixture
def new_peer() -> Iterator[Callable[..., Peer]]:
    """Starts real processes that run what they are told, with the environment given; none outlives the test."""
    peers: list[Peer] = []

    def start(**env: str) -> Peer:
        peers.append(Peer(env))
        return peers[-1]

    yield start
    for end in at_end:
        end()  # what is held here, since a peer's stream could wait for it
    for peer in peers:
        peer.dismiss()  # all at once: one with work in flight takes a while to end
    for peer in peers:
        peer.close()
    crashed = [(peer.pid, peer.status) for peer in peers if peer.status in _CRASHES]
    assert not crashed, f"peers crashed (pid, signal): {crashed}"


@pytest.fixture
def peer(new_peer: Callable[..., Peer]) -> Peer:
    """One process beside this one."""
    return new_peer()


@pytest.fixture
def machine() -> Iterator[Machine]:
    """Measures meanwhile how slow this machine is."""
    one = Machine()
    yield one
    one.close()


_STARTS_PROCESSES = {
    "coordinator",
    "foreign",
    "ipcsync_coordinator",
    "ipcsync_spawn",
    "machine",
    "new_coordinator",
    "new_peer",
    "pytester",
}


def pytest_collection_finish() -> None:
    """Keep the collector from what lies here from the start, some thousand tests: to walk it takes longer than most."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what starts processes by a fixture; what starts them by itself says so. Give time to what takes its time."""
    for item in items:
        if (LONG or item.get_closest_marker("planted")) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_LONG_S))
        if _STARTS_PROCESSES.intersection(getattr(item, "fixturenames", ())) or "softcuda" in item.path.parts:
            item.add_marker(pytest.mark.process)


@pytest.fixture(autouse=True)
def _starts_no_process_unless_it_says_so(request: pytest.FixtureRequest) -> Iterator[None]:
    before = len(zygote.started)
    yield
    if request.node.get_closest_marker("process") is None:
        assert zygote.started[before:] == [], "a test that starts a process has the marker `process`"


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Give each worker a run of its own, and so the plugin's coordinator on its own machine."""
    if hasattr(config, "workerinput"):
        config.workerinput["ipcsync_run"] = run.own()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Remember what others have in shared memory. A worker says in a file of its own where it crashes."""
    session.config.stash[_BEFORE] = _boards()
    if hasattr(session.config, "workerinput"):
        _told.append(Path(f"{_TRACEBACKS}{os.getpid()}").open("w"))  # noqa: SIM115 - as long as the process lives
        faulthandler.enable(_told[0])  # pytest's own goes to what it captures
    else:
        _told.append(os.fdopen(os.dup(2), "w"))  # before it is captured


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """End a worker whose test stands in a call of the driver: no signal, and so no timeout, gets it out of there."""
    given, marked = item.config.getoption("timeout"), item.get_closest_marker("timeout")
    limit_s = float(marked.args[0] if marked else item.config.getini("timeout") if given is None else given)
    if limit_s and not item.config.getoption("usepdb"):
        faulthandler.dump_traceback_later(limit_s + _STANDS_S, exit=True, file=_told[0])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """At the end of a run, when its workers have ended, no board without a coordinator may lie in shared memory."""
    if hasattr(session.config, "workerinput"):
        faulthandler.disable()
    _told.pop().close()
    if hasattr(session.config, "workerinput"):
        return
    before = session.config.stash[_BEFORE]
    left = set(filter(is_abandoned, _boards() - before))
    deadline = time.monotonic() + DEADLINE_S
    # Tests of a run beside this one kill coordinators all the time; each board that they leave is soon taken away.
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left &= {board for board in _boards() if is_abandoned(board)}
    session.config.stash[_LEFT] = sorted(left)
    if left:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say at the end where workers crashed, and which boards are left, since the run fails for them."""
    if not hasattr(config, "workerinput"):
        for path in map(Path, glob.glob(f"{_TRACEBACKS}*")):
            if said := path.read_text():
                terminalreporter.section(f"a worker crashed, process {path.name.rpartition('-')[2]}", red=True)
                terminalreporter.write_line(said)
            path.unlink()
    if left := config.stash.get(_LEFT, []):
        terminalreporter.section("boards left in shared memory, without a coordinator", red=True)
        for board in left:
            terminalreporter.line(board)


def _boards() -> set[str]:
    return set(glob.glob(f"/dev/shm/ipcsync-board-{os.getuid()}-*"))
