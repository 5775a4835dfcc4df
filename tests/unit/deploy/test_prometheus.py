"""The alerts: promtool takes them, each fires, and they name metrics that there are."""

from __future__ import annotations

import re

import pytest

from tests.unit.deploy.deploying import (
    ALERTS,
    DEPLOY,
    documents,
    exported_metrics,
    run,
    tool,
)


@pytest.mark.process
def test_promtool_takes_the_rules() -> None:
    assert "SUCCESS" in run(tool("promtool"), "check", "rules", ALERTS)


@pytest.mark.process
def test_each_alert_fires_as_it_should() -> None:
    said = run(tool("promtool"), "test", "rules", DEPLOY / "prometheus" / "alerts.test.yaml")
    assert "SUCCESS" in said
    rules = documents(ALERTS.read_text())[0]["groups"][0]["rules"]
    tests = (DEPLOY / "prometheus" / "alerts.test.yaml").read_text()
    assert [rule["alert"] for rule in rules if tests.count(rule["alert"]) < 2 and "Missing" not in rule["alert"]] == []


def test_alerts_name_only_metrics_that_are_exported() -> None:
    exported = exported_metrics()
    assert {"ipcsync_up", "ipcsync_pool_size", "ipcsync_deaths_total", "ipcsync_request_seconds_bucket"} <= exported
    rules = documents(ALERTS.read_text())[0]["groups"][0]["rules"]
    named = {name for rule in rules for name in re.findall(r"\bipcsync_\w+", rule["expr"])}
    assert len(named) > 5
    assert named - exported == set()
