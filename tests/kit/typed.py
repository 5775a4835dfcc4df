"""How much of the public interface has types that every checker reads alike, of a package as it is installed.

    python -m tests.kit.typed PYTHON

PYTHON's environment has the package and basedpyright. What `ipcsync.integrations` builds on classes of other packages
counts only as far as those are installed, so it is left out. Exit status 1 if anything else has no such type.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_LEFT_OUT = "ipcsync.integrations."


def main(python: str) -> int:
    """Print what has no type, and the share that has."""
    folder = Path(python).absolute().parent
    done = subprocess.run(
        [str(folder / "basedpyright"), "--outputjson", "--verifytypes", "ipcsync", "--ignoreexternal"],
        cwd=folder.parent,  # where no other ipcsync lies
        env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "VIRTUAL_ENV": str(folder.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    symbols: list[dict[str, Any]] = json.loads(done.stdout)["typeCompleteness"]["symbols"]
    counted = [symbol for symbol in symbols if not symbol["name"].startswith(_LEFT_OUT)]
    lacking = [symbol for symbol in counted if not symbol["isTypeKnown"] or symbol["isTypeAmbiguous"]]
    for symbol in lacking:
        sys.stdout.write(f"{symbol['name']}: {'; '.join(each['message'] for each in symbol['diagnostics'])}\n")
    share = 1 - len(lacking) / len(counted) if counted else 0.0
    sys.stdout.write(f"{share:.1%} of {len(counted)} symbols have a type that every checker reads alike\n")
    return 1 if lacking or not counted else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
