"""Functions that hold a call's lock release it at every instruction: see `ipcsync._locks`."""

from __future__ import annotations

import dis
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

import ipcsync

_ROOT = Path(ipcsync.__file__).parent

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no table of handlers to read")


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _holders() -> Iterator[tuple[str, CodeType]]:
    """The functions that hold a lock and undo that themselves."""
    for path in sorted(_ROOT.rglob("*.py")):
        for code in _codes(compile(path.read_text(), str(path), "exec")):
            if "unwind" in code.co_names:
                yield f"{path.relative_to(_ROOT)} {code.co_name}", code


def _uncovered(code: CodeType) -> list[int]:
    """The offsets of instructions that do nothing, right behind a covered one, and have no handler."""
    bytecode: Any = dis.Bytecode(code)
    covered = [range(each.start, each.end) for each in bytecode.exception_entries]
    handled = [(each.opname, each.offset, any(each.offset in entry for entry in covered)) for each in bytecode]
    return [
        offset
        for (_, _, was_covered), (name, offset, is_covered) in itertools.pairwise(handled)
        if name == "NOP" and was_covered and not is_covered
    ]


def test_no_instruction_of_a_lock_block_is_left_out_by_its_handler() -> None:
    holders = dict(_holders())
    assert len(holders) > 10
    assert {name: offsets for name, code in holders.items() if (offsets := _uncovered(code))} == {}


def test_a_try_within_a_lock_block_is_seen() -> None:
    source = """
def change(lock):
    try:
        with lock:
            try:
                return work()
            finally:
                tidy()
    except BaseException:
        lock.unwind()
        raise
"""
    (code,) = [each for each in _codes(compile(source, "change.py", "exec")) if "unwind" in each.co_names]
    assert _uncovered(code)
