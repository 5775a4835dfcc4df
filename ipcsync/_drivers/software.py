"""The software driver: a libcuda in C for machines without a GPU (`ipcsync/_softcuda`), loaded under cuda.bindings.

The binding opens `libcuda.so.1`. What is loaded already and has that SONAME is what it gets, so ours is loaded
before the binding looks, by its path. A SONAME is one for the whole process: it is never loaded beside another
libcuda, and a process that chose it by `auto` hides it from all other libraries, whose `cuInit` finds no device.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

from cuda.bindings import driver as _bindings

from ipcsync.errors import ForkedProcessError, NoDriver

SONAME = "libcuda.so.1"
DIRECTORY = "IPCSYNC_HOST_DIR"
"""The variable that names the directory of the shared memory."""
LIBRARY = Path(__file__).parent.parent / "_softcuda" / "libipcsync_softcuda.so"

_NOT_INITIALIZED = 3
_JOIN = "ipcsync_softcuda_join"


def loaded() -> ctypes.CDLL | None:
    """The libcuda that this process has loaded, whoever did; None if there is none."""
    try:
        return ctypes.CDLL(SONAME, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return None


def is_ours(library: ctypes.CDLL | None) -> bool:
    """Whether a libcuda is this driver."""
    return library is not None and hasattr(library, _JOIN)


def load(hidden: bool | None) -> tuple[int, str]:
    """Load and initialise it. `hidden`: no other library of this process finds a device in it; None: as it was loaded.

    Returns what `cuInit` does, and why if it refuses (a setting, no visible device). Raises NoDriver where the library
    cannot be had, ForkedProcessError in a child forked after it was used.
    """
    if directory := os.environ.get(DIRECTORY):
        with contextlib.suppress(FileNotFoundError):  # the working directory was removed
            os.environ[DIRECTORY] = os.path.abspath(directory)  # children find the same one, wherever they are started
    library = loaded()
    if library is None:
        library = open_library()
    elif not is_ours(library):
        raise NoDriver(
            f"the software driver (IPCSYNC_DRIVER=host) cannot be loaded: this process has another {SONAME} already"
            f"{_path_of()}; use IPCSYNC_DRIVER=cuda, or a process that loads no CUDA library before ipcsync"
        )
    said = ctypes.create_string_buffer(512)
    code: int = library[_JOIN](-1 if hidden is None else int(hidden), said, ctypes.c_size_t(len(said)))
    if code == _NOT_INITIALIZED:
        raise ForkedProcessError
    if not code:
        _prove_bound(library)
    return code, said.value.decode(errors="replace")


def open_library() -> ctypes.CDLL:
    """Load it, and initialise nothing. Raises NoDriver if it is not there."""
    try:
        return ctypes.CDLL(os.fspath(LIBRARY), mode=os.RTLD_NOW | os.RTLD_LOCAL)
    except OSError as error:
        raise NoDriver(
            f"there is no software driver: {error}; it is built when ipcsync is installed (pip install .)"
        ) from None


def _prove_bound(library: ctypes.CDLL) -> None:
    """See that the binding's functions are this library's. Raises NoDriver if they are not."""
    asked = library.ipcsync_softcuda_asked
    before = asked()
    try:
        _bindings.cuDriverGetVersion()
    except Exception as error:  # noqa: BLE001 - the binding raises its own types
        raise NoDriver(
            f"cuda.bindings looked for {SONAME} before ipcsync loaded the software driver, and this version of it never"
            f" looks again ({error}): use ipcsync before other CUDA libraries, or a newer cuda-bindings"
        ) from None
    if asked() == before:
        raise NoDriver(f"cuda.bindings has its functions from another {SONAME} than the software driver")


def _path_of() -> str:
    """Where the loaded libcuda lies, as " (path)"; empty if that is not known."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return ""
    paths = (line.split(maxsplit=5)[5] for line in lines if "libcuda" in line.rpartition("/")[2])
    return next((f" ({path})" for path in paths), "")
