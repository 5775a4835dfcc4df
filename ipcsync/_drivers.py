"""The CUDA driver API, as `cuda.bindings.driver` has it, over one of two libraries.

`cuda` is NVIDIA's libcuda. `host` is a software driver for machines without a GPU, a libcuda of our own in C
(`ipcsync/_softcuda`). No layer above this module knows which one it has.

The binding opens `libcuda.so.1`. What is loaded already and has that SONAME is what it gets, so ours is loaded before
the binding looks, by its path. A SONAME is one for the whole process: it is never loaded beside another libcuda, and a
process that chose it by `auto` hides it from all other libraries, whose `cuInit` finds no device.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import logging
import os
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from cuda.bindings import driver as _bindings

from ipcsync._threads import CallLock, under
from ipcsync.errors import DriverError, ForkedProcessError, HandleError, NoDriver

log = logging.getLogger("ipcsync")

DriverObject: TypeAlias = Any
"""A handle, struct or enum of cuda.bindings, which ships no type information."""

SUCCESS = _bindings.CUresult.CUDA_SUCCESS
HANDLE_SIZE = 64
SONAME = "libcuda.so.1"
LIBRARY = Path(__file__).parent / "_softcuda" / "libipcsync_softcuda.so"
DIRECTORY = "IPCSYNC_HOST_DIR"
"""The environment variable that names the directory of the software driver's shared memory."""
WARNED = "IPCSYNC_WARNED_OF_NO_DRIVER"
"""The environment variable that is set once a parent process has warned that there is no CUDA driver."""

# Arguments and results by their names in cuda.h: an enum of the binding costs more than the rest of some calls.
EVENT_BLOCKING_SYNC = 1
EVENT_DISABLE_TIMING = 2
EVENT_INTERPROCESS = 4
STREAM_NON_BLOCKING = 1
STREAM_WAIT_VALUE_GEQ = 0  # cyclic: (int64)(*address - value) >= 0
STREAM_WAIT_VALUE_FLUSH = 1 << 30  # a remote writer's earlier writes are visible after the wait
STREAM_WRITE_VALUE_DEFAULT = 0
MEMHOSTREGISTER_PORTABLE = 1  # for every context of this process
MEMHOSTREGISTER_DEVICEMAP = 2

ERROR_INVALID_VALUE = 1
ERROR_NO_DEVICE = 100
ERROR_INVALID_DEVICE = 101
ERROR_INVALID_CONTEXT = 201
ERROR_MAP_FAILED = 205
ERROR_OPERATING_SYSTEM = 304
ERROR_INVALID_HANDLE = 400
ERROR_NOT_READY = 600
ERROR_STREAM_CAPTURE_UNSUPPORTED = 900
ERROR_STREAM_CAPTURE_IMPLICIT = 906

_NVIDIA = "/dev/nvidia"
_DEVICE_FILES = (f"{_NVIDIA}*", "/dev/dxg", "/dev/nvhost*", "/dev/nvgpu*")  # of a GPU, in WSL, of a Tegra
_NOT_INITIALIZED = 3
_JOIN = "ipcsync_softcuda_join"
_lock = CallLock()
os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined] # noqa: SLF001 - as threading
_chosen: tuple[str, ModuleType] | None = None


def load() -> ModuleType:
    """`cuda.bindings.driver`, over the library chosen once by IPCSYNC_DRIVER (auto, cuda or host) and initialised.

    Raises NoDriver, which says what was tried; ForkedProcessError in a child forked after any library used CUDA;
    ValueError for another value of IPCSYNC_DRIVER.
    """
    return (_chosen or under(_lock, _choose_once))[1]


def _choose_once() -> tuple[str, ModuleType]:
    global _chosen  # noqa: PLW0603 - one driver a process, for its whole life
    if _chosen is None:
        _chosen = (_choose(os.environ.get("IPCSYNC_DRIVER") or "auto"), _bindings)
    return _chosen


