"""Try a built wheel and sdist where no checkout is near: `python -m tests.packaging.installed DIST -- TESTS…`.

The wheel is installed in a fresh virtual environment and used with a fresh HOME; then the tests of the unpacked sdist
run against it. What is missing from either shows here, and not at the first user's.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

_FROM_ELSEWHERE = ("IPCSYNC_", "PYTEST", "PYTHON", "VIRTUAL_ENV")
_WHERE = "import ipcsync; print(ipcsync.__version__, ipcsync.__file__)"


def _one(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise SystemExit(f"one {pattern} is expected in {folder}, not {len(found)}")
    return found[0].resolve()


def _environment(home: Path, bin_: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_FROM_ELSEWHERE)}
    return {**kept, "HOME": str(home), "PATH": f"{bin_}{os.pathsep}{os.environ['PATH']}", "IPCSYNC_DRIVER": "host"}


def _run(command: list[str | Path], **where: object) -> str:
    words = [str(word) for word in command]
    print("+", *words, flush=True)  # noqa: T201 - a program of the command line
    done = subprocess.run(words, check=False, stdout=subprocess.PIPE, text=True, **where)  # type: ignore[call-overload]
    print(done.stdout, end="", flush=True)  # noqa: T201
    if done.returncode != 0:
        raise SystemExit(f"{words[0]} ended with {done.returncode}")
    return str(done.stdout)


def main(dist: str, tests: list[str]) -> None:
    """Install, use, test."""
    wheel, sdist = _one(Path(dist), "*.whl"), _one(Path(dist), "*.tar.gz")
    with tempfile.TemporaryDirectory(prefix="ipcsync-installed-") as name:
        temporary = Path(name)
        home, elsewhere, venv = temporary / "home", temporary / "elsewhere", temporary / "venv"
        home.mkdir()
        elsewhere.mkdir()
        env = _environment(home, venv / "bin")
        pip: list[str | Path] = [venv / "bin" / "python", "-m", "pip", "install", "--quiet"]
        _run([sys.executable, "-m", "venv", venv])
        _run([*pip, "--upgrade", "pip"], env=env)
        _run([*pip, f"{wheel}[observer]"], env=env)
        said = _run([venv / "bin" / "python", "-c", _WHERE], env=env, cwd=elsewhere)
        version, path = said.split(maxsplit=1)
        if version != wheel.name.split("-")[1] or not Path(path).is_relative_to(venv):
            raise SystemExit(f"the wheel {wheel.name} was to be imported, not version {version} from {path}")
        for command in ("demo", "doctor", "observer --help", "coordinator --help"):
            _run([venv / "bin" / "ipcsync", *command.split()], env=env, cwd=elsewhere)
        with tarfile.open(sdist) as archive:
            archive.extractall(temporary, filter="data")
        tree = temporary / sdist.name.removesuffix(".tar.gz")
        # The processes that the tests start find the tree before what is installed, and its package is not built.
        shutil.rmtree(tree / "ipcsync")
        shutil.copytree(Path(path.strip()).parent, tree / "ipcsync")
        _run([*pip, "--group", f"{tree / 'pyproject.toml'}:dev"], env=env)
        _run([venv / "bin" / "pytest", "-q", "-n", "2", *tests], env=env, cwd=tree)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[sys.argv.index("--") + 1 :])
