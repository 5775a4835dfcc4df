"""Lanes of a sender, a process that replays a graph over what it sends, and a third that is told; some are killed.

    python -m tests.soak.graphs --seconds 60 --lanes 2 --seed 1

The sender, held back, fills the cells of each layer, and records for several replays; the graph waits for each layer,
copies it and records. What the third is told to be complete must have been copied with its
own value; what it is told to be lost must name who died. Ends with a table, and with status 1 if any of it was wrong.
"""

from __future__ import annotations

import collections
import random
import sys
import time
from collections.abc import Sequence

import ipcsync
from tests.graphs import actions as do
from tests.kit.peer import Peer, PeerError
from tests.soak.lanes import command, run_groups

_TTL_S = 5.0
_START_S = 120.0  # a process on a machine that is busy
_LAYERS = 3
_BURST = 4


class Lane:
    """One pair, burst after burst. `wrong` tells what broke a promise, `counts` what happened."""

    def __init__(self, endpoint: str, number: int, seed: int) -> None:
        self.wrong: list[str] = []
        self.counts: collections.Counter[str] = collections.Counter()
        self._endpoint = endpoint
        self._number = number
        self._random = random.Random(f"{seed}:{number}")
        self._uses = 0
        self._value = 0

    def run(self, deadline: float) -> None:
        """Go on until then."""
        self._third = self._connected("third")
        self._renew_replaying()
        try:
            while time.monotonic() < deadline:
                self._burst()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told
            self.wrong.append(f"lane {self._number}: {error!r}")
        finally:
            for peer in (self._sending, self._replaying, self._third):
                peer.close()

    def _connected(self, name: str) -> Peer:
        peer = Peer()
        peer.call(do.connect, self._endpoint, f"{name}{self._number}", timeout=_START_S)
        return peer

    def _name(self, what: str) -> str:
        return f"{what}{self._number}/{self._uses}"

    def _renew_replaying(self) -> None:
        self._uses += 1
        self._replaying = self._connected("replaying")
        self._handles = self._replaying.call(do.build, _LAYERS, self._name("read"), "timeline")
        self._renew_sending()

    def _renew_sending(self) -> None:
        self._sending = self._connected("sending")
        self._sending.call(do.open_sources, self._handles, self._name("layers"))

    def _burst(self) -> None:
        (victim,) = self._random.choices(("sending", "replaying", ""), (1, 1, 60))
        self._value = self._value % 255 + 1
        points = self._sending.call(do.send_held, self._value, _BURST)
        sender, replaying = self._sending.pid, self._replaying.pid
        self._replaying.begin(do.replay_burst, points)
        time.sleep(self._random.expovariate(500))  # when the death comes is drawn: nothing is waited for
        if victim:
            (self._sending if victim == "sending" else self._replaying).kill()
        if victim != "sending":
            self._sending.call(do.let_go)
        try:
            made, seen, error = self._replaying.result()
        except (PeerError, EOFError, OSError):
            if victim != "replaying":
                raise
            made, seen, error = [], [], ""
        told = self._third.call(do.outcomes, made)
        self._judge(told, seen, error, sender if victim == "sending" else replaying if victim else 0)
        if victim == "replaying":
            self._sending.kill()  # its cells are gone
            self._renew_replaying()
        elif victim:
            self._uses += 1
            self._replaying.call(do.resume)
            self._replaying.call(do.open_anew, self._name("read"), "timeline")
            self._renew_sending()

    def _judge(self, told: list[tuple[str, str | None, int]], seen: list[int], error: str, victim: int) -> None:
        self.counts["replays"] += len(told)
        self.counts["deaths"] += bool(victim)
        if error and not victim:
            self.wrong.append(f"lane {self._number}: {error}, and nobody died")
        for number, (what, cause, pid) in enumerate(told):
            self.counts[what if cause is None else f"lost, {cause}"] += 1
            found = seen[number * _LAYERS : (number + 1) * _LAYERS]
            if what == "complete" and found != [self._value] * _LAYERS:
                self.wrong.append(f"lane {self._number}: a silent pass: {found} and not {self._value}")
            if what != "complete" and (pid != victim or not victim):
                self.wrong.append(
                    f"lane {self._number}: {victim or 'nobody'} died, and it is told {what} {cause} {pid}"
                )


def soak(seconds: float, lanes: int, seed: int) -> tuple[collections.Counter[str], list[str]]:
    """What happened in so many lanes, and what was wrong."""
    with ipcsync.launch(lease_ttl=_TTL_S, log_level="error") as coordinator:
        return run_groups([Lane(coordinator.endpoint, number, seed) for number in range(lanes)], seconds)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run lanes; 0 if every promise held."""
    return command("graphs", __doc__.splitlines()[0] if __doc__ else None, soak, arguments)


if __name__ == "__main__":
    sys.exit(main())
