"""Lanes of calls that are interrupted at random, by signals and at any point, one call after another in one process.

    python -m tests.soak.interrupts --seconds 120 --lanes 2 --seed 1

`tests.faults.interrupts` interrupts each call once at each of its points, on events that few exceptions have met. Here
a process goes on and on, over what all the interruptions before have left. Ends with a table, and with status 1 if a
promise was broken or anything is left at the end.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial

import ipcsync
from ipcsync.typing import EngineName
from tests.faults.interrupt_scenes import SCENES
from tests.faults.interrupt_stage import LONG_TTL_S, Call, Stage
from tests.faults.interrupting import HAS_INSTRUCTIONS, Outcome, interrupted
from tests.faults.interrupts import RENEW, attempt
from tests.faults.signalled import Alarm, arm, disarm, note_dead_threads, raise_alarm
from tests.kit.descriptors import descriptors
from tests.kit.until import until

_CALLS = [call for call in SCENES if call != "launch"]  # which starts a process each time
_ENGINES: tuple[EngineName, ...] = ("event", "timeline")
_LONGEST_S = 2e-3
_SPARE = 8  # descriptors that a process may have more at the end: of a context, a thread on its way


def _signalled(fn: Call, seconds: float) -> Outcome:
    """Run `fn`, and have a signal's handler raise after so long, and again until it was heard."""
    outcome = Outcome()
    try:
        try:
            arm(seconds)
            outcome.result = fn()
        finally:
            disarm()
    except Alarm:
        disarm()  # if it came before the one above could begin
        outcome.where = outcome.stack = "a signal"
    except BaseException as error:  # noqa: BLE001 - told to the caller
        outcome.error = error
    return outcome


def _rounds(
    coordinator: ipcsync.Coordinator, engine: EngineName, seed: str, seconds: float
) -> tuple[Counter[str], list[str]]:
    chance, deadline, stage = random.Random(seed), time.monotonic() + seconds, Stage(coordinator, engine)
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    highest = dict.fromkeys(_CALLS, 400)  # points of a call, as far as is known
    kind = "instruction" if HAS_INSTRUCTIONS else "line"
    while time.monotonic() < deadline and len(wrong) < 5:
        counts["calls"] += 1
        if counts["calls"] % RENEW == 0:
            stage.renew()
        call, point = chance.choice(_CALLS), 0
        if chance.random() < 0.5:
            outcome, failure = attempt(stage, call, partial(_signalled, seconds=chance.uniform(20e-6, _LONGEST_S)))
            counts["by a signal"] += outcome.was_interrupted
        else:
            point = chance.randint(1, highest[call])
            outcome, failure = attempt(stage, call, partial(interrupted, point=point, kind=kind))
            counts[f"at a {kind}"] += outcome.was_interrupted
            if not outcome.was_interrupted:
                highest[call] = max(outcome.points, 1)
        if failure:
            wrong.append(f"{call}, point {point}: {failure}")
            stage.renew()
    stage.close()
    return counts, wrong


def _lane(engine: EngineName, seed: str, seconds: float) -> int:
    """One process's work, over a coordinator of its own; 1 if a promise was broken."""
    signal.signal(signal.SIGALRM, raise_alarm)
    sys.unraisablehook = lambda _: None  # an exception in a finalizer is swallowed, and printed
    died = note_dead_threads()
    with ipcsync.launch(log_level="error", lease_ttl=LONG_TTL_S) as coordinator:
        Stage(coordinator, engine).close()  # what a process opens once
        ipcsync.Event(interprocess=True).ipc_handle()
        before, threads = _descriptors(), set(threading.enumerate())
        counts, wrong = _rounds(coordinator, engine, seed, seconds)
        wrong += _left(coordinator, before, threads)
    wrong += died
    for name, count in sorted(counts.items()):
        sys.stdout.write(f"interrupts: {engine:10}{name:<16}  {count}\n")
    for each in wrong:
        sys.stdout.write(f"VIOLATION {engine}: {each}\n")
    return 1 if wrong or not counts["by a signal"] else 0


def _descriptors() -> Counter[str]:
    """What this process has open: how many of each kind."""
    return Counter(path.partition(":[")[0] for path in descriptors().values())


def _left(coordinator: ipcsync.Coordinator, before: Counter[str], threads: set[threading.Thread]) -> list[str]:
    """What is not given back once the clients are closed."""

    def counts() -> dict[str, object]:
        gc.collect()  # an exception's traceback may keep a closed client, whose board stays mapped as long
        with ipcsync.connect(coordinator.endpoint) as client:
            stats = client.stats()
        more = _descriptors() - before
        found = {
            "slots": stats["pool_in_use"],
            "sessions": stats["sessions"] - 1,
            "threads": [thread.name for thread in set(threading.enumerate()) - threads],
            "descriptors": dict(more) if more.total() > _SPARE else {},
        }
        return {what: count for what, count in found.items() if count}

    try:
        until(lambda: not counts(), "all is given back", 20)
    except AssertionError:
        return [f"left: {counts()}"]
    return []


def soak(seconds: float, lanes: int, seed: int) -> bool:
    """Whether every promise held in so many processes."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.soak.interrupts", "--seconds", str(seconds)]
    running = [
        subprocess.Popen([*command, "--engine", _ENGINES[number % 2], "--seed", str(seed + number)])
        for number in range(lanes)
    ]
    return sum(process.wait() for process in running) == 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run lanes; 0 if every promise held."""
    parser = argparse.ArgumentParser(prog="soak.interrupts", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--lanes", type=int, default=2)
    parser.add_argument("--engine", choices=_ENGINES, help="one lane, in this process")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    os.environ.setdefault("IPCSYNC_DRIVER", ipcsync.driver_name())  # found once, and said once, for all processes
    if options.engine:
        return _lane(options.engine, f"{options.seed}", options.seconds)
    return 0 if soak(options.seconds, options.lanes, options.seed) else 1


if __name__ == "__main__":
    sys.exit(main())
