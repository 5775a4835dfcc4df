"""A client in a pid namespace of its own, with the very pid value that the coordinator has in its.

    unshare --pid --fork --kill-child --mount-proc python -m tests.events.same_pid PID ENDPOINT

The first process of the namespace chooses the pid of the next one, which is the client. It prints what it found and
recorded as one line of JSON, then waits for the point that it is told on stdin, and prints how that ended.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

import ipcsync


def tell(**found: Any) -> None:
    """Print a line of JSON."""
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


def choose_pid(pid: int) -> int:
    """Start the client as process `pid` of this namespace; its exit status."""
    with open("/proc/sys/kernel/ns_last_pid", "w") as file:
        file.write(str(pid - 1))
    return subprocess.run([sys.executable, "-m", __spec__.name, *sys.argv[1:]], check=False).returncode


def serve(pid: int, endpoint: str) -> None:
    """The client's part."""
    assert os.getpid() == pid
    with ipcsync.connect(endpoint, name="same-pid") as client:
        event = client.event("from-inside", recorder=True)
        point = event.record(ipcsync.Stream())
        point.synchronize(10)
        tell(engine=event.engine, check=client.check(), point=bytes(point).hex())
        theirs = client.point(bytes.fromhex(sys.stdin.readline()))
        while not theirs.is_recorded:
            time.sleep(0.001)
        tell(recorded=True)
        try:
            theirs.synchronize(30)
        except ipcsync.RecorderLost as error:
            tell(lost=error.generation)
        else:
            tell(done=theirs.query())


if __name__ == "__main__":
    if os.getpid() == 1:
        sys.exit(choose_pid(int(sys.argv[1])))
    serve(int(sys.argv[1]), sys.argv[2])
