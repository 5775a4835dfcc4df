"""A bridge's counters."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields


@dataclass
class Counters:
    """Since the start of the process or its last upgrade; `handovers` counts those upgrades."""

    handovers: int = 0
    remote_requests: int = 0
    news_sent: int = 0
    rows_sent: int = 0
    conflated: int = 0
    news_received: int = 0
    acks: int = 0
    resyncs: int = 0
    pings: int = 0
    pings_lost: int = 0
    invalid_messages: int = 0
    store_failures: int = 0
    names_lost: int = 0  # names of the fleet that the store gave to others, while their events were open here
    lost: Counter[str] = field(default_factory=Counter)  # nodes, by reason
    refusals: Counter[str] = field(default_factory=Counter)  # of remote requests, by error

    def counts(self) -> dict[str, int]:
        """Each plain count by its name."""
        counts = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: count for name, count in counts.items() if isinstance(count, int)}
