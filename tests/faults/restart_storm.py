"""Everything that may happen to a keeper's children, at random, under load, and nobody notices.

`python -m tests.faults.restart_storm [--seconds N] [--seed N]`: coordinators and spares are killed or stopped,
descriptors and the place for outcomes taken away, the keeper itself stopped, new code asked for, up to three times at
once. Meanwhile threads open, record, wait and close. Status 1, and why, if one of them meets an error, or anything is
left afterwards.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import signal
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import ipcsync
from ipcsync._board.runtime_dir import OUTCOME, RELOAD
from tests.faults.restart_figures import Asker, children
from tests.kit.until import until

_ASKERS = 4
_LONGEST_STOP_S = 0.5


class Storm:
    """What is done to one kept coordinator; `done` counts it by name."""

    def __init__(self, one: ipcsync.Coordinator, askers: list[Asker], seed: int) -> None:
        self._one = one
        self._askers = askers
        self._random = random.Random(seed)
        self._descriptors = resource.prlimit(one.pid, resource.RLIMIT_NOFILE)
        self._acts: list[Callable[[], None]] = [
            self.kill, self.kill, self.kill, self.kill_all, self.stop, self.stop_the_keeper,
            self.reload, self.reload, self.reload_and_kill, self.take_descriptors, self.take_the_place,
        ]  # fmt: skip
        self.done: Counter[str] = Counter()

    def rage(self, seconds: float) -> None:
        """Do one thing after the other, some at once."""
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            act = self._random.choice(self._acts)
            act()
            self.done[act.__name__] += 1
            if self._random.random() < 0.6:
                self.lull()
            self._wait(0.3)

    def lull(self) -> None:
        """Wait until everybody goes on."""
        turns = [asker.turns for asker in self._askers]
        until(
            lambda: all(asker.turns > before for asker, before in zip(self._askers, turns, strict=True)),
            "everybody goes on",
            60.0,
        )

    def _wait(self, most_s: float) -> None:
        threading.Event().wait(self._random.uniform(0.0, most_s))  # the storm's own rhythm: nothing is waited for

    def _children(self) -> list[int]:
        return sorted(children(self._one.pid))

    def _signal(self, pid: int, number: int) -> None:
        with suppress(ProcessLookupError):  # the keeper has replaced it meanwhile
            os.kill(pid, number)

    def kill(self) -> None:
        """The coordinator, or the spare, or one that is about to take over."""
        present = self._children()
        if present:
            self._signal(self._random.choice(present), signal.SIGKILL)

    def kill_all(self) -> None:
        """All of them at once."""
        for pid in self._children():
            self._signal(pid, signal.SIGKILL)

    def stop(self) -> None:
        """One of them stands still for a while."""
        for pid in self._children()[:1]:
            self._signal(pid, signal.SIGSTOP)
            self._wait(_LONGEST_STOP_S)
            self._signal(pid, signal.SIGCONT)

    def stop_the_keeper(self) -> None:
        """The keeper stands still for a while, in which a child of its may die."""
        os.kill(self._one.pid, signal.SIGSTOP)
        if self._random.random() < 0.5:
            self.kill()
        self._wait(_LONGEST_STOP_S)
        os.kill(self._one.pid, signal.SIGCONT)

    def reload(self) -> None:
        """New code, asked for up to three times at once."""
        for _ in range(self._random.randint(1, 3)):
            os.kill(self._one.pid, RELOAD)

    def reload_and_kill(self) -> None:
        """A child dies somewhere in a reload."""
        os.kill(self._one.pid, RELOAD)
        self._wait(0.5)
        self.kill()

    def take_descriptors(self) -> None:
        """The keeper can start nothing for a while."""
        _, most = self._descriptors
        resource.prlimit(self._one.pid, resource.RLIMIT_NOFILE, (8, most))
        self.kill()
        self._wait(_LONGEST_STOP_S)
        resource.prlimit(self._one.pid, resource.RLIMIT_NOFILE, self._descriptors)

    def take_the_place(self) -> None:
        """What came of a reload cannot be told for a while."""
        path = Path(self._one.runtime_dir, f"{OUTCOME}.new")
        with suppress(FileExistsError):  # one is being written
            path.unlink(missing_ok=True)
            path.mkdir()
            os.kill(self._one.pid, RELOAD)
            self._wait(_LONGEST_STOP_S)
            path.rmdir()


def weather(seconds: float, seed: int) -> Counter[str]:
    """The storm, and what is left when it is over. AssertionError, or whatever an asker met."""
    with (
        ipcsync.launch(keeper=True, spare=True, log_level="error") as one,
        ipcsync.connect(one.endpoint, name="looks", timeout=60.0) as client,
    ):
        client.timeout = 60.0
        client.stats()
        askers = [Asker(one.endpoint, f"asker-{number}") for number in range(_ASKERS)]
        storm = Storm(one, askers, seed)
        try:
            storm.rage(seconds)
            storm.lull()
        finally:
            for asker in askers:
                asker.end()
        until(lambda: client.stats()["sessions"] == 1, "the askers' sessions are over")
        until(lambda: client.stats()["pool_in_use"] == 0, "every slot is free")
        stats = client.stats()
        assert sum(stats["deaths"].values()) == 0, stats["deaths"]
        assert [session.name for session in client.list_sessions()] == ["looks"]
        assert one.is_running
        return storm.done + Counter({"turns": sum(asker.turns for asker in askers), "starts": stats["starts"]})


def main() -> int:
    """Weather it, and say what there was."""
    parser = argparse.ArgumentParser(description="Kill, stop, starve and reload what a keeper keeps, under load.")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3), "little"))
    options = parser.parse_args()
    os.environ.setdefault("IPCSYNC_DRIVER", "host")
    os.environ.setdefault("IPCSYNC_HOST_SEGMENT", uuid.uuid4().hex[:8])
    sys.stdout.write(f"seed {options.seed}\n")
    sys.stdout.flush()
    done = weather(options.seconds, options.seed)
    sys.stdout.write("".join(f"{name:>20} {count}\n" for name, count in sorted(done.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
