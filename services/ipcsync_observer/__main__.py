"""`python -m ipcsync_observer`, which `ipcsync observer` executes."""

from __future__ import annotations

import asyncio

import click

from ipcsync.cli.asking import endpoint_of, with_endpoint
from ipcsync.cli.output import Command, Failed, Seconds

_EXTRA = ("prometheus_client", "starlette", "uvicorn")


@click.command("observer", cls=Command, context_settings={"show_default": True})
@click.option("--host", default="127.0.0.1", metavar="ADDRESS", help="Address to serve on; there is no authentication.")
@click.option("--port", default=9464, type=click.IntRange(0, 65535), metavar="N", help="The port; 0 takes a free one.")
@with_endpoint
@click.option("--period", default=1.0, type=Seconds(0.1, 60), metavar="S", help="Seconds between samples.")
@click.option("--log-level", default="info", type=click.Choice(["debug", "info", "warning", "error"]))
@click.option("--log-json", is_flag=True, help="Log JSON instead of key=value.")
def main(
    host: str, port: int, endpoint: str | None, runtime_dir: str | None, period: float, log_level: str, log_json: bool
) -> None:
    """Serve a coordinator's state: a page on /, /metrics for Prometheus, /healthz, /api/state.

    \b
    Examples:
      ipcsync observer
      ipcsync observer --port 9000 --endpoint ipc:///run/ipcsync/coordinator.sock

    It takes no session, and goes on with the next coordinator when one ends. It needs the extra ipcsync[observer].
    """
    try:
        from ipcsync_observer import app
        from ipcsync_observer.sampler import Sampler
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRA:
            raise
        raise Failed(f"the observer needs {missing}; in a checkout of ipcsync: pip install -e '.[observer]'") from None
    from ipcsync._logs import configure

    sampler = Sampler(endpoint_of(endpoint, runtime_dir), period)
    configure(log_level, as_json=log_json, libraries=("asyncio", "py.warnings", "uvicorn"))
    try:
        listening = app.bind(host, port)
    except (OSError, UnicodeError) as error:  # the second: of no name that a host can have
        raise Failed(f"cannot serve on {host} port {port}: {getattr(error, 'strerror', None) or error}") from None
    with listening:
        asyncio.run(app.serve(listening, sampler))


if __name__ == "__main__":
    main(prog_name="ipcsync observer")
