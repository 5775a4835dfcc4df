"""Running the calls of an asynchronous client so that none of them makes the loop wait.

Records and waits on streams are made on the loop's thread, and queries that no driver's answer is needed for: a
hand-over to another one costs ten times as much. Requests, which end by their own timeouts, have a pool of threads.
Waits for GPU work take no thread: the session's thread looks at all, and tells the loop. A long call has its own.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial, wraps
from queue import Empty, SimpleQueue
from threading import TIMEOUT_MAX
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar, cast
from weakref import WeakKeyDictionary

from ipcsync import _drivers
from ipcsync._deadline import bounded, deadline_of, left_of
from ipcsync._inbox import LoopCalls
from ipcsync._native import context, fork
from ipcsync._session.attachments import AttachmentRef
from ipcsync._session.session import Session
from ipcsync._session.waits import Pending
from ipcsync._threads import Job, start
from ipcsync.errors import IpcSyncError, WaitTimeout

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")
A = TypeVar("A")

_IDLE_S = 1.0  # after which a thread of a pool ends
_TURN_S = 0.01  # a thread's start takes no longer, unless all are busy

Submit: TypeAlias = Callable[[Callable[[], object]], None]


def new_pool(name: str, most: int = 1) -> Submit:
    """A function that has a thread make a call: of up to `most`, each started while the others are busy.

    An interpreter ends without them.
    """
    calls: SimpleQueue[Callable[[], object]] = SimpleQueue()
    left = deque([None] * most)  # one for each thread that may be started
    idle: deque[None] = deque()  # one for each that waits for a call that was not submitted yet

    def make_all() -> None:
        while True:
            try:
                call = calls.get(timeout=_IDLE_S)
            except Empty:
                _take(idle)
                left.append(None)
                # Whoever has counted on this thread has put in the call before: then it goes on.
                if calls.empty() or not _take(left):
                    return
                continue
            call()
            del call  # while the next one is awaited, it would keep what it used
            idle.append(None)
            if not calls.empty():  # asked behind it: who came first may have counted on nobody
                _take(idle)

    def submit(call: Callable[[], object]) -> None:
        calls.put(call)
        if not _take(idle) and _take(left):
            try:
                start(make_all, name, lambda _: make_all())  # or the thread that was to start it
            except BaseException:
                left.append(None)
                raise

    return submit


def _take(tokens: deque[None]) -> bool:
    """Whether there was one; it is taken."""
    try:
        tokens.pop()
    except IndexError:
        return False
    return True


_pools: WeakKeyDictionary[Session, Submit] = WeakKeyDictionary()


async def request(
    session: Session,
    fn: Callable[..., T],
    timeout: float | None = None,
    undo: Callable[[T], object] | None = None,
    *,
    alone: bool = False,
) -> T:
    """Return `fn(timeout=…)`, which asks the coordinator; `undo` gets its result if this is cancelled meanwhile.

    `timeout` (None: the session's) includes the wait for a thread of the session's pool. `alone`: on a thread of its
    own, for what may wait for more than a reply.
    """
    session.check()
    seconds = bounded(session.timeout if timeout is None else timeout, ", or None")
    deadline = deadline_of(seconds)

    def ask() -> T:
        left = left_of(deadline)
        return fn(timeout=left if seconds - left > _TURN_S else seconds)

    pool = None if alone else _pools.setdefault(session, new_pool("ipcsync-requests", 16))
    return await run(ask, undo, pool=pool, turn_s=seconds)


async def over(attached: AttachmentRef, pending: Pending) -> None:
    """Wait until the point is complete or recorded; raises the error that ends the wait."""
    fork.check()
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    attached.waits.add(pending, partial(LoopCalls().soon, _resolve, future))
    try:
        await future
    finally:
        attached.waits.remove(pending)
        del future  # as below


async def run(
    fn: Callable[[], T],
    undo: Callable[[T], object] | None = None,
    *,
    pool: Submit | None = None,
    surely: bool = False,
    or_here: bool = False,
    turn_s: float = TIMEOUT_MAX,
) -> T:
    """Return `fn()`, run on a thread of the pool, or on its own, with the CUDA context that is current on this one.

    If this is cancelled before `fn` begins, it never does, unless `surely`; afterwards its result goes to `undo`. So it
    does if the coroutine is closed, as that of a task is whose loop was abandoned. WaitTimeout if all threads of the
    pool are busy for `turn_s` seconds. `or_here`: on this thread, if none can be started.
    """
    fork.check()
    # The context that is current here, NULL included; None before the driver is loaded.
    current = context.call("cuCtxGetCurrent") if _drivers.is_loaded() else None

    def there() -> T:
        if current is not None:
            result = _drivers.load().cuCtxSetCurrent(current)
            if not surely:  # a close goes on whatever became of the context
                _drivers.unwrap(result, "cuCtxSetCurrent")
        return fn()

    def undo_elsewhere(made: T) -> None:  # this may be called on the loop's thread, or by the garbage collector
        if undo is not None:
            _apart("ipcsync-undo", partial(undo, made), or_here=True)

    job = Job(there, undo_elsewhere)
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    limit = loop.call_later(turn_s + _TURN_S, _end_turn, future, job, turn_s)
    calls, unresolved = LoopCalls(), [future]

    def make() -> None:
        if job.is_wanted or surely:
            job.run()
            calls.soon(_resolve, unresolved.pop(), job.take_error(), job.value)

    try:
        if pool is None:
            _apart("ipcsync-alone", make, or_here=or_here)
        else:
            pool(make)
        return await future
    except BaseException:
        job.give_up()
        raise
    finally:
        limit.cancel()
        del future  # else an error, its traceback and this frame would keep each other


def _apart(name: str, call: Callable[[], object], *, or_here: bool) -> None:
    """Have a thread of its own make a call; `or_here`: this one, where none can be started."""
    try:
        start(call, name, lambda _: call())
    except IpcSyncError:
        if not or_here:
            raise
        call()


def _end_turn(future: asyncio.Future[T], job: Job[T], seconds: float) -> None:
    if not job.has_begun:
        text = f"no answer within {seconds:g} s: other requests of this client may have taken all of them"
        _resolve(future, WaitTimeout(text, timeout=seconds))


def _resolve(future: asyncio.Future[T], error: BaseException | None, result: T | None = None) -> None:
    if future.done():
        return  # cancelled meanwhile
    if error is None:
        future.set_result(cast("T", result))
    else:
        future.set_exception(error)


# --- twins of methods that ask: each has the parameters of the one that it wraps --------------------------------------


def twin(
    method: Callable[Concatenate[Any, P], T], undo: Callable[[T], object] | None = None
) -> Callable[[Callable[[A, T], R]], Callable[Concatenate[A, P], Coroutine[Any, Any, R]]]:
    """Decorate what makes the asynchronous result from the one of `method`, which is called on a thread.

    If the call is cancelled meanwhile, `undo` gets that result.
    """

    def decorate(result: Callable[[A, T], R]) -> Callable[Concatenate[A, P], Coroutine[Any, Any, R]]:
        @taking(method)
        @wraps(result)
        async def call(self: Any, *arguments: Any, **options: Any) -> R:  # noqa: ANN401 - what wraps a client
            timeout = options.pop("timeout", None)
            ask = partial(getattr(self._client, method.__name__), *arguments, **options)
            # One of the whole fleet is looked for until the timeout, which must not take a thread from others.
            is_long = bool(options.get("fleet"))
            return result(self, await request(self._client._session, ask, timeout, undo, alone=is_long))

        return cast("Callable[Concatenate[A, P], Coroutine[Any, Any, R]]", call)

    return decorate


def taking(function: Callable[P, object]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Decorate a function that has the parameters of `function`."""

    def decorate(other: Callable[..., R]) -> Callable[P, R]:
        told = inspect.signature(function).replace(return_annotation=inspect.signature(other).return_annotation)
        other.__signature__ = told  # type: ignore[attr-defined] # what help() shows
        return cast("Callable[P, R]", other)

    return decorate
