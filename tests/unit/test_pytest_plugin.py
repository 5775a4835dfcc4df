"""The pytest plugin's parts, and runs of pytest in this process that start no coordinator."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
import textwrap
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_randomly  # noqa: F401

from ipcsync import pytest_plugin
from ipcsync._linux.process import start_time
from ipcsync.client import Client
from ipcsync.errors import ConnectError, ProtocolError, RecorderLost
from ipcsync.pytest_plugin import run, spawned
from ipcsync.pytest_plugin.run import Run, RunCoordinator
from ipcsync.pytest_plugin.spawned import Child, ChildError, Children, NamespacedClient
from tests.kit.descriptors import descriptors

# Imported before an inner run would do it, whose modules are forgotten with it: `ipcsync.client`, and pytest-randomly,
# which imports numpy, which warns when it is imported again.


@pytest.fixture
def fresh_gpu() -> Iterator[None]:
    """What was found out about the GPU is asked anew, before and after."""
    pytest_plugin.why_no_gpu.cache_clear()
    yield
    pytest_plugin.why_no_gpu.cache_clear()


@pytest.mark.process
def test_loading_the_plugin_loads_nothing_heavy() -> None:
    script = """
        import pytest
        import sys
        before = set(sys.modules)
        import ipcsync.pytest_plugin
        new = {name.partition(".")[0] for name in set(sys.modules) - before}
        assert not new & {"zmq", "cuda", "msgspec", "msgpack", "multiprocessing", "asyncio"}, new
        assert not {name for name in sys.modules if name.startswith("ipcsync.")} & {
            "ipcsync.client", "ipcsync._native", "ipcsync._drivers"
        }
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_run_without_the_fixtures_starts_nothing(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        def test_nothing(pytestconfig, ipcsync_namespace):
            import os
            from ipcsync import pytest_plugin
            mine = pytestconfig.stash[pytest_plugin._RUN]
            assert not os.path.exists(mine.directory)
        """
    )
    pytester.runpytest_inprocess().assert_outcomes(passed=1)


def test_its_options_and_marker_are_told(pytester: pytest.Pytester) -> None:
    shown = pytester.runpytest_inprocess("--help").stdout
    shown.fnmatch_lines(["*--ipcsync-driver={auto,cuda,host}*", "*--ipcsync-timeout=S*"])
    markers = ["@pytest.mark.ipcsync_gpu: needs a real NVIDIA GPU*", "@pytest.mark.gpu: of a test that uses*"]
    pytester.runpytest_inprocess("--markers").stdout.fnmatch_lines_random(markers)


@pytest.mark.parametrize("wrong", ["--ipcsync-timeout=0", "--ipcsync-timeout=nan", "--ipcsync-driver=opencl"])
def test_a_wrong_option_is_a_usage_error(pytester: pytest.Pytester, wrong: str) -> None:
    assert pytester.runpytest_inprocess(wrong).ret == pytest.ExitCode.USAGE_ERROR


# --- gpu --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("why_not", "outcome"), [("no GPU today", "skipped"), (None, "passed")])
def test_the_gpu_marker_skips_with_the_reason_where_there_is_none(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, why_not: str | None, outcome: str
) -> None:
    monkeypatch.setattr(pytest_plugin, "why_no_gpu", lambda: why_not)
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.ipcsync_gpu
        def test_on_a_gpu():
            pass

        @pytest.mark.gpu
        def test_on_a_gpu_with_a_fixture_of_ours(ipcsync_namespace):
            pass

        @pytest.fixture
        def mine(ipcsync_namespace):
            return ipcsync_namespace

        @pytest.mark.gpu
        def test_on_a_gpu_with_a_fixture_that_uses_ours(mine):
            pass

        def test_anywhere(ipcsync_namespace):
            pass
        """
    )
    result = pytester.runpytest_inprocess("-rs", "--strict-markers")
    result.assert_outcomes(**({"passed": 4} if outcome == "passed" else {"passed": 1, "skipped": 3}))
    if why_not:
        result.stdout.fnmatch_lines([f"*{why_not}*"])


