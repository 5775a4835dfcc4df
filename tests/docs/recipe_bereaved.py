"""Run a recipe in which one process kills itself amid its work, and say how the others end: they must by themselves.

python -m tests.docs.recipe_bereaved services/recipes/NAME.py
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

ALONE_S = 20.0  # for those that are left


def _run(*workers: tuple[Callable[..., None], tuple[Any, ...]]) -> None:
    """As `processes.run`, which kills the others as soon as one fails."""
    import processes  # the recipes'

    spawned = [processes.SPAWN.Process(target=fn, args=args, name=fn.__name__, daemon=True) for fn, args in workers]
    for process in spawned:
        process.start()
    for _, args in workers:
        processes.close(args)
    wait([process.sentinel for process in spawned], processes.DEADLINE_S)
    for process in spawned:
        process.join(ALONE_S)
        sys.stdout.write(f"{process.name}: {process.exitcode}\n")
        process.kill()


if __name__ == "__main__":
    recipe = Path(sys.argv[1])
    sys.path.insert(0, str(recipe.parent))
    import processes  # the recipes'

    processes.run = _run
    runpy.run_path(str(recipe), run_name="__main__")
