"""A worker to see a deployment by: `worker.py record` makes a record a second, `worker.py wait` waits for each of them.

It ends after as many as its second argument says, and goes on for ever without one. Both print a line for each.
"""

from __future__ import annotations

import itertools
import sys
import time

import ipcsync

_EVENT = "example/tick"
_PERIOD_S = 1.0


def main(role: str, times: int | None = None) -> None:
    """Be one of the two, `times` times; raises what ipcsync raises when the other side or the coordinator is lost."""
    counts = itertools.count(1) if times is None else range(1, times + 1)
    with ipcsync.connect(name=f"example {role}", timeout=30) as client:
        stream = ipcsync.Stream()
        with (
            client.event(_EVENT, recorder=role == "record") as event,
            client.event(f"{_EVENT}/seen", recorder=role != "record") as seen,
        ):
            for generation in counts:
                if role == "record":
                    point = event.record(stream)
                    seen.at(generation).synchronize()  # the next one is made when this one was seen
                else:
                    point = event.at(generation)
                    point.wait(stream)
                    point.synchronize()
                    seen.record(stream)
                sys.stdout.write(f"{role} {point.event_name} #{point.generation} ({event.engine} engine)\n")
                sys.stdout.flush()
                if role == "record":
                    time.sleep(_PERIOD_S)


if __name__ == "__main__":
    if sys.argv[1:2] not in (["record"], ["wait"]):
        raise SystemExit("usage: worker.py record|wait [TIMES]")
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else None)
