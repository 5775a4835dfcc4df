"""The observer's page in a real browser, headless: what it shows, by mouse-less hands, and what it never does."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import ipcsync
from tests.kit import browser as browsers
from tests.kit.browser import Browser
from tests.kit.peer import Peer
from tests.kit.until import until
from tests.observer.observing import Observer

pytestmark = [
    pytest.mark.process,
    pytest.mark.program,
    pytest.mark.skipif(bool(browsers.why_not()), reason=browsers.why_not() or "there is a browser"),
]

_EVIL = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"
_TAB, _ENTER = "\ue004", "\ue007"
_NAMES = "return [...document.querySelectorAll('#events tbody th')].map((cell) => cell.textContent)"
_COMPLETE = """
    const row = [...document.querySelectorAll('#events tbody tr')].find((row) => row.cells[0].textContent === arguments[0]);
    const cells = Object.fromEntries([...row?.cells ?? []].map((cell) => [cell.dataset.label, cell.textContent]));
    return cells['known complete'] === arguments[1] && cells;
"""  # noqa: E501 - JavaScript


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    """A fresh browser, with the observer's page nowhere in it yet."""
    with Browser(tmp_path) as one:
        yield one


def _assert_clean(browser: Browser, observer: Observer) -> None:
    """Nothing went wrong in the page, and it asked nobody but its observer."""
    assert browser.console() == []
    addresses = [urlsplit(address) for address in browser.requested()]
    asked = {
        f"{address.scheme}://{address.netloc}" for address in addresses if address.scheme in ("http", "https", "ws")
    }
    assert asked == {observer.url}


def test_the_page_shows_what_happens_while_it_happens(
    browser: Browser,
    coordinator: ipcsync.Coordinator,
    new_observer: Callable[..., Observer],
    new_client: Callable[..., ipcsync.Client],
) -> None:
    observer = new_observer("--endpoint", coordinator.endpoint)
    recorder, waiter = new_client("prefill"), new_client("decode")
    stream = ipcsync.Stream()
    event = recorder.event("kv/layer-0", recorder=True, engine="event")
    waiter.event("kv/layer-0")
    recorder.event(_EVIL, recorder=True)
    recorder.event("kv/\u202esnekot", recorder=True)
    event.record(stream).synchronize(10)
    browser.look(width=1280, height=900)
    browser.open(observer.url)
    shown = browser.until(
        _COMPLETE,
        "kv/layer-0",
        "1",
        what="the event is shown, with its first generation complete",
    )
    assert (shown["state"], shown["engine"], shown["recorded"]) == ("open", "event", "1")
    assert (shown["last recorder"], shown["attached"]) == ("prefill", "2")

    # Live: without another look at the page's address.
    event.record(stream).synchronize(10)
    browser.until(_COMPLETE, "kv/layer-0", "2", what="the second generation")
    browser.until(
        "return [...document.querySelectorAll('.lane .made')].some((path) => path.getAttribute('d').length > 20)",
        what="a lane has grown",
    )

    # What the lane shows is said: the generations at its edges, and the time.
    axes = browser.run(
        "return [...document.querySelectorAll('.plot')].map((plot) => [...plot.querySelectorAll('span')].map((each) => each.textContent))"  # noqa: E501 - JavaScript
    )
    assert all(axis[2:] == ["60 s ago", "30 s", "now"] for axis in axes)
    assert all(axis[0].isdigit() and axis[1].isdigit() and int(axis[0]) > int(axis[1]) for axis in axes)

    # Who records, who waits.
    texts = browser.run("return [...document.querySelectorAll('#links li')].map((item) => item.textContent)")
    assert sorted(texts)[0] == "decode waits on kv/layer-0"
    assert "prefill records on kv/layer-0" in texts

    # A name is text, whatever it holds.
    assert _EVIL in browser.run(_NAMES)
    assert r"kv/\u{202e}snekot" in browser.run(_NAMES)
    assert "\u202e" not in browser.run("return document.body.outerHTML")
    assert browser.run("return document.querySelectorAll('main img, main script').length") == 0
    assert browser.run("return document.title").startswith("ipcsync")

    # An event that is closed goes.
    event.close()
    waiter.close()
    browser.until(
        f"{_NAMES.replace('return', 'const names =')}; return !names.includes('kv/layer-0')", what="it is gone"
    )
    _assert_clean(browser, observer)


