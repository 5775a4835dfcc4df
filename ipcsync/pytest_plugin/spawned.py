"""A test's client, and the processes that it spawns: what they do, their results, and their end.

A process runs one function with a client, answers over the pipe, and ends by itself, after its time or with its parent.

All that is pickled travels over a pipe that only the two processes have, never over a socket that others can reach.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import inspect
import os
import pickle
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import MethodType, ModuleType
from typing import Any, NamedTuple

import pytest

from ipcsync._deadline import bounded
from ipcsync._linux import child
from ipcsync._linux.files import memory_file
from ipcsync._native import fork
from ipcsync.client import Client

_END_S = 10.0
_GRACE_S = 2.0  # for a child that ends at its own time limit and writes its traceback
_UNASKED_S = 1.0  # from its function's begin, for a child whose result the test did not ask for
_DELIBERATE = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT)  # how a test may have ended it
_BEGUN = "begun"  # the message that the function is called now; the other one is the answer


class NamespacedClient(Client):
    """A client, connected as `name`, whose names of events and streams begin with `namespace` and a slash.

    Names go in without it, or with it; they come out with it, by which a process with a client of its own finds the
    event. Lists and `watch` show the namespace only, with its sessions; `stats` counts everything. Operations without a
    name (`record`, points) need no namespace.
    """

    _shows_prefix = True

    def __init__(self, endpoint: str, namespace: str, name: str, timeout: float) -> None:
        fork.arm()
        super().__init__(endpoint, f"{namespace}/{name}", prefix=f"{namespace}/")
        self._begin(timeout)


# --- in such a process ------------------------------------------------------------------------------------------------


class Task(NamedTuple):
    """The function to run, and the client's names."""

    module: str
    name: str
    file: str | None
    endpoint: str
    namespace: str
    label: str
    limit: float


def _run(pipe: Connection, task: Task, args: bytes, trace_fd: int) -> None:
    """Do one task, and answer over the pipe; tracebacks of a crash or a time-out go to `trace_fd`."""
    faulthandler.enable(trace_fd)
    # A watchdog in C, which needs no GIL: it writes every thread's traceback and ends the process.
    faulthandler.dump_traceback_later(task.limit, exit=True, file=trace_fd)
    try:
        fn: Any = _load(task.module, task.file)
        for part in task.name.split("."):
            fn = getattr(fn, part)
        values = pickle.loads(args)  # noqa: S301 - from the pipe of our own parent; after the module that may define them
        with NamespacedClient(task.endpoint, task.namespace, task.label, task.limit) as client:
            pipe.send(_BEGUN)
            value = fn(client, *values)
        pipe.send(("returned", value, ""))
    except BaseException as error:  # noqa: BLE001 - the parent raises it; also of a value that does not pickle
        pipe.send(("raised", *_told(error)))
    pipe.close()


def _load(name: str, file: str | None) -> ModuleType:
    """The module by its name, or from its file where the name leads elsewhere (pytest's import mode importlib)."""
    package, path = name.rpartition(".")[0], (file or "").removesuffix(".py").removesuffix("/__init__")
    if package and os.path.exists(init := f"{os.path.dirname(path)}/__init__.py"):
        _load(package, init)  # its own, not an installed one of that name
    elif package and file:
        sys.path.append(path.removesuffix(f"/{name.replace('.', '/')}"))  # for packages without `__init__.py`
    spec = None
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(name)
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


# --- in the test's process --------------------------------------------------------------------------------------------


class ChildError(AssertionError):
    """A spawned process has no result: it crashed, was killed, ran past its time, or raised what cannot be pickled.

    `traceback` is that process's, empty if there is none; `status` its exit status (negative: a signal), None before.
    """

    def __init__(self, message: str = "", *, traceback: str = "", status: int | None = None) -> None:
        super().__init__(message)
        self.traceback = traceback
        self.status = status


