"""The package's face: what it names, and that naming costs nothing."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import textwrap
from importlib import metadata

import pytest

import ipcsync
import ipcsync.errors
import ipcsync.testing
import ipcsync.typing

NATIVE = [
    "Device",
    "DeviceProperties",
    "Event",
    "ExternalStream",
    "Stream",
    "can_device_access_peer",
    "current_device",
    "current_stream",
    "default_stream",
    "device",
    "device_count",
    "driver_name",
    "driver_version",
    "exchange_device",
    "get_device_properties",
    "has_primary_context",
    "ipc_collect",
    "is_available",
    "is_current_stream_capturing",
    "is_in_bad_fork",
    "maybe_exchange_device",
    "set_device",
    "set_stream",
    "stream",
    "synchronize",
]
SERVICE = [
    "AsyncClient",
    "AsyncPoint",
    "AsyncReplay",
    "AsyncReplaying",
    "AsyncReservation",
    "AsyncSharedEvent",
    "AsyncUpcoming",
    "AttachmentInfo",
    "BridgeInfo",
    "Client",
    "Connecting",
    "Coordinator",
    "EventInfo",
    "GraphRecord",
    "GraphWait",
    "NodeInfo",
    "Notice",
    "PeerInfo",
    "Point",
    "Replay",
    "Replaying",
    "Reservation",
    "SessionInfo",
    "SharedEvent",
    "Upcoming",
    "aconnect",
    "connect",
    "default_client",
    "synchronize_all",
    "wait_all",
    "launch",
]


TYPING = [
    "Chains",
    "ClientStats",
    "CoordinatorSettings",
    "CoordinatorStats",
    "DeviceLike",
    "EngineCheck",
    "EngineChecks",
    "EngineChoice",
    "EngineName",
    "EventLike",
    "EventState",
    "HasCudaEvent",
    "HasCudaStream",
    "HasDeviceId",
    "HasHandle",
    "HasId",
    "HasIndex",
    "HasPtr",
    "Latency",
    "NoticeKind",
    "Stats",
    "StreamLike",
    "SupportsCudaStream",
    "Waitable",
]


def run(script: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_names_are_these() -> None:
    assert sorted(ipcsync.__all__) == sorted(["DEFAULT_DEPTH", *NATIVE, *SERVICE, *ipcsync.errors.__all__])
    assert set(ipcsync.__all__) <= set(dir(ipcsync))


def test_the_names_for_tests_and_annotations_are_these() -> None:
    assert ipcsync.testing.__all__ == ["Memory", "StreamGate"]
    assert sorted(ipcsync.typing.__all__) == TYPING
    own = {name for name, value in vars(ipcsync.typing).items() if getattr(value, "__module__", "") == "ipcsync.typing"}
    assert own <= set(TYPING), "what users meet in a signature is listed; what they do not begins with an underscore"


def test_the_version_is_the_projects() -> None:
    assert metadata.version("ipcsync") == ipcsync.__version__


def test_the_version_needs_no_metadata() -> None:
    assert vars(ipcsync)["__version__"] == ipcsync.__version__, "a package installed by --target has none"


def test_every_error_is_there_without_loading_anything() -> None:
    for name in ipcsync.errors.__all__:
        assert vars(ipcsync)[name] is getattr(ipcsync.errors, name)


@pytest.mark.parametrize("name", NATIVE + SERVICE)
def test_every_name_leads_to_something(name: str) -> None:
    assert callable(getattr(ipcsync, name))


def test_what_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        ipcsync.nonsense  # type: ignore[attr-defined] # noqa: B018 - looking is the test


@pytest.mark.process
def test_importing_the_package_loads_nothing_heavy() -> None:
    run(
        """
        import sys
        before = set(sys.modules)
        import ipcsync, ipcsync.errors
        new = {name.partition(".")[0] for name in set(sys.modules) - before}
        heavy = new & {"zmq", "cuda", "asyncio", "msgspec", "msgpack", "numpy", "click", "rich", "logging", "socket"}
        assert not heavy, heavy
        mine = sorted(name for name in sys.modules if name.startswith("ipcsync"))
        assert mine == ["ipcsync", "ipcsync.errors"], mine
        """
    )


@pytest.mark.process
def test_native_objects_load_no_message_layer() -> None:
    run(
        """
        import sys, ipcsync
        ipcsync.Stream().record_event().synchronize()
        heavy = {name.partition(".")[0] for name in sys.modules} & {"zmq", "asyncio", "msgspec", "msgpack"}
        assert not heavy, heavy
        """
    )


def test_each_public_name_is_in_the_list_of_its_module() -> None:
    for home in set(ipcsync._HOME.values()):
        names = {name for name, module in ipcsync._HOME.items() if module == home}
        assert names == set(importlib.import_module(home).__all__), home


@pytest.mark.process
def test_a_star_import_brings_every_name() -> None:
    run(
        """
        import ipcsync
        names = {}
        exec("from ipcsync import *", names)
        missing = set(ipcsync.__all__) - set(names)
        assert not missing, missing
        """
    )