_kept: list[object] = []


def _hold(endpoint: str, name: str) -> None:
    """In a peer: record on an event."""
    _kept.append(ipcsync.connect(endpoint, name="dies").event(name, recorder=True))


@pytest.mark.own_coordinator  # its slots' numbers are shown
def test_events_that_look_alike_are_told_apart_and_a_broken_one_says_why_and_when(
    browser: Browser,
    coordinator: ipcsync.Coordinator,
    new_observer: Callable[..., Observer],
    new_client: Callable[..., ipcsync.Client],
    peer: Peer,
) -> None:
    observer = new_observer("--endpoint", coordinator.endpoint)
    client = new_client("stays")
    peer.call(_hold, coordinator.endpoint, "weights")
    held = client.event("weights")
    peer.kill()
    until(lambda: held.state == "broken", "its recorder's death is seen")
    client.event("weights", recorder=True)
    for _ in range(2):
        client.record(ipcsync.Stream())
    browser.look(width=1280, height=900)
    browser.open(observer.url)
    expected = ["(unnamed, of stays) (slot 2)", "(unnamed, of stays) (slot 3)", "weights (slot 0)", "weights (slot 1)"]
    browser.until(f"{_NAMES.replace('return', 'const names =')}; return names.length === 4", what="all are shown")
    assert sorted(browser.run(_NAMES)) == expected
    texts = browser.run("return [...document.querySelectorAll('#links li')].map((item) => item.textContent)")
    assert {text.partition(" on ")[2] for text in texts} == set(expected)
    ends = browser.run(
        "return [...document.querySelectorAll('#events tbody tr')].map((row) => "
        "[row.cells[0].textContent, [...row.cells].find((cell) => cell.dataset.label === 'ended').textContent])"
    )
    assert {name: end.partition(" ")[0] for name, end in ends if "ago" in end} == {"weights (slot 0)": "died"}
    assert len(ends) == len(expected)
    figures = browser.run(
        "return [...document.querySelectorAll('#figures div')].map((box) => [...box.children].map((each) => each.textContent))"  # noqa: E501 - JavaScript
    )
    shown = dict(figures)
    assert (shown["version"], shown["driver"]) == (ipcsync.__version__, ipcsync.driver_name())
    assert shown["default TTL"] == "30.0 s"
    assert {"pool high-water", "last gap", "deaths"} <= shown.keys()
    heads = browser.run(
        "return [...document.querySelectorAll('#events th[scope=col]')].map((head) => head.textContent)"
    )
    assert {"records/s", "last minute", "ended"} <= set(heads)
    _assert_clean(browser, observer)


def test_the_page_is_usable_by_keyboard_and_on_a_phone_in_light_and_dark(
    browser: Browser, coordinator: ipcsync.Coordinator, new_observer: Callable[..., Observer], client: ipcsync.Client
) -> None:
    observer = new_observer("--endpoint", coordinator.endpoint)
    for number in range(12):
        client.event(f"layer-{number}", recorder=True).record().synchronize(10)
    client.event("a/name/" + "that-is-long-" * 15)
    browser.look(width=390, height=844)
    browser.open(observer.url)
    browser.until("return document.querySelectorAll('#events tbody tr').length === 13", what="all events are shown")
    assert browser.run("return document.documentElement.scrollWidth <= innerWidth"), "a phone scrolls sideways"
    light = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert browser.picture().startswith(b"\x89PNG")

    browser.look(width=1280, height=900, dark=True)
    dark = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert (light, dark) == ("rgb(255, 255, 255)", "rgb(13, 17, 23)")
    assert browser.run("return document.documentElement.scrollWidth <= innerWidth")

    # The first Tab offers to skip to the events; from there on Tab reaches filter and heads.
    browser.press(_TAB)
    assert browser.run("return document.activeElement.className") == "skip"
    assert browser.run("return document.activeElement.getBoundingClientRect().left >= 0"), "what has focus is seen"
    browser.press(_ENTER, _TAB)
    assert browser.run("return document.activeElement.id") == "filter"
    browser.press(*"layer-1")
    browser.until(
        f"{_NAMES.replace('return', 'const names =')}; return names.join() === 'layer-1,layer-10,layer-11'",
        what="the names that hold what was typed",
    )
    browser.press(_TAB, _TAB)  # over the table, which scrolls by keys
    assert browser.run("return document.activeElement.textContent") == "name"
    browser.press(_ENTER)
    assert browser.run(_NAMES) == ["layer-11", "layer-10", "layer-1"]
    sorting = "return document.activeElement.parentElement.getAttribute('aria-sort')"
    assert browser.run(sorting) == "descending"
    _assert_clean(browser, observer)


