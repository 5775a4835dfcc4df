"""Devices: how they are named, which is current, what they tell."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import pickle
import re
import threading
import uuid
from typing import Any

import pytest

import ipcsync
from ipcsync._drivers import load
from ipcsync._native import context
from ipcsync._native.context import ordinal_of, uuid_of
from ipcsync._native.device import collectors, parse
from tests.kit.scripts import run, run_on_two

pytestmark = pytest.mark.driver


@dataclasses.dataclass(frozen=True)
class Torchlike:
    """What torch.device is to us."""

    type: str
    index: int | None


@dataclasses.dataclass(frozen=True)
class WithId:
    """What cuda.core.Device is to us."""

    device_id: int


@dataclasses.dataclass(frozen=True)
class WithShortId:
    """What cupy.cuda.Device is to us."""

    id: int


class WithNumber:
    """What numpy's integers are to us."""

    def __index__(self) -> int:
        return 0


def test_there_is_a_driver_and_a_device() -> None:
    assert ipcsync.is_available()
    assert ipcsync.driver_name() in ("cuda", "host")
    assert ipcsync.driver_version() >= 12000
    assert ipcsync.device_count() >= 1


def test_each_way_of_naming_a_device_gives_its_ordinal() -> None:
    name = ipcsync.get_device_properties(0).uuid
    ways: list[Any] = [0, "cuda:0", WithNumber(), Torchlike("cuda", 0), WithId(0)]
    ways += [WithShortId(0), ipcsync.Device(0)]
    ways += [name, f"GPU-{name}", name.upper(), f"gpu-{name}", name.replace("-", "")]
    assert {parse(way) for way in ways} == {0}


def test_none_and_cuda_and_an_object_without_a_number_are_the_current_device() -> None:
    here = ipcsync.current_device()
    assert [parse(way) for way in (None, "cuda", Torchlike("cuda", None))] == [here] * 3


@pytest.mark.parametrize(
    "wrong",
    [
        "cpu",
        "cpu:0",
        "cuda:",
        "cuda:-1",
        "cuda:00",
        "cuda:99",
        "cuda:99999999999999999999",
        "CUDA",
        "",
        "0",
        "mps",
        99,
        -1,
        10**30,
        "GPU-00000000-0000-0000-0000-000000000000",
        "00000000-0000-0000-0000-000000000000",
        "GPU-",
        "MIG-00000000-0000-0000-0000-000000000000",
        Torchlike("cpu", None),
        Torchlike("cpu", 0),
        Torchlike("cuda", 99),
        Torchlike("cuda", -1),
        WithId(99),
        ipcsync.Device(99),
    ],
    ids=repr,
)
def test_what_names_no_device_of_this_process_is_an_invalid_device(wrong: Any) -> None:
    with pytest.raises(ipcsync.InvalidDevice):
        ipcsync.get_device_properties(wrong)


@pytest.mark.parametrize(
    "wrong", [True, False, 0.0, 1.5, b"cuda", [], (0,), {}, frozenset(), len, int, Torchlike], ids=repr
)
def test_what_is_no_device_at_all_is_a_type_error(wrong: Any) -> None:
    for call in (
        ipcsync.get_device_properties,
        ipcsync.set_device,
        ipcsync.device,
        ipcsync.Stream,
        ipcsync.synchronize,
    ):
        with pytest.raises(TypeError):
            call(wrong)


def test_an_invalid_device_is_a_value_error_and_an_ipcsync_error() -> None:
    assert issubclass(ipcsync.InvalidDevice, ValueError)
    assert issubclass(ipcsync.InvalidDevice, ipcsync.IpcSyncError)


def test_a_device_is_a_frozen_value() -> None:
    device = ipcsync.Device(0)
    assert (device.type, device.index, str(device), repr(device)) == (
        "cuda",
        0,
        "cuda:0",
        "Device(type='cuda', index=0)",
    )
    assert device == ipcsync.Device(0)
    assert hash(device) == hash(ipcsync.Device(0))
    assert pickle.loads(pickle.dumps(device)) == device
    with pytest.raises(dataclasses.FrozenInstanceError):
        device.index = 1  # type: ignore[misc] # that it cannot be set is what is tested


