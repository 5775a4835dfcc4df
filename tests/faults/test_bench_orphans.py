"""A benchmark that is killed leaves no server of its peers behind, and its directories to the next `launch`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

import ipcsync
from ipcsync._linux.process import PidFd
from tests.kit.until import DEADLINE_S

pytestmark = pytest.mark.process

_SERVERS = {
    "Manager": "from tests.benchmarks.peers import Manager; one = Manager(); print(one._manager._process.pid, '')",
    "Redis": "from tests.benchmarks.peers import Redis; one = Redis(); print(one._process.pid, one._directory)",
    "Echo": "from tests.benchmarks.peers import Echo; one = Echo(); print(one._worker.pid, one._directory)",
}


@pytest.mark.parametrize("name", _SERVERS)
def test_the_server_of_a_benchmarks_peer_ends_with_the_benchmark(name: str) -> None:
    if name == "Redis" and shutil.which("redis-server") is None:
        pytest.skip("redis-server not found")
    program = f"{_SERVERS[name]}; import sys; sys.stdout.flush(); sys.stdin.read()"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as bench:
        assert bench.stdout is not None
        pid, _, directory = bench.stdout.readline().strip().partition(" ")
        server = PidFd(int(pid))
        bench.kill()
        assert server.has_ended(DEADLINE_S), f"the {name} server goes on without its parent"
        server.close()
        bench.wait()  # until then its pid is there
    if directory:
        with ipcsync.launch(log_level="error"):
            assert not os.path.exists(directory)
