"""What runs on a host of the soak: its worker processes, which record, follow and claim, and who tends them."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import ipcsync
from tests.fleet import history, hosts
from tests.fleet.history import Journal
from tests.kit.peer import Peer, PeerError
from tests.kit.until import DEADLINE_S, until

FIRST_WAIT_S = 5.0
LONGEST_WAIT_S = 60.0  # none takes that long: they end by a record, or a loss
_PACE_S = 0.03
_AGAIN_S = 0.1  # until another host is asked again that had nothing, or was away
_NAMES = 3
_ROOM = 4  # descriptors that a bridge may have open for what it does just now

# --- a worker ---------------------------------------------------------------------------------------------------------


class Worker:
    """Records on one event after another, follows events of other nodes, and claims names of the fleet."""

    def __init__(self, endpoint: str, node: str, others: list[str], by: str, path: Path, *, is_recorder: bool) -> None:
        self._journal = Journal(path)
        self._client = ipcsync.connect(endpoint, name=by)
        self._client.timeout = DEADLINE_S
        self._node, self._others, self._by = node, others, by
        self._chance = random.Random(by)
        self._stop = threading.Event()
        works = [self._follow, self._claim, *([self._record] if is_recorder else [])]
        self._threads = [threading.Thread(target=self._guarded, args=(work,)) for work in works]

    def run(self) -> None:
        """Work until SIGTERM, or until the session is lost."""
        for thread in self._threads:
            thread.start()
        signal.sigwait({signal.SIGTERM})
        self._stop.set()
        for thread in self._threads:
            thread.join(2 * LONGEST_WAIT_S)
            if thread.is_alive():
                self._journal.write("problem", f"{thread.name} did not end")
        self._client.close()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except ipcsync.SessionLost:  # it was stopped for longer than its lease
            os.kill(os.getpid(), signal.SIGTERM)
        except BaseException as error:
            self._journal.write("problem", f"{work.__name__}: {error!r}")
            raise

    def _record(self) -> None:
        stream, number = ipcsync.Stream(), 0
        while not self._stop.is_set():
            number += 1
            with self._client.event(f"{self._node}/{self._by}.{number}", recorder=True, engine="timeline") as event:
                use = _use_of(event)
                for _ in range(self._chance.randrange(20, 200)):
                    if self._stop.is_set():
                        break
                    self._journal.write("recorded", use, event.generation + 1)
                    event.record(stream)
                    self._stop.wait(_PACE_S)
                if event.generation:
                    event.at(event.generation).synchronize(LONGEST_WAIT_S)

    def _follow(self) -> None:
        while not self._stop.is_set():
            other = self._chance.choice(self._others)
            try:
                rows = self._client.list_events(f"{other}/", node=other, timeout=5.0)
                names = [row.name for row in rows if row.state == "open" and row.recorder]
                event = self._client.event(self._chance.choice(names), node=other, timeout=5.0) if names else None
            except ipcsync.SessionLost:
                raise
            except ipcsync.IpcSyncError:
                event = None
            if event is None:
                self._stop.wait(_AGAIN_S)
                continue
            with event:
                self._follow_one(event, other, self._chance.randrange(5, 300))

    def _follow_one(self, event: ipcsync.SharedEvent, other: str, count: int) -> None:
        generation, use = 0, _use_of(event)
        for _ in range(count):
            if self._stop.is_set():
                return
            generation = max(generation + 1, event.generation)
            began = time.monotonic()
            try:
                event.at(generation).synchronize(LONGEST_WAIT_S if generation > 1 else FIRST_WAIT_S)
                what = "complete"
            except ipcsync.RecorderLost as error:
                what = type(error).__name__
            except ipcsync.WaitTimeout:
                if generation > 1:
                    raise
                return  # its recorder had closed before it was opened here, which opened it anew
            self._journal.write("seen", other, use, generation, what, began)
            if what != "complete":
                return

    def _claim(self) -> None:
        while not self._stop.wait(self._chance.uniform(0.1, 2.0)):
            name, asked = f"lock/{self._chance.randrange(_NAMES)}", time.monotonic()
            try:
                event = self._client.event(name, recorder=True, fleet=True, timeout=5.0)
            except (ipcsync.RecorderTaken, ipcsync.FleetUnavailable, ipcsync.WaitTimeout, ipcsync.NoBridge):
                continue
            with event:
                self._journal.write("holds", name, asked)
                self._stop.wait(self._chance.uniform(0.0, 1.0))
                self._journal.write("frees", name)


def _use_of(event: ipcsync.SharedEvent) -> str:
    """The same on every host, and another one for each use of a name."""
    return bytes(event.at(1))[:32].hex()


def work(endpoint: str, node: str, others: list[str], by: str, path: str, *, is_recorder: bool) -> None:
    """Be a worker."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # before there are threads, which inherit it
    Worker(endpoint, node, others, by, Path(path), is_recorder=is_recorder).run()


# --- who tends them ---------------------------------------------------------------------------------------------------


