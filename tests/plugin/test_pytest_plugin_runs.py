"""The pytest plugin in real runs: one coordinator for a run, and nothing left of it however the run ends."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ipcsync._linux.process import PidFd, is_running
from tests.kit.examples import LONG

pytestmark = [pytest.mark.process, pytest.mark.program]

LONG_S = 100.0
_LATE_S = 30 if LONG else 8  # of a child, whose start takes 5 s on a busy machine, and more beside soaks
FEW_PLUGINS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "-p ipcsync -p xdist"}
"""All plugins that are installed here take ten times as long to import."""

# Each test tells, in a file of its own, of the coordinator and of the namespace that it got.
SUITE = """
import json, os, pathlib, secrets, time
import pytest
import ipcsync
from ipcsync._linux.process import start_time

SEEN = pathlib.Path(__file__).parent / "seen"

def tell(coordinator, namespace="", *pids):
    SEEN.mkdir(exist_ok=True)
    said = {"pid": coordinator.pid, "started": coordinator.started, "endpoint": coordinator.endpoint,
            "namespace": namespace, "children": [(pid, start_time(pid)) for pid in pids], "worker": os.getpid(),
            "log": coordinator.log}
    (SEEN / secrets.token_hex(8)).write_text(json.dumps(said))
    fifo = os.environ.get("TELL")
    if fifo:
        with open(fifo, "w") as file:
            file.write(json.dumps(said) + "\\n")

def hand_over(client, name):
    with client.event(name, recorder=True) as event:
        point = event.record(ipcsync.Stream())
        point.synchronize(30)
        client.event("seen").at(1).synchronize(30)
        return os.getpid(), bytes(point)

def block(client):
    time.sleep(600)

def fail(client, text):
    raise ipcsync.RecorderLost(text, generation=5)
"""


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Makes a test file out of its tests, for runs with few plugins."""
    for name, value in FEW_PLUGINS.items():
        monkeypatch.setenv(name, value)

    def make(tests: str) -> Path:
        return pytester.makepyfile(test_inner=SUITE + tests)

    return make


def seen(pytester: pytest.Pytester) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in (pytester.path / "seen").iterdir()]


def assert_one_and_gone(told: list[dict[str, Any]]) -> None:
    """All tests had the same coordinator, and now nothing of it is left."""
    assert len({(said["pid"], said["endpoint"]) for said in told}) == 1
    coordinator = told[0]
    assert not is_running(coordinator["pid"], coordinator["started"])
    assert not Path(coordinator["endpoint"].removeprefix("ipc://")).parents[1].exists()
    for said in told:
        for pid, started in said["children"]:
            assert not is_running(pid, started)


def await_gone(pid: int, started: int) -> None:
    if not is_running(pid, started):
        return
    process = PidFd(pid)
    try:
        assert select.select([process], [], [], LONG_S)[0], f"the process {pid} is still there"
    finally:
        process.close()


HAND_OVERS = """
@pytest.mark.parametrize("i", range(4))
@pytest.mark.xdist_group("all")
def test_hand_over(ipcsync_coordinator, ipcsync_client, ipcsync_namespace, ipcsync_spawn, i):
    child = ipcsync_spawn(hand_over, "same")
    event = ipcsync_client.event("same")
    event.at(1).synchronize(30)
    assert event.name == f"{ipcsync_namespace}/same"
    assert event.name in [info.name for info in ipcsync_client.list_events()]
    assert all(info.name.startswith(ipcsync_namespace) for info in ipcsync_client.list_events())
    assert len(ipcsync_client.list_sessions()) == 2
    ipcsync_client.event("seen", recorder=True).record()
    pid, data = child.result(30)
    assert (pid, data) == (child.pid, bytes(event.at(1)))
    tell(ipcsync_coordinator, ipcsync_namespace, child.pid)
"""


