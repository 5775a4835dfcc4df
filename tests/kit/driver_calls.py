"""The driver's calls that a test makes on its own thread: what they were, and any of them refused or interrupted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from cuda.bindings.driver import CUresult

from ipcsync import _drivers

_REFUSED = CUresult.CUDA_ERROR_UNKNOWN


_FINALIZER = "cuStreamDestroy"  # comes when the garbage collector does


class Interrupted(BaseException):
    """What comes between a driver's call and the one who made it."""


class DriverCalls:
    """Stands before the process's driver until the test ends; calls of other threads pass by unseen."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[str, tuple[Any, ...]]] = []
        self._refused = self._interrupted = -1
        self._thread = threading.get_ident()
        driver = _drivers.load()
        for name in dir(driver):
            call = getattr(driver, name)
            if name.startswith("cu") and name != _FINALIZER and callable(call) and not isinstance(call, type):
                patch.setattr(driver, name, self._watch(name, call))

    def _watch(self, name: str, call: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
        def watched(*args: Any) -> tuple[Any, ...]:
            if threading.get_ident() != self._thread:
                return call(*args)
            number = len(self.made)
            self.made.append((name, args))
            if number == self._refused:
                return (_REFUSED, None)
            result = call(*args)
            if number == self._interrupted:
                raise Interrupted
            return result

        return watched

    @property
    def names(self) -> list[str]:
        """Of the calls since the last `watch`."""
        return [name for name, _ in self.made]

    def watch(self, *, refused: int = -1, interrupted: int = -1) -> None:
        """Count anew. The call number `refused` is not made, and fails; behind `interrupted` an exception comes."""
        self.made = []
        self._refused, self._interrupted = refused, interrupted