class Tender:
    """The workers of this host; each that ends is replaced by a new one, and so is a bridge."""

    def __init__(self, node: str, others: list[str], processes: int, recorders: int) -> None:
        self._node, self._others, self._recorders = node, others, recorders
        self._directory = Path(hosts._here["coordinator"].runtime_dir) / "journals"
        self._directory.mkdir()
        self._lives = 0
        self.ends: Counter[str] = Counter()
        self._problems: list[str] = []
        self._files = self._bridge_files()  # while nothing is linked
        self._by: list[str] = [""] * processes
        self._peers = [self._started(place) for place in range(processes)]

    def _path(self, by: str) -> Path:
        return self._directory / by

    def _started(self, place: int) -> Peer:
        self._lives += 1
        by = self._by[place] = f"{self._node}.{place}.{self._lives}"
        peer = Peer()
        peer.begin(
            work, hosts._here["coordinator"].endpoint, self._node, self._others, by, str(self._path(by)),
            is_recorder=place < self._recorders,
        )  # fmt: skip
        return peer

    def _ended(self, place: int) -> None:
        """Nothing that the worker holds counts from now on."""
        journal = Journal(self._path(self._by[place]))
        journal.write("ended")
        journal.close()

    def kill(self, place: int) -> None:
        """Kill one."""
        self._ended(place)
        self._peers[place].signal(signal.SIGKILL)
        self._peers[place].wait(DEADLINE_S)

    def stop(self, place: int, *, is_for_long: bool) -> None:
        """Stop one; `is_for_long` if its session will be lost by that."""
        self._peers[place].signal(signal.SIGSTOP)
        if is_for_long:
            self._ended(place)

    def go_on(self, place: int) -> None:
        """Let one that was stopped go on."""
        self._peers[place].signal(signal.SIGCONT)

    def tend(self) -> None:
        """Replace whoever has ended."""
        self._tend_bridge()
        for place, peer in enumerate(self._peers):
            if peer.status is not None or peer.has_result:
                self.ends[f"worker {self._reaped(peer)}"] += 1
                self._peers[place] = self._started(place)

    def _tend_bridge(self) -> None:
        status = hosts._here["bridge"].poll()
        if status is not None:
            if status not in (-signal.SIGKILL, 1):  # 1: its lease has expired, or there was no store when it began
                self._problems.append(f"the bridge of {self._node} ended with {status}: {hosts.bridge_text()[-2000:]}")
            self.ends[f"bridge {status}"] += 1
            hosts.start_bridge()

    def _reaped(self, peer: Peer) -> str:
        """How it ended: by a signal, "lost" if it had lost its session, or not as it should."""
        if peer.status == -signal.SIGKILL:
            peer.close()
            return "killed"
        try:
            peer.result()
        except PeerError as error:
            self._problems.append(f"a worker of {self._node}: {error}")
            peer.close()
            return "failed"
        peer.close()
        return "lost"

    def heard(self, since: float) -> set[str]:
        """Of which other nodes a worker has seen a generation complete that it asked for since then."""
        return {
            line[2]
            for by in self._by
            if self._path(by).exists()
            for line in history.read(self._path(by))
            if line[0] == "seen" and line[5] == "complete" and line[6] >= since
        }

    def end(self) -> None:
        """Have the workers end."""
        for peer in self._peers:
            peer.signal(signal.SIGCONT)
            peer.signal(signal.SIGTERM)
        for peer in self._peers:
            try:
                peer.result(3 * LONGEST_WAIT_S)
            except PeerError as error:
                if not peer.wait(0.0) or peer.status != -signal.SIGKILL:  # it goes on, or nobody killed it
                    self._problems.append(f"a worker of {self._node}: {error}")
            peer.close()

    def rest(self) -> tuple[dict[str, history.Lines], list[str], dict[str, int]]:
        """After all hosts' workers have ended: the journals by worker, what is wrong, and how processes ended."""
        client = hosts._here["client"]
        if hosts._here["bridge"].poll() is not None:
            self._problems.append(f"the bridge of {self._node} ended undisturbed: {hosts.bridge_text()[-2000:]}")
            return (
                {path.name: history.read(path) for path in self._directory.iterdir()},
                self._problems,
                dict(self.ends),
            )
        for what, left in (
            ("slots", lambda: client.stats()["pool_in_use"]),
            ("mirrors", lambda: client.bridge().mirrors),
            ("exports", lambda: client.bridge().exports),
            ("descriptors", lambda: max(0, self._bridge_files() - self._files - _ROOM)),
        ):
            try:
                until(lambda left=left: not left(), f"no {what}")  # type: ignore[misc] # mypy: a lambda's default
            except AssertionError:  # noqa: PERF203 - each is looked at
                self._problems.append(f"{left()} {what} are left on {self._node}")
        return {path.name: history.read(path) for path in self._directory.iterdir()}, self._problems, dict(self.ends)

    def _bridge_files(self) -> int:
        return len(os.listdir(f"/proc/{hosts._here['bridge'].pid}/fd"))


def begin(*arguments: object) -> None:
    """Start this host's workers."""
    hosts._here["tender"] = Tender(*arguments)  # type: ignore[arg-type] # as they came


def tell(method: str, *arguments: object, **keywords: object) -> object:
    """Call a method of this host's tender."""
    return getattr(hosts._here["tender"], method)(*arguments, **keywords)
