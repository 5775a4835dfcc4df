"""No lock of the package is forgotten: each that is made is in the table, and what the table says is listed, is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import ipcsync
from tests.faults.interrupt_locks import LATCHS, LOCKS, NOBODYS, THREADS_OWN, locks_of
from tests.faults.interrupt_stage import Stage

_PACKAGE = Path(ipcsync.__file__).parent
_MAKERS = {"CallLock", "OuterLock", "Lock", "RLock", "allocate_lock", "Condition", "Semaphore", "BoundedSemaphore"}


def _is_made(value: ast.expr | None) -> bool:
    """Whether the expression makes a lock."""
    if not isinstance(value, ast.Call):
        return False
    return (value.func.attr if isinstance(value.func, ast.Attribute) else getattr(value.func, "id", "")) in _MAKERS


def _made_in(source: str) -> Iterator[str]:
    """The attribute of each lock that the source makes; "N without a name" for the rest, from 1."""
    assigned: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign | ast.AnnAssign) and _is_made(node.value):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                name = target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", "")
                if name:
                    assigned.add(node.lineno)
                    yield name
    others = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call) and _is_made(node)]
    for number, _ in enumerate((node for node in others if node.lineno not in assigned), 1):
        yield f"{number} without a name"


def _made() -> set[tuple[str, str]]:
    return {
        (str(path.relative_to(_PACKAGE)), attribute)
        for path in sorted(_PACKAGE.rglob("*.py"))
        for attribute in _made_in(path.read_text())
    }


def test_each_lock_that_the_package_makes_is_in_the_table() -> None:
    made = _made()
    assert made - LOCKS.keys() == set(), "a new lock: list it in interrupt_locks, or say there why not"
    assert LOCKS.keys() - made == set(), "no such lock is made any more"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("_lock = CallLock()", ["_lock"]),
        ("class A:\n def __init__(self):\n  self.x: CallLock = _locks.CallLock()", ["x"]),
        ("locks = {1: CallLock()}", ["1 without a name"]),
        ("def f():\n return threading.Lock()", ["1 without a name"]),
        ("locks[1] = CallLock()\nlock = Lock()", ["lock", "1 without a name"]),
        ("lock = other", []),
    ],
)
def test_a_lock_is_seen_wherever_it_is_made(source: str, found: list[str]) -> None:
    assert list(_made_in(source)) == found


@pytest.mark.process
def test_each_lock_that_the_table_calls_listed_is(any_coordinator: ipcsync.Coordinator, tmp_path: Path) -> None:
    stage = Stage(any_coordinator, "timeline")
    with ipcsync.connect(any_coordinator.endpoint, trace=tmp_path) as traced:
        event = traced.event(stage.name(), recorder=True)
        reservation = stage.reserve()
        names = [name for name, _ in [*stage.locks(), *locks_of(traced)]]
        reservation.close()
        event.close()
    stage.close()
    missing = {what for what in LOCKS.values() if not any(name.startswith(what) for name in names)}
    assert missing == {THREADS_OWN, LATCHS, NOBODYS}
