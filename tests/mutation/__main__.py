"""Plants mistakes in the product and counts those that the tests find: `python -m tests.mutation [part…]`.

mutmut makes the mutants and runs them, in a copy under build/mutation; here stands which tests are to find the mutants
of which part. README.md beside this lists those that are left, with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "mutation"
PROGRAMS = ("ipcsync_coordinator", "ipcsync_keeper")
ENOUGH = 85  # per cent

_PYTEST = ("-p", "no:cacheprovider", "-m", "not thorough", "--hypothesis-profile=mutants")

# What mutmut leaves as a mutant's status. One whose process does not end, or dies, was noticed too.
_FOUND = {
    1: "found",
    3: "found",
    36: "hung",
    24: "hung",
    -24: "hung",
    152: "hung",
    255: "hung",
    -9: "died",
    -11: "died",
}
_SURVIVED = {0: "survived", 5: "untested", 33: "untested"}


@dataclass(frozen=True)
class Part:
    """Files of the product, and the tests that must bite when they change. Only the tests' own process has mutants."""

    files: tuple[str, ...]
    tests: tuple[str, ...]


PARTS = {
    "registry": Part(
        ("ipcsync_coordinator/registry.py", "ipcsync_coordinator/state.py"),
        ("tests/unit/coordinator/test_registry.py", "tests/unit/coordinator/test_registry_machine.py"),
    ),
    "dispatcher": Part(
        ("ipcsync_coordinator/requests.py", "ipcsync_coordinator/state.py"),
        ("tests/unit/coordinator/test_dispatcher.py", "tests/unit/coordinator/test_dispatcher_replies.py"),
    ),
    "effects": Part(
        ("ipcsync_coordinator/effects.py",),
        (
            "tests/unit/coordinator/test_effects.py",
            "tests/unit/coordinator/test_effects_mirrors.py",
            "tests/faults/test_board_order.py",
        ),
    ),
    "attachments": Part(
        (
            "ipcsync/_session/attachments.py",
            "ipcsync/_session/driving.py",
        ),
        ("tests/unit/session/test_attachments.py", "tests/unit/session/test_driving.py"),
    ),
    "engines": Part(
        (
            "ipcsync/_engines/loss.py",
            "ipcsync/_engines/queued.py",
        ),
        (
            "tests/faults/test_board_order.py",
            "tests/faults/test_chain_order.py",
            "tests/unit/session/test_attachments.py",
            "tests/unit/session/test_driving.py",
            "tests/unit/engines/test_engine_chains.py",
            "tests/unit/engines/test_chain_entries.py",
            "tests/unit/engines/test_chain_judgement.py",
            "tests/unit/engines/test_chain_waits.py",
            "tests/unit/engines/test_slot.py",
            "tests/unit/engines/test_engine_use.py",
            "tests/events/test_driver_calls.py",
            "tests/events/test_full_ring.py",
            "tests/events/test_shared_event.py",
            "tests/events/test_shared_event_roles.py",
            "tests/client/test_error_texts.py",
            "tests/events/test_point.py",
            "tests/events/test_point_callbacks.py",
            "tests/client/test_async.py",
            "tests/events/test_fan_in.py",
            "tests/faults/test_deaths.py",
            "tests/faults/test_points.py",
        ),
    ),
}


@dataclass(frozen=True)
class Mutant:
    """One mistake, and what mutmut says became of it: None before it was tried."""

    name: str
    status: int | None


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _toml(values: tuple[str, ...]) -> str:
    return json.dumps(list(values))


