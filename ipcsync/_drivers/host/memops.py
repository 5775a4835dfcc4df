"""Stream memory operations of the host driver: write a word when the stream gets there, or wait until it fits."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from ipcsync._drivers.host import capture as capturing
from ipcsync._drivers.host.memory import Range, usable
from ipcsync._drivers.host.results import INVALID_VALUE, OK, CallFailed, Result, entry, number
from ipcsync._drivers.host.segment import SEQ_CST, fence
from ipcsync._drivers.host.stream import find_stream
from ipcsync._linux.futex import Futex

GEQ, EQ, AND, NOR = range(4)
FLUSH = 1 << 30
NO_MEMORY_BARRIER = 1
_FIRST_PAUSE_NS, _LONGEST_PAUSE_NS = 10_000, 1_000_000

_WORDS: dict[int, Any] = {32: ctypes.c_uint32, 64: ctypes.c_uint64}


def _fits(bits: int, comparison: int, wanted: int) -> Callable[[int], bool]:
    """The test of a word's value. GEQ is cyclic, as in CUDA: the signed difference is not negative."""
    sign, mask = 1 << (bits - 1), (1 << bits) - 1
    if comparison == GEQ:
        return lambda value: not (value - wanted) & sign
    if comparison == EQ:
        return lambda value: value == wanted
    if comparison == AND:
        return lambda value: bool(value & wanted)
    return lambda value: bool(~(value | wanted) & mask)


def _place(addr: Any, bits: int) -> tuple[Range, int]:
    address = number(addr)
    if address % (bits // 8):
        raise CallFailed(INVALID_VALUE)
    return usable(address, bits // 8), address


def _write(hStream: Any, addr: Any, value: Any, flags: Any, bits: int) -> Result:
    stream, wanted = find_stream(hStream), number(value) & ((1 << bits) - 1)
    keep, address = _place(addr, bits)
    if number(flags) & ~NO_MEMORY_BARRIER:
        raise CallFailed(INVALID_VALUE)
    if not (capturing.active and capturing.capture_op(stream)):
        stream.submit(partial(_store, keep, _WORDS[bits].from_address(address), wanted, Futex(address)))
    return OK


def _store(keep: Range, word: Any, value: int, futex: Futex) -> None:
    if not keep.is_live and keep.kind == "registered":
        return  # the program took its memory back, against CUDA's rules: it may be unmapped
    if fence:
        fence(SEQ_CST)
    word.value = value
    futex.wake()


def _wait(hStream: Any, addr: Any, value: Any, flags: Any, bits: int) -> Result:
    stream, wanted, how = find_stream(hStream), number(value) & ((1 << bits) - 1), number(flags) & ~FLUSH
    keep, address = _place(addr, bits)
    if how > NOR or how < 0:
        raise CallFailed(INVALID_VALUE)
    if capturing.active and capturing.capture_op(stream):
        return OK
    word, fits = _WORDS[bits].from_address(address), _fits(bits, how, wanted)
    if stream.has_nothing_before() and fits(word.value):
        stream.submit()  # the stream has looked in this moment
    else:
        stream.submit(partial(_poll, keep, word, fits, Futex(address)), at_once=False)
    return OK


def _poll(keep: Range, word: Any, fits: Callable[[int], bool], futex: Futex) -> None:
    """Poll until the word fits. A plain store wakes no sleeper, so each sleep is bounded; a stream's write wakes."""
    pause = _FIRST_PAUSE_NS
    while not fits(value := word.value):
        futex.wait(value, pause)
        pause = min(pause * 2, _LONGEST_PAUSE_NS)
        if not keep.is_live and keep.kind == "registered":
            threading.Event().wait()  # the memory may be unmapped, and nothing can fulfil the wait any more
    if fence:
        fence(SEQ_CST)


@entry()
def cuStreamWriteValue32(stream: Any, addr: Any, value: Any, flags: Any) -> Result:
    """Store 32 bits at an aligned address, and wake who sleeps on them."""
    return _write(stream, addr, value, flags, 32)


@entry()
def cuStreamWriteValue64(stream: Any, addr: Any, value: Any, flags: Any) -> Result:
    """Store 64 bits at an aligned address, and wake who sleeps on the low half."""
    return _write(stream, addr, value, flags, 64)


@entry()
def cuStreamWaitValue32(stream: Any, addr: Any, value: Any, flags: Any) -> Result:
    """Let later work wait until 32 bits compare with `value`. Flags: CUstreamWaitValue_flags."""
    return _wait(stream, addr, value, flags, 32)


@entry()
def cuStreamWaitValue64(stream: Any, addr: Any, value: Any, flags: Any) -> Result:
    """Let later work wait until 64 bits compare with `value`. Flags: CUstreamWaitValue_flags."""
    return _wait(stream, addr, value, flags, 64)
