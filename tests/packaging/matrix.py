"""ipcsync on every Python that is here, with the oldest and the newest libraries.

`pythons` says where one is looked for; what is not here is told by name. Options behind `--` go to pytest.

    python -m tests.packaging.matrix DIRECTORY
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from tests.packaging.pythons import NAMES, found

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_ROOT = Path(__file__).parents[2]
_TESTS = ["tests/unit", "tests/contract", "tests/events/test_shared_event.py"]
_QUICK = ["-m", "not thorough and not benchmark and not alone"]
_DEADLINE_S = 3600
_EXTRAS = ("observer", "fleet")


def _oldest(version: str) -> str:
    """Constraints to the oldest libraries that pyproject.toml allows on this version of Python."""
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + [name for extra in _EXTRAS for name in project["optional-dependencies"][extra]]
    oldest: dict[str, Version] = {}
    for each in map(Requirement, wanted):
        if each.marker is None or each.marker.evaluate({"python_version": version}):
            floors = [Version(one.version) for one in each.specifier if one.operator == ">="]
            oldest[each.name] = max([*floors, oldest.get(each.name, Version("0"))])
    return "\n".join(f"{name}=={floor}" for name, floor in oldest.items())


def _run(python: Path, version: str, directory: Path, libraries: str, options: list[str]) -> str:
    """What pytest said last, or what failed before it."""
    shutil.rmtree(directory, ignore_errors=True)
    subprocess.run([python, "-m", "venv", directory], check=True)
    own = str(directory / "bin" / "python")
    constraints = directory / "constraints.txt"
    constraints.write_text(_oldest(version) if libraries == "oldest" else "")
    pip = [own, "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, "--upgrade", "pip"], check=True)
    install = [*pip, "--editable", f".[{','.join(_EXTRAS)}]", "--group", "test", "--constraint", str(constraints)]
    if subprocess.run(install, cwd=_ROOT, check=False).returncode:
        return "could not be installed"
    command = [own, "-m", "pytest", "-q", "-n", "2", *_TESTS, *_QUICK, *options]
    env = {**os.environ, "IPCSYNC_DRIVER": "host"}
    done = subprocess.run(
        command, cwd=_ROOT, env=env, stdout=subprocess.PIPE, text=True, timeout=_DEADLINE_S, check=False
    )
    (directory / "pytest.log").write_text(done.stdout)
    last = done.stdout.strip().rpartition("\n")[2]
    return last if done.returncode == 0 else f"FAILED ({directory / 'pytest.log'}): {last}"


def main(out: Path, options: list[str]) -> int:
    """1 if a Python that is here failed."""
    rows = []
    for name in NAMES:
        python = found(name)
        version = name.removeprefix("python").rstrip("t")
        for libraries in ("oldest", "newest"):
            directory = out / f"{name}-{libraries}"
            said = "not here" if python is None else _run(python, version, directory, libraries, options)
            rows.append((name, libraries, said))
            sys.stdout.write(f"{name:12} {libraries:7} {said}\n")
            sys.stdout.flush()
    return int(any("FAILED" in said or "could not" in said for *_, said in rows))


if __name__ == "__main__":
    directory, _, *rest = [*sys.argv[1:], "--"] if "--" not in sys.argv else sys.argv[1:]
    raise SystemExit(main(Path(directory).absolute(), rest))
