"""The exceptions: their tree is fixed, and they pickle with all they carry."""

from __future__ import annotations

import ast
import copy
import inspect
import pickle
from pathlib import Path

import pytest

import ipcsync
from ipcsync import errors
from ipcsync.errors import IpcSyncError

_ROOT = Path(__file__).parents[2]

_TREE = {
    "IpcSyncError": ("RuntimeError",),
    "DriverError": ("IpcSyncError",),
    "HandleError": ("DriverError",),
    "NoDriver": ("IpcSyncError",),
    "InvalidDevice": ("IpcSyncError", "ValueError"),
    "ForkedProcessError": ("IpcSyncError",),
    "StreamCapturing": ("IpcSyncError",),
    "CaptureError": ("IpcSyncError",),
    "ConnectError": ("IpcSyncError",),
    "NoBridge": ("ConnectError",),
    "SessionLost": ("IpcSyncError",),
    "CoordinatorLost": ("SessionLost",),
    "SessionExpired": ("SessionLost",),
    "ClientClosed": ("IpcSyncError",),
    "EventClosed": ("IpcSyncError",),
    "RecorderLost": ("IpcSyncError",),
    "StalePoint": ("RecorderLost",),
    "NodeLost": ("RecorderLost",),
    "NotComplete": ("IpcSyncError",),
    "NotRecorder": ("IpcSyncError",),
    "RecorderTaken": ("NotRecorder",),
    "DeviceMismatch": ("IpcSyncError",),
    "EngineMismatch": ("IpcSyncError",),
    "Reentered": ("IpcSyncError",),
    "QuotaExceeded": ("IpcSyncError",),
    "NodeNameTaken": ("IpcSyncError",),
    "FleetUnavailable": ("IpcSyncError",),
    "ProtocolError": ("IpcSyncError",),
    "WaitTimeout": ("IpcSyncError", "TimeoutError"),
}
_ATTRIBUTES: dict[str, dict[str, object]] = {
    "DriverError": {"code": 600, "name": "CUDA_ERROR_NOT_READY", "call": "cuEventQuery"},
    "HandleError": {"code": 201, "name": "CUDA_ERROR_INVALID_CONTEXT", "call": "cuIpcOpenEventHandle"},
    "ConnectError": {"endpoint": "ipc:///x"},
    "NoBridge": {"endpoint": "ipc:///x"},
    "SessionLost": {"endpoint": "ipc:///x"},
    "CoordinatorLost": {"endpoint": "ipc:///x", "pid": 17, "cause": "died"},
    "SessionExpired": {"endpoint": "ipc:///x", "session": "decode"},
    "ClientClosed": {"client": "decode", "endpoint": "ipc:///x"},
    "EventClosed": {"event": "e"},
    "RecorderLost": {
        "event": "e",
        "generation": 7,
        "session": "prefill",
        "pid": 4711,
        "cause": "died",
        "over": True,
    },
    "StalePoint": {"event": "", "generation": 0, "session": "", "pid": 0, "cause": "gone", "over": None},
    "NodeLost": {
        "event": "e",
        "generation": 7,
        "session": "",
        "pid": 0,
        "cause": None,
        "over": None,
        "node": "prefill-0",
        "reason": "silent",
    },
    "NodeNameTaken": {"node": "prefill-0"},
    "FleetUnavailable": {"timeout": 0.5},
    "NotRecorder": {"event": "e", "recorder": "somebody", "pid": 4711},
    "RecorderTaken": {"event": "e", "recorder": "somebody", "pid": 4711},
    "QuotaExceeded": {"limit": 2048},
    "ProtocolError": {"code": "malformed"},
    "WaitTimeout": {"event": "e", "generation": 3, "timeout": 0.5},
}


def test_the_tree_is_the_one_that_was_promised() -> None:
    found = {
        name: tuple(base.__name__ for base in kind.__bases__)
        for name, kind in vars(errors).items()
        if inspect.isclass(kind) and kind.__module__ == errors.__name__
    }
    assert found == _TREE
    assert sorted(errors.__all__) == sorted(_TREE)
    assert errors.__all__ == sorted(errors.__all__)


@pytest.mark.parametrize("name", _TREE)
def test_every_error_is_re_exported_and_documented(name: str) -> None:
    kind = getattr(errors, name)
    assert getattr(ipcsync, name) is kind
    assert kind.__doc__
    assert name in (errors.__doc__ or "")


@pytest.mark.parametrize("name", _TREE)
def test_attributes_are_there_with_defaults_and_nothing_else(name: str) -> None:
    kind = getattr(errors, name)
    attributes = _ATTRIBUTES.get(name, {})
    assert set(vars(kind("text"))) == set(attributes)
    error = kind("text", **attributes)
    assert vars(error) == attributes
    assert str(error) == "text"
    with pytest.raises(TypeError):
        kind("text", colour="red")


@pytest.mark.parametrize("name", _TREE)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_error_pickles_with_its_attributes(name: str, protocol: int) -> None:
    error = getattr(errors, name)("text", **_ATTRIBUTES.get(name, {}))
    for again in (pickle.loads(pickle.dumps(error, protocol)), copy.copy(error), copy.deepcopy(error)):
        assert type(again) is type(error)
        assert again.args == error.args
        assert str(again) == str(error)
        assert vars(again) == vars(error)


def test_the_product_gives_no_error_an_attribute_that_it_does_not_have() -> None:
    """A type checker does not see it, and where it is raised it would be a TypeError."""
    calls = [
        (f"{path}:{node.lineno}", getattr(errors, name), keyword.arg)
        for folder in ("ipcsync", "services")
        for path in (_ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and (name := ast.unparse(node.func).rpartition(".")[2]) in errors.__all__
        for keyword in node.keywords
    ]
    assert len(calls) > 100
    assert [where for where, kind, name in calls if name not in {None, *vars(kind())}] == []


def test_what_is_caught_as_what() -> None:
    assert issubclass(errors.WaitTimeout, TimeoutError)
    assert issubclass(errors.InvalidDevice, ValueError)
    assert issubclass(errors.WaitTimeout, OSError)  # which errors.md says where it bites
    for kind in (errors.CoordinatorLost, errors.SessionExpired):
        assert issubclass(kind, errors.SessionLost)
    assert issubclass(errors.IpcSyncError, RuntimeError)
    assert not issubclass(errors.IpcSyncError, (ValueError, OSError))
    with pytest.raises(errors.NotRecorder):
        raise errors.RecorderTaken("text", recorder="r")
    with pytest.raises(IpcSyncError):
        raise errors.WaitTimeout("text")


def test_the_text_of_a_forked_process_is_torchs() -> None:
    text = (
        "Cannot re-initialize CUDA in forked subprocess. "
        "To use CUDA with multiprocessing, you must use the 'spawn' start method"
    )
    assert str(errors.ForkedProcessError()) == text
    assert str(pickle.loads(pickle.dumps(errors.ForkedProcessError()))) == text


def test_a_timeout_shows_its_text_and_not_an_errno() -> None:
    error = errors.WaitTimeout("generation 3 was late", event="e", generation=3, timeout=None)
    assert str(error) == "generation 3 was late"
    assert (error.errno, error.strerror) == (None, None)
