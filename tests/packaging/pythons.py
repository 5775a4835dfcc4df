"""The Pythons that are here: by their names on the path, in pyenv's versions, or at a path in $MATRIX_PYTHONS.

`python -m tests.packaging.pythons 3.12` prints the newest one of that version or above.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

NAMES = ("python3.10", "python3.11", "python3.12", "python3.13", "python3.14", "python3.14t")


def found(name: str) -> Path | None:
    """Where the one of this name is; None if it is not here."""
    candidates = [Path(path) for path in os.environ.get("MATRIX_PYTHONS", "").split(os.pathsep) if path]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    candidates += sorted(pyenv.glob(f"*/bin/{name}"), reverse=True)
    on_path = shutil.which(name)
    candidates += [Path(on_path)] if on_path else []
    return next((python for python in candidates if _works(python, name)), None)


def _works(python: Path, name: str) -> bool:
    """Whether it is what its name says: a shim of pyenv's may lead nowhere."""
    ask = (
        "import sys, sysconfig; "
        "print('python%d.%d' % sys.version_info[:2], sysconfig.get_config_var('Py_GIL_DISABLED'))"
    )
    try:
        said = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=False).stdout.split()
    except OSError:
        return False
    return bool(said) and said[0] + "t" * (said[1] == "1") == name


def newest(least: str) -> Path | None:
    """The newest one with a GIL, of version `least` or above; None if there is none."""
    names = [name for name in NAMES[NAMES.index(f"python{least}") :] if not name.endswith("t")]
    return next(filter(None, map(found, reversed(names))), None)


def main(least: str) -> str | None:
    """Print the newest one; what is wrong if there is none."""
    python = newest(least)
    if python is None:
        return f"there is no Python {least} or above here; MATRIX_PYTHONS=path:path names more"
    sys.stdout.write(f"{python}\n")
    return None


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
