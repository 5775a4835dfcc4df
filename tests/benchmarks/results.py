"""`make results`: measures everything and writes the tables of RESULTS.md anew, each older figure beside its new one.

What stands there in front of the first table is for people to write. `before.json` has the older figures: those of the
last full run in which every call was Python.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

_HERE = Path(__file__).parent
_PAGE = _HERE / "RESULTS.md"
_BEGIN = "<!-- what follows is written by make results -->\n"


class Run(NamedTuple):
    """One table."""

    title: str
    older: str  # which of the older runs stands beside it
    env: dict[str, str]
    only: tuple[str, ...] = ()


_HOST = {"IPCSYNC_DRIVER": "host"}
RUNS = (
    Run("The software driver", "cuda", _HOST),
    Run("The same, all work sent through the stream's thread", "", {**_HOST, "IPCSYNC_HOST_ASYNC": "1"}, ("wake_up",)),
)


def _measure(run: Run, options: list[str], older: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Its table and its machine."""
    with tempfile.TemporaryDirectory() as folder:
        table, before = Path(folder, "table.md"), Path(folder, "before.json")
        command = [sys.executable, "-m", "tests.benchmarks", "--json", "--markdown", table]
        if run.older:
            before.write_text(json.dumps(older[run.older]))
            command += ["--before", before]
        for name in run.only:
            command += ["--only", name]
        env = {**os.environ, **run.env, "IPCSYNC_HOST_SEGMENT": f"results-{os.getpid()}"}
        done = subprocess.run([*map(str, command), *options], env=env, check=True, stdout=subprocess.PIPE, text=True)
        return table.read_text(), json.loads(done.stdout)["machine"]


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a look, not a figure")
    parser.add_argument("--rounds", help="rounds of each row")
    parser.add_argument("--only", action="append", default=[], help="only this benchmark; may be repeated")
    given = parser.parse_args()
    options = [*(["--quick"] if given.quick else []), *(["--rounds", given.rounds] if given.rounds else [])]
    older = json.loads((_HERE / "before.json").read_text())
    parts = []
    for run in RUNS:
        only = tuple(name for name in given.only if not run.only or name in run.only) if given.only else run.only
        if given.only and not only:
            continue
        began = os.getloadavg()[0]
        table, machine = _measure(run._replace(only=only), options, older)
        where = f"{machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}, Python {machine['python']}"
        load = f"load average {began:.1f} before, {os.getloadavg()[0]:.1f} after, {time.strftime('%Y-%m-%d')}"
        parts.append(f"## {run.title}\n\n{where}; {load}{'; --quick' if given.quick else ''}.\n\n{table}")
    page = _PAGE.read_text()
    _PAGE.write_text(page[: page.index(_BEGIN) + len(_BEGIN)] + "\n" + "\n".join(parts))


if __name__ == "__main__":
    main()
