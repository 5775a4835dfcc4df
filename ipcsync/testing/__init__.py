"""What tests and examples of code that uses streams and events need, on either driver."""

from ipcsync.testing.gate import StreamGate
from ipcsync.testing.memory import Memory

__all__ = ["Memory", "StreamGate"]
