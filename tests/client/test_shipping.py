"""Functions that name `ipcsync`, and points, travel by the libraries that ship code to workers."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import ipcsync

pytestmark = pytest.mark.process

_ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "library", ["cloudpickle", *(pytest.param(each, marks=pytest.mark.thorough) for each in ("loky", "distributed"))]
)
def test_a_function_of_main_and_what_it_captured_arrive(
    new_coordinator: Callable[..., ipcsync.Coordinator], library: str
) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed; pip install --group proof brings it")
    command = [sys.executable, "-m", "tests.client.shipping", library, new_coordinator().endpoint]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False, cwd=_ROOT)
    assert done.returncode == 0, done.stderr
    wanted = [ipcsync.driver_name(), "generation 1", "ConnectError", "the module"]
    if library == "cloudpickle":  # in the process itself, which has a client
        wanted.remove("ConnectError")
    assert done.stdout.splitlines() == wanted
