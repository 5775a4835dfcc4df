"""A peer in another pid namespace: `python -m tests.faults.foreign FD`, started and killed by way of unshare(1)."""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection

from tests.kit.peer import serve


def main() -> None:
    """Serve until the other side closes its end."""
    try:
        serve(Connection(int(sys.argv[1])))
    except EOFError:
        return


if __name__ == "__main__":
    main()