def test_properties_are_frozen_and_complete() -> None:
    properties = ipcsync.get_device_properties()
    assert [field.name for field in dataclasses.fields(properties)] == [
        "name",
        "major",
        "minor",
        "uuid",
        "total_memory",
        "multi_processor_count",
        "max_threads_per_multi_processor",
        "regs_per_multiprocessor",
        "is_integrated",
        "is_multi_gpu_board",
        "ordinal",
    ]
    assert properties.name
    assert "\0" not in properties.name
    assert re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", properties.uuid)
    assert properties.total_memory > 0
    assert properties.multi_processor_count > 0
    assert isinstance(properties.is_integrated, bool)
    assert isinstance(properties.is_multi_gpu_board, bool)
    assert properties.ordinal == 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        properties.name = ""  # type: ignore[misc] # that it cannot be set is what is tested


def test_a_devices_name_is_that_of_its_part_where_the_driver_tells_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA 12 has two functions, of which the second knows a MIG instance; CUDA 13 has that one by the first's name."""
    monkeypatch.delattr(load(), "cuDeviceGetUuid_v2", raising=False)
    for number, name in enumerate(("cuDeviceGetUuid", "cuDeviceGetUuid_v2")):
        found = uuid.UUID(int=number)  # has `bytes`, too
        monkeypatch.setattr(load(), name, lambda _, found=found: (0, found), raising=False)
        assert set(context._uuids.__wrapped__()) == {str(found)}


def test_uuids_and_ordinals_name_each_other() -> None:
    for ordinal in range(ipcsync.device_count()):
        assert ordinal_of(uuid_of(ordinal)) == ordinal
        assert ordinal_of(f"GPU-{uuid_of(ordinal)}") == ordinal
    for wrong in ("", "GPU-", "nonsense", "00000000-0000-0000-0000-000000000000"):
        with pytest.raises(ipcsync.InvalidDevice):
            ordinal_of(wrong)


def test_a_negative_number_changes_nothing() -> None:
    before = ipcsync.current_device()
    ipcsync.set_device(-1)
    assert ipcsync.exchange_device(-1) == -1
    assert ipcsync.maybe_exchange_device(-5) == -1
    with ipcsync.device(-1):
        assert ipcsync.current_device() == before
    assert ipcsync.current_device() == before


def test_exchanging_returns_what_was_current() -> None:
    ipcsync.set_device(0)
    assert ipcsync.exchange_device(0) == 0
    assert ipcsync.maybe_exchange_device(0) == 0
    assert ipcsync.has_primary_context(0)


def test_a_device_has_no_peer_access_to_itself() -> None:
    assert ipcsync.can_device_access_peer(0, 0) is False
    with pytest.raises(ipcsync.InvalidDevice):
        ipcsync.can_device_access_peer(0, 99)


@pytest.mark.alone
def test_synchronize_takes_any_name_of_a_device() -> None:
    for way in (None, 0, "cuda", "cuda:0", ipcsync.Device(0)):
        ipcsync.synchronize(way)


def test_ipc_collect_counts_what_the_collectors_closed() -> None:
    before = ipcsync.ipc_collect()
    assert isinstance(before, int)

    def three() -> int:
        return 3

    collectors.append(three)
    try:
        assert ipcsync.ipc_collect() == 3
    finally:
        collectors.remove(three)


@pytest.mark.process
def test_asking_makes_no_context() -> None:
    run(
        """
        import ipcsync
        from ipcsync._drivers import load
        assert ipcsync.is_available() and ipcsync.device_count() and ipcsync.current_device() == 0
        ipcsync.get_device_properties(); ipcsync.can_device_access_peer(0, 0); ipcsync.synchronize()
        ipcsync.current_stream(); ipcsync.default_stream(); ipcsync.is_current_stream_capturing()
        event = ipcsync.Event()
        assert event.query()
        event.wait(); event.synchronize()
        assert ipcsync.maybe_exchange_device(0) == 0
        assert not ipcsync.has_primary_context(0) and not ipcsync.has_primary_context(None)
        assert int(load().cuCtxGetCurrent()[1]) == 0
        ipcsync.set_device(0)
        assert ipcsync.has_primary_context(0)
        assert int(load().cuCtxGetCurrent()[1]) != 0
        """
    )


def test_a_device_block_on_a_thread_without_a_context_leaves_it_without_one() -> None:
    seen: list[bool] = []

    def body() -> None:
        with ipcsync.device(0):
            seen.append(context.current() is not None)
        seen.append(context.current() is not None)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [True, False]


