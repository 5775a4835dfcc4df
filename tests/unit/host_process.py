"""Processes that use the host driver in a segment of their own, and do what a test tells them, line by line."""

from __future__ import annotations

import ast
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from ipcsync._drivers.host.layout import LAYOUT
from tests.kit import zygote

ROOT = Path(__file__).parents[2]
PREFIX = f"ipcsync-host-{LAYOUT}-{os.getuid()}-"
ANSWER_S = 20

_PROGRAM = """
import ast, ctypes, json, os, sys, threading, time
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

def execute(source, names):
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "test", "exec"), names)
    text = repr(eval(compile(ast.Expression(last.value), "test", "eval"), names) if last else None)
    try:
        ast.literal_eval(text)
    except (SyntaxError, ValueError):  # a driver's result: the test did not ask for it
        return "None"
    return text

for _line in sys.stdin:
    print(execute(json.loads(_line), globals()), flush=True)
"""
zygote.PROGRAMS.append(["-c", _PROGRAM])


class HostProcess:
    """A process with the host driver as `d`.

    `run` executes statements in it and returns the value of a last expression of plain numbers, bytes and the like.
    """

    def __init__(self, segment: str, *, initialise: bool = True, **environment: str) -> None:
        self.segment = segment
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "IPCSYNC_HOST_SEGMENT": segment, **environment},
        )
        self.pid = self._process.pid
        if initialise:
            self.run("start()")

    def tell(self, code: str) -> None:
        """Have `code` executed, without waiting for it."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(code) + "\n")
        self._process.stdin.flush()

    def run(self, code: str) -> Any:
        """Have `code` executed and return the value of its last expression."""
        self.tell(code)
        return self.answer()

    def answer(self) -> Any:
        """What came of the code that was told last."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the process ended"
        return ast.literal_eval(line)

    def signal(self, number: int) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and reap."""
        self._process.kill()
        self._process.wait(ANSWER_S)

    def finish(self) -> int:
        """Let it come to its end and return its exit status."""
        assert self._process.stdin is not None
        if not self._process.stdin.closed:
            self._process.stdin.close()
        return self._process.wait(ANSWER_S)

    def __enter__(self) -> HostProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._process.poll() is None:
            self.finish()
        self._process.kill()
        self._process.wait(ANSWER_S)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not pipe.closed:
                pipe.close()


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
