"""Programs whose calls the handler of a real signal interrupts, at random; each ends with 1 if a promise does not hold.

    python -m tests.faults.signalled PROGRAM COUNT ENGINE

COUNT is how many calls are interrupted; of `handlers`, how often each kind of handler runs.

Run by `test_interrupts` in processes of their own: what they look for includes crashes and calls that never return.
"""

from __future__ import annotations

import faulthandler
import itertools
import random
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

import ipcsync
from ipcsync.testing import StreamGate
from ipcsync.typing import EngineName
from tests.kit.until import until

_STUCK_S = 60.0
_REFUSED = {"record", "unnamed", "open", "same", "stats"}  # records, openings and other requests
LONG_TTL_S = 600.0  # a session that is left open does not expire within a test


def goes_on() -> None:
    """Not stuck: from here on it has as long again. How long all of it takes depends on the machine."""
    faulthandler.dump_traceback_later(_STUCK_S, exit=True)


class Alarm(Exception):  # noqa: N818 - not an error: a handler's exception, as Ctrl-C's
    """What the handler raises."""


_is_armed: list[bool] = []


def raise_alarm(*_: Any) -> None:
    """The handler."""
    if _is_armed:  # another thread may have been given a signal that comes only now
        raise Alarm


def arm(seconds: float) -> None:
    """Have the handler called in so long, and again until it was heard: pyzmq may swallow what it raises."""
    _is_armed.append(True)
    signal.setitimer(signal.ITIMER_REAL, seconds, 0.05)


def disarm() -> None:
    """Nothing is raised any more."""
    while True:
        try:
            _is_armed.clear()
            signal.setitimer(signal.ITIMER_REAL, 0)
        except Alarm:
            continue
        return


def is_refusal(kind: str, error: BaseException) -> bool:
    """Whether a call of this kind may raise that within another one: Reentered, but for "query", "wait" and "close"."""
    return kind in _REFUSED and isinstance(error, ipcsync.Reentered)


def note_dead_threads() -> list[str]:
    """A list, of what ends threads from now on: nothing that is raised in a call may reach one of ipcsync's."""
    died: list[str] = []

    def note(args: threading.ExceptHookArgs) -> None:
        told = "".join(traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback))
        died.append(f"the thread {args.thread.name if args.thread else '?'} died: {told}")

    threading.excepthook = note
    return died


def _interrupted(call: Callable[[], object], longest_s: float) -> bool:
    """Whether a signal came within `call()`, which is repeated until one does."""
    try:
        try:
            arm(random.uniform(20e-6, longest_s))
            while True:
                call()
        finally:
            disarm()
    except Alarm:
        disarm()  # if it came before the one above could begin
        return True
    return False


def records(coordinator: ipcsync.Coordinator, count: int, engine: EngineName) -> None:
    """No number twice, no silent pass, no hang."""
    with ipcsync.connect(coordinator.endpoint) as client, ipcsync.connect(coordinator.endpoint) as peer:
        stream = ipcsync.Stream()
        event = client.event("e", recorder=True, engine=engine, depth=64)
        seen = peer.event("e", engine=engine)
        for _ in range(count):
            goes_on()
            _interrupted(lambda: event.record(stream), 400e-6)
            stream.synchronize()
            highest = event.generation
            with StreamGate(stream) as gate:
                point = event.record(stream, timeout=5)
                assert point.generation > highest
                assert not point.query(), "a record behind a closed gate is complete"
                assert not seen.at(point.generation).query(), "a record behind a closed gate is complete for its peer"
                gate.open()
            seen.at(point.generation).synchronize(10)


def requests(coordinator: ipcsync.Coordinator, count: int, _: EngineName) -> None:
    """The next request works, and the client closes."""
    client = ipcsync.connect(coordinator.endpoint, name="asker")
    for _number in range(count):
        goes_on()
        _interrupted(client.stats, 900e-6)
        client.stats(timeout=5)
    client.close()
    with ipcsync.connect(coordinator.endpoint) as observer:
        until(lambda: "asker" not in [row.name for row in observer.list_sessions()], "the session has ended")


def connects(coordinator: ipcsync.Coordinator, count: int, _: EngineName) -> None:
    """No crash, no other exception than the handler's, no session and no thread left."""
    ipcsync.connect(coordinator.endpoint).close()
    before = threading.active_count()
    clients: list[ipcsync.Client] = []
    for _number in range(count):
        goes_on()
        _interrupted(
            lambda: clients.append(ipcsync.connect(coordinator.endpoint, name="one", lease_ttl=LONG_TTL_S)), 6e-3
        )
        while clients:
            clients.pop().close()
    with ipcsync.connect(coordinator.endpoint) as observer:
        until(lambda: "one" not in [row.name for row in observer.list_sessions()], "the sessions have ended")
    until(lambda: threading.active_count() <= before, f"the threads have ended: {threading.enumerate()}")


def closes(coordinator: ipcsync.Coordinator, count: int, engine: EngineName) -> None:
    """A close that was interrupted can be repeated until it is done, with work in flight too."""
    stream = ipcsync.Stream()
    with ipcsync.connect(coordinator.endpoint) as observer:
        for number in range(count):
            goes_on()
            with StreamGate(stream) as gate:
                client = ipcsync.connect(coordinator.endpoint, name="closing")
                client.event("e", recorder=True, engine=engine).record(stream)
                _interrupted(client.close, 20e-3)
                if number:  # with work in flight it takes its time
                    gate.open()
                client.close()
                gate.open()
            until(lambda: "closing" not in [row.name for row in observer.list_sessions()], "the session has ended")
            until(lambda: not observer.list_events("e"), "its event is given back")