@pytest.mark.parametrize("interrupted", [1, 2], ids=["entering", "leaving"])
def test_an_interrupt_behind_the_drivers_call_leaves_a_thread_its_own_context(
    monkeypatch: pytest.MonkeyPatch, interrupted: int
) -> None:
    api = load()
    switch, switches = api.cuCtxSetCurrent, itertools.count(1)
    seen: list[Any] = []

    def switch_and_raise(handle: Any) -> Any:
        result = switch(handle)
        if next(switches) == interrupted:
            raise KeyboardInterrupt
        return result

    def body() -> None:
        try:
            with context.OnDevice(0, context.primary(0)):
                seen.append(context.current() is not None)
        except KeyboardInterrupt:
            seen.append(context.current() is not None)

    monkeypatch.setattr(api, "cuCtxSetCurrent", switch_and_raise)
    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == ([False] if interrupted == 1 else [True, False])


@pytest.mark.process
def test_two_devices_are_current_one_at_a_time_and_per_thread() -> None:
    run_on_two(
        """
        import threading
        ipcsync.set_device(1)
        assert ipcsync.current_device() == 1
        seen = []
        thread = threading.Thread(target=lambda: seen.append(ipcsync.current_device()))
        thread.start(); thread.join()
        assert seen == [0]
        assert ipcsync.exchange_device(0) == 1
        with ipcsync.device(1) as block:
            assert ipcsync.current_device() == 1
            with ipcsync.device("cuda:0"), block:
                assert ipcsync.current_device() == 1
            assert ipcsync.current_device() == 1
        assert ipcsync.current_device() == 0
        try:
            with ipcsync.device(1):
                raise KeyError
        except KeyError:
            assert ipcsync.current_device() == 0
        assert ipcsync.maybe_exchange_device(1) == 0 and ipcsync.current_device() == 1
        """
    )


@pytest.mark.process
def test_maybe_exchange_leaves_a_device_without_a_context_alone() -> None:
    run_on_two(
        """
        ipcsync.set_device(0)
        assert ipcsync.maybe_exchange_device(1) == 0
        assert ipcsync.current_device() == 0 and not ipcsync.has_primary_context(1)
        ipcsync.synchronize(1)
        assert not ipcsync.has_primary_context(1)
        """
    )


def test_a_copy_of_a_block_is_one_of_its_own() -> None:
    with ipcsync.device(0) as block:
        copies = [copy.deepcopy(block), pickle.loads(pickle.dumps(block))]
    for each in copies:
        assert each.idx == 0
        with each:
            assert ipcsync.current_device() == 0
        with pytest.raises(IndexError):
            each.__exit__(None, None, None)


@pytest.mark.process
def test_a_context_that_somebody_else_made_current_is_the_current_device() -> None:
    run_on_two(
        """
        from ipcsync._drivers import unwrap, load
        api = load()
        theirs = unwrap(api.cuDevicePrimaryCtxRetain(unwrap(api.cuDeviceGet(1), "")), "")
        unwrap(api.cuCtxSetCurrent(theirs), "")
        assert ipcsync.current_device() == 1
        assert ipcsync.Stream().device_index == 1
        event = ipcsync.Event()
        event.record(ipcsync.Stream(0))
        assert event.device == ipcsync.Device(0)
        assert ipcsync.current_device() == 1 and int(api.cuCtxGetCurrent()[1]) == int(theirs)
        """
    )


@pytest.mark.process
def test_visible_devices_renumber_the_ordinals_and_keep_the_uuids() -> None:
    run_on_two(
        """
        import os, subprocess
        uuids = [ipcsync.get_device_properties(i).uuid for i in range(2)]
        code = "import ipcsync; print(*(ipcsync.get_device_properties(i).uuid for i in range(ipcsync.device_count())))"
        for visible, expected in (("1,0", uuids[::-1]), (f"GPU-{uuids[1]}", uuids[1:])):
            out = subprocess.check_output(
                [sys.executable, "-c", code], env={**os.environ, "CUDA_VISIBLE_DEVICES": visible}, timeout=30
            )
            assert out.decode().split() == expected, (visible, out)
        """
    )


@pytest.mark.process
def test_without_any_device_there_is_nothing_and_asking_says_so() -> None:
    run(
        """
        import ipcsync
        assert ipcsync.device_count() == 0 and not ipcsync.is_available()
        try:
            ipcsync.Stream()
        except (ipcsync.NoDriver, ipcsync.InvalidDevice, ipcsync.DriverError):
            pass
        else:
            raise AssertionError
        """,
        CUDA_VISIBLE_DEVICES="",
    )
