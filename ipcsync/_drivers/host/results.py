"""Results of the host driver's functions, and the frame in which each of them runs.

A function of the driver API never raises for a refused call: it returns `(CUresult, None…)`. Inside the driver a
refusal is the exception `CallFailed`, which `entry` turns into that tuple.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import index
from typing import Any, ParamSpec

from cuda.bindings.driver import CUresult

from ipcsync._drivers.host.process import process
from ipcsync._locks import HeldBelow

P = ParamSpec("P")
Result = tuple[Any, ...]

SUCCESS = CUresult.CUDA_SUCCESS
OK: Result = (SUCCESS,)
NOT_READY: Result = (CUresult.CUDA_ERROR_NOT_READY,)


class CallFailed(Exception):  # noqa: N818 - it never leaves the driver, and is no error of Python's
    """The call is refused with `code`, a CUresult."""

    def __init__(self, code: Any) -> None:
        super().__init__(code)
        self.code = code


INVALID_VALUE = CUresult.CUDA_ERROR_INVALID_VALUE
OUT_OF_MEMORY = CUresult.CUDA_ERROR_OUT_OF_MEMORY
INVALID_DEVICE = CUresult.CUDA_ERROR_INVALID_DEVICE
INVALID_CONTEXT = CUresult.CUDA_ERROR_INVALID_CONTEXT
INVALID_HANDLE = CUresult.CUDA_ERROR_INVALID_HANDLE
NOT_PERMITTED = CUresult.CUDA_ERROR_NOT_PERMITTED


def entry(values: int = 0) -> Callable[[Callable[P, Result]], Callable[P, Result]]:
    """Make a function of the driver API, whose result has `values` values behind the CUresult.

    It is refused before cuInit and in a forked child (NOT_INITIALIZED), at interpreter exit (DEINITIALIZED), and in the
    middle of another call of this thread that it cannot go before (NOT_PERMITTED).
    """
    nothing = (None,) * values

    def wrap(function: Callable[P, Result]) -> Callable[P, Result]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> Result:
            mark = process.mark
            if mark is None or not mark.byte[0]:  # `in_child`
                return (CUresult.CUDA_ERROR_NOT_INITIALIZED if mark else process.refusal, *nothing)
            try:
                return function(*args, **kwargs)
            except CallFailed as refused:
                return (refused.code, *nothing)
            except HeldBelow:
                return (NOT_PERMITTED, *nothing)

        return call

    return wrap


def number(value: Any) -> int:
    """The handle, address or count that `value` stands for: an int, one of the binding's objects, or None for 0."""
    if value is None:
        return 0
    try:
        return index(value)
    except TypeError:
        if isinstance(value, (str, bytes, bytearray)):
            raise
        return int(value)  # a CUdevice has no __index__
