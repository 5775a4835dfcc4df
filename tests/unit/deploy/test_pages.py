"""The pages of deploy/: what each says, and that every file, flag, path and metric it names is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ipcsync_keeper import config
from tests.unit.deploy.deploying import (
    ALERTS,
    DEPLOY,
    ROOT,
    exported_metrics,
    parse,
)

_READMES = sorted(DEPLOY.glob("*/README.md"))


@pytest.fixture(params=_READMES, ids=lambda page: page.parent.name)
def page(request: pytest.FixtureRequest) -> Path:
    """The page of each folder."""
    path = request.param
    assert isinstance(path, Path)
    return path


def test_every_folder_has_a_page_that_says_what_to_set_how_to_see_it_and_what_was_not_run(page: Path) -> None:
    assert {readme.parent.name for readme in _READMES} == {"container", "kubernetes", "prometheus", "systemd"}
    text = page.read_text()
    titles = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert [title for title in titles if not title.startswith("What each")] == [
        "What to set",
        "How to see that it works",
        "What was checked, and what was not",
    ]


def test_pages_name_files_settings_alerts_and_commands_that_there_are(page: Path) -> None:
    text = page.read_text()
    for path in re.findall(r"\bdeploy/[\w./@-]*\w", text):
        assert (ROOT / path).exists(), path
    for name in re.findall(r"IPCSYNC_([A-Z_]+)=?", text):
        assert name.lower() in config.FIELDS or name == "ENDPOINT", name
    assert set(re.findall(r"`(Ipcsync\w+)`", text)) <= set(re.findall(r"alert: (\w+)", ALERTS.read_text()))
    assert set(re.findall(r"`(ipcsync_\w+)`", text)) <= exported_metrics()
    for call in re.findall(r"(?:^|= *|-- |exec \w+ )ipcsync ([a-z][\w .:-]*)$", text, re.MULTILINE):
        parse(call.split())


def test_nothing_names_a_registry() -> None:
    for path in DEPLOY.rglob("*"):
        if path.is_file():
            text = path.read_text()
            assert not re.search(r"https?://(?!127\.0\.0\.1)|docker\.io|ghcr|quay\.io|nvcr|pypi", text), path