@pytest.mark.parametrize(
    ("options", "needs", "count"),
    [
        pytest.param([], "pytest", 4, id="plain", marks=pytest.mark.thorough),
        pytest.param(["-n", "2"], "xdist", 4, id="xdist"),
        pytest.param(["-n", "4", "--maxschedchunk", "1"], "xdist", 4, id="maxschedchunk", marks=pytest.mark.thorough),
        pytest.param(["-n", "2", "--dist", "loadgroup"], "xdist", 4, id="loadgroup", marks=pytest.mark.thorough),
        pytest.param(["-n", "2", "-p", "randomly"], "pytest_randomly", 4, id="randomly", marks=pytest.mark.thorough),
        pytest.param(
            ["-n", "2", "-p", "pytest_repeat", "--count", "2"],
            "pytest_repeat",
            8,
            id="repeat",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_a_run_has_one_coordinator_and_each_test_its_own_names(
    pytester: pytest.Pytester, suite: Callable[[str], Path], options: list[str], needs: str, count: int
) -> None:
    pytest.importorskip(needs)
    suite(HAND_OVERS)
    pytester.runpytest_subprocess("-p", "no:cacheprovider", *options, timeout=LONG_S).assert_outcomes(passed=count)
    told = seen(pytester)
    assert len(told) == count
    assert len({said["namespace"] for said in told}) == count
    assert_one_and_gone(told)


def test_the_plugin_is_found_where_it_is_installed(
    pytester: pytest.Pytester, suite: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in FEW_PLUGINS:
        monkeypatch.delenv(name, raising=False)
    suite(HAND_OVERS)
    pytester.runpytest_subprocess("-k", "0", timeout=LONG_S).assert_outcomes(passed=1, deselected=3)
    assert_one_and_gone(seen(pytester))


def test_a_worker_that_crashes_takes_nothing_with_it(pytester: pytest.Pytester, suite: Callable[[str], Path]) -> None:
    suite(
        """
def test_crash(ipcsync_coordinator, ipcsync_client, ipcsync_spawn):
    ipcsync_client.event("held", recorder=True)
    tell(ipcsync_coordinator, "", ipcsync_spawn(block).pid)
    os._exit(3)

@pytest.mark.parametrize("i", range(3))
def test_others(ipcsync_coordinator, ipcsync_client, i):
    ipcsync_client.event("held", recorder=True)
    tell(ipcsync_coordinator)
"""
    )
    # One worker: the one that crashes is the one that started the coordinator.
    result = pytester.runpytest_subprocess("-n", "1", timeout=LONG_S)
    result.assert_outcomes(passed=3, failed=1)
    told = seen(pytester)
    assert len({said["worker"] for said in told}) == 2
    for said in told:
        for pid, started in said["children"]:
            await_gone(pid, started)
    assert_one_and_gone(told)


def test_a_run_that_stops_at_its_first_failure_leaves_nothing(
    pytester: pytest.Pytester, suite: Callable[[str], Path]
) -> None:
    suite(
        """
@pytest.mark.parametrize("i", range(20))
def test_fails(ipcsync_coordinator, ipcsync_client, ipcsync_spawn, i):
    tell(ipcsync_coordinator, "", ipcsync_spawn(block).pid)
    assert False
"""
    )
    result = pytester.runpytest_subprocess("-n", "2", "-x", timeout=LONG_S)
    assert result.ret in (pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED)
    assert_one_and_gone(seen(pytester))


@pytest.fixture
def fifo(tmp_path: Path) -> Iterator[Callable[[], dict[str, Any]]]:
    """Reads what the inner tests tell while they run; $TELL is its path."""
    path = tmp_path / "fifo"
    os.mkfifo(path)
    fd = os.open(path, os.O_RDWR)  # for writing too, so that it has no end while nobody writes
    file = os.fdopen(fd)

    def read() -> dict[str, Any]:
        assert select.select([file], [], [], LONG_S)[0], "no inner test said anything"
        said: dict[str, Any] = json.loads(file.readline())
        return said

    yield read
    file.close()


def start(pytester: pytest.Pytester, tmp_path: Path, *options: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options],
        cwd=pytester.path,
        env={**os.environ, "TELL": str(tmp_path / "fifo")},
        start_new_session=True,
        stdout=subprocess.DEVNULL,
    )


BLOCKED = """
def test_blocked(ipcsync_coordinator, ipcsync_client, ipcsync_spawn):
    child = ipcsync_spawn(block)
    tell(ipcsync_coordinator, "", child.pid)
    child.result()

def test_blocked_too(ipcsync_coordinator):
    tell(ipcsync_coordinator)
    time.sleep(600)
"""


def test_a_run_that_is_interrupted_leaves_nothing(
    pytester: pytest.Pytester, suite: Callable[[str], Path], tmp_path: Path, fifo: Callable[[], dict[str, Any]]
) -> None:
    suite(BLOCKED)
    process = start(pytester, tmp_path, "-n", "2")
    try:
        told = [fifo(), fifo()]
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        process.wait(LONG_S)
    finally:
        process.kill()
        process.wait()
    for said in told:
        for pid, started in said["children"]:
            await_gone(pid, started)
    assert_one_and_gone(told)


@pytest.mark.parametrize("options", [["-n", "2"], []], ids=["xdist", "plain"])
def test_a_run_that_is_killed_takes_its_coordinator_with_it(
    pytester: pytest.Pytester,
    suite: Callable[[str], Path],
    tmp_path: Path,
    fifo: Callable[[], dict[str, Any]],
    options: list[str],
) -> None:
    suite(BLOCKED)
    process = start(pytester, tmp_path, *options)
    try:
        said = fifo()
    finally:
        process.kill()
        process.wait()
    await_gone(said["pid"], said["started"])
    for pid, started in said["children"]:
        await_gone(pid, started)  # under xdist once execnet has ended the worker


def test_tests_behind_the_coordinators_death_say_so_at_once(
    pytester: pytest.Pytester, suite: Callable[[str], Path]
) -> None:
    suite(
        """
import signal
def test_kills(ipcsync_coordinator, ipcsync_client):
    tell(ipcsync_coordinator)
    os.kill(ipcsync_coordinator.pid, signal.SIGKILL)
    while ipcsync_coordinator.is_running:
        time.sleep(0.01)

def test_connects(ipcsync_client):
    pass

def test_spawns(ipcsync_spawn):
    pass
"""
    )
    result = pytester.runpytest_subprocess("--ipcsync-timeout=1000", timeout=LONG_S)
    result.assert_outcomes(passed=1, errors=2)
    result.stdout.fnmatch_lines(["*ConnectError: the run's coordinator (pid *) has ended; its log is *"] * 2)


def test_a_failure_names_the_log_and_shows_the_childs_traceback(
    pytester: pytest.Pytester, suite: Callable[[str], Path]
) -> None:
    suite(
        """
def test_failing(ipcsync_coordinator, ipcsync_spawn):
    tell(ipcsync_coordinator)
    ipcsync_spawn(fail, "the reason").result()
"""
    )
    result = pytester.runpytest_subprocess("-n", "1", timeout=LONG_S)
    result.assert_outcomes(failed=1)
    log = seen(pytester)[0]["log"]
    result.stdout.fnmatch_lines(
        [
            "E * ipcsync.errors.RecorderLost: the reason",
            "E * fail-1 (pid *) raised; its traceback:",
            "E *test_inner.py*, line *, in fail",
            "*ipcsync coordinator*",
            f"*its log is {log}, which ends with:",
            "*session opened*fail-1*",
        ]
    )
    assert " event=ready endpoint=" in Path(log).read_text()


def test_the_driver_is_host_unless_told(
    pytester: pytest.Pytester, suite: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("IPCSYNC_DRIVER", raising=False)
    suite(
        """
def name(client):
    return ipcsync.driver_name()

def test_driver(ipcsync_client, ipcsync_spawn):
    assert ipcsync.driver_name() == "host"
    assert ipcsync_spawn(name).result() == "host"
"""
    )
    pytester.runpytest_subprocess(timeout=LONG_S).assert_outcomes(passed=1)
    monkeypatch.setenv("IPCSYNC_DRIVER", "auto")
    pytester.runpytest_subprocess("--ipcsync-driver=host", timeout=LONG_S).assert_outcomes(passed=1)


def test_a_run_keeps_its_coordinator_whatever_the_suite_and_the_environment_change(
    pytester: pytest.Pytester, suite: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IPCSYNC_EXIT_WHEN_IDLE", "0.1")
    suite(
        """
import tempfile
@pytest.fixture(scope="session", autouse=True)
def elsewhere(tmp_path_factory):
    tempfile.tempdir = str(tmp_path_factory.mktemp("elsewhere"))

def test_first(ipcsync_coordinator, ipcsync_client):
    tell(ipcsync_coordinator)

def test_between():
    time.sleep(0.5)

def test_last(ipcsync_coordinator, ipcsync_client):
    tell(ipcsync_coordinator)
"""
    )
    pytester.runpytest_subprocess("-n", "2", "--dist", "each", timeout=LONG_S).assert_outcomes(passed=6)
    assert_one_and_gone(seen(pytester))


@pytest.mark.usefixtures("suite")
def test_children_run_the_very_function_among_several_files_of_one_name(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        """
        import pytest
        def which(client): return "root"
        @pytest.fixture
        def run(ipcsync_spawn): return lambda: ipcsync_spawn(which).result(30)
        """
    )
    pytester.makepyfile(
        **{
            "test_root": "def test_root(run): assert run() == 'root'",
            "package/conftest": "def which(client): return 'package'",
            "package/test_it": "def test_it(): pass",
        }
    )
    pytester.runpytest_subprocess(timeout=LONG_S).assert_outcomes(passed=2)


@pytest.mark.usefixtures("suite")
@pytest.mark.parametrize(
    "inits", [["suite_of_it/__init__", "suite_of_it/unit/__init__"], []], ids=["packages", "folders"]
)
def test_children_import_a_test_module_with_its_package(pytester: pytest.Pytester, inits: list[str]) -> None:
    pytester.makepyfile(
        **{f"project/{init}": "" for init in inits},
        **{
            "project/suite_of_it/helpers": "VALUE = 7",
            "project/suite_of_it/unit/test_relative": """
                from ..helpers import VALUE
                def value(client): return VALUE
                def test_relative(ipcsync_spawn): assert ipcsync_spawn(value).result(30) == 7
            """,
        },
    )
    pytester.runpytest_subprocess("--import-mode=importlib", timeout=LONG_S).assert_outcomes(passed=1)


@pytest.mark.thorough
def test_modules_that_pytest_imports_by_their_file_are_found_by_children(
    pytester: pytest.Pytester, suite: Callable[[str], Path]
) -> None:
    suite(HAND_OVERS)
    result = pytester.runpytest_subprocess("--import-mode=importlib", "-k", "0 or 1", timeout=LONG_S)
    result.assert_outcomes(passed=2, deselected=2)


def test_an_error_that_nobody_asked_for_is_a_warning_of_a_test_that_failed_by_itself(
    pytester: pytest.Pytester, suite: Callable[[str], Path]
) -> None:
    suite(
        """
def test_careless(ipcsync_client, ipcsync_spawn):
    child = ipcsync_spawn(fail, "unseen")
    assert child._child.has_ended(30)
    assert not "its own"
"""
    )
    result = pytester.runpytest_subprocess(timeout=LONG_S)
    result.assert_outcomes(failed=1, warnings=1)
    result.stdout.fnmatch_lines(["*PytestWarning: fail-1 (pid *) raised, and its result was never asked for*"])


@pytest.mark.parametrize("function", ["_hold_the_gil", "_hold_the_gil_unwatched"])
def test_a_child_past_its_time_is_ended_with_its_traceback(
    pytester: pytest.Pytester, suite: Callable[[str], Path], function: str
) -> None:
    suite(
        f"""
from tests.plugin.test_pytest_plugin_spawn import {function}
from ipcsync.pytest_plugin.spawned import ChildError

def test_late(ipcsync_spawn):
    with pytest.raises(ChildError, match="ran past its {_LATE_S} s(.|\\\\n)*{function}"):
        ipcsync_spawn({function}).result()
"""
    )
    pytester.syspathinsert(Path(__file__).parents[2])
    pytester.runpytest_subprocess(f"--ipcsync-timeout={_LATE_S}", timeout=LONG_S).assert_outcomes(passed=1)


def test_a_child_that_is_stopped_past_its_time_is_killed(
    pytester: pytest.Pytester, suite: Callable[[str], Path]
) -> None:
    suite(
        """
import signal
from ipcsync.pytest_plugin.spawned import ChildError

def test_stopped(ipcsync_spawn):
    child = ipcsync_spawn(block)
    os.kill(child.pid, signal.SIGSTOP)
    with pytest.raises(ChildError, match="ran past its 1 s"):
        child.result()
"""
    )
    pytester.runpytest_subprocess("--ipcsync-timeout=1", timeout=LONG_S).assert_outcomes(passed=1)


def test_a_child_that_fails_fails_its_test_without_being_asked(
    pytester: pytest.Pytester, suite: Callable[[str], Path]
) -> None:
    suite("""
def crash(client):
    os._exit(5)

def test_raised(ipcsync_spawn):
    ipcsync_spawn(fail, "no such block")

@pytest.fixture
def child(ipcsync_spawn):
    return ipcsync_spawn(fail, "spawned by a fixture")

def test_of_a_fixture(child):
    pass

def test_crashed(ipcsync_spawn):
    ipcsync_spawn(crash)

def test_asked(ipcsync_spawn):
    with pytest.raises(ipcsync.RecorderLost):
        ipcsync_spawn(fail, "asked").result()

def test_killed(ipcsync_spawn):
    child = ipcsync_spawn(crash)
    child.kill()

def test_runs_on(ipcsync_spawn):
    ipcsync_spawn(block)

def test_its_own_failure_comes_first(ipcsync_spawn):
    ipcsync_spawn(fail, "the child's")
    assert not "its own"
""")
    done = pytester.runpytest_subprocess("-rf", "-W", "ignore", timeout=LONG_S)
    done.assert_outcomes(passed=3, failed=4)
    done.stdout.fnmatch_lines_random(
        [
            "E*RecorderLost: no such block*",
            "*in fail*",
            "E*RecorderLost: spawned by a fixture*",
            "E*ended without a result: exit status 5*",
            "E*assert not 'its own'*",
            "FAILED *::test_raised - *",
            "FAILED *::test_of_a_fixture - *",
            "FAILED *::test_crashed - *",
            "FAILED *::test_its_own_failure_comes_first - *",
        ]
    )


def test_an_asynchronous_client_is_of_the_tests_namespace_and_closed_after_it(
    pytester: pytest.Pytester, suite: Callable[[str], Path]
) -> None:
    suite("""
import asyncio
left = []

def test_entered(ipcsync_async_client, ipcsync_client, ipcsync_namespace):
    async def use():
        async with ipcsync_async_client as client:
            event = await client.event("e", recorder=True)
            assert event.name == ipcsync_client.event("e").name == f"{ipcsync_namespace}/e"
            point = await event.record(ipcsync.Stream())
            await point.synchronize(10)
        assert not client.is_connected
    asyncio.run(use())

def test_left_open(ipcsync_async_client):
    async def use():
        left.append(await ipcsync_async_client)
    asyncio.run(use())
    assert left[0].is_connected

def test_is_closed_by_now():
    assert not left[0].is_connected

def test_dropped(ipcsync_async_client):
    async def use():
        assert (await ipcsync_async_client).is_connected
    asyncio.run(use())

def test_not_used(ipcsync_async_client):
    pass
""")
    pytester.runpytest_subprocess("-W", "error", timeout=LONG_S).assert_outcomes(passed=5)
