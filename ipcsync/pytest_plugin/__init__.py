"""Fixtures for suites that use ipcsync, alone or under pytest-xdist.

Loading the plugin loads neither ZeroMQ nor CUDA and starts nothing. The first test that asks for a coordinator starts
one for the whole run; every worker shares it, and it is gone when the run is, however that ends.

    def test_hand_over(ipcsync_client, ipcsync_spawn):
        child = ipcsync_spawn(record_on, "frames")  # a function of a module: record_on(client, name)
        point = ipcsync_client.event("frames").at(1)
        point.synchronize(10)
        assert child.result(10) == bytes(point)
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import secrets
import subprocess
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from ipcsync._linux.child import PYTHON, environment
from ipcsync._linux.process import is_running
from ipcsync.pytest_plugin import run

if TYPE_CHECKING:
    from ipcsync.client import Client
    from ipcsync.client.aio.client import Connecting
    from ipcsync.pytest_plugin.run import Run, RunCoordinator
    from ipcsync.pytest_plugin.spawned import Child

__all__ = ["ipcsync_async_client", "ipcsync_client", "ipcsync_coordinator", "ipcsync_namespace", "ipcsync_spawn"]

_RUN: pytest.StashKey[Run] = pytest.StashKey()
_CHILDREN: pytest.StashKey[list[Child]] = pytest.StashKey()
_WORKER_KEY = "ipcsync_run"
# NVIDIA's kernel driver: on a PC or server, under WSL, on a Tegra. The software driver has none of them.
_KERNEL_DRIVERS = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg", "/dev/nvhost-ctrl-gpu", "/dev/nvgpu")
_COUNT = "import ipcsync; print(ipcsync.device_count())"
_ASK_S = 60.0


# --- hooks ------------------------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --ipcsync-driver and --ipcsync-timeout."""
    group = parser.getgroup("ipcsync", "ipcsync: shared CUDA events")
    group.addoption(
        "--ipcsync-driver",
        choices=["auto", "cuda", "host"],
        default=None,
        help="driver of the run's coordinator and of what connects to it; default: $IPCSYNC_DRIVER, else host",
    )
    group.addoption(
        "--ipcsync-timeout",
        type=_seconds,
        default=30.0,
        metavar="S",
        help="seconds for connecting, and for each process of ipcsync_spawn (default: %(default)s)",
    )


def _seconds(text: str) -> float:
    """A finite number of seconds above 0; else ValueError, which argparse reports as a usage error."""
    seconds = float(text)
    if not 0 < seconds <= 1e6:
        raise ValueError(text)
    return seconds


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers, and find the run of this process."""
    needs = "needs a real NVIDIA GPU; skipped, with the reason, where there is none"
    config.addinivalue_line("markers", f"ipcsync_gpu: {needs}")
    config.addinivalue_line("markers", f"gpu: of a test that uses an ipcsync_* fixture: {needs}")
    told = getattr(config, "workerinput", {}).get(_WORKER_KEY)
    config.stash[_RUN] = run.Run(*told) if told and is_running(*told[:2]) else run.own()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:  # noqa: ANN401 - xdist ships no types
    """Send an xdist worker its run (in the controller)."""
    node.workerinput[_WORKER_KEY] = tuple(node.config.stash[_RUN])


def pytest_unconfigure(config: pytest.Config) -> None:
    """Stop the run's coordinator, in the process that the run belongs to: its workers have ended by now."""
    mine = config.stash.get(_RUN, None)
    if mine is not None and mine.pid == os.getpid():
        run.stop(mine)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests that need a GPU if there is none."""
    # Other suites may have a marker `gpu` too, for GPUs of other makers.
    uses_us = any(name.startswith("ipcsync_") for name in getattr(item, "fixturenames", ()))
    marker = item.get_closest_marker("ipcsync_gpu") or (item.get_closest_marker("gpu") if uses_us else None)
    if marker is not None and (reason := why_no_gpu()):
        pytest.skip(reason)


@functools.cache
def why_no_gpu() -> str | None:
    """Why no test that needs a GPU can run here; None if it can.

    The first call may start a process for a second: CUDA is not loaded into this one.
    """
    if not any(os.path.exists(path) for path in _KERNEL_DRIVERS):
        return "no real GPU here: NVIDIA's kernel driver is not loaded"
    try:
        asked = subprocess.run(
            [*PYTHON, "-c", _COUNT],
            env=environment({"IPCSYNC_DRIVER": "cuda"}),
            capture_output=True,
            text=True,
            timeout=_ASK_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no usable GPU here: the CUDA driver did not answer within {_ASK_S:g} s"
    if asked.returncode != 0:
        return f"no usable GPU here: {(asked.stderr.strip() or 'the CUDA driver does not load').splitlines()[-1]}"
    return None if int(asked.stdout) > 0 else "no GPU is visible here"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Fail a test of whose children one has failed without being asked for its result."""
    __tracebackhide__ = True
    result = yield
    for child in item.stash.get(_CHILDREN, ()):
        child.raise_unasked()
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Name the coordinator's log in the report of a failed test that used it, and show its end."""
    report = yield
    coordinator: RunCoordinator | None = (getattr(item, "funcargs", None) or {}).get("ipcsync_coordinator")
    if report.failed and coordinator is not None:
        state = "runs" if coordinator.is_running else "has ended"
        text = f"pid {coordinator.pid} {state}; its log is {coordinator.log}, which ends with:\n"
        report.sections.append(("ipcsync coordinator", text + run.tail(coordinator.log)))
    return report


