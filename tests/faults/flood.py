"""A flood of malformed messages, and what a good client notices of it: `python -m tests.faults.flood [--messages N]`.

Prints a good client's round trips alone and during the flood, the coordinator's memory before and after, and what the
same flood does to the round trips of a bare echo, which looks at nothing: so much is ZeroMQ's and the machine's.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing

import msgpack
import zmq

import ipcsync
from ipcsync import _drivers
from ipcsync._wire import codec, messages
from ipcsync._wire.messages import VERSION
from ipcsync_keeper import config
from tests.benchmarks.peers import Echo
from tests.kit.raw_client import Raw, request, resident_kib, unix_socket
from tests.kit.until import DEADLINE_S

_DRAIN_EVERY = 32  # a flooder that never reads is another test
_ROUND_TRIPS = 3000
_COMMAND = [sys.executable, "-m", "tests.faults.flood"]
_LAST_ID = 1 << 60  # no malformed message has that one


def _random_bytes(chance: random.Random) -> list[bytes]:
    return [chance.randbytes(chance.randrange(300))]


def _truncated(chance: random.Random) -> list[bytes]:
    frame = codec.encode_request(chance.getrandbits(40) + 1, messages.Open("name", True), chance.randbytes(16), 0)
    return [frame[: chance.randrange(len(frame))]]


def _mutated(chance: random.Random) -> list[bytes]:
    frame = bytearray(codec.encode_request(1, messages.Attach(1, 1), chance.randbytes(16), 0))
    for _ in range(chance.randrange(1, 4)):
        frame[chance.randrange(len(frame))] = chance.randrange(256)
    return [bytes(frame)]


def _deep(chance: random.Random) -> list[bytes]:
    return [chance.choice((b"\x91", b"\x81\xa1a")) * chance.randrange(5000)]


def _bomb(chance: random.Random) -> list[bytes]:
    return [chance.choice((b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9")) + b"\xff\xff\xff\xff" + chance.randbytes(20)]


def _nested_bombs(chance: random.Random) -> list[bytes]:
    return [b"\xdc\x0f\xff" * chance.randrange(1000)]


def _unknown(chance: random.Random) -> list[bytes]:
    choices = [
        request(chance.choice(("shutdown", 7, None, "open", "x" * 1000))),
        request("open", {"name": "a", "colour": 1}),
        request(version=chance.randrange(VERSION + 1, 1 << 32)),
        request("sessions", token=chance.randbytes(16)),
        request("open", {"name": "../" * 10}, token=chance.randbytes(16)),
        msgpack.packb([VERSION] * chance.randrange(20)),
    ]
    return [chance.choice(choices)]


def _large(chance: random.Random) -> list[bytes]:
    return [b"\xc6" + chance.randbytes(4) * (config.MAX_FRAME // 4 + chance.randrange(1000))]


def _many_frames(chance: random.Random) -> list[bytes]:
    return [b""] * (10_000 if chance.random() < 0.01 else chance.randrange(2, 20))


_KINDS: list[tuple[int, Callable[[random.Random], list[bytes]]]] = [
    (30, _random_bytes),
    (20, _truncated),
    (20, _mutated),
    (5, _deep),
    (10, _bomb),
    (2, _nested_bombs),
    (20, _unknown),
    (1, _large),
    (5, _many_frames),
]


def pour(endpoint: str, count: int, seed: int, *, leaves: bool = True) -> int:
    """Send `count` malformed messages, over ZeroMQ and now and then over a bare socket; how many were sent.

    `leaves`: the coordinator has taken all of them in by then.
    """
    chance = random.Random(seed)
    weights, kinds = zip(*_KINDS, strict=True)
    with Raw(endpoint) as raw:
        for number in range(count):
            if number % 500 == 499:
                _bare(endpoint, chance)
                continue
            (kind,) = chance.choices(kinds, weights)
            raw.send(*kind(chance))
            if number % _DRAIN_EVERY == 0:
                _drain(raw)
        if leaves:
            _leave(raw, messages.Hello(chance.randbytes(16), _drivers.name(), "flooder"))
    return count


def _leave(raw: Raw, hello: messages.Hello) -> None:
    """Say hello until that is answered: then everything before it was taken in."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        raw.send(codec.encode_request(_LAST_ID, hello, b"", 0))
        while frame := raw.receive_bytes(0.2):  # replies beyond the queue's length were dropped, this one perhaps too
            answered, body = codec.decode_reply(frame)
            if answered == _LAST_ID:
                assert isinstance(body, messages.Welcome)
                raw.ask(messages.Bye(), body.token, messages.Done, _LAST_ID + 1)
                return
    raise AssertionError("the coordinator does not answer any more")


