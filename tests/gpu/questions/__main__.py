"""Asks them, one after the other, each in processes of its own that are killed at its limit.

    IPCSYNC_DRIVER=cuda python -m tests.gpu.questions [--out questions.md] [--only NAME …]

Each answer is in the table before the next is asked. A question that does not end has that as its answer.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tests.contract.probes import write_down
from tests.gpu.probe_report import Answer, read, table
from tests.kit import driver_kit as kit

ROOT = Path(__file__).parents[3]
QUESTIONS: dict[str, tuple[str, float]] = {
    "poisoned_slot": ("slots", 10),
    "late_signals": ("slots", 14),
    "files": ("slots", 10),
    "lowered_words": ("deaths", 8),
    "never_ending_streams": ("deaths", 40),
    "turns": ("turns", 15),
    "capture_of_words": ("graphs", 6),
    "copies_end_waits": ("graphs", 6),
    "external_events": ("graphs", 8),
    "feeder_and_drainer": ("graphs", 12),
    "hardware_queues": ("graphs", 12),
    "beside_a_gate": ("graphs", 14),
    "death_amid_a_graph": ("graphs", 8),
    "memory_of_the_dead": ("graphs", 8),
    "many_gates": ("graphs", 10),
    "dependent_launches": ("dependent", 8),
    "odd_handles": ("semantics", 10),
    "slot_order": ("semantics", 10),
    "replaced_records": ("semantics", 6),
    "captured_events": ("semantics", 6),
    "writes_without_barrier": ("semantics", 6),
    "forbidden_calls": ("semantics", 8),
    "graph_records": ("semantics", 6),
}
"""Each is a generator of rows and answers in that module; so many seconds are its limit."""


def ask(name: str) -> None:
    """In a process of its own: write down each answer. What a question raises is its answer."""
    module = importlib.import_module(f"tests.gpu.questions.{QUESTIONS[name][0]}")
    kit.use_device(0)
    answers: Iterator[tuple[str, str]] = getattr(module, name)()
    try:
        for row, answer in answers:
            write_down(row, answer)
    except Exception as error:  # noqa: BLE001 - whatever a driver does that nobody expected
        write_down(f"{name}, further", f"{type(error).__name__}: {' '.join(str(error).split())[-300:]}")
    kit.open_all_latches()
    os._exit(0)  # streams of this process may never end, and neither would its exit


def _in_time(name: str, path: Path) -> bool:
    command = [sys.executable, "-m", "tests.gpu.questions", "--one", name]
    env = {**os.environ, "IPCSYNC_PROBE_OUT": str(path)}
    process = subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True)
    try:
        process.wait(QUESTIONS[name][1])
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return False
    return process.returncode == 0


def _say_it_did_not_end(name: str, path: Path) -> None:
    """By the words of an earlier answer, which names the device."""
    known = read(path)
    if known:
        row, answer = f"{name}, further", f"no answer within {QUESTIONS[name][1]:g} s"
        late: Answer = replace(known[0], row=row, answer=answer)
        with path.open("a") as file:
            file.write(late.as_json() + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 1 if a question did not end."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.questions", description=__doc__)
    parser.add_argument("--out", type=Path, help="the file to write (default: standard output)")
    parser.add_argument("--only", action="append", default=[], choices=[*QUESTIONS], help="may be repeated")
    parser.add_argument("--one", choices=[*QUESTIONS], help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.one:
        ask(chosen.one)
    did_all_end = True
    with tempfile.TemporaryDirectory(prefix="ipcsync-questions-") as folder:
        path = Path(folder, "answers.jsonl")
        path.touch()
        for name in chosen.only or QUESTIONS:
            began = time.monotonic()
            did_end = _in_time(name, path)
            if not did_end:
                _say_it_did_not_end(name, path)
            did_all_end = did_all_end and did_end
            sys.stderr.write(f"{name}: {time.monotonic() - began:.1f} s{'' if did_end else ', did not end'}\n")
            if chosen.out:
                chosen.out.write_text(table(read(path)), encoding="utf-8")
        if not chosen.out:
            sys.stdout.write(table(read(path)))
    return 0 if did_all_end else 1


if __name__ == "__main__":
    sys.exit(main())
