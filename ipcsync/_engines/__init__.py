"""Engines: how a record of a shared event is made and waited for.

The compiled core (`core_cython`) has every step of every call; `engine` has what it asks of Python, `outcome` errors.
"""

from ipcsync._engines.engine import Engine, Guard

__all__ = ["Engine", "Guard"]
