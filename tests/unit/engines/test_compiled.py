"""Which core a process has, and what it says of that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import ipcsync
from ipcsync._engines import compiled, core_python

pytestmark = pytest.mark.process

_TELL = """
import json, ipcsync
compiled = ipcsync.__compiled__
from ipcsync._engines import compiled as chosen
print(json.dumps([compiled, chosen.WHY_NOT, chosen.SessionCheck.__module__]))
"""
IS_BUILT = any(Path(compiled.__file__).parent.glob("core*.so"))
needs_core = pytest.mark.skipif(not IS_BUILT, reason=f"no compiled core was built: {compiled.built_with()}")


def told(value: str, script: str = _TELL) -> subprocess.CompletedProcess[str]:
    """What a new process says of its core, with that IPCSYNC_COMPILED; not in a folder that it would import from."""
    env = {**os.environ, "IPCSYNC_COMPILED": value}
    command = [sys.executable, "-c", script]
    return subprocess.run(command, env=env, cwd="/", capture_output=True, text=True, check=False)


@pytest.mark.process
@pytest.mark.parametrize("value", ["auto", "1"])
@needs_core
def test_a_core_that_was_built_is_used(value: str) -> None:
    assert json.loads(told(value).stdout) == [True, None, "ipcsync._engines.core"]


@pytest.mark.process
def test_0_is_pure_python() -> None:
    assert json.loads(told("0").stdout) == [False, "IPCSYNC_COMPILED=0", "ipcsync._engines.core_python"]


@pytest.mark.process
def test_another_value_is_refused() -> None:
    assert "IPCSYNC_COMPILED must be auto, 0 or 1, but is 'yes'" in told("yes").stderr


def test_a_core_that_is_not_there_is_said_and_1_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ipcsync._engines.core", None)  # as if there were no such module
    monkeypatch.delattr("ipcsync._engines.core", raising=False)
    monkeypatch.setattr(compiled, "built_with", lambda: "pure: no C compiler (looked for cc)")
    monkeypatch.setenv("IPCSYNC_COMPILED", "auto")
    assert compiled._load() == (core_python, "no C compiler (looked for cc)")
    monkeypatch.setenv("IPCSYNC_COMPILED", "1")
    with pytest.raises(ImportError, match=r"there is no compiled core: no C compiler \(looked for cc\)"):
        compiled._load()


@needs_core
def test_a_core_of_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPCSYNC_COMPILED", "auto")
    monkeypatch.setattr(core_python, "INTERFACE", core_python.INTERFACE + 1)
    core, why_not = compiled._load()
    assert core is core_python
    assert why_not is not None
    assert "it was built from another version" in why_not


def test_the_build_says_what_it_did() -> None:
    assert compiled.built_with().startswith("compiled: " if IS_BUILT else "pure: ")
    assert isinstance(ipcsync.__compiled__, bool)


_GOOD_REASONS = ("no C compiler", "IPCSYNC_BUILD_CORE=0", "it is written for", "this tree was never installed")


def test_a_core_whose_code_does_not_build_is_not_left_out_in_silence() -> None:
    """An install goes on without it; then all tests of the core are skipped, and this one alone says why."""
    note = compiled.built_with()
    has_headers = Path(sysconfig.get_paths()["include"], "Python.h").exists()
    if note.startswith("pure: ") and has_headers and sys.implementation.name == "cpython":
        assert note.removeprefix("pure: ").startswith(_GOOD_REASONS)


_DESCRIBE = """
import inspect, json, ipcsync


def told(function):
    signature = inspect.signature(function)
    return [[each.name, each.kind.name, repr(each.default)] for each in signature.parameters.values()]


point, event = ipcsync.Point(None, 1), ipcsync.SharedEvent.__new__(ipcsync.SharedEvent)
bound = [point.wait, point.query, point.synchronize, event.record]
own = [ipcsync.Point.wait, ipcsync.Point.query, ipcsync.Point.synchronize, ipcsync.SharedEvent.record]
print(json.dumps({
    "compiled": ipcsync.__compiled__,
    "signatures": [told(each) for each in [*bound, ipcsync.Point, ipcsync.SharedEvent]],
    "names": [list(inspect.signature(each).parameters) for each in own],
    "docstrings": [inspect.getdoc(each) for each in own],
    "listed": [each.__name__ in vars(owner) for each, owner in zip(own, [ipcsync.Point] * 3 + [ipcsync.SharedEvent])],
}))
"""


@needs_core
def test_shortcuts_have_the_docstring_and_the_signature_of_what_they_replace() -> None:
    fast, pure = (json.loads(told(value, _DESCRIBE).stdout) for value in ("1", "0"))
    assert fast.pop("compiled")
    assert not pure.pop("compiled")
    assert fast == pure
    assert pure["signatures"][0][1] == ["timeout", "KEYWORD_ONLY", "None"]
    assert all(pure["docstrings"])
