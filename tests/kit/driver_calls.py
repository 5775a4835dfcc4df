"""The driver's calls that a test makes on its own thread, the core's too: what they were, and any of them refused."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
from cuda.bindings.driver import CUresult

from ipcsync import _drivers
from ipcsync._engines import core
from tests.kit import driver_functions

_REFUSED = CUresult.CUDA_ERROR_UNKNOWN


_FINALIZER = "cuStreamDestroy"  # comes when a stream is let go


class DriverCalls:
    """Stands before the process's driver until the test ends; calls of other threads pass by unseen.

    No garbage is collected meanwhile: what another test left would call the driver too.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        gc.disable()
        self.names: list[str] = []
        self._refused = -1
        self._thread = threading.get_ident()
        driver = _drivers.load()
        for name in dir(driver):
            call = getattr(driver, name)
            if name.startswith("cu") and name != _FINALIZER and callable(call) and not isinstance(call, type):
                patch.setattr(driver, name, self._watch(name, call))
        driver_functions.replace({name: self._watch_core(name) for name in core.FUNCTIONS})

    def end(self) -> None:
        """The core calls the driver itself again."""
        driver_functions.restore()
        gc.enable()

    def _watch(self, name: str, call: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
        return lambda *args: (_REFUSED, None) if self._is_refused(name) else call(*args)

    def _watch_core(self, name: str) -> driver_functions.Call:
        return lambda real, *args: driver_functions.REFUSED if self._is_refused(name) else int(real(*args))

    def _is_refused(self, name: str) -> bool:
        """Note a call; whether it is the one that fails."""
        if threading.get_ident() != self._thread:
            return False
        self.names.append(name)
        return len(self.names) - 1 == self._refused

    def watch(self, *, refused: int = -1) -> None:
        """Count anew. The call number `refused` is not made, and fails."""
        self.names = []
        self._refused = refused
