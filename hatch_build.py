"""Builds the compiled core, `ipcsync._engines.core`, where a C compiler is; where none is, the package is pure Python.

Which of the two it became, and why, stands in `ipcsync/_engines/core_build.txt` for `ipcsync doctor` to tell. A wheel's
tag follows from what was built: with the core one for CPython's stable ABI from 3.10 on (on a free-threaded Python,
which has none, one for that version alone), else `py3-none-any`.

IPCSYNC_BUILD_CORE is auto (the default), 0 (do not try) or 1 (fail if it cannot be built). CC is the compiler, and
IPCSYNC_BUILD_MACHINE another machine that it compiles for, such as aarch64.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_CYTHON = "Cython>=3.1,<4"
_HOME = Path("ipcsync", "_engines")
_SOURCES = _HOME / "core_cython"
_MACHINES = ("x86_64", "aarch64")
_FLAGS = ["-O2", "-g0", "-fPIC", "-shared", "-fvisibility=hidden", "-fno-strict-overflow", "-Wl,--strip-all"]
_STABLE = ["-DPy_LIMITED_API=0x030A0000", "-DCYTHON_LIMITED_API=1"]


class _NotBuiltError(Exception):
    """The core cannot be built here, and why."""


class CoreHook(BuildHookInterface[Any]):
    """Called by hatchling for each wheel and each editable install."""

    def dependencies(self) -> list[str]:
        """Cython, if there is anything to translate for."""
        try:
            _compiler()
        except _NotBuiltError:
            return []
        return [_CYTHON]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the core: into the tree for an editable install, else into the wheel."""
        root = Path(self.root)
        name = "core.abi3.so" if _is_stable() else f"core{sysconfig.get_config_var('EXT_SUFFIX')}"
        self._temporary = tempfile.mkdtemp(prefix="ipcsync-core-")
        folder = Path(self._temporary)
        if version == "editable":
            folder = root / _HOME
            for old in folder.glob("core*.so"):  # of a build that no longer holds
                old.unlink()
        try:
            note = _build(root / _SOURCES / "core.pyx", folder / name)
        except _NotBuiltError as why:
            if _wanted() == "1":
                raise
            note = f"pure: {why}"
        else:
            build_data["pure_python"] = False
            build_data["tag"] = _tag()
            if version != "editable":
                build_data["force_include"][str(folder / name)] = str(_HOME / name)
        (folder / "core_build.txt").write_text(note + "\n")
        if version != "editable":
            build_data["force_include"][str(folder / "core_build.txt")] = str(_HOME / "core_build.txt")
        self.app.display_info(f"ipcsync's core: {note}")

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002 - hatchling's
        """Remove what is in the wheel now."""
        shutil.rmtree(self._temporary)


def _wanted() -> str:
    wanted = os.environ.get("IPCSYNC_BUILD_CORE", "auto")
    if wanted not in ("auto", "0", "1"):
        raise ValueError(f"IPCSYNC_BUILD_CORE must be auto, 0 or 1, but is {wanted!r}")
    return wanted


def _machine() -> str:
    return os.environ.get("IPCSYNC_BUILD_MACHINE") or platform.machine()


def _is_stable() -> bool:
    return not sysconfig.get_config_var("Py_GIL_DISABLED")


def _tag() -> str:
    from packaging.tags import sys_tags

    if not _is_stable():
        return str(next(iter(sys_tags())))
    return f"cp310-abi3-linux_{_machine()}"


def _compiler() -> list[str]:
    """The command of a C compiler. Raises _NotBuiltError if there is none, or none is wanted."""
    if _wanted() == "0":
        raise _NotBuiltError("IPCSYNC_BUILD_CORE=0 when it was built")
    if platform.python_implementation() != "CPython":
        raise _NotBuiltError(f"{platform.python_implementation()} is not CPython")
    if _machine() not in _MACHINES:
        raise _NotBuiltError(f"it is written for {' and '.join(_MACHINES)}, not for {_machine()}")
    chosen = os.environ.get("CC")
    known = [chosen] if chosen else [sysconfig.get_config_var("CC") or "cc", "cc", "gcc", "clang"]
    for command in known:
        words = shlex.split(command)
        if words and shutil.which(words[0]):
            return words
    raise _NotBuiltError(f"no C compiler (looked for {', '.join(dict.fromkeys(known))})")


def _build(source: Path, target: Path) -> str:
    """Translate and compile `source`; one line that says with what. Raises _NotBuiltError."""
    compiler = _compiler()
    from Cython import __version__ as cython
    from Cython.Compiler.Main import CompilationOptions, compile_single

    paths = sysconfig.get_paths()
    headers = [f"-I{folder}" for folder in dict.fromkeys((paths["include"], paths["platinclude"], source.parent))]
    with tempfile.TemporaryDirectory(prefix="ipcsync-core-") as name:
        generated, built = Path(name, "core.c"), Path(name, "core.so")
        options = CompilationOptions(output_file=str(generated), language_level=3)
        if compile_single(str(source), options=options, full_module_name="ipcsync._engines.core").num_errors:
            raise _NotBuiltError(f"Cython {cython} does not translate {source.name}")
        extra = shlex.split(os.environ.get("CFLAGS", ""))
        stable = _STABLE if _is_stable() else []
        command = [*compiler, *_FLAGS, *stable, *headers, *extra, str(generated), "-o", str(built)]
        try:
            done = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        except OSError as error:
            raise _NotBuiltError(f"no C compiler: {compiler[0]}: {error.strerror}") from None
        if done.returncode:
            faults = [line.strip() for line in done.stdout.splitlines() if "error" in line] or ["it said nothing"]
            raise _NotBuiltError(f"the C compiler {compiler[0]} failed: {faults[0]}")
        shutil.copyfile(built, target.with_suffix(".new"))
        target.with_suffix(".new").replace(target)  # whoever has the old one mapped keeps it
    return f"compiled: {'CPython 3.10 or later' if _is_stable() else _tag()}, Cython {cython}, {compiler[0]}"
