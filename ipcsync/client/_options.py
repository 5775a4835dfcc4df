"""What a client is made with: the arguments of `connect`, and what the environment has in place of those not given."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, cast

from ipcsync._wire import endpoints
from ipcsync._wire.names import plain
from ipcsync.errors import ConnectError
from ipcsync.typing import Chains, EngineChoice

if TYPE_CHECKING:
    from ipcsync._session.traced import Tracing

DEFAULT_DEPTH = 16
"""How many records of an event may be in flight on the `event` engine, unless its creator says otherwise."""


class ConnectOptions:
    """The arguments of `connect`, checked. Raises what it does for them."""

    def __init__(
        self,
        endpoint: str | None = None,
        name: str | None = None,
        timeout: float = 5.0,
        lease_ttl: float | None = None,
        trace: str | os.PathLike[str] | None = None,
        chains: Chains = "stream",
        prefix: str = "",
        engine: EngineChoice = "auto",
        depth: int | None = None,
    ) -> None:
        if chains not in ("stream", "session"):
            raise ValueError(f"chains is 'stream' or 'session', but got {chains!r}")
        self.behind_all: bool = chains == "session"
        self.timeout = timeout
        self.lease_ttl = lease_ttl
        self.prefix = prefix
        self.tracing: Tracing | None = _tracing(os.environ.get("IPCSYNC_TRACE", "") if trace is None else trace, name)
        try:
            where = plain(endpoint, "endpoint") if endpoint is not None else endpoints.default_endpoint()
        except (ValueError, FileNotFoundError) as error:
            raise ConnectError(f"the default endpoint cannot be used: {error}") from None
        self.endpoint: str = endpoints.absolute(where)
        self.name: str = plain(name or "")
        found_engine = engine if engine != "auto" else os.environ.get("IPCSYNC_ENGINE") or "auto"
        if found_engine not in ("auto", "event", "timeline"):
            where = "engine" if found_engine == engine else "IPCSYNC_ENGINE"
            raise ValueError(f"{where} is 'auto', 'event' or 'timeline', but got {found_engine!r}")
        self.engine: EngineChoice = cast("EngineChoice", found_engine)
        if depth is None:
            found = os.environ.get("IPCSYNC_DEPTH") or str(DEFAULT_DEPTH)
            if not (found.isascii() and found.isdigit() and len(found) <= 4 and 1 <= int(found) <= 1024):
                raise ValueError(f"IPCSYNC_DEPTH is from 1 to 1024, but got {found!r:.80}")
            depth = int(found)
        check_depth(depth)
        self.depth: int = depth


def check_depth(depth: int) -> None:
    """ValueError or TypeError for an invalid one."""
    if isinstance(depth, bool) or not isinstance(depth, int):
        raise TypeError(f"depth is an int, but got {type(depth).__name__}")
    if not 1 <= depth <= 1024:
        raise ValueError(f"depth is from 1 to 1024, but got {depth}")


def _tracing(directory: str | os.PathLike[str], name: str | None) -> Tracing | None:
    """The trace of a client named `name`, None without a directory."""
    if not os.fspath(directory):
        return None
    from ipcsync._session.traced import Tracing
    from ipcsync._trace.writer import prepare

    return Tracing(prepare(directory), name or "")
