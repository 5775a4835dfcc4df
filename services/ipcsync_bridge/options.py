"""The options by which a bridge reaches the servers: those of `ipcsync bridge` and of `ipcsync doctor --fleet`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ipcsync.cli.output import Failed, WrongCall

if TYPE_CHECKING:
    from ipcsync_bridge.config import Settings

C = TypeVar("C", bound=Callable[..., Any])

VARIABLES = "IPCSYNC_BRIDGE"
"""The prefix of environment variables for options."""

_CONNECTION = (
    click.option("--node", required=True, metavar="NAME", help="What this node is called in the fleet."),
    click.option(
        "--nats",
        "servers",
        envvar=f"{VARIABLES}_NATS",
        required=True,
        multiple=True,
        metavar="URL",
        help="A server; more than once for more.",
    ),
    click.option("--fleet", default="main", metavar="NAME", help="Which fleet of those on the servers."),
    click.option(
        "--runtime-dir", metavar="DIR", help="Where the coordinator serves. [IPCSYNC_RUNTIME_DIR, else the user's]"
    ),
    click.option("--insecure", is_flag=True, help="Speak in the clear to servers that are not on this machine."),
    click.option("--tls-ca", default="", metavar="FILE", help="The CA certificate that verifies the servers."),
    click.option("--tls-cert", default="", metavar="FILE", help="This node's certificate; its name is the node's."),
    click.option("--tls-key", default="", metavar="FILE", help="Its key, mode 0600."),
    click.option("--credentials", default="", metavar="FILE", help="NATS credentials (JWT and NKEY), mode 0600."),
)


def connection(command: C) -> C:
    """Give a command these options."""
    for option in reversed(_CONNECTION):
        command = option(command)
    return command


def settings(directory: str, given: Mapping[str, Any]) -> Settings:
    """The settings for the coordinator of a runtime directory. Failed without nats-py, WrongCall for what cannot be."""
    from ipcsync._wire import endpoints
    from ipcsync_bridge.config import ConfigError, Settings

    try:
        import nats  # noqa: F401 - whether it is there
    except ModuleNotFoundError:
        raise Failed("the bridge needs nats-py; in a checkout of ipcsync: pip install -e '.[fleet]'") from None
    try:
        return Settings(endpoint=endpoints.endpoint_in(directory), **given)
    except (ConfigError, ValueError) as error:
        raise WrongCall(str(error)) from None
