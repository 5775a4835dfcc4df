"""Counts the product's lines that the tests ran, for each package: `make coverage`.

python -m tests.kit.covered begin    from now on, whatever this interpreter runs is noted (`lines`)
python -m tests.kit.covered show     the table of it, what is missing in build/coverage/missing.txt
"""

from __future__ import annotations

import sys
import sysconfig
from collections import Counter
from pathlib import Path

from coverage import Coverage, CoverageData

from tests.kit import lines

_ROOT = Path(__file__).parents[2]
_FOLDER = _ROOT / "build" / "coverage"
_ELSEWHERE = "ipcsync/integrations"
_LEAST = 0.95
_NOTE = f"""
{_ELSEWHERE} is tested by `make test-lmcache`, `make test-ray` and `make test-vllm`, beside the projects that it is for,
and what runs there is not counted here.
"""


def begin() -> None:
    """Have this interpreter note from its next start on what it runs."""
    if sys.prefix == sys.base_prefix:
        raise SystemExit("this is not an interpreter of a virtual environment's: another program may use it")
    _FOLDER.mkdir(parents=True, exist_ok=True)
    at, index = 0, ""
    for source in sorted([*_ROOT.glob("ipcsync/**/*.py"), *_ROOT.glob("services/**/*.py")]):
        index += f"{at} {source}\n"
        at += len(source.read_text().splitlines()) + 1  # they count from 1
    (_FOLDER / lines.NOTES).write_bytes(bytes(at))
    (_FOLDER / lines.INDEX).write_text(index)
    Path(sysconfig.get_path("purelib"), "zz_lines.pth").write_text(lines.START.format(folder=str(_FOLDER)))


def _noted() -> dict[str, list[int]]:
    """The lines that ran of each source, those of which none ran included."""
    notes = (_FOLDER / lines.NOTES).read_bytes()
    index = [line.split(" ", 1) for line in (_FOLDER / lines.INDEX).read_text().splitlines()]
    begins = [int(begin) for begin, _ in index]
    return {
        source: [line for line in range(end - begin) if notes[begin + line]]
        for (_, source), begin, end in zip(index, begins, [*begins[1:], len(notes)], strict=True)
    }


def show() -> int:
    """Print a line for each package, one for all, and one for what is tested here; leave coverage's data behind.

    Returns 1 if less than 95 % of what is tested here ran.
    """
    data_file = _FOLDER / "data"
    data = CoverageData(str(data_file))
    data.erase()
    noted = _noted()
    data.add_lines(noted)
    data.touch_files(noted)
    data.write()
    coverage = Coverage(str(data_file), config_file=str(_ROOT / "pyproject.toml"))
    coverage.load()
    total, ran = Counter[str](), Counter[str]()
    for source in noted:
        _, statements, _, missing, _ = coverage.analysis2(source)
        package = Path(source).relative_to(_ROOT).parent.as_posix()
        totals = ["all"] if package.startswith(_ELSEWHERE) else ["all", f"all but {_ELSEWHERE}"]
        for name in (package, *totals):
            total[name] += len(statements)
            ran[name] += len(statements) - len(missing)
    for name in sorted(total, key=lambda name: (name.startswith("all"), name)):
        sys.stdout.write(f"{ran[name] / (total[name] or 1):7.1%}  {ran[name]:5d} of {total[name]:5d} lines  {name}\n")
    sys.stdout.write(_NOTE)
    with open(_FOLDER / "missing.txt", "w") as file:
        coverage.report(file=file, show_missing=True, skip_covered=True, sort="-miss")
    tested = f"all but {_ELSEWHERE}"
    return int(ran[tested] < _LEAST * total[tested])


if __name__ == "__main__":
    sys.exit({"begin": begin, "show": show}[sys.argv[1]]())
