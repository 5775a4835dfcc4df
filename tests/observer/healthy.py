"""An hour of what a healthy coordinator exports, by two looks at it, before the alerts that are shipped."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.kit.until import until
from tests.observer.observing import Observer

_ALERTS = Path(__file__).parents[2] / "deploy" / "prometheus" / "alerts.yaml"
_MINUTES = 60
_LEAST_S = 1.0  # between the looks, by the coordinator's clock: what happens each second is in it
_MACHINES_OWN = "ipcsync_request_seconds"  # how busy the machine of the tests is, is no matter of theirs
_LATE = r'^ipcsync_refusals_total\{.*reason="(late|handshake)"'

Figures = dict[str, float]


def assert_no_alert(observer: Observer, tmp_path: Path) -> None:
    """What changed between two looks goes on for an hour, and no alert fires in it."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool not found (Debian: apt-get install prometheus)")
    looks: list[Figures] = [
        until(lambda: _later(observer, {}), "a look, which may be of before the caller's last call")
    ]

    def have_two() -> bool:
        looks.append(until(lambda: _later(observer, looks[-1]), "a later look"))
        return len(looks) > 2 and not _stood_still(*looks[-2:])

    until(have_two, "two looks between which the machine did not stand still")
    first, second = looks[-2:]
    seconds = _age(second) - _age(first)
    series = [
        {"series": name, "values": f"{value:f}+{max(value - first.get(name, 0.0), 0.0) / seconds * 60:f}x{_MINUTES}"}
        for name, value in second.items()
    ]
    alerts = [line.split()[-1] for line in _ALERTS.read_text().splitlines() if "- alert:" in line]
    assert len(alerts) > 10
    test = {
        "rule_files": [str(_ALERTS)],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": series,
                "alert_rule_test": [{"eval_time": f"{_MINUTES}m", "alertname": alert} for alert in alerts],
            }
        ],
    }
    path = tmp_path / "healthy.yaml"
    path.write_text(json.dumps(test))  # JSON is YAML
    done = subprocess.run([promtool, "test", "rules", path], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def _look(observer: Observer) -> Figures:
    """Each series, as Prometheus writes it, with its value."""
    found = {}
    for family in text_string_to_metric_families(observer.get("/metrics")[1]):
        for sample in family.samples:
            if not sample.name.startswith(_MACHINES_OWN):
                labels = {**sample.labels, "instance": "a", "job": "ipcsync"}
                written = ", ".join(f'{label}="{text}"' for label, text in labels.items())
                found[f"{sample.name}{{{written}}}"] = sample.value
    return found


def _later(observer: Observer, first: Figures) -> Figures:
    """Nothing while there is none, nor while the coordinator does not answer, as on a busy machine."""
    found = _look(observer)
    return found if _age(found) - _age(first) > _LEAST_S else {}


def _stood_still(first: Figures, second: Figures) -> bool:
    """Whether something came too late meanwhile, as on such a machine. Where it always does, no two looks count."""
    return any(value > first.get(name, 0.0) for name, value in second.items() if re.search(_LATE, name))


def _age(figures: Figures) -> float:
    """0 if the coordinator did not answer."""
    return sum(value for name, value in figures.items() if name.startswith("ipcsync_uptime_seconds{"))
