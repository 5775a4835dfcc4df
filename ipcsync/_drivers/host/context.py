"""Contexts of the host driver: one primary context a device, and a stack of current ones for each thread."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from cuda.bindings.driver import CUcontext, CUdevice, CUresult

from ipcsync._drivers.host.device import devices, ordinal_of
from ipcsync._drivers.host.process import process
from ipcsync._drivers.host.results import INVALID_CONTEXT, OK, SUCCESS, CallFailed, Result, entry, number
from ipcsync._locks import CallLock, under

if TYPE_CHECKING:
    from ipcsync._drivers.host.stream import Stream

LEAST_PRIORITY, GREATEST_PRIORITY = 0, -5


class Context:
    """The primary context of one device, between its first retain and its last release."""

    __slots__ = (
        "active",
        "everything",
        "handle",
        "legacy",
        "ordinal",
        "per_thread",
        "physical",
        "retained",
        "streams",
    )

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self.physical = devices.visible[ordinal]
        self.handle = next(process.numbers)
        self.retained = 0
        self.active = True
        self.streams: set[Stream] = set()  # also destroyed ones, until their work is done
        self.legacy: Stream | None = None
        self.everything: Stream | None = None  # for records of all of the context; its handle is never given out
        self.per_thread: list[tuple[threading.Thread, Stream]] = []


class _Stack(threading.local):
    def __init__(self) -> None:
        self.contexts: list[Context] = []


lock = CallLock()
_primary: dict[int, Context] = {}  # by ordinal
_by_handle: dict[int, Context] = {}
_stack = _Stack()


def current() -> Context:
    """The current context of this thread; refused if there is none or it is gone."""
    contexts = _stack.contexts
    if not contexts:
        raise CallFailed(INVALID_CONTEXT)
    if not contexts[-1].active:
        raise CallFailed(CUresult.CUDA_ERROR_CONTEXT_IS_DESTROYED)
    return contexts[-1]


def find_context(ctx: Any) -> Context:
    """The context of a handle; refused for an unknown handle, or if the context is gone."""
    context = _by_handle.get(number(ctx))
    if context is None:
        raise CallFailed(INVALID_CONTEXT)
    if not context.active:
        raise CallFailed(CUresult.CUDA_ERROR_CONTEXT_IS_DESTROYED)
    return context


@entry(1)
def cuDevicePrimaryCtxRetain(dev: Any) -> Result:
    """The primary context of a device, made with the first retain; not made current."""
    return SUCCESS, CUcontext(under(lock, _retain, ordinal_of(dev)).handle)


def _retain(ordinal: int) -> Context:
    context = _primary.get(ordinal)
    if context is None:
        context = Context(ordinal)
        _by_handle[context.handle] = context
        _primary[ordinal] = context
    context.retained += 1
    return context


@entry()
def cuDevicePrimaryCtxRelease(dev: Any) -> Result:
    """Undo one retain; the last one destroys the context and its streams, whose queued work still runs."""
    context = under(lock, _release, ordinal_of(dev))
    if not context.active:
        for stream in list(context.streams):
            stream.destroy()
    return OK


def _release(ordinal: int) -> Context:
    context = _primary.get(ordinal)
    if context is None:
        raise CallFailed(INVALID_CONTEXT)
    context.retained -= 1
    if not context.retained:
        context.active = False
        del _primary[ordinal]
    return context


@entry(2)
def cuDevicePrimaryCtxGetState(dev: Any) -> Result:
    """Flags (0), and 1 if the primary context of a device exists. Makes none."""
    return SUCCESS, 0, int(ordinal_of(dev) in _primary)


@entry(1)
def cuCtxGetCurrent() -> Result:
    """The thread's current context, 0 if it has none."""
    contexts = _stack.contexts
    return SUCCESS, CUcontext(contexts[-1].handle if contexts else 0)


@entry()
def cuCtxSetCurrent(ctx: Any) -> Result:
    """Put a context in the place of the thread's current one; 0 takes that one away."""
    contexts = _stack.contexts
    if number(ctx) == 0:
        del contexts[-1:]
        return OK
    contexts[-1:] = [find_context(ctx)]
    return OK


@entry()
def cuCtxPushCurrent(ctx: Any) -> Result:
    """Make a context current above the thread's present one."""
    _stack.contexts.append(find_context(ctx))
    return OK


@entry(1)
def cuCtxPopCurrent() -> Result:
    """Take the thread's current context off and return it."""
    if not _stack.contexts:
        raise CallFailed(INVALID_CONTEXT)
    return SUCCESS, CUcontext(_stack.contexts.pop().handle)


@entry(1)
def cuCtxGetDevice() -> Result:
    """The device of the current context."""
    return SUCCESS, CUdevice(current().ordinal)


@entry(2)
def cuCtxGetStreamPriorityRange() -> Result:
    """The least and the greatest priority, as numbers: (0, -5)."""
    current()
    return SUCCESS, LEAST_PRIORITY, GREATEST_PRIORITY


@entry(2)
def cuMemGetInfo() -> Result:
    """Free and total bytes of the current device's memory, whichever process has the rest."""
    free = max(0, devices.memory_limit - process.segment.used_memory(current().physical))
    return SUCCESS, free, devices.memory_limit


def contexts_in_use() -> list[Context]:
    """Every context there ever was in this process: also one that is gone may have work left."""
    return list(_by_handle.values())
