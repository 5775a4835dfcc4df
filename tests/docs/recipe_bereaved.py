"""Run a recipe in which one process kills itself amid its work, and say how the others end: they must by themselves.

python -m tests.docs.recipe_bereaved services/recipes/NAME.py
python -m tests.docs.recipe_bereaved services/recipes/NAME.py N

With N, which counts from 0, this process kills the recipe's Nth one as soon as that has a session.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

ALONE_S = 20.0  # for those that are left


def _run(*workers: tuple[Any, ...]) -> None:
    """As `processes.run`, which kills the others as soon as one fails."""
    import processes  # the recipes'

    started = [processes.start(*worker) for worker in workers]
    wait([process.sentinel for process in started], processes.DEADLINE_S)
    for process in started:
        process.join(ALONE_S)
        sys.stdout.write(f"{process.name}: {process.exitcode}\n")
        process.kill()


def _kill(number: int) -> None:
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    while True:
        spawned = [pid for pid in children.read_text().split() if b"spawn_main" in _read(f"/proc/{pid}/cmdline")]
        for pid in spawned[number : number + 1]:
            if b"board-" in _read(f"/proc/{pid}/maps"):
                os.kill(int(pid), signal.SIGKILL)
                sys.stdout.write(f"killed: {pid}\n")
                return
        time.sleep(0.005)


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""  # it has ended


if __name__ == "__main__":
    recipe, numbers = Path(sys.argv[1]), sys.argv[2:]
    del sys.argv[1:]
    sys.path.insert(0, str(recipe.parent))
    import processes  # the recipes'

    if numbers:
        processes.DEADLINE_S = ALONE_S
        threading.Thread(target=_kill, args=(int(numbers[0]),), daemon=True).start()
    else:
        processes.run = _run
    runpy.run_path(str(recipe), run_name="__main__")
