"""The house's order: imports point down the list in CONTRIBUTING.md, and nothing goes in a circle.

Every import counts: inside of functions and for type checkers too, since a reader has to follow those as well.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_ROW = re.compile(r"^\| ((?:`(?:ipcsync|services)/[^`]*`(?:, )?)+) \|", re.MULTILINE)
_CIRCLES = {
    frozenset(("ipcsync._native.event", "ipcsync._native.stream")),  # an event's stream, a stream's event, as in CUDA
}


def _floors() -> list[list[str]]:
    """The places of the list, from the top: those of one line stand side by side."""
    text = (_ROOT / "CONTRIBUTING.md").read_text().partition("## Where code lives")[2]
    return [re.findall(r"`([^`]*)`", row) for row in _ROW.findall(text)]


@cache
def _modules() -> dict[str, Path]:
    found = {}
    for top in (_ROOT / "ipcsync", *sorted((_ROOT / "services").glob("ipcsync_*"))):
        for path in top.rglob("*.py") if top.is_dir() else [top]:
            parts = path.relative_to(top.parent).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of each import of ours in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            assert node.level == 0, f"{path}: a relative import"
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in _modules() else node.module for name in inner]
        else:
            continue
        for name in names:
            if name in _modules():
                yield node.lineno, name


@cache
def _graph() -> dict[str, dict[str, int]]:
    """Module to the modules that it imports, with the line."""
    graph: dict[str, dict[str, int]] = {}
    for name, path in _modules().items():
        graph[name] = {module: line for line, module in _imports(path) if module != name}
    return graph


def _place(module: str) -> str:
    """The place of the list that a module belongs to: the longest that holds it."""
    path = str(_modules()[module].relative_to(_ROOT))
    holding = [
        place
        for floor in _floors()
        for place in floor
        if path == place or (place[-1] == "/" and path.startswith(place))
    ]
    assert holding, f"CONTRIBUTING.md does not say where {path} belongs"
    return max(holding, key=len)


def _circles(graph: dict[str, dict[str, int]]) -> set[frozenset[str]]:
    """The sets of modules that reach each other."""
    reached = {module: _reachable(graph, module) for module in graph}
    return {
        frozenset(other for other in reached[module] if module in reached[other])
        for module in graph
        if module in reached[module]
    }


def _reachable(graph: dict[str, dict[str, int]], start: str) -> set[str]:
    seen: set[str] = set()
    left = list(graph[start])
    while left:
        module = left.pop()
        if module not in seen:
            seen.add(module)
            left += graph[module]
    return seen


def test_every_place_of_the_list_is_there() -> None:
    places = [place for floor in _floors() for place in floor]
    assert len(places) > 15
    assert [place for place in places if not (_ROOT / place).exists()] == []
    assert len(places) == len(set(places))


def test_every_import_points_down_the_list() -> None:
    floor_of = {place: number for number, floor in enumerate(_floors()) for place in floor}
    upward = []
    for module, imported in _graph().items():
        mine = _place(module)
        for other, line in imported.items():
            theirs = _place(other)
            if mine != theirs and floor_of[mine] >= floor_of[theirs]:
                upward.append(f"{_modules()[module].relative_to(_ROOT)}:{line} ({mine}) imports {other} ({theirs})")
    assert upward == []


def test_no_modules_import_each_other_but_those_whose_objects_do() -> None:
    assert _circles(_graph()) == _CIRCLES


@pytest.mark.parametrize(
    ("graph", "circles"),
    [
        ({"a": {"b": 1}, "b": {}}, set()),
        ({"a": {"b": 1}, "b": {"a": 1}}, {frozenset("ab")}),
        ({"a": {"b": 1}, "b": {"c": 1}, "c": {"a": 1}, "d": {"a": 1}}, {frozenset("abc")}),
    ],
)
def test_a_circle_is_found(graph: dict[str, dict[str, int]], circles: set[frozenset[str]]) -> None:
    assert _circles(graph) == circles


def test_what_is_marked_as_a_model_imports_nothing_of_the_product() -> None:
    found = [path for path in (_ROOT / "tests").rglob("test_*.py") if "mark.model" in path.read_text()]
    models = [path for path in found if path != Path(__file__)]
    assert models
    todo, seen = list(models), set()
    while todo:
        path = todo.pop()
        seen.add(path)
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            assert not [name for name in names if name.startswith("ipcsync")], path
            ours = {(_ROOT / name.replace(".", "/")).with_suffix(".py") for name in names if name.startswith("tests.")}
            todo += [other for other in ours - seen if other.exists()]
    assert len(seen) > len(models)
