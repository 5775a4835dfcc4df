"""Builds what of ipcsync is not Python: the software driver in C, and the compiled core, `ipcsync._engines.core`.

Where there is no C compiler, the build asks for ziglang, which has one. The core needs Python's headers too; without
them the engines are pure Python. `ipcsync/_engines/core_build.txt` says whether there is a core, and why not, which
`ipcsync doctor` shows. A wheel's tag follows from what was built: with the core, CPython's stable ABI from 3.10 on (a
free-threaded Python has none, so that version alone); without it, any Python on this kind of machine.

IPCSYNC_BUILD_CORE is auto (the default), 0 (do not try) or 1 (fail if it cannot be built). CC is the compiler, and
IPCSYNC_BUILD_MACHINE another machine that it compiles for, such as aarch64.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_CYTHON = "Cython>=3.1,<4"
_ZIG = "ziglang>=0.13"
_HOME = Path("ipcsync", "_engines")
_SOURCES = _HOME / "core_cython"
_DRIVER = Path("ipcsync", "_softcuda")
_DRIVER_FILE = "libipcsync_softcuda.so"
_MACHINES = ("x86_64", "aarch64")
_FLAGS = ["-O2", "-g0", "-fPIC", "-shared", "-fvisibility=hidden", "-fno-strict-overflow", "-Wl,--strip-all"]
_CORE_FLAGS = ["-Wno-error=incompatible-pointer-types"]  # of what Cython writes for the limited API
_DRIVER_FLAGS = ["-std=gnu11", "-pthread", "-Wl,-soname,libcuda.so.1", "-Wl,-z,nodelete"]
_STABLE = ["-DPy_LIMITED_API=0x030A0000", "-DCYTHON_LIMITED_API=1"]


class _NotBuiltError(Exception):
    """The core cannot be built here, and why."""


class CompilerNeededError(Exception):
    """The package cannot be built here, and what to install."""


class CompiledHook(BuildHookInterface[Any]):
    """Called by hatchling for each wheel and each editable install."""

    def dependencies(self) -> list[str]:
        """Cython, if the core is wanted, and a C compiler, if none is here."""
        cython = [] if _wanted() == "0" else [_CYTHON]
        return cython if _compilers_here() else [*cython, _ZIG]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build both: into the tree for an editable install, else into the wheel."""
        self._temporary = tempfile.mkdtemp(prefix="ipcsync-build-")
        self._is_editable = version == "editable"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-linux_{_machine()}"
        self._build_driver(build_data)
        self._build_core(build_data)

    def _build_driver(self, build_data: dict[str, Any]) -> None:
        target = self._place(build_data, _DRIVER / _DRIVER_FILE)
        try:
            _compile(Path(self.root, _DRIVER, "softcuda.c"), target, _DRIVER_FLAGS)
        except _NotBuiltError as why:
            raise CompilerNeededError(
                f"ipcsync cannot be built here: {why}. Install a C compiler (gcc or clang, with headers), or build"
                " with an index that has ziglang and without --no-build-isolation; a wheel of ipcsync needs neither"
            ) from None

    def _build_core(self, build_data: dict[str, Any]) -> None:
        name = "core.abi3.so" if _is_stable() else f"core{sysconfig.get_config_var('EXT_SUFFIX')}"
        if self._is_editable:
            for old in Path(self.root, _HOME).glob("core*.so"):  # of a build that no longer holds
                old.unlink()
        try:
            note = _build(Path(self.root, _SOURCES, "core.pyx"), Path(self._temporary, name))
        except _NotBuiltError as why:
            if _wanted() == "1":
                raise
            note = f"pure: {why}"
        else:
            _put(Path(self._temporary, name), self._place(build_data, _HOME / name))
            build_data["tag"] = _tag()
        self._place(build_data, _HOME / "core_build.txt").write_text(note + "\n")
        self.app.display_info(f"ipcsync's core: {note}")

    def _place(self, build_data: dict[str, Any], name: Path) -> Path:
        """Where to build the file `name` of the package."""
        if self._is_editable:
            return Path(self.root, name)
        place = Path(self._temporary, "wheel", name)
        place.parent.mkdir(parents=True, exist_ok=True)
        build_data["force_include"][str(place)] = str(name)
        return place

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


def _compilers_here() -> list[list[str]]:
    """The commands of C compilers that are here, the chosen one first."""
    chosen = os.environ.get("CC")
    known = [chosen] if chosen else [sysconfig.get_config_var("CC") or "cc", "cc", "gcc", "clang"]
    return [words for words in map(shlex.split, known) if words and shutil.which(words[0])]


def _compiler() -> list[str]:
    """The command of a C compiler. Raises _NotBuiltError if there is none."""
    if _machine() not in _MACHINES:
        raise _NotBuiltError(f"it is written for {' and '.join(_MACHINES)}, not for {_machine()}")
    if here := _compilers_here():
        return here[0]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "cc"]
    raise _NotBuiltError("there is no C compiler")


def _compile(source: Path, target: Path, flags: list[str]) -> str:
    """Compile `source` to the shared library `target`, by CFLAGS too; the compiler's name. Raises _NotBuiltError."""
    compiler = _compiler()
    with tempfile.TemporaryDirectory(prefix="ipcsync-build-") as folder:
        built = Path(folder, "built.so")
        own = shlex.split(os.environ.get("CFLAGS", ""))
        command = [*compiler, *_FLAGS, *flags, *own, str(source), "-o", str(built)]
        zig = {"ZIG_GLOBAL_CACHE_DIR": folder, "ZIG_LOCAL_CACHE_DIR": folder}  # $HOME may not be ours to write in
        environment = {**os.environ, **zig}
        try:
            done = subprocess.run(
                command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
            )
        except OSError as error:
            raise _NotBuiltError(f"no C compiler: {compiler[0]}: {error.strerror}") from None
        if done.returncode:
            faults = [line.strip() for line in done.stdout.splitlines() if "error" in line] or ["it said nothing"]
            raise _NotBuiltError(f"the C compiler {shlex.join(compiler)} failed: {faults[0]}")
        _put(built, target)
    return "zig cc" if "ziglang" in compiler else compiler[0]


def _put(built: Path, target: Path) -> None:
    shutil.copyfile(built, target.with_suffix(".new"))
    target.with_suffix(".new").replace(target)  # whoever has the old one mapped keeps it


def _build(source: Path, target: Path) -> str:
    """Translate and compile the core; one line that says with what. Raises _NotBuiltError."""
    if _wanted() == "0":
        raise _NotBuiltError("IPCSYNC_BUILD_CORE=0 when it was built")
    if platform.python_implementation() != "CPython":
        raise _NotBuiltError(f"{platform.python_implementation()} is not CPython")
    _compiler()
    from Cython import __version__ as cython
    from Cython.Compiler.Main import CompilationOptions, compile_single

    paths = sysconfig.get_paths()
    headers = [f"-I{folder}" for folder in dict.fromkeys((paths["include"], paths["platinclude"], source.parent))]
    with tempfile.TemporaryDirectory(prefix="ipcsync-core-") as folder:
        generated = Path(folder, "core.c")
        options = CompilationOptions(output_file=str(generated), language_level=3)
        if compile_single(str(source), options=options, full_module_name="ipcsync._engines.core").num_errors:
            raise _NotBuiltError(f"Cython {cython} does not translate {source.name}")
        compiler = _compile(generated, target, [*_CORE_FLAGS, *(_STABLE if _is_stable() else []), *headers])
    return f"compiled: {'CPython 3.10 or later' if _is_stable() else _tag()}, Cython {cython}, {compiler}"