def _handled(mode: str, coordinator: ipcsync.Coordinator, client: ipcsync.Client, event: ipcsync.SharedEvent) -> None:
    stream = ipcsync.Stream()
    if mode == "record":
        event.record(stream, timeout=10)
    elif mode == "unnamed":
        client.record(stream)
    elif mode == "query":
        event.at(1).query()
    elif mode == "wait":
        event.at(1).wait(stream, timeout=10)
    elif mode == "open":
        client.event(f"x{next(_numbers)}", recorder=True, timeout=10).close()
    elif mode == "same":
        client.event("same", timeout=10).close()
    elif mode == "stats":
        client.stats(timeout=10)
    else:
        ipcsync.connect(coordinator.endpoint, timeout=10).close()


_numbers = itertools.count()


def handlers(coordinator: ipcsync.Coordinator, count: int, engine: EngineName) -> None:
    """A handler that uses the client and event of the call it interrupts: it, and that call, work or raise at once."""
    seen: Counter[str] = Counter()
    wrong: list[str] = []
    for mode in ("record", "unnamed", "query", "wait", "open", "same", "stats", "connect"):
        client = ipcsync.connect(coordinator.endpoint)
        event = client.event(f"{mode}-event", recorder=True, engine=engine, depth=8)
        stream = ipcsync.Stream()
        event.record(stream).synchronize(5)
        inside: list[str] = []

        def on_alarm(*_: Any, mode: str = mode, client: Any = client, event: Any = event, inside: Any = inside) -> None:
            if inside:
                return
            inside.append(mode)
            began = time.monotonic()
            try:
                _handled(mode, coordinator, client, event)
            except BaseException as error:  # noqa: BLE001 - what the call below swallowed would not be seen
                seen[f"{mode}: {type(error).__name__}"] += 1
                if not is_refusal(mode, error):
                    wrong.append(f"{mode}: {error!r}")
            finally:
                seen[mode] += 1
                inside.clear()
            if time.monotonic() - began > 20:
                wrong.append(f"{mode}: it took {time.monotonic() - began:.1f} s")

        signal.signal(signal.SIGALRM, on_alarm)
        signal.setitimer(signal.ITIMER_REAL, 0.0015, 0.0015)
        try:
            while seen[mode] < count:
                goes_on()
                point = event.record(stream, timeout=20)
                point.query()
                point.wait(stream)
                client.stats(timeout=20)
                client.event(f"y{next(_numbers)}", recorder=True, timeout=20).close()
                client.event("same", timeout=20).close()
        finally:  # an interpreter that ends has no handler any more
            signal.setitimer(signal.ITIMER_REAL, 0)
        client.close()
    sys.stdout.write(f"{dict(seen)}\n")
    assert not wrong, wrong[:3]


def finalizers(coordinator: ipcsync.Coordinator, count: int, engine: EngineName) -> None:
    """Owners in cycles close their events, and use another, in whatever call the collector comes: nothing waits."""
    client, stream = ipcsync.connect(coordinator.endpoint), ipcsync.Stream()
    shared = client.event("shared", recorder=True, engine=engine)
    shared.record(stream)
    refused: Counter[str] = Counter()
    wrong: list[str] = []

    class Owner:
        def __init__(self) -> None:
            self.event = client.event(f"owned-{next(_numbers)}", recorder=True, engine=engine, depth=2)
            self.point = self.event.record(stream)
            self.me = self

        def __del__(self) -> None:
            uses: dict[str, Callable[[], object]] = {
                "record": lambda: shared.record(stream, timeout=5),
                "query": lambda: shared.at(1).query(),
                "stats": client.stats,
                "close": self.event.close,
            }
            for kind, use in uses.items():
                try:
                    use()
                except BaseException as error:  # noqa: BLE001, PERF203 - each by itself; Python would swallow it
                    refused[kind] += is_refusal(kind, error)
                    if not is_refusal(kind, error):
                        wrong.append(f"{kind}: {error!r}")

    import gc

    gc.set_threshold(50)
    for _ in range(count):
        goes_on()
        Owner()
        shared.record(stream).query()
    gc.set_threshold(700)

    def are_given_back() -> bool:
        gc.collect()  # each time: it does nothing while the collector runs on another thread
        return not client.list_events("owned-")

    until(are_given_back, "each event that was closed is given back")
    sys.stdout.write(f"refused: {dict(refused)}\n")
    assert not wrong, wrong[:3]
    client.close()


PROGRAMS = {program.__name__: program for program in (records, requests, connects, closes, handlers, finalizers)}


def main() -> None:
    """One of the programs."""
    faulthandler.enable()
    goes_on()
    signal.signal(signal.SIGALRM, raise_alarm)
    died = note_dead_threads()
    engine: Any = sys.argv[3]
    with ipcsync.launch(log_level="error", max_sessions=256) as coordinator:
        PROGRAMS[sys.argv[1]](coordinator, int(sys.argv[2]), engine)
    assert not died, died[:3]


if __name__ == "__main__":
    main()
