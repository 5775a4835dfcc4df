"""For mkdocs: files of the repository that the pages link to become part of the site.

In the repository, `../SECURITY.md` is right; in the site there is no such place. So what lies outside of `docs` and is
linked to from it, or from a page that came in this way, is taken in as `repository/…`, and the links are turned to it.
A link to a folder, which the repository shows and the site does not, becomes its text.
"""

from __future__ import annotations

import os
import posixpath
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

_LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(\))")
_WHOLE_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s#:]+)\)")
_OUTSIDE = "repository"


def _root(config: MkDocsConfig) -> str:
    return os.path.dirname(config.docs_dir)


def _targets(text: str, path: str) -> list[str]:
    """What the text of the file at `path` links to; paths in the repository, as all are here."""
    return [posixpath.normpath(posixpath.join(posixpath.dirname(path), match[1])) for match in _LINK.findall(text)]


def _place(path: str) -> str:
    """Where a file of the repository is in the site's sources."""
    return path.removeprefix("docs/") if path.startswith("docs/") else f"{_OUTSIDE}/{path}"


def _path(place: str) -> str:
    """And back."""
    return place.removeprefix(f"{_OUTSIDE}/") if place.startswith(f"{_OUTSIDE}/") else f"docs/{place}"


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Take in what is linked to, and what that links to."""
    from mkdocs.structure.files import File

    root = _root(config)
    waiting = [_path(file.src_uri) for file in files.documentation_pages()]
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        with open(os.path.join(root, path), encoding="utf-8") as file:
            text = file.read()
        for target in _targets(text, path) if path.endswith(".md") else []:
            full = os.path.join(root, target)
            if target in seen or target.startswith((".", "docs/")) or not os.path.isfile(full):
                continue
            seen.add(target)
            waiting.append(target)
            files.append(File.generated(config, _place(target), abs_src_path=full))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Turn links to where the files are in the site."""
    path = _path(page.file.src_uri)

    def unlink(match: re.Match[str]) -> str:
        target = os.path.join(_root(config), os.path.dirname(path), match[2])
        return match[1] if os.path.isdir(target) else match[0]

    def turn(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), match[2]))
        link = posixpath.relpath(_place(target), posixpath.dirname(page.file.src_uri) or ".")
        return f"{match[1]}{link}{match[3] or ''}{match[4]}"

    return _LINK.sub(turn, _WHOLE_LINK.sub(unlink, markdown))
