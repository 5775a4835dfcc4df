"""The driver's C functions that the compiled core calls, with a Python function in place of any of them."""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from cuda.bindings import cydriver

from ipcsync._engines import core, engine

REFUSED = 999
"""CUDA_ERROR_UNKNOWN."""

_pointer_in = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_in.restype, _pointer_in.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)

_TYPES = {
    "CUevent": ctypes.c_void_p,
    "CUstream": ctypes.c_void_p,
    "CUcontext": ctypes.c_void_p,
    "CUdeviceptr": ctypes.c_uint64,
    "cuuint64_t": ctypes.c_uint64,
    "unsigned int": ctypes.c_uint,
}  # every other argument is a pointer to where the answer goes

RECORD = {"event": "cuEventRecord", "timeline": "cuStreamWriteValue64"}
WAIT = {"event": "cuStreamWaitEvent", "timeline": "cuStreamWaitValue64"}
"""What makes a record or queues a wait, on each engine."""

Call = Callable[..., int]
"""What stands in place of a function: it is given the real one, then that one's arguments, and returns its result."""

_LONGEST_S = 60.0
_kept: list[Any] = []  # a thread of an earlier test may still be inside of one


def _types(signature: bytes) -> list[Any]:
    arguments = signature.decode().partition("(")[2].rstrip(")").split(", ")
    return [_TYPES.get(each, ctypes.c_void_p) for each in arguments]


def _addresses() -> dict[str, int]:
    found = {name: _pointer_in(cydriver.__pyx_capi__[name], kind) for name, kind in core.FUNCTIONS.items()}
    return {name: int(address or 0) for name, address in found.items()}


def replace(calls: dict[str, Call]) -> None:
    """From now on the core's calls of these functions are made by `calls`, with the GIL; of the others, as ever."""
    engine.bind()  # which the first engine of a process would do
    addresses = _addresses()
    for name, call in calls.items():
        kind: Any = ctypes.CFUNCTYPE(ctypes.c_int, *_types(core.FUNCTIONS[name]))
        real = kind(addresses[name])
        function = kind(lambda *args, call=call, real=real: call(real, *args))
        _kept.append(function)
        addresses[name] = ctypes.cast(function, ctypes.c_void_p).value or 0
    core.bind_functions(addresses)


def restore() -> None:
    """The core calls the driver itself again."""
    core.bind_driver()


@contextmanager
def replaced(calls: dict[str, Call]) -> Iterator[None]:
    """`replace` for a block."""
    replace(calls)
    try:
        yield
    finally:
        restore()


@contextmanager
def doing_nothing(*names: str) -> Iterator[None]:
    """The core's calls of these functions do nothing, and return 0 at once."""
    engine.bind()
    idle = ctypes.cast(ctypes.CDLL(None).pthread_mutexattr_destroy, ctypes.c_void_p).value or 0  # is such a function
    core.bind_functions(_addresses() | dict.fromkeys(names, idle))
    try:
        yield
    finally:
        restore()


def amid(name: str, within: Callable[[], object]) -> dict[str, Call]:
    """For `replace`: `within` is called once, on this thread's next call of that function, before that is made."""
    thread, left = threading.get_ident(), [within]
    raised: list[BaseException] = []

    def call(real: Call, *args: Any) -> int:
        if left and threading.get_ident() == thread:
            try:
                left.pop()()
            except BaseException as error:  # noqa: BLE001 - C has no exceptions
                raised.append(error)
        return int(real(*args))

    return {name: call}


def refused_once(name: str, behind: int = 0, *, is_made: bool = False) -> dict[str, Call]:
    """For `replace`: behind so many calls, one of that function fails, whether the driver has done it or not."""
    made = itertools.count()

    def call(real: Call, *args: Any) -> int:
        if next(made) != behind:
            return int(real(*args))
        if is_made:
            real(*args)
        return REFUSED

    return {name: call}


@contextmanager
def held_up(*names: str, threads: int = 1) -> Iterator[HeldUp]:
    """The next calls of these functions on other threads than this, so many, block until the block ends."""
    held, this = HeldUp(), threading.get_ident()

    def call(real: Call, *args: Any) -> int:
        if threading.get_ident() != this and held.left.acquire(blocking=False):
            held.inside.release()
            assert held.go_on.wait(_LONGEST_S)
        return int(real(*args))

    held.left = threading.Semaphore(threads)
    replace(dict.fromkeys(names, call))
    try:
        yield held
    finally:
        held.go_on.set()
        restore()


class HeldUp:
    """Calls that block in the driver, as behind a full queue: without the GIL, with the turn of the event's calls."""

    left: threading.Semaphore

    def __init__(self) -> None:
        self.inside, self.go_on = threading.Semaphore(0), threading.Event()

    def wait(self) -> None:
        """Until one more is inside."""
        assert self.inside.acquire(timeout=_LONGEST_S)