def test_the_page_says_when_coordinator_or_observer_are_gone(
    browser: Browser,
    new_coordinator: Callable[..., ipcsync.Coordinator],
    new_observer: Callable[..., Observer],
    tmp_path: Path,
) -> None:
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    first = new_coordinator(runtime_dir=str(directory))
    observer = new_observer("--endpoint", first.endpoint)
    status = "return document.getElementById('status').textContent.startsWith(arguments[0])"
    browser.open(observer.url)
    browser.until(status, "live: ipc://", what="it is live")
    first.stop()
    browser.until(status, "not ready: ", what="the coordinator's end is shown")
    second = new_coordinator(runtime_dir=str(directory))
    with ipcsync.connect(second.endpoint, name="next") as client, client.event("again"):
        browser.until(status, "live: ipc://", what="it is live again")
        browser.until(
            f"{_NAMES.replace('return', 'const names =')}; return names.includes('again')", what="a new event"
        )
    # As behind a network that is cut: the connection stays, and nothing comes.
    os.kill(observer.process.pid, signal.SIGSTOP)
    browser.until(status, "the observer does not answer", what="its silence is shown")
    os.kill(observer.process.pid, signal.SIGCONT)
    browser.until(status, "live: ipc://", what="it is live once more")
    assert browser.console() == []
    observer.stop()
    browser.until(status, "the observer does not answer", what="the observer's end is shown")
    browser.run("document.dispatchEvent(new Event('visibilitychange'))")
    assert browser.run(status, "the observer does not answer"), "another tab was shown meanwhile"


_LEFT_OUT = """
    const known = view.state;
    const said = Object.entries(arguments[0]).map(([part, shown]) => {
        view.state = { ...known, ...shown };
        show();
        return [part, document.getElementById(part).textContent];
    });
    view.state = known;
    show();
    return Object.fromEntries(said);
"""


def test_the_page_says_what_it_does_not_show(
    browser: Browser, coordinator: ipcsync.Coordinator, new_observer: Callable[..., Observer], client: ipcsync.Client
) -> None:
    observer = new_observer("--endpoint", coordinator.endpoint)
    client.event("e", recorder=True)
    browser.open(observer.url)
    browser.until(f"{_NAMES.replace('return', 'const names =')}; return names.includes('e')", what="it is shown")
    said = browser.run(
        _LEFT_OUT,
        {
            "more": {"events": [], "events_found": 0, "events_total": 5000},
            "links": {"links": []},
            "more-sessions": {"sessions_total": 0},
        },
    )
    assert said == {
        "more": "No event that the coordinator lists has such a name.",
        "links": "1 more are not shown.",
        "more-sessions": "There are no sessions.",
    }
    said = browser.run(_LEFT_OUT, {"more": {"events_found": 400}})
    assert said == {"more": "399 more are not shown: narrow the names."}
    said = browser.run(_LEFT_OUT, {"more": {"events_found": 0, "events_total": 0}})
    assert said == {"more": ""}, "one has ended since they were counted"
    _assert_clean(browser, observer)