def _drain(raw: Raw) -> None:
    while raw.socket.poll(0):
        raw.socket.recv(zmq.NOBLOCK)


def _bare(endpoint: str, chance: random.Random) -> None:
    words = [b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", chance.randbytes(500), b"\xff" + bytes(8) + b"\x7f\x03"]
    # A pipe may be broken: of this process, which is a stranger by now, any connection may be cut.
    with unix_socket(endpoint) as connection, contextlib.suppress(BrokenPipeError):
        connection.sendall(chance.choice(words))


def round_trips(client: ipcsync.Client, until: Callable[[int], bool]) -> list[float]:
    """Milliseconds of each of a client's requests, one at a time, until told to stop."""
    taken: list[float] = []
    while not until(len(taken)):
        began = time.perf_counter()
        client.list_events("nothing")
        taken.append((time.perf_counter() - began) * 1000)
    return taken


def bare_round_trips(count: int) -> tuple[list[float], list[float]]:
    """Milliseconds of a bare echo's round trips, alone and during the same flood."""
    with closing(Echo()) as echo, Raw(echo.endpoint) as raw:

        def trips(until: Callable[[int], bool]) -> list[float]:
            taken: list[float] = []
            while not until(len(taken)):
                began = time.perf_counter()
                raw.send(b"x" * 60)
                assert raw.receive_bytes(DEADLINE_S)
                taken.append((time.perf_counter() - began) * 1000)
            return taken

        trips(lambda done: done >= 200)
        alone = trips(lambda done: done >= _ROUND_TRIPS)
        flooder = subprocess.Popen([*_COMMAND, "--messages", str(count), "--flood", echo.endpoint, "--bare"])
        return alone, trips(lambda done: flooder.poll() is not None and done >= 100)


def p99(taken: list[float]) -> float:
    """The 99th percentile."""
    return statistics.quantiles(taken, n=100)[98]


def main() -> int:
    """Measure, print, and say by the status whether all is as it should be."""
    os.environ.setdefault("IPCSYNC_DRIVER", "host")  # no GPU takes part
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--flood", help=argparse.SUPPRESS)
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.flood:
        pour(options.flood, options.messages, seed=0, leaves=not options.bare)
        return 0
    with ipcsync.launch(log_level="warning") as coordinator, ipcsync.connect(coordinator.endpoint) as client:
        pour(coordinator.endpoint, 2000, seed=3)  # so that the allocator's own growth is behind us
        round_trips(client, lambda done: done >= 200)
        alone = round_trips(client, lambda done: done >= _ROUND_TRIPS)
        before = resident_kib(coordinator.pid)
        flooder = subprocess.Popen([*_COMMAND, "--messages", str(options.messages), "--flood", coordinator.endpoint])
        during = round_trips(client, lambda done: flooder.poll() is not None and done >= 100)
        after = resident_kib(coordinator.pid)
        refusals = client.stats()["refusals"]
        running = coordinator.is_running
    bare = bare_round_trips(options.messages)
    return _report(options.messages, alone, during, before, after, refusals, running and flooder.returncode == 0, bare)


def _report(
    sent: int,
    alone: list[float],
    during: list[float],
    before: int,
    after: int,
    refusals: dict[str, int],
    ran: bool,
    bare: tuple[list[float], list[float]],
) -> int:
    ratio = p99(during) / p99(alone)
    verdicts = {
        "stays up": ran and not refusals.get("internal"),
        "memory is flat (below 8 MiB)": after - before < 8 * 1024,
        "p99 is at most 3 times its own": ratio <= 3,
    }
    lines = [
        f"messages        {sent}",
        f"round trip p50  {statistics.median(alone):.3f} ms alone, {statistics.median(during):.3f} ms during",
        f"round trip p99  {p99(alone):.3f} ms alone, {p99(during):.3f} ms during: {ratio:.2f} times",
        f"a bare echo's   {p99(bare[0]):.3f} ms alone, {p99(bare[1]):.3f} ms: {p99(bare[1]) / p99(bare[0]):.2f} times",
        f"memory          {before} KiB before, {after} KiB after",
        "refusals        " + ", ".join(f"{reason} {count}" for reason, count in sorted(refusals.items())),
        *(f"{'yes' if good else 'NO '}  {what}" for what, good in verdicts.items()),
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0 if all(verdicts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