def _choose(wanted: str) -> str:
    """Initialise the library that IPCSYNC_DRIVER=`wanted` means here; returns "cuda" or "host"."""
    if wanted not in ("auto", "cuda", "host"):
        raise ValueError(f"IPCSYNC_DRIVER must be auto, cuda or host, but is {wanted!r}")
    if wanted == "host":
        return _load_software(hidden=False)
    if wanted == "auto" and _is_software(_loaded()):
        return _load_software(hidden=None)
    if wanted == "auto" and _loaded() is None and not any(map(glob.glob, _DEVICE_FILES)):
        reason: str | None = "there is no device file of a GPU"  # told without loading anything
    else:
        reason = _why_not()
    if reason is None:
        return "cuda"
    if wanted == "cuda":
        raise NoDriver(f"IPCSYNC_DRIVER=cuda, but the CUDA driver does not work here: {reason}")
    try:
        _load_software(hidden=True)
    except NoDriver as error:
        raise NoDriver(f"the CUDA driver does not work here ({reason}), and {error}") from None
    if not os.environ.get(WARNED):
        log.warning("no CUDA driver here (%s): using the software driver; no GPU is involved", reason)
        os.environ[WARNED] = "1"  # the processes that this one starts do not warn again
    return "host"


def is_loaded() -> bool:
    return _chosen is not None


def name(*, is_forked: bool = False) -> str:
    """ "cuda" or "host". In a forked child it is the parent's: ForkedProcessError if that had none yet."""
    with contextlib.suppress(ForkedProcessError):  # in a child, whose parent's driver works
        if not is_forked:
            load()
    if _chosen is not None:
        return _chosen[0]
    if (library := _loaded()) is None:
        raise ForkedProcessError
    return "host" if _is_software(library) else "cuda"


# --- NVIDIA's driver --------------------------------------------------------------------------------------------------


def _why_not() -> str | None:
    """Why CUDA cannot be initialised here; None: it is. ForkedProcessError: a library used it before a fork."""
    try:
        ctypes.CDLL(SONAME)  # not by the binding: before 13.5 one that found no library never looks again
    except OSError as error:
        return str(error)
    if _is_software(_loaded()):
        return f"the {SONAME} here is ipcsync's software driver, which is chosen by IPCSYNC_DRIVER=host"
    try:
        (code,) = _bindings.cuInit(0)
    except Exception as error:  # noqa: BLE001 - the binding raises its own types
        return f"{type(error).__name__}: {error}".splitlines()[0]
    if code == _NOT_INITIALIZED:
        raise ForkedProcessError
    return None if code == SUCCESS else f"cuInit: {code.name} ({int(code)})"


def mps_directory() -> str:
    """Where an MPS control daemon's pipe is, if there is one."""
    return os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")  # noqa: S108 - CUDA's default


def may_be_served() -> bool:
    """Whether a CUDA MPS server may do this process's GPU work: its contexts are the server's, which lives on.

    The driver has an attribute of each device (CU_DEVICE_ATTRIBUTE_MPS_ENABLED, CUDA 12.3); with an older one, the
    control daemon's pipe says so, which a process uses if it finds it. After a wrong True the end of work is unknown.
    """
    if name() == "cuda" and os.path.exists(os.path.join(mps_directory(), "control")):
        return True
    attribute = _bindings.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MPS_ENABLED
    driver = load()
    code, count = driver.cuDeviceGetCount()
    if code is not SUCCESS:
        return False
    answers = [driver.cuDeviceGetAttribute(attribute, driver.cuDeviceGet(ordinal)[1]) for ordinal in range(count)]
    return any(code is SUCCESS and value for code, value in answers)


def files_survive_exec() -> bool:
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it was closed meanwhile
            if os.readlink(f"/proc/self/fd/{number}").startswith(_NVIDIA) and os.get_inheritable(int(number)):
                return True
    return False


# --- the software driver ----------------------------------------------------------------------------------------------