class Child:
    """One spawned process, made by `ipcsync_spawn`. `pid` is its process id."""

    def __init__(self, task: Task, args: tuple[Any, ...]) -> None:
        self._label = task.label
        self._limit = task.limit
        self._answer: tuple[str, Any, str] | None = None  # what it sent, or "failed" with the ChildError
        self._was_asked = self._was_killed = False
        self._began = time.monotonic()
        pickled = pickle.dumps(args)  # separately: the child needs the module before it can unpickle them
        self._trace = memory_file("ipcsync-child")
        try:
            self._child = child.Child(_run, task, pickled, self._trace, fds=[self._trace])
        except BaseException:
            os.close(self._trace)
            raise
        self.pid: int = self._child.pid

    def result(self, timeout: float | None = None) -> Any:  # noqa: ANN401 - what the function returned
        """The function's result; waits at most `timeout` seconds (None: until the child's own time limit).

        Raises the function's exception, with that process's traceback as a note; ChildError, with a traceback if there
        is one, if the process ended otherwise or the time is over. A child past its own limit (--ipcsync-timeout) is
        killed; after a shorter `timeout` it runs on.
        """
        __tracebackhide__ = True  # so that pytest shows the test's own line
        self._was_asked = True
        kind, value, trace = self._answer or self._receive(timeout)
        if kind != "returned":
            raise value if kind == "failed" else self._error(value, trace)
        return value

    def _receive(self, timeout: float | None) -> tuple[str, Any, str]:
        """Read the answer, or find out why there is none."""
        over = self._began + self._limit + _GRACE_S
        until = over if timeout is None else min(over, time.monotonic() + bounded(timeout))
        for _ in range(2):
            self._hear(until)
        if self._answer is not None:
            return self._answer
        if not self._child.has_ended() and time.monotonic() < over:
            raise ChildError(f"{self._label} (pid {self.pid}) did not end within {timeout} s; it runs on")
        late = not self._child.has_ended()
        if late:  # on a busy machine its own limit may not be over yet, or its function has ended the watchdog
            os.kill(self.pid, signal.SIGABRT)  # at which faulthandler writes the traceback; it is not reaped yet
            self._child.has_ended(_GRACE_S)
        self.kill()
        trace = os.pread(self._trace, 1 << 20, 0).decode(errors="replace").strip()
        late = late or trace.startswith("Timeout (")  # the text of faulthandler
        how = f"ended without a result: {child.in_words(self._child.status)}"
        text = f"{self._label} (pid {self.pid}) {f'ran past its {self._limit:g} s' if late else how}{_block(trace)}"
        self._answer = "failed", ChildError(text, traceback=trace, status=self._child.status), ""
        return self._answer

    def _hear(self, until: float) -> None:
        """Read one message, that the function has begun or the answer, if it comes by `until` (monotonic)."""
        if self._answer is not None or (self._child.has_ended() and not self._child.connection.poll(0)):
            return
        self._child.has_spoken(until - time.monotonic())
        if self._child.connection.poll(0):
            try:
                said = self._child.connection.recv()
            except (EOFError, OSError):  # the second: it ended amid its answer
                self._child.has_ended(_END_S)  # the pipe's end came first
                return
            if said != _BEGUN:
                self._answer = said

    def raise_unasked(self) -> None:
        """Raise what it raised, or how it ended without a result, if nobody asked for its result or killed it.

        It gets a second once its function has begun; one that still runs then is ended with its test, as it should be.
        """
        __tracebackhide__ = True
        if self._was_asked or self._was_killed or self._answer is not None:
            return
        self._hear(self._began + self._limit)
        self._hear(time.monotonic() + _UNASKED_S)
        has_failed = self._answer is not None and self._answer[0] == "raised"
        if self._answer is None and self._child.has_ended():
            self.kill()  # what it started too, while its group is known: `status` reaps it
            has_failed = self._child.status not in _DELIBERATE
        if has_failed:
            self.result()

    def _error(self, pickled: bytes | None, trace: str) -> Exception:
        error: Any = None
        if pickled is not None:
            with contextlib.suppress(Exception):  # if it cannot be unpickled here, the traceback says what it was
                error = pickle.loads(pickled)  # noqa: S301 - from the pipe of our own child
        if not isinstance(error, Exception):
            return ChildError(f"{self._label} (pid {self.pid}) raised{_block(trace)}", traceback=trace)
        # As `add_note` of Python 3.11 does; pytest shows notes under every version.
        notes = [*getattr(error, "__notes__", []), f"{self._label} (pid {self.pid}) raised{_block(trace)}"]
        error.__dict__["__notes__"] = notes
        return error

    def kill(self) -> None:
        """Kill it and every process that it started by SIGKILL, and reap it; does nothing once it has ended."""
        self._was_killed = True
        self._child.kill(with_group=True)

    def close(self) -> None:
        """Kill it if it runs, and close its files; warns of an exception if `result` was never called."""
        if not self._was_asked and self._answer is None and self._child.connection.poll(0):
            # It ended in the middle of its answer, or that cannot be rebuilt here: nobody has asked for it.
            with contextlib.suppress(Exception):
                for _ in range(2):
                    self._hear(time.monotonic())
        self.kill()
        self._child.close()
        os.close(self._trace)
        if not self._was_asked and self._answer is not None and self._answer[0] == "raised":
            text = f"{self._label} (pid {self.pid}) raised, and its result was never asked for{_block(self._answer[2])}"
            warnings.warn(pytest.PytestWarning(text), stacklevel=2)

    def __repr__(self) -> str:
        return f"<Child {self._label} pid={self.pid}>"


class Children(contextlib.ExitStack):
    """The processes of one test: each is ended behind the block, also if another one's end raises."""

    def __init__(self, endpoint: str, namespace: str, limit: float) -> None:
        super().__init__()
        self._endpoint = endpoint
        self._namespace = namespace
        self._limit = limit
        self.all: list[Child] = []

    def spawn(self, fn: Callable[..., Any], *args: Any) -> Child:
        """Start a fresh process that runs `fn(client, *args)` with a client of the test's namespace.

        Raises TypeError if `fn` cannot be found by its module and name.
        """
        module, name = getattr(fn, "__module__", None), getattr(fn, "__qualname__", None)
        is_bound = isinstance(fn, MethodType) and not isinstance(fn.__self__, type)  # its object would not come along
        if not callable(fn) or not module or not name or "<" in name or module == "__main__" or is_bound:
            raise TypeError(f"ipcsync_spawn takes a function of a module, which the process imports, but got {fn!r}")
        own = getattr(inspect.unwrap(fn), "__globals__", {})  # of several `conftest.py`, that module may be another
        file = {**vars(sys.modules.get(module, sys)), **(own if own.get("__name__") == module else {})}.get("__file__")
        label = f"{name.rpartition('.')[2]}-{len(self.all) + 1}"
        task = Task(module, name, file, self._endpoint, self._namespace, label, self._limit)
        made = Child(task, args)
        self.callback(made.close)
        self.all.append(made)
        return made


def _block(trace: str) -> str:
    return f"; its traceback:\n{trace}" if trace else ""
