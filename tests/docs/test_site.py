"""The documentation as a site: it builds, fetches nothing, fits the window, and can be dark. `make docs` runs this."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.kit import browser as browsers
from tests.kit.browser import Browser

pytest.importorskip("mkdocs", reason="the docs group is not installed (make install installs it)")

pytestmark = [pytest.mark.process, pytest.mark.thorough, pytest.mark.timeout(900)]

_ROOT = Path(__file__).parents[2]
_DEADLINE_S = 120.0
_BUILD_S = 600.0  # each worker that has a test of these builds it, beside other tests
_WIDTH = 1400
# What is wider than its place, as [element, text]; a scroll bar inside of a page counts, since nobody scrolls a table.
# A line that ends with code may pass its end by the code's padding, by some fonts.
_CUT = """
    const may_be_cut = "pre code, .md-typeset__scrollwrap, .md-typeset__table, .doc-heading, h1, h2, h3, p, li, .md-nav__link";
    const cut = [...document.querySelectorAll(may_be_cut)].filter((e) => e.clientWidth && e.scrollWidth > e.clientWidth + 4);
    const page = document.documentElement;
    return [...cut, ...page.scrollWidth > innerWidth ? [page] : []].map((e) => [e.tagName, e.textContent.slice(0, 80)]);
"""  # noqa: E501 - JavaScript
_COLOUR = "return getComputedStyle(document.querySelector('.md-main')).getPropertyValue('--md-default-bg-color').trim()"
_SWITCH = "document.querySelector('label.md-header__button:not([hidden])[for^=__palette]').click()"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built without a warning; that of `make docs` is there already."""
    if built := os.environ.get("IPCSYNC_SITE"):
        return Path(built)
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=_ROOT, env=env, capture_output=True, text=True, timeout=_BUILD_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    """A fresh browser with a window of a laptop's width."""
    reason = browsers.why_not()
    if reason:
        pytest.skip(reason)
    with Browser(tmp_path, _DEADLINE_S) as one:
        one.look(width=_WIDTH, height=1000)
        yield one


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert pages
    for page in pages:
        assert not re.search(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=\"?https?:", page.read_text()), page


def test_links_lead_to_a_page_or_a_file(site: Path) -> None:
    for page in site.rglob("*.html"):
        if page.name == "404.html":  # its links are of the place at which it is shown
            continue
        for link in re.findall(r"<a[^>]+href=\"?([^\" >]+)", page.read_text()):
            url = urlsplit(link)
            if url.scheme or not url.path or url.path.startswith("/"):
                continue
            target = page.parent / unquote(url.path)
            assert target.is_file() or (target / "index.html").is_file(), (page.relative_to(site), link)


def test_the_index_lists_each_page() -> None:
    index = (_ROOT / "docs/index.md").read_text()
    pages = {page.name for page in (_ROOT / "docs").glob("*.md")} - {"index.md"}
    assert {page for page in pages if f"({page}" not in index} == set()


def test_nothing_is_cut(site: Path, browser: Browser) -> None:
    for page in site.rglob("*.html"):
        browser.open(page.as_uri())
        assert browser.run(_CUT) == [], page.relative_to(site)


def test_something_that_is_cut_is_found(site: Path, browser: Browser) -> None:
    browser.open((site / "getting-started.html").as_uri())
    browser.run("document.querySelector('pre code').prepend('x'.repeat(400))")
    assert [element for element, _ in browser.run(_CUT)] == ["CODE"]


def test_a_switch_leads_from_the_systems_colours_to_light_to_dark_and_back(site: Path, browser: Browser) -> None:
    browser.look(width=_WIDTH, height=1000, dark=True)
    browser.open((site / "index.html").as_uri())
    seen = [browser.run(_COLOUR)]
    for _ in range(3):
        browser.run(_SWITCH)
        seen.append(browser.run(_COLOUR))
    dark, light, dark_again, system = seen
    assert dark == dark_again == system != light
