"""Devices and contexts: what is asked of each device, which ones a process sees and in which order, several at once."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from ipcsync._drivers import name
from tests.contract import actions
from tests.kit import driver_kit as kit
from tests.kit.driver_kit import code, in_thread, ok
from tests.kit.peer import Peer

pytestmark = [pytest.mark.driver, pytest.mark.process]

New = Callable[..., Any]
INVALID_DEVICE = 101

ATTRIBUTES = {
    "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR": 75,
    "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR": 76,
    "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT": 16,
    "CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR": 39,
    "CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR": 82,
    "CU_DEVICE_ATTRIBUTE_INTEGRATED": 18,
    "CU_DEVICE_ATTRIBUTE_MULTI_GPU_BOARD": 84,
    "CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED": 78,
    "CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED": 125,
}


def gpu_name(raw: bytes) -> str:
    return f"GPU-{uuid.UUID(bytes=raw)}"


def test_counting_devices_before_initialising_says_not_initialized(new_peer: New, drv: ModuleType) -> None:
    assert new_peer().call(actions.count_before_init, name()) == kit.NOT_INITIALIZED


def test_the_driver_tells_its_version(drv: ModuleType) -> None:
    assert int(ok(drv.cuDriverGetVersion())) >= 12000


def test_ordinals_reach_from_zero_to_the_count(drv: ModuleType, ctx: Any) -> None:
    count = int(ok(drv.cuDeviceGetCount()))
    assert count >= 1
    assert [int(ok(drv.cuDeviceGet(i))) for i in range(count)] == list(range(count))
    assert code(drv.cuDeviceGet(count)) == INVALID_DEVICE
    assert code(drv.cuDeviceGet(-1)) == INVALID_DEVICE


@pytest.mark.parametrize(("attribute", "number"), ATTRIBUTES.items())
def test_a_device_answers_for_every_attribute_that_is_asked(
    drv: ModuleType, ctx: Any, attribute: str, number: int
) -> None:
    member = getattr(drv.CUdevice_attribute, attribute)
    assert int(member) == number
    value = int(ok(drv.cuDeviceGetAttribute(member, ok(drv.cuDeviceGet(0)))))
    assert value >= 0
    if number in (125, 78):
        assert value == 1


def test_a_device_has_a_name_memory_and_a_uuid_of_16_bytes(drv: ModuleType, ctx: Any) -> None:
    assert kit.device_name()
    assert int(ok(drv.cuDeviceTotalMem(ok(drv.cuDeviceGet(0))))) > 0
    assert len(kit.device_uuid(0)) == 16
    assert any(kit.device_uuid(0))


def test_every_process_sees_the_same_uuid(drv: ModuleType, ctx: Any, partner: Peer, third: Peer) -> None:
    assert partner.call(actions.uuids) == third.call(actions.uuids)
    assert partner.call(actions.uuids)[0] == kit.device_uuid(0)


def test_a_device_is_chosen_by_its_uuid(drv: ModuleType, ctx: Any, new_peer: New) -> None:
    raw = kit.device_uuid(0)
    assert new_peer(CUDA_VISIBLE_DEVICES=gpu_name(raw)).call(actions.uuids) == [raw]


# ---- contexts


def test_the_primary_context_is_the_same_for_all_and_current_per_thread(drv: ModuleType, ctx: Any) -> None:
    assert int(ok(drv.cuCtxGetCurrent())) == int(ctx)
    assert int(ok(drv.cuCtxGetDevice())) == 0
    assert in_thread(lambda: int(ok(drv.cuCtxGetCurrent()))) == 0
    assert in_thread(lambda: int(kit.use_device(0))) == int(ctx)


def test_pushing_and_popping_a_context_restores_the_one_before(drv: ModuleType, ctx: Any) -> None:
    def push_and_pop() -> list[int]:
        ok(drv.cuCtxPushCurrent(ctx))
        inside = int(ok(drv.cuCtxGetCurrent()))
        popped = int(ok(drv.cuCtxPopCurrent()))
        return [inside, popped, int(ok(drv.cuCtxGetCurrent()))]

    assert in_thread(push_and_pop) == [int(ctx), int(ctx), 0]


def test_asking_for_the_device_without_a_context_is_an_invalid_context(drv: ModuleType, ctx: Any) -> None:
    assert in_thread(lambda: code(drv.cuCtxGetDevice())) == kit.INVALID_CONTEXT


def test_a_primary_context_is_active_only_while_retained_and_asking_creates_nothing(new_peer: New) -> None:
    assert new_peer().call(actions.primary_context_states) == [False, True, True, True, False]


# ---- forks


def test_calls_in_a_child_forked_after_initialising_say_not_initialized(partner: Peer) -> None:
    assert partner.call(actions.codes_in_forked_child) == [kit.NOT_INITIALIZED] * 5


def test_a_child_forked_before_the_first_use_may_use_the_driver(new_peer: New) -> None:
    assert new_peer().call(actions.use_in_child_forked_before_use) == 0


# ---- several devices


def test_devices_have_different_uuids(two_devices: New) -> None:
    uuids = two_devices().call(actions.uuids)
    assert len(set(uuids)) == len(uuids) >= 2


def test_visible_devices_are_chosen_and_ordered_by_index(two_devices: New) -> None:
    first, second = two_devices().call(actions.uuids)[:2]
    expected = {"1,0": [second, first], "1": [second], "0": [first], "0,-1,1": [first], "1,99,0": [second]}
    for visible, seen in expected.items():
        assert two_devices(visible).call(actions.uuids) == seen, visible


def test_visible_devices_are_chosen_and_ordered_by_uuid(two_devices: New) -> None:
    first, second = two_devices().call(actions.uuids)[:2]
    names = [gpu_name(second), gpu_name(first)]
    assert two_devices(",".join(names)).call(actions.uuids) == [second, first]
    assert two_devices(names[0]).call(actions.uuids) == [second]
    assert two_devices(names[0][:16]).call(actions.uuids) == [second]  # a prefix that only one device has


def test_an_event_reaches_processes_that_number_the_same_devices_differently(two_devices: New) -> None:
    straight = two_devices()
    crossed = two_devices("1,0")
    straight.call(actions.start, 0)
    ordinal = crossed.call(actions.uuids).index(straight.call(actions.uuids)[0])
    assert ordinal == 1
    crossed.call(actions.start, ordinal)
    assert crossed.call(actions.open_event, "e", straight.call(actions.share_event, "e")) == kit.SUCCESS
    for each in (straight, crossed):
        each.call(actions.create_stream, "s")
    straight.call(actions.hold, "s")
    assert straight.call(actions.record, "e", "s") == kit.SUCCESS
    assert crossed.call(actions.query, "e") == kit.NOT_READY
    assert crossed.call(actions.wait, "s", "e") == kit.SUCCESS
    assert crossed.call(actions.query_stream, "s") == kit.NOT_READY
    straight.call(actions.release, "s")
    crossed.call(actions.finish, "s")
    assert crossed.call(actions.record, "e", "s") == kit.SUCCESS
    straight.call(actions.complete, "e")


def test_a_stream_of_another_device_may_wait_but_not_record_and_others_may_query_and_synchronize(
    two_devices: New,
) -> None:
    assert two_devices().call(actions.across_devices) == {
        "record on a stream of another device": kit.INVALID_HANDLE,
        "wait from another device": kit.SUCCESS,
        "stream of another device that waits": kit.NOT_READY,
        "query of a pending event with another device current": kit.NOT_READY,
        "elapsed time across devices": kit.INVALID_HANDLE,
        "synchronize with another device current": kit.SUCCESS,
        "query with another device current": kit.SUCCESS,
    }


def test_a_device_is_no_peer_of_itself(two_devices: New) -> None:
    to_itself, _ = two_devices().call(actions.peer_access)
    assert to_itself is False
