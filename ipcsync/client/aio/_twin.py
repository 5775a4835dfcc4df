"""The asynchronous twins of methods that ask the coordinator: each has the parameters of the one that it wraps."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

from ipcsync.client.aio._runner import request
from ipcsync.client.client import Client


class Asynchronous(Protocol):
    """What has twins: it wraps a client."""

    _client: Client


P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")
A = TypeVar("A", bound=Asynchronous)


def twin(
    method: Callable[Concatenate[Client, P], T], undo: Callable[[T], object] | None = None
) -> Callable[[Callable[[A, T], R]], Callable[Concatenate[A, P], Coroutine[Any, Any, R]]]:
    """Decorate what makes the asynchronous result from the one of `method`, which is called on a thread.

    If the call is cancelled meanwhile, `undo` gets that result.
    """

    def decorate(result: Callable[[A, T], R]) -> Callable[Concatenate[A, P], Coroutine[Any, Any, R]]:
        @functools.wraps(result)
        async def call(self: A, *arguments: Any, **options: Any) -> R:
            timeout = options.pop("timeout", None)
            ask = functools.partial(getattr(self._client, method.__name__), *arguments, **options)
            # One of the whole fleet is looked for until the timeout, which must not take a thread from others.
            is_long = bool(options.get("fleet"))
            return result(self, await request(self._client._session, ask, timeout, undo, alone=is_long))

        theirs = inspect.signature(method)
        told = theirs.replace(return_annotation=inspect.signature(result).return_annotation)
        call.__signature__ = told  # type: ignore[attr-defined] # what help() shows
        return cast("Callable[Concatenate[A, P], Coroutine[Any, Any, R]]", call)

    return decorate


def taking(function: Callable[P, object]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Decorate a function that has the parameters of `function`."""

    def decorate(other: Callable[..., R]) -> Callable[P, R]:
        told = inspect.signature(function).replace(return_annotation=inspect.signature(other).return_annotation)
        other.__signature__ = told  # type: ignore[attr-defined] # what help() shows
        return cast("Callable[P, R]", other)

    return decorate
