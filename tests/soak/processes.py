"""The workers of a soak: forked from this process, killed, stopped, started anew.

This process is the parent of each and has one thread: a worker that it signals is one that it has not reaped, so it
cannot have been replaced by another process of its pid.
"""

from __future__ import annotations

import atexit
import os
import random
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

# Imported for the children, and unused here.
import cuda.bindings.driver
import zmq

import ipcsync._drivers
import ipcsync.client.client
from ipcsync._linux.child import die_with
from tests.soak import worker
from tests.soak.history import DEEDS, History, Op, Record, Result
from tests.soak.oracle import Truth
from tests.soak.session import Plan

assert cuda.bindings.driver
assert zmq
assert ipcsync.client.client

TTL_S = 3.0
TICK_S = 0.02
_END_S = worker.LONG_S + 15.0  # by then the slowest call of a worker has ended


@dataclass(frozen=True)
class Options:
    """What to soak, for how long."""

    minutes: float = 1.0
    processes: int = 64
    kill_rate: float = 5.0  # a second
    seed: int = 1
    driver: str = "host"
    engine: str = "both"
    names: int = 1000
    operations: int = 3000  # a second, of all processes together
    coordinator_kills: float = 0.0  # so many seconds apart, under a keeper; 0: none, and no keeper

    @property
    def seconds(self) -> float:
        """How long workers are started."""
        return self.minutes * 60

    @property
    def lives(self) -> int:
        """More lives than there will be."""
        return 64 + 4 * self.processes + int(self.seconds * (2 * self.kill_rate + self.processes / 16))


@dataclass(eq=False)
class Child:
    """A worker's process."""

    pid: int
    index: int
    life: int
    born: float
    is_killed: bool = False
    goes_on_at: float = 0.0  # while it is stopped


class Herd:
    """The workers: started, killed, stopped, and their ends waited for."""

    def __init__(self, options: Options, plan: Plan, truth: Truth) -> None:
        self._options = options
        self._plan = plan
        self._truth = truth
        self._random = random.Random(f"{options.seed}:deeds")
        self._deeds = History(plan.directory / DEEDS)
        self._children: dict[int, Child] = {}
        self._next_kill = 0.0
        self.lives = 0
        self.kills = 0
        self.stops = 0
        self.hung: list[int] = []

    def start(self) -> None:
        """Start every worker."""
        for index in range(self._options.processes):
            self._spawn(index)
        self._next_kill = time.monotonic() + 2.0

    def _spawn(self, index: int) -> None:
        life, self.lives = self.lives, self.lives + 1
        start = time.monotonic_ns()
        pid = fork(lambda: worker.main(self._plan, self._truth, index, life))
        self._deed(Op.SPAWN, life, start, generation=pid)
        self._children[pid] = Child(pid, index, life, time.monotonic())

    def _deed(self, op: Op, life: int, start: int, **fields: int) -> None:
        self._deeds.write(Record(op, Result.OK, slot=life, start=start, end=time.monotonic_ns(), **fields))

    def tick(self) -> None:
        """Do what is due: reap and start anew, let go on, kill."""
        for child in self._reap():
            if not self._truth.is_over:
                self._spawn(child.index)
        now = time.monotonic()
        for child in self._children.values():
            if child.goes_on_at and now >= child.goes_on_at:
                self._continue(child)
        if self._options.kill_rate and now >= self._next_kill:
            self._next_kill = max(self._next_kill + 1 / self._options.kill_rate, now - 1.0)
            self._strike(now)

    def _reap(self) -> list[Child]:
        ended = []
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            child = self._children.pop(pid)
            code = os.waitstatus_to_exitcode(status)
            self._deed(Op.EXIT, child.life, time.monotonic_ns(), generation=code if code >= 0 else 256 - code)
            ended.append(child)
        return ended

    def _strike(self, now: float) -> None:
        """Kill one, or stop one: mostly for longer than its TTL, sometimes never to go on."""
        # A stopped process keeps what locks of the driver's own it holds, and the start is where it holds them.
        grown = [c for c in self._children.values() if now - c.born > 1.0 and not c.is_killed and not c.goes_on_at]
        if not grown:
            return
        child = self._random.choice(grown)
        fate = self._random.random()
        if fate < 0.85:
            self._kill(child)
        elif len([c for c in self._children.values() if c.goes_on_at]) < 4:
            start = time.monotonic_ns()
            os.kill(child.pid, signal.SIGSTOP)
            self._deed(Op.STOP, child.life, start)
            self.stops += 1
            child.goes_on_at = now + (0.3 if fate < 0.9 else TTL_S * 1.5)

    def _kill(self, child: Child) -> None:
        start = time.monotonic_ns()
        os.kill(child.pid, signal.SIGKILL)
        self._deed(Op.KILL, child.life, start)
        child.is_killed, child.goes_on_at = True, 0.0
        self.kills += 1

    def _continue(self, child: Child) -> None:
        start = time.monotonic_ns()
        os.kill(child.pid, signal.SIGCONT)
        self._deed(Op.CONTINUE, child.life, start)
        child.goes_on_at = 0.0

    def end(self) -> None:
        """Have every worker come to its end; whoever does not is asked for its stacks and killed."""
        self._truth.end()
        for child in self._children.values():
            if child.goes_on_at:
                self._continue(child)
        deadline = time.monotonic() + _END_S
        while self._children and time.monotonic() < deadline:
            self._reap()
            select.select([], [], [], TICK_S)
        for child in list(self._children.values()):
            self.hung.append(child.life)
            os.kill(child.pid, signal.SIGUSR1)
        if self._children:
            select.select([], [], [], 1.0)
        for child in list(self._children.values()):
            self._kill(child)
            self.kills -= 1
        while self._children:
            self._reap()
            select.select([], [], [], TICK_S)
        self._deeds.close()


def fork(run: Callable[[], None]) -> int:
    """A child that calls `run` and ends as an interpreter does; its pid."""
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        die_with(parent)
        run()
        atexit._run_exitfuncs()
        status = 0
    except BaseException:  # noqa: BLE001 - it must not return into the parent's code
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)
