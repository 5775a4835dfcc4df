"""What the tests of deploy/ share: its files, the tools that check them, and what the product has of what they name."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest

from ipcsync import cli
from ipcsync_coordinator.__main__ import main as coordinator_command

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
ALERTS = DEPLOY / "prometheus" / "alerts.yaml"
UID = 10001
DEADLINE_S = 60.0


def run(*command: str | Path, **env: str) -> str:
    """What a tool prints, which must succeed."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=DEADLINE_S, env={**os.environ, **env}, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def module(name: str) -> Any:
    return pytest.importorskip(name, reason=f"{name} is not installed (the group `deploy`)")


def documents(text: str) -> list[Any]:
    return list(module("yaml").safe_load_all(text))


def parse(words: list[str]) -> None:
    """Raise click.UsageError for a call of `ipcsync words…` that is wrong, without running it."""
    from ipcsync_bridge.__main__ import main as bridge_command
    from ipcsync_observer.__main__ import main as observer_command

    name, *rest = words
    by_exec = {"bridge": bridge_command, "coordinator": coordinator_command, "observer": observer_command}
    with click.Context(cli.main) as context:
        command = by_exec.get(name) or cli.main.get_command(context, name)
        assert command is not None, f"ipcsync {name}: there is no such command"
        command.make_context(name, list(rest), parent=context)


def exported_metrics() -> set[str]:
    """The names of all metrics, by what the observer's own code declares."""
    metrics = pytest.importorskip("ipcsync_observer.sampler", reason="the extra `observer` is not installed")
    source = Path(metrics.__file__).read_text()
    names = {f"ipcsync_{name}" for name in metrics.GAUGES}
    names |= {f"ipcsync_bridge_{name}_total" for name in metrics.BRIDGE_COUNTS}
    families = re.findall(r'(\w+)MetricFamily\(\s*"(\w+)"', source)
    families += [
        (kind.title(), f"ipcsync_{name}") for kind, name in re.findall(r'_(gauge|counter)\(\s*"(\w+)"', source)
    ]
    for family, name in families:
        names |= {
            "Gauge": {name},
            "Counter": {f"{name}_total"},
            "Histogram": {f"{name}_bucket", f"{name}_count", f"{name}_sum"},
        }[family]
    return names
