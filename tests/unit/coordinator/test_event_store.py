"""The CUDA events behind the slots: what is pending is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from ipcsync import _drivers
from ipcsync._drivers.constants import STREAM_NON_BLOCKING
from ipcsync.errors import QuotaExceeded
from ipcsync_keeper.events import SharedCudaEvent
from tests.kit.driver_kit import Latch, complete, finish, ok, open_all_latches
from tests.unit.coordinator.coordinator_world import World


@pytest.fixture
def record_pending(world: World) -> Iterator[Callable[[SharedCudaEvent], Latch]]:
    """Records events on streams that are held back; opening the latch completes the record."""
    driver, streams = _drivers.load(), []

    def record(shared: SharedCudaEvent) -> Latch:
        streams.append(ok(driver.cuStreamCreate(STREAM_NON_BLOCKING)))
        latch = Latch(streams[-1])
        ok(driver.cuEventRecord(world.events._made[shared.serial][1], streams[-1]))
        return latch

    yield record
    open_all_latches()
    for stream in streams:
        finish(stream)
        ok(driver.cuStreamDestroy(stream))


def test_an_event_with_a_pending_record_is_not_destroyed(
    world: World, record_pending: Callable[[SharedCudaEvent], Latch]
) -> None:
    (device,) = world.pool.devices
    made = world.events.make(device, 3)
    serials = [shared.serial for shared in made]
    latch = record_pending(made[1])
    assert world.events.destroy(serials) == 1
    assert (list(world.events._made), world.events.held()) == ([serials[1]], [])
    assert world.events.destroy(serials) == 1
    handles = [shared.handle for shared in world.events.make(device, 8)]
    assert made[1].handle not in handles
    latch.open()
    complete(world.events._made[serials[1]][1])
    assert world.events.destroy(serials) == 0


def test_what_is_set_aside_counts_until_it_is_complete(
    world: World, record_pending: Callable[[SharedCudaEvent], Latch]
) -> None:
    pool, (device,) = world.pool, world.pool.devices
    ring = pool.take(device, 4)
    made = pool.made
    latches = [record_pending(world.events._made[serial][0]) for serial in ring[:2]]
    pool.destroy(ring)
    assert pool.made == made - 2
    with pytest.raises(QuotaExceeded, match="already, 2 of them set aside with a pending record"):
        pool.take(device, 200)
    latches[0].open()
    complete(world.events._made[ring[0]][1])
    pool.destroy_aside()
    assert pool.made == made - 3
    world.begin(held=world.events.held())  # the next coordinator is told how many there are
    world.pool.sweep(())
    assert ring[1] in world.events._made
    assert world.pool.made == 1
    latches[1].open()
    complete(world.events._made[ring[1]][1])
    world.pool.destroy_aside()
    assert not world.events._made
    assert world.pool.made == 0
