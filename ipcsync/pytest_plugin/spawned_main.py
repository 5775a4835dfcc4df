"""The spawned process's side: it runs one function with a client, answers over the pipe, and ends.

It ends by itself, when its time is over, or with its parent.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import os
import pickle
import sys
import traceback
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any, NamedTuple

BEGUN = "begun"
"""The message that the function is called now; the other one is the answer."""


class Task(NamedTuple):
    """The function to run, and the client's names."""

    module: str
    name: str
    file: str | None
    endpoint: str
    namespace: str
    label: str
    limit: float


def run(pipe: Connection, task: Task, args: bytes, trace_fd: int) -> None:
    """Do one task, and answer over the pipe; tracebacks of a crash or a time-out go to `trace_fd`."""
    faulthandler.enable(trace_fd)
    # A watchdog in C, which needs no GIL: it writes every thread's traceback and ends the process.
    faulthandler.dump_traceback_later(task.limit, exit=True, file=trace_fd)
    answer = _run(pipe, task, args)
    try:
        pipe.send(answer)
    except Exception as error:  # noqa: BLE001 - an answer that does not pickle
        pipe.send(("raised", *_told(error)))
    pipe.close()


def _run(pipe: Connection, task: Task, args: bytes) -> tuple[str, Any, str]:
    try:
        fn: Any = _load(task.module, task.file)
        for part in task.name.split("."):
            fn = getattr(fn, part)
        values = pickle.loads(args)  # noqa: S301 - from the pipe of our own parent; after the module that may define them
        from ipcsync.pytest_plugin.namespaced import NamespacedClient

        with NamespacedClient(task.endpoint, task.namespace, task.label, task.limit) as client:
            pipe.send(BEGUN)
            return ("returned", fn(client, *values), "")
    except BaseException as error:  # noqa: BLE001 - the parent raises it
        return ("raised", *_told(error))


def _load(name: str, file: str | None) -> ModuleType:
    """The module by its name, or from its file where the name leads elsewhere (pytest's import mode importlib)."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if file is None or (spec is not None and spec.origin is not None and os.path.samefile(spec.origin, file)):
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import {name} from {file}")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _told(error: BaseException) -> tuple[bytes | None, str]:
    """An error as a message: pickled, if it can be unpickled again, and its traceback."""
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip()
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)  # noqa: S301 - what was just written
    except Exception:  # noqa: BLE001 - whatever its own methods raise
        return None, trace
    return pickled, trace
