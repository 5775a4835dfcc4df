"""Interrupts every public call at each of its points, and looks whether every promise still holds.

    python -m tests.faults.interrupts [--kind line|instruction] [--engine E] [--only CALL] [--every N]

It prints a table of what was interrupted where, with counts, and ends with 1 if anything does not hold. A point is a
line, or on Python 3.12 and later an instruction, of ipcsync's own code beneath the call; see `interrupting`.
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import ipcsync
from ipcsync.typing import EngineName
from tests.faults.interrupt_scenes import SCENES
from tests.faults.interrupt_stage import LONG_TTL_S, Call, Stage
from tests.faults.interrupting import HAS_INSTRUCTIONS, Outcome, interrupted

RENEW = 100  # calls after which a scene has new events
_STUCK_S = 60.0
ENOUGH = 10  # failures of one call


@dataclass
class Result:
    """What became of one call's points."""

    call: str
    engine: str
    points: int = 0
    where: Counter[str] = field(default_factory=Counter)  # modules
    failures: list[str] = field(default_factory=list)


def attempt(stage: Stage, call: str, run: Callable[[Call], Outcome]) -> tuple[Outcome, str]:
    """Make a call once, as `run` makes and interrupts it, and look: what came of it, and what does not hold."""
    faulthandler.dump_traceback_later(_STUCK_S, exit=True)
    fn, after = SCENES[call](stage)
    stage.highest = max(stage.highest, stage.event._engine._begun)
    outcome, failure = run(fn), ""
    kept = stage.kept()  # before what follows, whose calls release what an exception left held
    try:
        if outcome.error is not None and not outcome.was_interrupted:
            raise outcome.error
        after(outcome)
        stage.check()
        stage.require(not kept, f"kept until the next call: {kept}")
    except Exception as error:  # noqa: BLE001 - told in the table
        failure = f"{type(error).__name__}: {error}\n    interrupted at {outcome.stack}\n    {stage.pending()}"
    faulthandler.cancel_dump_traceback_later()
    return outcome, failure


def interrupt(stage: Stage, call: str, kind: str, every: int = 1, first: int = 1) -> Result:
    """Interrupt a call at each of its points, or at every so many from the `first` on; what did not hold."""
    result = Result(call, stage.engine)
    number = first
    while True:
        if result.points % RENEW == 0:
            stage.renew()
        outcome, failure = attempt(stage, call, partial(interrupted, point=number, kind=kind))
        if failure:
            result.failures.append(failure)
            if len(result.failures) >= ENOUGH:
                break
            stage.renew()
        if not outcome.was_interrupted:
            break
        result.points += 1
        result.where[outcome.where.partition(":")[0]] += 1
        number += every
    return result


def main() -> None:
    """The whole."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.interrupts")
    parser.add_argument("--kind", choices=["line", "instruction"], action="append")
    parser.add_argument("--engine", choices=["event", "timeline"], action="append")
    parser.add_argument("--only", choices=SCENES, action="append")
    parser.add_argument("--every", type=int, default=1, help="of so many points, interrupt one")
    args = parser.parse_args()
    kinds = args.kind or ["line", *(["instruction"] if HAS_INSTRUCTIONS else [])]
    engines: list[EngineName] = args.engine or ["event", "timeline"]
    failed = False
    with ipcsync.launch(log_level="error", pool=8192, lease_ttl=LONG_TTL_S) as coordinator:
        for kind in kinds:
            for engine in engines:
                stage = Stage(coordinator, engine)
                for call in args.only or SCENES:
                    result = interrupt(stage, call, kind, args.every)
                    failed |= bool(result.failures)
                    modules = ", ".join(f"{name} {count}" for name, count in result.where.most_common(6))
                    sys.stdout.write(
                        f"{kind:12}{engine:10}{call:26}{result.points:6} points, {len(result.failures)} failures"
                        f"   {modules}\n"
                    )
                    for failure in result.failures[:3]:
                        sys.stdout.write(f"  {failure[:1500]}\n")
                    sys.stdout.flush()
                stage.close()
    sys.exit(failed)


if __name__ == "__main__":
    main()
