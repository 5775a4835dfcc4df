"""Runs make once for each argument, whatever became of those before: `python -m tests.kit.passes make lint "test -k"`.

At the end it says of each how long it took and what its tests said. Fails if any did.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time

_SAID = re.compile(r"=+ (\d+ (?:failed|passed).*) in [\d.]+s")


def _run(command: list[str]) -> tuple[int, list[str]]:
    """Its exit status, and what its tests said; its output is passed on as it comes."""
    said = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
            if found := _SAID.search(line):
                said.append(found[1])
    return process.returncode, said


def main() -> int:
    """Run all, and print a line for each."""
    make, *passes = sys.argv[1:]
    lines, began, failed = [], time.monotonic(), 0
    for each in passes:
        start = time.monotonic()
        status, said = _run([*shlex.split(make), *shlex.split(each)])
        failed += status != 0
        took = f"{(time.monotonic() - start) / 60:.1f} min"
        lines.append(f"{'FAILED' if status else 'passed'} {'; '.join([f'{each}: {took}', *said])}\n")
    lines.append(f"{len(passes) - failed} of {len(passes)} passed, {(time.monotonic() - began) / 60:.0f} min\n")
    sys.stdout.write("".join(lines))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
