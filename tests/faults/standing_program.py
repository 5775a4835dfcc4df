"""A program that ends while its stream stands behind a dead recorder's work: `… ENDPOINT`, the point on its input."""

from __future__ import annotations

import os
import sys

import ipcsync

if __name__ == "__main__":
    client = ipcsync.connect(sys.argv[1], name="waiter")
    stream = ipcsync.Stream()
    point = client.point(bytes.fromhex(sys.stdin.readline()))
    point.wait(stream, timeout=20)
    os.write(1, b"waits\n")
    try:
        point.synchronize(20)
    except ipcsync.RecorderLost:
        os.write(1, b"lost\n")
