"""Processes that use the host driver in a segment of their own, and do what a test tells them."""

from __future__ import annotations

import ast
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ipcsync._drivers.host.layout import LAYOUT
from ipcsync._linux.child import Worker

PREFIX = f"ipcsync-host-{LAYOUT}-{os.getuid()}-"
ANSWER_S = 20

_BEGINNING = """
import ctypes, os, sys, threading, time
from ipcsync._drivers import host as d, handle_bytes, handle_from_bytes
from ipcsync._drivers.host import layout
from ipcsync._drivers.host.process import process

def start():
    assert d.cuInit(0) == (0,), d.cuInit(0)
    d.cuCtxSetCurrent(d.cuDevicePrimaryCtxRetain(0)[1])

def exported(flags=6):
    event = d.cuEventCreate(flags)[1]
    return event, handle_bytes(d.cuIpcGetEventHandle(event)[1])

def opened(data):
    code, event = d.cuIpcOpenEventHandle(handle_from_bytes(d.CUipcEventHandle, data))
    assert code == 0, code
    return event

def hold(stream):
    # The stream waits for a word that nobody has stored yet.
    address = d.cuMemAllocHost(8)[1]
    d.cuStreamWaitValue32(stream, address, 1, 0)
    return ctypes.c_uint32.from_address(address)

def code(result):
    return int(result[0])
"""
_names: dict[str, Any] = {}


def _execute(source: str) -> Any:
    """Execute statements; the value of a last expression, if it is made of plain numbers, bytes and the like."""
    if not _names:
        exec(_BEGINNING, _names)
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "test", "exec"), _names)
    if not isinstance(last, ast.Expr):
        return None
    try:
        return ast.literal_eval(repr(eval(compile(ast.Expression(last.value), "test", "eval"), _names)))
    except (SyntaxError, ValueError):  # a driver's result: the test did not ask for it
        return None


class HostProcess(Worker):
    """A process with the host driver as `d`, which does its work within the call unless IPCSYNC_HOST_ASYNC is given.

    `run` executes statements in it and returns the value of a last expression of plain numbers, bytes and the like.
    """

    def __init__(self, segment: str, *, initialise: bool = True, **environment: str) -> None:
        self.segment = segment
        super().__init__("host", env={"IPCSYNC_HOST_SEGMENT": segment, "IPCSYNC_HOST_ASYNC": "0", **environment})
        if initialise:
            self.run("start()")

    def tell(self, code: str) -> None:
        """Have `code` executed, without waiting for it."""
        self.begin(_execute, code)

    def run(self, code: str) -> Any:
        """Have `code` executed and return the value of its last expression."""
        return self.call(_execute, code, timeout=ANSWER_S)

    def answer(self) -> Any:
        """What came of the code that was told last."""
        return self.result(ANSWER_S)

    def finish(self) -> int | None:
        """Let it come to its end and return its exit status."""
        self.connection.close()
        assert self.wait(ANSWER_S), "the process does not end"
        return self.status


def segment_files(segment: str) -> list[str]:
    """The names of a segment's files, without what they have in common."""
    start = PREFIX + segment
    return sorted(name.removeprefix(start) for name in os.listdir("/dev/shm") if name.startswith(start))


@contextmanager
def own_segment() -> Iterator[str]:
    """A segment name that nobody else has; its files are gone afterwards whatever the test did."""
    name = f"unit-{secrets.token_hex(4)}"
    try:
        yield name
    finally:
        for file in segment_files(name):
            Path(f"/dev/shm/{PREFIX}{name}{file}").unlink(missing_ok=True)  # whoever comes to any segment removes it
