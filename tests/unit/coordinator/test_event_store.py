"""The CUDA events behind the slots: one that is destroyed while a record is pending."""

from __future__ import annotations

from ipcsync import _drivers
from ipcsync._drivers.constants import STREAM_NON_BLOCKING
from tests.kit.driver_kit import Latch, finish, ok
from tests.unit.coordinator.coordinator_world import World


def test_no_other_event_gets_the_place_of_one_that_was_destroyed_with_a_pending_record(world: World) -> None:
    driver, (device,) = _drivers.load(), world.pool.devices
    made = world.events.make(device, 3)
    stream = ok(driver.cuStreamCreate(STREAM_NON_BLOCKING))
    latch = Latch(stream)
    try:
        ok(driver.cuEventRecord(world.events._made[made[1].serial][1], stream))
        world.events.destroy([shared.serial for shared in made])
        assert world.events.held() == []
        assert made[1].handle not in [shared.handle for shared in world.events.make(device, 8)]
    finally:
        latch.open()
        finish(stream)
        ok(driver.cuStreamDestroy(stream))
