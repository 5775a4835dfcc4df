"""Words to compare with the board's."""

from __future__ import annotations

import struct


def words(*values: int) -> memoryview:
    """Words to compare with the board's: one comparison costs as much as reading a single word."""
    return memoryview(struct.pack(f"={len(values)}Q", *values)).cast("Q")
