"""The compiled core of a process: what is said if it does not fit, and that its calls look as they are written."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

import ipcsync
from ipcsync._engines import INTERFACE, core

_CALLS: list[Any] = [
    ipcsync.Point.wait,
    ipcsync.Point.query,
    ipcsync.Point.synchronize,
    ipcsync.SharedEvent.record,
]


def run(script: str, **env: str) -> subprocess.CompletedProcess[str]:
    """A new process, not in a folder that it would import from."""
    command = [sys.executable, "-c", script]
    return subprocess.run(command, env={**os.environ, **env}, cwd="/", capture_output=True, text=True, check=False)


def test_an_install_has_the_core() -> None:
    assert ipcsync.__compiled__ is True
    assert core.INTERFACE == INTERFACE


@pytest.mark.process
def test_a_core_that_is_not_there_is_one_sentence() -> None:
    done = run("import sys; sys.modules['ipcsync._engines.core'] = None; import ipcsync.client")
    assert done.returncode == 1
    said = "ImportError: ipcsync's compiled core is missing: it is built when ipcsync is installed (pip install .), and"
    assert done.stderr.splitlines()[-1].startswith(said)


@pytest.mark.process
def test_a_core_of_another_version_is_one_sentence() -> None:
    done = run(f"""
import sys, types
other = sys.modules["ipcsync._engines.core"] = types.ModuleType("core")
other.INTERFACE, other.__file__ = {INTERFACE - 1}, "core.abi3.so"
import ipcsync.client
""")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "ImportError: ipcsync's compiled core was built from another version, install ipcsync again (pip install .):"
        f" core.abi3.so has interface {INTERFACE - 1}, not {INTERFACE}"
    )


def _slow(method: Any) -> Callable[..., Any]:
    """What looks at the arguments that are rare."""
    owner = ipcsync.SharedEvent if method.__name__ == "record" else ipcsync.Point
    found: Callable[..., Any] = vars(owner)[f"_slow_{method.__name__}"]
    return found


@pytest.mark.parametrize("method", _CALLS, ids=lambda method: str(method.__name__))
def test_a_call_has_the_docstring_and_the_signature_of_its_python_part(method: Any) -> None:
    def parts(function: Callable[..., Any]) -> list[tuple[Any, ...]]:
        signature = inspect.signature(function)
        return [(each.name, each.kind, each.default) for each in signature.parameters.values()]

    slow = _slow(method)
    _, *own = parts(method)
    _, *replaced = parts(slow)
    assert own == replaced
    assert inspect.getdoc(method) == inspect.getdoc(slow)
    assert inspect.getdoc(method)


def test_the_classes_are_made_as_they_are_written() -> None:
    assert list(inspect.signature(ipcsync.Point).parameters) == ["attached", "generation"]
    assert list(inspect.signature(ipcsync.SharedEvent).parameters) == ["session", "opening", "is_recorder"]
    assert {method.__name__ for method in _CALLS} <= {*vars(ipcsync.Point), *vars(ipcsync.SharedEvent)}
