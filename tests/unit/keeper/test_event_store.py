"""The CUDA events behind the slots: one that is destroyed while a record is pending."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import ipcsync
from ipcsync import _drivers
from ipcsync._drivers import STREAM_NON_BLOCKING
from ipcsync._native import context
from tests.kit.driver_kit import Latch, finish, ok
from tests.unit.coordinator.coordinator_world import World


@contextmanager
def pending(world: World, serial: int) -> Iterator[None]:
    """Within the block a record of that event is pending."""
    driver = _drivers.load()
    stream = ok(driver.cuStreamCreate(STREAM_NON_BLOCKING))
    latch = Latch(stream)
    try:
        ok(driver.cuEventRecord(world.events._made[serial][1], stream))
        yield
    finally:
        latch.open()
        finish(stream)
        ok(driver.cuStreamDestroy(stream))


def test_no_other_event_gets_the_place_of_one_that_was_destroyed_with_a_pending_record(world: World) -> None:
    (device,) = world.pool.devices
    made = world.events.make(device, 3)
    with pending(world, made[1].serial):
        assert world.events.destroy([shared.serial for shared in made]) == 1
        assert world.events.held() == []
        assert made[1].handle not in [shared.handle for shared in world.events.make(device, 8)]


def test_an_event_that_cannot_be_destroyed_keeps_no_other_from_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    (device,) = world.pool.devices
    made = [shared.serial for shared in world.events.make(device, 3)]
    driver = _drivers.load()
    destroy, refused = driver.cuEventDestroy, world.events._made[made[1]][1]

    def refuse_one(event: object) -> object:
        result = destroy(event)
        return (driver.CUresult.CUDA_ERROR_UNKNOWN,) if event is refused else result

    monkeypatch.setattr(driver, "cuEventDestroy", refuse_one)
    with pytest.raises(ipcsync.DriverError, match="cuEventDestroy"):
        world.events.destroy(made)
    assert world.events.held() == []


def test_an_event_whose_context_cannot_be_made_current_is_held_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    (device,) = world.pool.devices
    made = world.events.make(device, 3)
    error = ipcsync.DriverError("cuCtxSetCurrent failed")
    ensure = context.ensure_context
    answers = iter([error])

    def ensure_but_once(ordinal: int) -> None:
        for first in answers:
            raise first
        ensure(ordinal)

    monkeypatch.setattr(context, "ensure_context", ensure_but_once)
    with pytest.raises(ipcsync.DriverError) as caught:
        world.events.destroy([shared.serial for shared in made])
    assert caught.value is error
    (held,) = world.events.held()
    world.events.destroy([held.serial])
    assert world.events.held() == []


def test_what_is_destroyed_with_a_pending_record_counts_for_the_next_coordinator_too(world: World) -> None:
    (device,) = world.pool.devices
    ring = world.pool.take(device, 2)
    with pending(world, ring[0]):
        made = world.pool.made
        world.pool.destroy(ring)
        assert (world.pool.left_pending, world.pool.made) == (1, made - 1)
        world.begin(held=world.events.held())
        world.pool.sweep(())
        assert (world.pool.left_pending, world.pool.made) == (1, 2)  # with the probe


@pytest.mark.parametrize("is_asked_first", [True, False])
def test_a_devices_probe_is_in_no_ring_and_the_next_coordinator_keeps_it(world: World, is_asked_first: bool) -> None:
    (device,) = world.pool.devices
    asked = world.pool.probe_handle(device) if is_asked_first else None
    ring = world.pool.take(device, 4)
    probe = world.pool.probe_handle(device)
    assert asked in (None, probe)
    assert probe not in world.pool.handles(ring)
    world.begin(held=world.events.held())
    world.pool.sweep(())
    assert [shared.handle for shared in world.events.held()] == [world.pool.probe_handle(device)] == [probe]
    assert world.pool.made == 1
