"""`python -m ipcsync_keeper PLAN`, which a coordinator with a keeper executes first."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress

import msgspec

from ipcsync import _room as room
from ipcsync._board.runtime_dir import KEEPER, Outcome, write_outcome
from ipcsync._linux.process import watched
from ipcsync._linux.service_manager import ServiceManager
from ipcsync._logs import configure
from ipcsync_keeper.keeper import Keeper, Plan, Wake
from ipcsync_keeper.resources import Resources, report_failure

log = logging.getLogger("ipcsync.coordinator")

_DESCRIPTORS = 65_536  # each coordinator that it starts has the same limit


def main(plan: Plan) -> int:
    """Hold everything, keep a coordinator serving, and return the exit status."""
    settings = plan.settings
    configure(settings.log_level, as_json=settings.log_json)
    driver, os.environ["IPCSYNC_DRIVER"] = os.environ.get("IPCSYNC_DRIVER", ""), settings.driver
    room.raise_descriptors(_DESCRIPTORS)
    manager = ServiceManager()
    parent = watched(plan.exit_with) if plan.exit_with else None
    if parent is not None and not parent.is_alive():
        return 0
    wake = Wake()  # before anything needs to be removed at the end
    resources = None
    try:
        resources = Resources(settings, KEEPER)
        keeper = Keeper(plan, resources, manager, parent, wake)
    except Exception as caught:  # noqa: BLE001 - whatever it is, it is reported
        if resources is not None:
            resources.close()
        report_failure(caught, "a keeper")
        return 1
    os.environ["IPCSYNC_DRIVER"] = driver  # by which coordinators read their settings
    with suppress(OSError):
        write_outcome(resources.directory.path, Outcome())  # before the file system is full
    status = keeper.run()
    log.info("stopped")
    return status


if __name__ == "__main__":
    sys.exit(main(msgspec.json.decode(sys.argv[1], type=Plan)))