# --- fixtures ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def ipcsync_coordinator(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunCoordinator]:
    """The run's coordinator: `.endpoint`, `.pid`, `.log`. One for all xdist workers; it ends with the run.

    $IPCSYNC_DRIVER is set for the rest of the session, so that this process and its children use the same driver.
    """
    driver = pytestconfig.getoption("--ipcsync-driver") or os.environ.get("IPCSYNC_DRIVER") or "host"
    base = tmp_path_factory.getbasetemp()
    if hasattr(pytestconfig, "workerinput"):
        base = base.parent  # the run's, above each worker's own
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPCSYNC_DRIVER", driver)
        mine = pytestconfig.stash[_RUN]
        yield run.join(mine, driver, base / f"ipcsync-coordinator-{mine.token}.log")


@pytest.fixture
def ipcsync_namespace(request: pytest.FixtureRequest) -> str:
    """The prefix of every name of this test; no other test, repetition or run has the same."""
    # From the system's randomness: some plugins seed `random` equally for each test.
    return f"{secrets.token_hex(6)}-{re.sub(r'[^A-Za-z0-9_.-]+', '_', request.node.name)[:60]}"


@pytest.fixture
def _ipcsync_connect(
    pytestconfig: pytest.Config, ipcsync_coordinator: RunCoordinator, ipcsync_namespace: str
) -> Callable[[str], Client]:
    """Opens a session of a name with the run's coordinator, with every name in the test's namespace."""
    from ipcsync.pytest_plugin.spawned import NamespacedClient

    ipcsync_coordinator.check()
    timeout = pytestconfig.getoption("--ipcsync-timeout")
    return lambda name: NamespacedClient(ipcsync_coordinator.endpoint, ipcsync_namespace, name, timeout)


@pytest.fixture
def ipcsync_client(_ipcsync_connect: Callable[[str], Client]) -> Iterator[Client]:
    """A client of the run's coordinator, with every name in the test's namespace."""
    with _ipcsync_connect("test") as client:
        yield client


@pytest.fixture
def ipcsync_async_client(_ipcsync_connect: Callable[[str], Client]) -> Iterator[Connecting]:
    """The same for asyncio: `async with ipcsync_async_client as client:`, in whichever loop runs the test.

    It connects when it is entered or awaited, once, and is closed after the test if the test has not done so.
    """
    from ipcsync.client.aio.client import Connecting

    with contextlib.ExitStack() as opened:
        session = Connecting(lambda: opened.enter_context(_ipcsync_connect("test-async")))
        yield session
        session.close()


@pytest.fixture
def ipcsync_spawn(
    request: pytest.FixtureRequest, ipcsync_coordinator: RunCoordinator, ipcsync_namespace: str
) -> Iterator[Callable[..., Child]]:
    """`ipcsync_spawn(fn, *args) -> Child`: a fresh process that runs `fn(client, *args)`; none outlives the test.

    `fn` is a function of a module (not a lambda, not one made in another function); arguments, result and errors must
    pickle. A child that fails makes the test fail, also if its result is not asked for. Call it from a thread that
    lives as long as the child: the kernel kills the child when that thread ends.
    """
    from ipcsync.pytest_plugin.spawned import Children

    ipcsync_coordinator.check()
    timeout = request.config.getoption("--ipcsync-timeout")
    with Children(ipcsync_coordinator.endpoint, ipcsync_namespace, timeout) as children:
        request.node.stash[_CHILDREN] = children.all
        yield children.spawn
