"""What is closed at the end of a `with` block.

What is abstract a type checker sees: ABCMeta would make each `isinstance` that fails slower.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self


class Closing:
    """A context manager that closes itself."""

    __slots__ = ()

    @abstractmethod
    def close(self) -> object:
        """End it; a second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClosing:
    """An asynchronous context manager that closes itself."""

    @abstractmethod
    async def close(self) -> None:
        """End it; a second call does nothing."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
