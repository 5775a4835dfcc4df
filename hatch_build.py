"""Builds what of ipcsync is not Python: the compiled core, `ipcsync._engines.core`, and the software driver in C.

It needs a C compiler (where none is, the build asks for ziglang, which has one), Python's headers and Cython. What is
missing is said in one sentence, and nothing is installed. The wheel is one for CPython's stable ABI from 3.10 on; on a
free-threaded Python, which has none, for that version alone.

CC is the compiler, CFLAGS has more flags for it, and IPCSYNC_BUILD_MACHINE is another machine that it compiles for,
such as aarch64.
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
from typing import Any, NoReturn

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_ZIG = "ziglang>=0.13"
_HOME = Path("ipcsync", "_engines")
_CORE = _HOME / "core_cython" / "core.pyx"
_DRIVER = Path("ipcsync", "_softcuda", "softcuda.c")
_DRIVER_FILE = _DRIVER.with_name("libipcsync_softcuda.so")
_MACHINES = ("x86_64", "aarch64")
_FLAGS = ["-O2", "-g0", "-fPIC", "-shared", "-fvisibility=hidden", "-fno-strict-overflow", "-Wl,--strip-all"]
_CORE_FLAGS = ["-Wno-error=incompatible-pointer-types"]  # of what Cython writes for the limited API
_DRIVER_FLAGS = ["-std=gnu11", "-pthread", "-Wl,-soname,libcuda.so.1", "-Wl,-z,nodelete"]
_STABLE = ["-DPy_LIMITED_API=0x030A0000", "-DCYTHON_LIMITED_API=1"]
_NEEDS_HEADERS = (
    "Python's headers are missing: there is no Python.h in {}. Install python3-dev on Debian or Ubuntu,"
    " python3-devel on Fedora; most other Pythons have them"
)
_NEEDS_COMPILER = "there is no C compiler. Install gcc or clang, or build without --no-build-isolation, with ziglang"
_NEEDS_CYTHON = "Cython is missing. Install it, or build without --no-build-isolation"


class CompiledHook(BuildHookInterface[Any]):
    """Called by hatchling for each wheel and each editable install."""

    def dependencies(self) -> list[str]:
        """A C compiler, if none is here."""
        return [] if _compilers_here() or os.environ.get("CC") else [_ZIG]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build both: into the tree for an editable install, else into the wheel."""
        self._temporary = tempfile.mkdtemp(prefix="ipcsync-build-")
        self._is_editable = version == "editable"
        build_data["pure_python"] = False
        build_data["tag"] = _tag()
        if _is_odd():
            self._fail(f"it is written for CPython on Linux with glibc, on {' or '.join(_MACHINES)}")
        core = "core.abi3.so" if _is_stable() else f"core{sysconfig.get_config_var('EXT_SUFFIX')}"
        self._compiler = self._find_compiler()
        self._compile(self._translate(), self._place(build_data, _HOME / core), _core_flags(self.root))
        self._compile(Path(self.root, _DRIVER), self._place(build_data, _DRIVER_FILE), _DRIVER_FLAGS)
        for other in Path(self.root, _HOME).glob("core*.so") if self._is_editable else ():
            if other.name != core:  # of another Python, which would come before this one
                other.unlink()

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002 - hatchling's
        """Remove what is in the wheel now."""
        shutil.rmtree(self._temporary)

    def _fail(self, why: str) -> NoReturn:
        shutil.rmtree(self._temporary)
        self.app.abort(f"ipcsync cannot be built here: {why}.")
        raise AssertionError  # `abort` has ended the process

    def _place(self, build_data: dict[str, Any], name: Path) -> Path:
        """Where to build the file `name` of the package."""
        if self._is_editable:
            return Path(self.root, name)
        place = Path(self._temporary, "wheel", name)
        place.parent.mkdir(parents=True, exist_ok=True)
        build_data["force_include"][str(place)] = str(name)
        return place

    def _find_compiler(self) -> list[str]:
        """The command of a C compiler."""
        if here := _compilers_here():
            return here[0]
        if chosen := os.environ.get("CC"):
            self._fail(f"CC is {chosen!r}, and there is no such program")
        if not importlib.util.find_spec("ziglang"):
            self._fail(_NEEDS_COMPILER)
        return [sys.executable, "-m", "ziglang", "cc"]

    def _translate(self) -> Path:
        """The core in C."""
        try:
            from Cython.Compiler.Main import CompilationOptions, compile_single
        except ImportError:
            self._fail(_NEEDS_CYTHON)
        translated = Path(self._temporary, "core.c")
        options = CompilationOptions(output_file=str(translated), language_level=3)
        source = str(Path(self.root, _CORE))
        if compile_single(source, options=options, full_module_name="ipcsync._engines.core").num_errors:
            self._fail(f"Cython does not translate {source}")
        return translated

    def _compile(self, source: Path, target: Path, flags: list[str]) -> None:
        """Compile `source` to the shared library `target`."""
        built = Path(self._temporary, "built.so")
        extra = shlex.split(os.environ.get("CFLAGS", ""))
        command = [*self._compiler, *_FLAGS, *flags, *extra, str(source), "-o", str(built)]
        zig = {f"ZIG_{kind}_CACHE_DIR": self._temporary for kind in ("GLOBAL", "LOCAL")}  # $HOME may be read-only
        env = {**os.environ, **zig, "LC_ALL": "C"}  # "error" is looked for in what it says
        done = subprocess.run(
            command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
        )
        if done.returncode:
            faults = [line.strip() for line in done.stdout.splitlines() if "error" in line] or ["it said nothing"]
            if "Python.h" in faults[0]:
                self._fail(_NEEDS_HEADERS.format(sysconfig.get_paths()["include"]))
            self._fail(f"the C compiler {shlex.join(self._compiler)} failed: {faults[0]}")
        shutil.copyfile(built, target.with_suffix(".new"))
        target.with_suffix(".new").replace(target)  # whoever has the old one mapped keeps it


def _is_odd() -> bool:
    """Whether this is a machine or a Python that ipcsync is not written for."""
    is_musl = "musl" in (sysconfig.get_config_var("SOABI") or "")
    return is_musl or platform.python_implementation() != "CPython" or _machine() not in _MACHINES


def _machine() -> str:
    return os.environ.get("IPCSYNC_BUILD_MACHINE") or platform.machine()


def _is_stable() -> bool:
    return not sysconfig.get_config_var("Py_GIL_DISABLED")


def _tag() -> str:
    from packaging.tags import sys_tags

    return f"cp310-abi3-linux_{_machine()}" if _is_stable() else str(next(iter(sys_tags())))


def _compilers_here() -> list[list[str]]:
    """The commands of C compilers that are here, the chosen one first."""
    chosen = os.environ.get("CC")
    known = [chosen] if chosen else [sysconfig.get_config_var("CC") or "cc", "cc", "gcc", "clang"]
    return [words for words in map(shlex.split, known) if words and shutil.which(words[0])]


def _core_flags(root: str) -> list[str]:
    paths = sysconfig.get_paths()
    folders = dict.fromkeys((paths["include"], paths["platinclude"], str(Path(root, _CORE).parent)))
    return [*_CORE_FLAGS, *(_STABLE if _is_stable() else []), *(f"-I{folder}" for folder in folders)]
