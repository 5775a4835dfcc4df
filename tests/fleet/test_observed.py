"""The observer beside a bridge: the page's nodes, and the figures that alerts are made of."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import ipcsync
from tests.fleet.nodes import Node
from tests.kit import browser as browsers
from tests.kit.browser import Browser
from tests.kit.until import DEADLINE_S, until
from tests.observer.healthy import assert_no_alert
from tests.observer.observing import Observer, running

pytestmark = [pytest.mark.process, pytest.mark.thorough]

_ROWS = """
    return [...document.querySelectorAll('#nodes tbody tr')].map((row) =>
        Object.fromEntries([...row.cells].map((cell) => [cell.dataset.label, cell.textContent])))
"""


@pytest.fixture
def observer(pair: tuple[Node, Node], tmp_path: Path) -> Iterator[Observer]:
    """One that looks at node `b`."""
    with running(tmp_path) as start:
        one = start("--endpoint", pair[1].coordinator.endpoint)
        one.until_ready()
        yield one


def linked(pair: tuple[Node, Node]) -> ipcsync.SharedEvent:
    """An event of `a` that `b` waits for; its first generation has come."""
    event = pair[0].client().event("kv", recorder=True, engine="timeline")
    seen = pair[1].client().event("kv", node="a")
    event.record(ipcsync.Stream())
    seen.at(1).synchronize(DEADLINE_S)
    return seen


def test_metrics_tell_of_links_and_of_nodes_that_are_lost(
    pair: tuple[Node, Node], observer: Observer, tmp_path: Path
) -> None:
    seen = linked(pair)
    figures = until(lambda: with_links(observer), "a look at the bridge")
    assert figures["ipcsync_bridge_up", ""] == figures["ipcsync_bridge_connected", ""] == 1
    assert figures["ipcsync_bridge_nodes", "linked"] == 1
    assert figures["ipcsync_bridge_news_received_total", ""] >= 1
    assert figures["ipcsync_bridge_nodes_lost_total", "stopped"] == 0
    if shutil.which("promtool") is not None:
        assert_no_alert(observer, tmp_path)
    pair[0].end_bridge()
    until(lambda: of(observer)["ipcsync_bridge_nodes_lost_total", "stopped"] == 1, "the loss")
    assert of(observer)["ipcsync_bridge_nodes", "lost"] == 1
    pair[1].end_bridge()
    until(lambda: of(observer)["ipcsync_bridge_up", ""] == 0, "the bridge's end")
    assert not [name for name, _ in of(observer) if name.startswith("ipcsync_bridge_") and name != "ipcsync_bridge_up"]
    assert of(observer)["ipcsync_up", ""] == 1
    seen.close()


def with_links(observer: Observer) -> dict[tuple[str, str], float]:
    figures = of(observer)
    has_both = figures.get(("ipcsync_bridge_links", "mirrored")) and figures.get(
        ("ipcsync_bridge_news_received_total", "")
    )
    return figures if has_both else {}


def of(observer: Observer) -> dict[tuple[str, str], float]:
    """The samples by name and label."""
    return {(name, "".join(labels)): value for (name, labels), value in observer.metrics().items()}


@pytest.mark.skipif(bool(browsers.why_not()), reason=browsers.why_not() or "there is a browser")
def test_the_page_shows_the_other_nodes(pair: tuple[Node, Node], observer: Observer, tmp_path: Path) -> None:
    seen = linked(pair)
    with Browser(tmp_path) as browser:
        browser.look(width=1280, height=900)
        browser.open(observer.url)
        until(lambda: browser.run(_ROWS), "the nodes' table")
        (row,) = browser.run(_ROWS)
        assert (row["node"], row["state"], row["waited for here"], row["waits for"]) == ("a", "linked", "1", "0")
        pair[0].end_bridge()
        until(lambda: browser.run(_ROWS)[0]["state"] == "lost: stopped", "the loss to be shown")
        pair[1].end_bridge()
        until(lambda: browser.run("return document.getElementById('fleet').hidden"), "the table to go")
        assert browser.console() == []
    seen.close()
