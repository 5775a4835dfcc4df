"""Prints how many of the product's lines the tests ran, for each package: `python -m tests.kit.covered lines.json`."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path, PurePath


def main() -> None:
    """Print a line for each package, and one for all."""
    files = json.loads(Path(sys.argv[1]).read_text())["files"]
    lines, covered = Counter[str](), Counter[str]()
    for name, file in files.items():
        summary = file["summary"]
        for package in (str(PurePath(name).parent), "all"):
            lines[package] += summary["num_statements"]
            covered[package] += summary["covered_lines"]
    for package in (*sorted(lines.keys() - {"all"}), "all"):
        share = covered[package] / (lines[package] or 1)
        sys.stdout.write(f"{share:7.1%}  {covered[package]:5d} of {lines[package]:5d} lines  {package}\n")


if __name__ == "__main__":
    main()
