"""`python -m ipcsync_keeper PLAN`, which a coordinator that is to have a keeper becomes."""

from __future__ import annotations

import logging
import os
import sys

import msgspec

from ipcsync._board.runtime_dir import KEEPER, RuntimeDirError
from ipcsync._linux.service_manager import ServiceManager
from ipcsync._logs import configure, fields
from ipcsync_keeper.holdings import Fixed, Holdings
from ipcsync_keeper.keeper import Keeper

log = logging.getLogger("ipcsync.coordinator")


class Plan(msgspec.Struct, frozen=True):
    """What the command line asked for. `command` starts a coordinator; `exit_with` is PID:START or nothing."""

    fixed: Fixed
    command: list[str]
    spare: bool
    log_level: str
    log_json: bool
    ready_fd: int | None = None
    exit_with: str | None = None


def main(plan: Plan) -> int:
    """Hold, keep a coordinator serving, and return the exit status."""
    configure(plan.log_level, as_json=plan.log_json)
    os.environ["IPCSYNC_DRIVER"] = plan.fixed.driver
    manager = ServiceManager()
    try:
        holdings = Holdings(plan.fixed)
    except Exception as error:
        is_plain = isinstance(error, RuntimeError | RuntimeDirError)
        why = error if isinstance(error, RuntimeDirError) else f"{type(error).__name__}: {error}"
        log.error("cannot start", extra=fields(why=why), exc_info=not is_plain)
        return 1

    holdings.directory.sign(KEEPER)

    def ready() -> None:
        endpoint = holdings.directory.endpoint
        log.info("ready", extra=fields(endpoint=endpoint, keeper=os.getpid(), epoch=holdings.epoch.hex()[:8]))
        if plan.ready_fd is not None:
            os.write(plan.ready_fd, f"{endpoint}\n".encode())
            os.close(plan.ready_fd)
        manager.ready(f"serves {endpoint}")

    keeper = Keeper(holdings, plan.command, manager, ready, spare=plan.spare)
    if plan.exit_with is not None:
        pid, _, started = plan.exit_with.partition(":")
        keeper.end_with(int(pid), int(started))
    status = keeper.run()
    log.info("stopped")
    return status


if __name__ == "__main__":
    sys.exit(main(msgspec.json.decode(sys.argv[1], type=Plan)))
