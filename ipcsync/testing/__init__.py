"""Tools for tests and examples of code with streams and events, on either driver."""

from ipcsync.testing.gate import StreamGate
from ipcsync.testing.memory import Memory

__all__ = ["Memory", "StreamGate"]
