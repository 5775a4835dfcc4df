"""Checks with two processes over a coordinator: each engine, the release of waiters, and a recorder's death.

Each check returns its finding; CheckFailed says why it could not be completed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from ipcsync.cli.doctor import actions
from ipcsync.cli.doctor.workers import CheckFailed, Workers
from ipcsync.typing import EngineName

_RELEASE_S = 2.0  # the coordinator, and drivers that release, take less than a tenth of this


@dataclass(frozen=True)
class Death:
    """The result of a recorder's death: the waiter's outcome, and whether its stream went on."""

    outcome: str
    stream_goes_on: bool


def _name(what: str) -> str:
    return f"ipcsync-doctor/{os.urandom(6).hex()}/{what}"


def hand_over(workers: Workers, endpoint: str, engine: EngineName, device: int) -> None:
    """A record behind a held stream in one process, waited for by a stream of another. CheckFailed if it fails."""
    name = _name("hand-over")
    recorder, waiter = workers["recorder"], workers["waiter"]
    recorder.call(actions.open_recorder, endpoint=endpoint, name=name, engine=engine, device=device)
    recorder.call(actions.record, name=name)
    waiter.call(actions.join, endpoint=endpoint, name=name, device=device, generation=1, ahead=False)
    if not waiter.call(actions.is_held, name=name):
        raise CheckFailed("the waiting stream did not wait for the other process's unfinished work")
    recorder.call(actions.release, name=name)
    if engine == "timeline" and not recorder.call(actions.completed_here, name=name, generation=1):
        raise CheckFailed("the CPU does not see what the recorder's stream wrote to the board")
    if not waiter.call(actions.goes_on, name=name):
        raise CheckFailed("the waiting stream did not go on when the other process's work was done")
    outcome = waiter.call(actions.outcome, name=name, generation=1)
    if outcome != "complete":
        raise CheckFailed(f"the waiter got {outcome!r} for work that is complete")
    waiter.call(actions.leave, name=name)
    recorder.call(actions.close_recorder, name=name)


def release(workers: Workers, endpoint: str) -> bool:
    """Whether a stream that waits ahead goes on when the coordinator releases it, which it does by a plain store."""
    name = _name("release")
    recorder, waiter = workers["recorder"], workers["waiter"]
    recorder.call(actions.open_recorder, endpoint=endpoint, name=name, engine="timeline", device=0)
    waiter.call(actions.join, endpoint=endpoint, name=name, device=0, generation=1, ahead=True)
    recorder.call(actions.close_recorder, name=name)
    woke: bool = waiter.call(actions.goes_on, name=name)
    if woke:
        waiter.call(actions.leave, name=name)
    else:
        waiter.kill()  # its stream can never go on
    return woke


def death(workers: Workers, endpoint: str, engine: EngineName) -> Death:
    """Kill a recorder by SIGKILL while its work is unfinished, with a stream of another process waiting for it."""
    name = _name("death")
    victim, waiter = workers["victim"], workers["bereaved"]
    victim.call(actions.open_recorder, endpoint=endpoint, name=name, engine=engine, device=0)
    victim.call(actions.record, name=name)
    waiter.call(actions.join, endpoint=endpoint, name=name, device=0, generation=1, ahead=False)
    if not waiter.call(actions.is_held, name=name):
        raise CheckFailed("the waiting stream did not wait for the other process's unfinished work")
    victim.kill()
    outcome = waiter.call(actions.outcome, name=name, generation=1)
    goes_on: bool = waiter.call(actions.goes_on, name=name, seconds=_RELEASE_S)
    if goes_on:
        waiter.call(actions.leave, name=name)
    else:
        waiter.kill()  # its stream can never go on
    return Death(outcome, goes_on)