def _loaded() -> ctypes.CDLL | None:
    """The libcuda that this process has loaded, whoever did; None if there is none."""
    try:
        return ctypes.CDLL(SONAME, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return None


def _is_software(library: ctypes.CDLL | None) -> bool:
    return library is not None and hasattr(library, _JOIN)


def _load_software(hidden: bool | None) -> str:
    """Load and initialise it. `hidden`: no other library of this process finds a device in it; None: as it was loaded.

    Raises DriverError if it refuses (a setting, no visible device), NoDriver where the library cannot be had.
    """
    if directory := os.environ.get(DIRECTORY):
        with contextlib.suppress(FileNotFoundError):  # the working directory was removed
            os.environ[DIRECTORY] = os.path.abspath(directory)  # children find the same one, wherever they are started
    library = _loaded()
    if library is None:
        library = open_library()
    elif not _is_software(library):
        raise NoDriver(
            f"the software driver (IPCSYNC_DRIVER=host) cannot be loaded: this process has another {SONAME} already"
            f"{_path_of()}; use IPCSYNC_DRIVER=cuda, or a process that loads no CUDA library before ipcsync"
        )
    said = ctypes.create_string_buffer(512)
    code: int = library[_JOIN](-1 if hidden is None else int(hidden), said, ctypes.c_size_t(len(said)))
    if code == _NOT_INITIALIZED:
        raise ForkedProcessError
    if code:
        raise describe(code, "cuInit", why=said.value.decode(errors="replace"))
    _prove_bound(library)
    return "host"


def open_library() -> ctypes.CDLL:
    """Load it, and initialise nothing. Raises NoDriver if it is not there."""
    try:
        return ctypes.CDLL(os.fspath(LIBRARY), mode=os.RTLD_NOW | os.RTLD_LOCAL)
    except OSError as error:
        raise NoDriver(
            f"there is no software driver: {error}; it is built when ipcsync is installed (pip install .), and is then "
            "beside the installed modules: start programs outside of the checkout, or install it with pip install -e ."
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


# --- results ----------------------------------------------------------------------------------------------------------


def unwrap(result: tuple[Any, ...], call: str, error: type[DriverError] = DriverError) -> DriverObject:
    """The value (or tuple of values, or None) of a driver call's result; raises `error` if the call failed."""
    if result[0] is not SUCCESS and result[0] != SUCCESS:
        raise describe(result[0], call, error)
    if len(result) == 2:
        return result[1]
    return None if len(result) == 1 else result[1:]


def describe(code: DriverObject, call: str, error: type[DriverError] = DriverError, why: str = "") -> DriverError:
    """The exception for a driver call that returned `code`; `why` says what that means, if it is known."""
    result = _bindings.CUresult(code)
    text = f"{call} failed: {result.name} ({result.value}){why and ': '}{why}"
    return error(text, code=int(result.value), name=result.name, call=call)


def handle_bytes(handle: DriverObject) -> bytes:
    return ctypes.string_at(handle.getPtr(), HANDLE_SIZE)


def handle_from_bytes(kind: type[DriverObject], data: bytes | bytearray | memoryview) -> DriverObject:
    """The handle of class `kind`, CUipcEventHandle or CUipcMemHandle, of 64 bytes; else HandleError or TypeError."""
    try:
        content = bytes(memoryview(data))
    except TypeError:
        raise TypeError(f"an IPC handle is {HANDLE_SIZE} bytes, but got {type(data).__name__}") from None
    if len(content) != HANDLE_SIZE:
        what = kind.__name__.removeprefix("CUipc")
        text = f"cudaIpc{what}_t expects byte-like object of size {HANDLE_SIZE}, but got {len(content)}"
        raise HandleError(text, code=1, name="CUDA_ERROR_INVALID_VALUE", call=f"cuIpcOpen{what}")
    handle = kind()
    ctypes.memmove(handle.getPtr(), content, HANDLE_SIZE)
    return handle
