"""A build for which something is missing says what in one sentence, and leaves no wheel: hatch_build.py."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("hatchling", reason="hatchling is not installed: make install")

pytestmark = pytest.mark.process

_ROOT = Path(__file__).parents[2]
_BUILD = """
import sys, sysconfig
from hatchling.cli import hatchling
{}
sys.argv = ["hatchling", "build", "--target", "wheel", "--directory", {!r}]
sys.exit(hatchling())
"""
_NO_HEADERS = """
found = sysconfig.get_paths()
sysconfig.get_paths = lambda: {**found, "include": "/nowhere", "platinclude": "/nowhere"}

from types import SimpleNamespace
from Cython.Compiler import Main

def translate(source, options, **_):  # which takes seconds, and makes a source that begins with the same line
    with open(options.output_file, "w") as file:
        file.write("#include <Python.h>\\n")
    return SimpleNamespace(num_errors=0)

Main.compile_single = translate
"""

_TRANSLATED = """sh -c 'echo "error: in $LC_ALL!"; exit 1'"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
@pytest.mark.parametrize(
    ("spoil", "env", "said"),
    [
        (
            "sysconfig.get_config_vars()['CC'] = 'cc'",
            {"PATH": "/nowhere", "CC": ""},
            "there is no C compiler. Install gcc or clang",
        ),
        ("", {"CC": "no-such-compiler -O2"}, "CC is 'no-such-compiler -O2', and there is no such program"),
        ("sys.modules['Cython'] = None", {}, "Cython is missing. Install it"),
        pytest.param("", {"CC": "false"}, "the C compiler false failed: it said nothing", marks=pytest.mark.thorough),
        (
            _NO_HEADERS,
            {"CC": _TRANSLATED, "LC_ALL": "C.UTF-8"},
            f"the C compiler {_TRANSLATED} failed: error: in C!",
        ),
        (
            _NO_HEADERS,
            {"CC": "cc"},
            "Python's headers are missing: there is no Python.h in /nowhere. Install python3-dev",
        ),
        (
            "",
            {"IPCSYNC_BUILD_MACHINE": "riscv64"},
            "it is written for CPython on Linux with glibc, on x86_64 or aarch64",
        ),
    ],
    ids=["compiler", "mistyped-compiler", "cython", "broken-compiler", "translated-compiler", "headers", "machine"],
)
def test_a_build_that_cannot_be_says_what_is_missing_and_makes_no_wheel(
    tmp_path: Path, spoil: str, env: dict[str, str], said: str
) -> None:
    dist, rest = tmp_path / "dist", tmp_path / "rest"
    rest.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", _BUILD.format(spoil, str(dist))],
        cwd=_ROOT,
        env={**os.environ, "TMPDIR": str(rest), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    (line,) = done.stdout.splitlines()
    assert line.startswith(f"ipcsync cannot be built here: {said}")
    assert not list(dist.glob("*"))
    assert not list(rest.iterdir())
