"""The compiled core's steps, with a Python function before one of them."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ipcsync._engines import core

_kept: list[Any] = []  # another thread may still be inside of one


@contextmanager
def at_step(name: str, call: Callable[[], object], behind: int = 0) -> Iterator[None]:
    """`call` comes once, on this thread, before the core takes its next step of that name, behind so many others."""
    thread, left = threading.get_ident(), [call] + behind * [lambda: None]

    def step(taken: bytes) -> None:
        if taken.decode() == name and left and threading.get_ident() == thread:
            left.pop()()

    hook = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(step)
    _kept.append(hook)
    core.set_hook(ctypes.cast(hook, ctypes.c_void_p).value)
    try:
        yield
    finally:
        core.set_hook(0)
    assert not left, f"no step {name} was taken"
