"""A recorder is killed: when do others learn of it, when do their streams go on, and what does a bystander feel?

    IPCSYNC_DRIVER=cuda python -m tests.gpu.deaths

Both engines; the recorder's stream is idle, held back, or has some 0.3 s of work in front of it. Milliseconds after the
kill; a line for each, at once.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import time
from contextlib import ExitStack, closing
from typing import Any

import ipcsync
from ipcsync._linux.process import PidFd
from ipcsync.typing import EngineName
from tests.contract import actions, probe_actions
from tests.kit import driver_kit as kit
from tests.kit.peer import Peer

_LONGEST_S = 8.0
_LONG = {"gpu": (2 << 30, 400), "software": (64 << 20, 30)}  # about 0.3 s
_kept: list[Any] = []


def record(endpoint: str, name: str, engine: EngineName, work: str) -> bytes:
    """In the recorder: record behind its work; the point."""
    client = ipcsync.connect(endpoint)
    kit.use_device(0)
    actions.create_stream("s")
    if work == "held":
        actions.hold("s")
    elif work == "long":
        probe_actions.submit_long_work("s", *_LONG[kit.driver_kind()])
    event = client.event(name, recorder=True, engine=engine)
    _kept.append((client, event))
    return bytes(event.record(int(actions._named["s"])))


def time_context() -> float:
    """In a bystander: how long its first context takes, in seconds."""
    began = time.perf_counter()
    kit.use_device(0)
    return time.perf_counter() - began


class _Death:
    """One death, and when each thing was seen first."""

    def __init__(self, client: ipcsync.Client, point: ipcsync.Point, pid: int) -> None:
        self._client, self._point, self._pid = client, point, pid
        self._began = 0.0
        self.seen: dict[str, float] = {}
        self.said: dict[str, str] = {}

    def _note(self, what: str) -> None:
        self.seen.setdefault(what, 1e3 * (time.perf_counter() - self._began))

    def _synchronize(self) -> None:
        try:
            self._point.synchronize(30)
            self._note("synchronize returned")
        except ipcsync.IpcSyncError as error:
            self._note(f"synchronize raised {type(error).__name__}")

    def watch(self, bystander: ipcsync.Stream) -> None:
        """Kill, and look until all is seen."""
        waiting, event = ipcsync.Stream(), ipcsync.Event()
        self._point.wait(waiting)
        host = threading.Thread(target=self._synchronize, daemon=True)
        worst = 0.0
        with closing(PidFd(self._pid)) as pidfd:
            self._began = time.perf_counter()
            host.start()
            time.sleep(0.05)
            self._began = time.perf_counter()
            os.kill(self._pid, signal.SIGKILL)
            while time.perf_counter() - self._began < _LONGEST_S:
                if pidfd.has_ended():
                    self._note("pidfd readable")
                if waiting.query():
                    self._note("waiting stream went on")
                before = time.perf_counter()
                event.record(bystander)
                event.synchronize()
                worst = max(worst, time.perf_counter() - before)
                is_over = "pidfd readable" in self.seen and not host.is_alive()
                if is_over and ("waiting stream went on" in self.seen or time.perf_counter() - self._began > 2):
                    break
            if "waiting stream went on" not in self.seen:
                self.said["waiting stream"] = f"stood still for {time.perf_counter() - self._began:.1f} s"
        self.said["a bystander's longest record and synchronize"] = f"{1e3 * worst:.2f} ms"
        asked = time.perf_counter()
        is_over = self._client.wait_over(self._point, 3)
        self.said["wait_over"] = f"{is_over}, {1e3 * (time.perf_counter() - asked):.0f} ms after it was asked"

    def in_words(self) -> str:
        """One line."""
        times = [f"{what} {after:.2f} ms" for what, after in sorted(self.seen.items(), key=lambda item: item[1])]
        return "; ".join([*times, *(f"{what}: {answer}" for what, answer in self.said.items())])


def main() -> None:
    """A line for each engine and each kind of work."""
    with ExitStack() as stack:
        coordinator = stack.enter_context(ipcsync.launch(log_level="error"))
        client = stack.enter_context(ipcsync.connect(coordinator.endpoint))
        bystander = ipcsync.Stream()
        engines: tuple[EngineName, ...] = ("event", "timeline")
        for engine in engines:
            for work in ("idle", "held", "long"):
                recorder, newcomer = Peer(), Peer()
                data = recorder.call(record, coordinator.endpoint, f"deaths/{engine}/{work}", engine, work)
                death = _Death(client, client.point(data), recorder.pid)
                death.watch(bystander)
                recorder.kill()
                context = newcomer.call(time_context)
                newcomer.close()
                sys.stdout.write(f"{engine}, {work}: {death.in_words()}; a new context after it: {context:.2f} s\n")
                sys.stdout.flush()
    sys.stdout.flush()
    os._exit(0)  # on `event` streams of this process wait for the dead for ever, and its exit would


if __name__ == "__main__":  # the peers import what they call by its own name
    importlib.import_module("tests.gpu.deaths").main()
