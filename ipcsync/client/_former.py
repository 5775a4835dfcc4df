"""Former spellings of calls, which work with a DeprecationWarning."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")


def positional_timeout(method: Callable[P, T]) -> Callable[P, T]:
    """Decorate a method whose only argument is `timeout`, by keyword: it is accepted by position too."""

    def by_keyword(arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if len(arguments) != 2 or options:
            return arguments, options  # right, or a TypeError of the method itself
        seconds = arguments[1]
        warnings.warn(
            f"{method.__qualname__} takes its timeout by keyword: timeout={seconds!r}", DeprecationWarning, stacklevel=3
        )
        return arguments[:1], {"timeout": seconds}

    function = cast("Callable[..., Any]", method)

    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def call(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - those of any method
            arguments, options = by_keyword(arguments, options)
            return await function(*arguments, **options)

    else:

        @functools.wraps(method)
        def call(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - those of any method
            arguments, options = by_keyword(arguments, options)
            return function(*arguments, **options)

    return cast("Callable[P, T]", call)
