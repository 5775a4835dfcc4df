"""What a bridge counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Counters:
    """Since the start of the process."""

    handovers: int = 0  # from one code to the next; since the first of them
    wants: int = 0
    tells: int = 0
    rows_told: int = 0
    tells_heard: int = 0
    acks: int = 0
    resyncs: int = 0
    pings: int = 0
    pings_lost: int = 0
    strange: int = 0
    store_failures: int = 0
    lost: Counter[str] = field(default_factory=Counter)  # nodes, by reason
    refusals: Counter[str] = field(default_factory=Counter)  # of wants, by error
