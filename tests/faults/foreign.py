"""A peer in another pid namespace: `python -m tests.faults.foreign FD`, started and killed by way of unshare(1)."""

from __future__ import annotations

import sys

from ipcsync._linux.child import run

if __name__ == "__main__":
    run(int(sys.argv[1]))