def test_the_tests_of_other_suites_are_left_alone(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their marker `gpu` may mean a GPU of any kind, and one that is here."""
    monkeypatch.setattr(pytest_plugin, "why_no_gpu", lambda: pytest.fail("nobody asked for a GPU of NVIDIA's"))
    pytester.makepyfile(
        """
        import unittest
        import pytest

        pytestmark = pytest.mark.gpu

        @pytest.fixture
        def device():
            return "rocm"

        def test_function(device):
            pass

        class TestOfUnittest(unittest.TestCase):
            def test_method(self):
                pass
        """
    )
    pytester.runpytest_inprocess("--strict-markers").assert_outcomes(passed=2)


def test_without_nvidias_kernel_driver_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch, fresh_gpu: None) -> None:
    monkeypatch.setattr(pytest_plugin, "_KERNEL_DRIVERS", ("/nonexistent/nvidia",))
    assert "kernel driver is not loaded" in (pytest_plugin.why_no_gpu() or "")


@pytest.mark.process
def test_what_the_cuda_driver_says_is_the_reason(
    monkeypatch: pytest.MonkeyPatch, fresh_gpu: None, tmp_path: Path
) -> None:
    monkeypatch.setattr(pytest_plugin, "_KERNEL_DRIVERS", (str(tmp_path),))
    monkeypatch.setattr(pytest_plugin, "_COUNT", "import ipcsync; raise ipcsync.NoDriver('it is asleep')")
    assert pytest_plugin.why_no_gpu() == "no usable GPU here: ipcsync.errors.NoDriver: it is asleep"
    pytest_plugin.why_no_gpu.cache_clear()
    monkeypatch.setattr(pytest_plugin, "_COUNT", "print(0)")
    assert pytest_plugin.why_no_gpu() == "no GPU is visible here"
    pytest_plugin.why_no_gpu.cache_clear()
    monkeypatch.setattr(pytest_plugin, "_COUNT", "print(2)")
    assert pytest_plugin.why_no_gpu() is None


# --- the run ----------------------------------------------------------------------------------------------------------


@pytest.mark.process
def test_the_runs_coordinator_inherits_no_descriptor_of_whoever_starts_it(tmp_path: Path) -> None:
    mine = run.own()
    inherited = os.memfd_create("a-drivers-file", 0)  # not close-on-exec, as what a C library opens may be
    try:
        started = run.join(mine, "host", tmp_path / "log")
        theirs = descriptors(started.pid).values()
        assert theirs
        assert not [path for path in theirs if "a-drivers-file" in path]
    finally:
        os.close(inherited)
        run.stop(mine)
    assert not started.is_running


@pytest.mark.parametrize("is_here", [True, False])
def test_a_worker_is_of_its_controllers_run_if_that_is_here(is_here: bool) -> None:
    mine, worker = run.own(), types.SimpleNamespace(stash=pytest.Stash(), addinivalue_line=lambda *_: None)
    told = mine if is_here else mine._replace(started=1)
    worker.workerinput = {pytest_plugin._WORKER_KEY: tuple(told)}
    pytest_plugin.pytest_configure(worker)  # type: ignore[arg-type] # all that it uses
    found = worker.stash[pytest_plugin._RUN]
    assert (found.pid, found.started) == (os.getpid(), start_time(os.getpid()))
    assert (found == mine) == is_here


def test_a_directory_that_inherits_the_set_group_id_bit_is_private(tmp_path: Path) -> None:
    tmp_path.chmod(0o2700)
    run._make_private(tmp_path / "run")
    assert (tmp_path / "run").stat().st_mode & 0o7777 == 0o2700


def test_a_directory_that_is_not_private_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    mine = run.own()
    os.mkdir(mine.directory)
    os.chmod(mine.directory, 0o755)  # whatever the umask is that another test left
    with pytest.raises(ConnectError, match="0700"):
        run.join(mine, "host", tmp_path / "log")


def test_a_run_with_a_dead_coordinator_says_so_and_starts_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    mine = run.own()
    os.mkdir(mine.directory, 0o700)
    log = tmp_path / "log"
    log.write_text("it said farewell\n")
    Path(mine.directory, run._FILE).write_text(json.dumps(RunCoordinator("ipc:///x", os.getpid(), 1, str(log))))
    with pytest.raises(ConnectError, match=r"has ended; its log is .*\nit said farewell"):
        run.join(mine, "host", log)
    run.stop(mine)
    assert not os.path.exists(mine.directory)


@pytest.mark.process
def test_a_coordinator_that_does_not_start_is_told_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    mine = run.own()
    with pytest.raises(ConnectError, match=r"did not start; its log (.|\n)*driver"):
        run.join(mine, "none-such", tmp_path / "log")
    run.stop(mine)


def test_the_end_of_a_log_is_its_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert "cannot be read" in run.tail(log)
    log.write_text("")
    assert run.tail(log) == "(it is empty)"
    log.write_text("".join(f"line {i}\n" for i in range(100_000)))
    assert run.tail(log).splitlines()[-1] == "line 99999"
    assert len(run.tail(log).splitlines()) == 20


def test_stopping_a_run_without_a_coordinator_is_nothing(tmp_path: Path) -> None:
    run.stop(Run(os.getpid(), 1, "none", str(tmp_path / "none")))


# --- namespaces and processes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "full"), [("e", "ns/e"), ("ns/e", "ns/e"), ("nse", "ns/nse"), ("a/b", "ns/a/b"), ("ns/ns/e", "ns/ns/e")]
)
def test_a_name_goes_into_the_namespace_once_and_is_shown_with_it(given: str, full: str) -> None:
    client = _namespaced()
    assert (client._full(given), client._full_prefix(given), client._shown(full)) == (full, full, full)
    assert (client._full_prefix(""), client._full_prefix("ns/")) == ("ns/", "ns/")


@pytest.mark.parametrize(("wrong", "error"), [("", ProtocolError), ("ns/", ProtocolError), (None, TypeError)])
def test_the_namespace_alone_is_no_name(wrong: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        _namespaced()._full(wrong)


def _namespaced() -> NamespacedClient:
    """One that is not connected."""
    client = NamespacedClient.__new__(NamespacedClient)
    Client.__init__(client, "ipc:///nowhere", prefix="ns/")
    return client


def test_what_is_no_function_of_a_module_is_refused() -> None:
    def inner() -> None:
        return

    children = Children("ipc:///nowhere", "ns", 1.0)
    for wrong in (inner, lambda: None, children.spawn, 7, None):
        with pytest.raises(TypeError, match="function of a module"):
            children.spawn(wrong)  # type: ignore[arg-type] # wrong on purpose
    children.close()


def test_a_module_that_is_not_to_be_found_by_its_name_is_loaded_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "some_file.py"
    file.write_text("class Thing:\n    x = 1\n")
    module = spawned._load("an_ipcsync_test.deep", str(file))
    assert module.Thing.x == 1
    assert sys.modules.pop("an_ipcsync_test.deep") is module
    assert spawned._load("json", None) is sys.modules["json"]


class UnpicklableError(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} {b}")


def test_an_error_travels_with_its_traceback() -> None:
    def told(error: BaseException) -> tuple[bytes | None, str]:
        try:
            raise error
        except BaseException as raised:  # noqa: BLE001 - it is what is looked at
            return spawned._told(raised)

    pickled, trace = told(RecorderLost("gone", generation=3))
    assert pickled is not None
    assert pickle.loads(pickled).generation == 3
    assert "in told" in trace
    assert told(UnpicklableError(1, 2))[0] is None  # it pickles, but does not come out of that again
    assert told(ValueError(threading.Lock()))[0] is None


def test_an_error_that_cannot_be_built_here_is_told_by_its_traceback() -> None:
    child = Child.__new__(Child)
    child._label, child.pid = "fn-1", 7
    for pickled in (None, b"noise", pickle.dumps(SystemExit(3))):
        error = child._error(pickled, "Traceback …")
        assert isinstance(error, ChildError)
        assert str(error) == "fn-1 (pid 7) raised; its traceback:\nTraceback …"
        assert error.traceback == "Traceback …"
    error = child._error(pickle.dumps(RecorderLost("x", generation=2)), "Traceback …")
    assert isinstance(error, RecorderLost)
    assert error.__dict__["__notes__"] == ["fn-1 (pid 7) raised; its traceback:\nTraceback …"]
