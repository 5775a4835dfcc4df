"""Runs a command many times beside a busy core: `python -m tests.kit.repeat 20 make test`; says how often it passed.

A test that passes once and fails at the twentieth time, or beside a neighbour that takes a core, is wrong.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time


def _be_busy(parent: int) -> None:
    while os.getppid() == parent:  # also when that is killed
        pass


def main() -> int:
    """Run it, and print a line for each time; what a failed time printed, in full."""
    times, command = int(sys.argv[1]), sys.argv[2:]
    neighbour = multiprocessing.get_context("spawn").Process(target=_be_busy, args=(os.getpid(),), daemon=True)
    neighbour.start()
    passed = 0
    for number in range(1, times + 1):
        began = time.monotonic()
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        passed += done.returncode == 0
        if done.returncode:
            sys.stdout.write(done.stdout)
        lines = [line for line in done.stdout.splitlines() if " passed" in line or " failed" in line]
        sys.stdout.write(f"{number} of {times}, {time.monotonic() - began:.0f} s: {'; '.join(lines)}\n")
        sys.stdout.flush()
    neighbour.kill()
    sys.stdout.write(f"{passed} of {times} passed\n")
    return int(passed != times)


if __name__ == "__main__":
    sys.exit(main())
