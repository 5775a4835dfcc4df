"""Words of this process that graphs and streams wait for and write, and batches of such operations.

The words are pinned host memory, which every context of the process reaches. They are never freed nor given to
another use: a graph that was captured with one may be launched for as long as the process lives.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

from cuda.bindings.driver import CUstreamBatchMemOpType

from ipcsync import _drivers
from ipcsync._drivers import SUCCESS, DriverObject, describe, unwrap
from ipcsync._drivers.constants import MEMHOSTREGISTER_DEVICEMAP, MEMHOSTREGISTER_PORTABLE
from ipcsync._locks import CallLock, under
from ipcsync._native.capture import relaxed_call
from ipcsync._native.context import LEGACY, OnDevice, primary

_BYTES = 4096
_FLAGS = MEMHOSTREGISTER_PORTABLE | MEMHOSTREGISTER_DEVICEMAP  # those of cuMemHostAlloc have the same numbers
_FIELDS = 6  # 64-bit fields of a CUstreamBatchMemOpParams: operation, address, value, flags, and two more
_MOST = 255  # operations of one call
_WAIT = int(CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WAIT_VALUE_64)  # its flags of 0 mean: at least the value
_WRITE = int(CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WRITE_VALUE_64)

_lock = CallLock()
_free: dict[int, list[Word]] = {}


class Word:
    """One 64-bit word, 0 at first."""

    __slots__ = ("_cell", "address")

    def __init__(self, host: int, address: int) -> None:
        self._cell = ctypes.c_uint64.from_address(host)
        self.address = address  # for streams and graphs of its device

    @property
    def value(self) -> int:
        """Its value now, as the host sees it."""
        return self._cell.value

    def release(self) -> None:
        """Let go on what waits for it to be 1."""
        self._cell.value = 1


def take(ordinal: int) -> Word:
    """A word for streams of device `ordinal` that nothing else uses or has used."""
    return under(_lock, _take, ordinal)


def _take(ordinal: int) -> Word:
    free = _free.setdefault(ordinal, [])
    if not free:
        driver = _drivers.load()
        with OnDevice(ordinal, primary(ordinal)) as inside, inside:
            # An allocation is an unsafe call, which would break another thread's capture.
            host = int(unwrap(relaxed_call(driver.cuMemHostAlloc, _BYTES, _FLAGS), "cuMemHostAlloc"))
            address = int(unwrap(driver.cuMemHostGetDevicePointer(host, 0), "cuMemHostGetDevicePointer"))
        ctypes.memset(host, 0, _BYTES)
        free.extend(Word(host + at, address + at) for at in range(0, _BYTES, 8))
    return free.pop(0)


class Step(NamedTuple):
    """One operation on a word. The number of a bracket is added to `value` if `counts`."""

    kind: int
    word: Word
    value: int
    counts: bool = False


def wait(word: Word, value: int) -> Step:
    """Wait until the word is at least `value`."""
    return Step(_WAIT, word, value)


def write(word: Word, value: int) -> Step:
    """Write `value`, behind all that the stream did before."""
    return Step(_WRITE, word, value)


def wait_number(word: Word, less: int = 0) -> Step:
    """Wait until the word is at least the bracket's number, less `less`."""
    return Step(_WAIT, word, -less, counts=True)


def write_number(word: Word) -> Step:
    """Write the bracket's number."""
    return Step(_WRITE, word, 0, counts=True)


class Batch:
    """Operations for one stream, in order, put there by one call of the driver for each 255 of them.

    Between two calls anything may happen: so there is no promise that they are taken in as a whole.
    """

    def __init__(self, steps: Sequence[Step]) -> None:
        fields = (ctypes.c_uint64 * (_FIELDS * len(steps)))()
        for index, step in enumerate(steps):
            fields[_FIELDS * index : _FIELDS * index + 3] = [step.kind, step.word.address, max(step.value, 0)]
        self._fields = fields
        self._counting = [(_FIELDS * index + 2, step.value) for index, step in enumerate(steps) if step.counts]
        at, size = ctypes.addressof(fields), 8 * _FIELDS
        self._calls = [(min(_MOST, len(steps) - n), at + n * size) for n in range(0, len(steps), _MOST)]

    def aim(self, index: int, address: int, value: int, flags: int) -> None:
        """Have operation `index`, a wait, be for another word and value."""
        at = _FIELDS * index
        self._fields[at + 1], self._fields[at + 2], self._fields[at + 3] = address, value, flags

    def put(self, stream: DriverObject, ordinal: int, number: int) -> None:
        """Have the CUstream `stream` of device `ordinal` do them, for the bracket `number`."""
        for index, value in self._counting:
            self._fields[index] = number + value
        if int(stream) not in LEGACY:
            self._put(stream)
            return
        with OnDevice(ordinal) as inside, inside:
            self._put(stream)

    def _put(self, stream: DriverObject) -> None:
        call = _function()
        for count, address in self._calls:
            code = call(int(stream), count, address, 0)
            if code:
                raise describe(code, "cuStreamBatchMemOp")


@cache
def _function() -> Callable[[int, int, int, int], int]:
    """cuStreamBatchMemOp as C has it: the binding would build an object for each operation of each call."""
    flags = _drivers.load().CUdriverProcAddress_flags.CU_GET_PROC_ADDRESS_DEFAULT
    found: tuple[Any, ...] = _drivers.load().cuGetProcAddress(b"cuStreamBatchMemOp", 12000, int(flags))
    address = int(unwrap(found[:2], "cuGetProcAddress"))
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint)
    return kind(address)


def capture(stream: DriverObject, step: Step) -> None:
    """Put one operation into the graph that `stream` is being captured into."""
    driver = _drivers.load()
    function = driver.cuStreamWaitValue64 if step.kind == _WAIT else driver.cuStreamWriteValue64
    result = function(stream, step.word.address, step.value, 0)
    if result[0] is not SUCCESS:
        unwrap(result, function.__name__)
