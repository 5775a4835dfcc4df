"""`ipcsync observer` as a command: what it needs, and how it refuses."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

import ipcsync

pytestmark = pytest.mark.process

_WITHOUT = """
import sys
from importlib.abc import MetaPathFinder
class Missing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in {missing!r}:
            raise ModuleNotFoundError(f'No module named {{name!r}}', name=name)
sys.meta_path.insert(0, Missing())
from ipcsync_observer.__main__ import main
main(sys.argv[1:], prog_name='ipcsync observer')
"""


@pytest.mark.parametrize("missing", ["prometheus_client", "starlette", "uvicorn"])
def test_without_the_extra_it_says_which_one_to_install(missing: str) -> None:
    command = [sys.executable, "-c", _WITHOUT.format(missing=(missing,)), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert (
        done.stderr
        == f"ipcsync: the observer needs {missing}; in a checkout of ipcsync: pip install -e '.[observer]'\n"
    )


def test_without_the_extra_its_help_is_there() -> None:
    missing = ("prometheus_client", "starlette", "uvicorn")
    command = [sys.executable, "-c", _WITHOUT.format(missing=missing), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0
    assert done.stdout.startswith("Usage: ipcsync observer")


def test_a_port_in_use_is_one_line_and_status_1(coordinator: ipcsync.Coordinator) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-c", "from ipcsync.cli import main; main()"]
        command += ["observer", "--port", str(port), "--endpoint", coordinator.endpoint]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert done.stderr == f"ipcsync: cannot serve on 127.0.0.1 port {port}: Address already in use\n"


def test_a_name_that_no_host_can_have_is_one_line_and_status_1() -> None:
    command = [sys.executable, "-m", "ipcsync_observer", "--host", "a..b", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert done.stderr.startswith("ipcsync: cannot serve on a..b port 0: ")


@pytest.mark.parametrize(
    "arguments", [("--endpoint", "tcp://a:1"), ("--port", "x"), ("--period", "0"), ("--period", "nan")]
)
def test_a_wrong_call_has_status_2(arguments: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "ipcsync_observer", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2, done.stderr