def _lay_out(part: Part, there: Path) -> None:
    """A copy of product and tests that mutmut understands: it looks for sources under src/."""
    for package, source in [("ipcsync", ROOT), *((program, ROOT / "services") for program in PROGRAMS)]:
        shutil.copytree(
            source / package, there / "src" / package, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    shutil.copytree(ROOT / "tests", there / "tests", dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    pyproject = (ROOT / "pyproject.toml").read_text()
    mutmut = f"""
[tool.mutmut]
source_paths = ["src"]
only_mutate = {_toml(tuple(f"src/{file}" for file in part.files))}
do_not_mutate_patterns = ['^\\s*log\\.']
pytest_add_cli_args_test_selection = {_toml(part.tests)}
pytest_add_cli_args = {_toml(_PYTEST)}
process_isolation = "forkserver"
timeout_constant = 2.0
timeout_multiplier = 15.0
use_git_change_detection = false
use_setproctitle = false
track_dependencies = false
"""
    (there / "pyproject.toml").write_text(pyproject + mutmut)


def _mutmut(there: Path, *arguments: str) -> int:
    env = dict(os.environ, IPCSYNC_DRIVER="host", IPCSYNC_TEST_LONG="1")
    return subprocess.run([sys.executable, "-m", "mutmut", *arguments], cwd=there, env=env, check=False).returncode


def _mutants(there: Path) -> list[Mutant]:
    found = []
    for meta in sorted((there / "mutants" / "src").rglob("*.meta")):
        for name, status in json.loads(meta.read_text())["exit_code_by_key"].items():
            found.append(Mutant(name, status))
    return found


def _generate(there: Path) -> None:
    """Have mutmut write the mutants without running any."""
    program = (
        "from mutmut.__main__ import *; import os; os.makedirs('mutants', exist_ok=True); copy_src_dir();"
        "copy_also_copy_files(); setup_source_paths(); create_mutants(1)"
    )
    subprocess.run([sys.executable, "-c", program], cwd=there, check=True)


def _try(name: str, part: Part, *, sample: int, seed: int, workers: int) -> bool:
    there = BUILD / name
    shutil.rmtree(there, ignore_errors=True)
    there.mkdir(parents=True)
    _lay_out(part, there)
    chosen: list[str] = []
    if sample:
        _generate(there)
        names = [mutant.name for mutant in _mutants(there)]
        chosen = sorted(random.Random(seed).sample(names, min(sample, len(names))))
    if _mutmut(there, "run", "--max-children", str(workers), *chosen):
        return False
    return _report(name, sample=sample, seed=seed)


def _report(name: str, *, sample: int, seed: int) -> bool:
    """A line for each file, and each mutant that is left; whether enough were found."""
    all_of_them = _mutants(BUILD / name)
    tried = [mutant for mutant in all_of_them if mutant.status is not None]
    if not tried:
        return False
    words = [_FOUND.get(mutant.status or 0) or _SURVIVED.get(mutant.status or 0, "failed") for mutant in tried]
    for mutant, word in zip(tried, words, strict=True):
        if word not in _FOUND.values():
            _say(f"{word}: {mutant.name}")
    by_file: dict[str, Counter[bool]] = {}
    for mutant, word in zip(tried, words, strict=True):
        by_file.setdefault(mutant.name.partition(".x")[0], Counter())[word in _FOUND.values()] += 1
    for file, counts in by_file.items():
        _say(f"  {file}: {counts[True]} of {counts.total()}, {100 * counts[True] / counts.total():.1f} %")
    found = sum(word in _FOUND.values() for word in words)
    which = f"a sample of {len(tried)} out of {len(all_of_them)}, seed {seed}" if sample else f"all {len(tried)}"
    kinds = ", ".join(f"{count} {word}" for word, count in Counter(words).most_common())
    _say(f"{name}: {100 * found / len(tried):.1f} % of {which} ({kinds})")
    return 100 * found >= ENOUGH * len(tried)


def main() -> int:
    """Try the mutants of the parts that are named, or of all; 1 if too few were found."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="of which parts: all of them if none is named")
    parser.add_argument("--sample", type=int, default=0, help="only so many of each part, drawn at random")
    parser.add_argument("--seed", type=int, default=1, help="of the sample")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()
    enough = [
        _try(name, PARTS[name], sample=asked.sample, seed=asked.seed, workers=asked.workers)
        for name in asked.parts or PARTS
    ]
    return int(not all(enough))


if __name__ == "__main__":
    sys.exit(main())
