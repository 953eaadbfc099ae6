"""Accuracy of compressed communication beside fp32, seed by seed: the 95 % interval of the paired difference.

    python benchmarks/compression_accuracy.py --data-dir DATA --plan             # what would run, and how long
    python benchmarks/compression_accuracy.py --data-dir DATA --jobs 16 --seconds 330
    python benchmarks/compression_accuracy.py --report                           # the tables of what has run
    python benchmarks/compression_accuracy.py --keep rows.jsonl                  # what they are made of, without curves

Runs of one seed have the same split, parts, initial weights, dropout masks and order of samples, on two worker
processes of unequal shares, and differ in what travels alone; what can be compared of that is
(`paired_runs.check_pairs`). Test accuracy at the epoch of the best validation accuracy, as everywhere. Beside it the
epochs until validation accuracy reaches 99 % of what the same seed's fp32 run ended with, and the bytes that both
workers handed over.

Each run becomes a line of a JSON-lines file at once; a benchmark that was interrupted, or that ``--seconds`` ended,
goes on where it stopped, as long as code and settings are the same. Seeds are started whole: every column of one runs.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import compression_cases
import compression_run
from compression_cases import COLUMNS, ROWS, WORKERS, Case, in_order
from compression_lines import append, kept_lines, read_runs
from compression_run import merged, train
from compression_tables import show
from worker_groups import WorkFailed, run_in_groups

ROOT = Path(__file__).resolve().parent.parent


@functools.cache
def code_version() -> str:
    """Hash over the sources that decide the result, wherever they were installed."""
    import nugnn
    from nugnn import comm, datasets, kernels, partition, precision

    found = hashlib.sha256()
    for module in (nugnn, comm, datasets, kernels, partition, precision):
        folder = Path(str(module.__file__)).parent
        own = folder.glob("*.py") if module is nugnn else folder.rglob("*.py")  # which may hold the others, or not
        for path in sorted(own):
            found.update(f"{module.__name__}:{path.relative_to(folder)}".encode() + b"\0" + path.read_bytes())
    for module in (compression_cases, compression_run):
        found.update(Path(str(module.__file__)).read_bytes())
    return found.hexdigest()[:12]


class Queue:
    """Cases one by one; after ``seconds`` no piece is begun, and those that were begun are finished.

    Args:
        pieces: Of cases, in order.
        seconds: None for no limit.
    """

    def __init__(self, pieces: Sequence[Sequence[Case]], seconds: float | None) -> None:
        self._pieces = [list(piece) for piece in pieces if piece]
        self._until = math.inf if seconds is None else time.monotonic() + seconds
        self._begun: list[Case] = []
        self.left_out = 0
        """Pieces that were not begun."""

    def next(self) -> Case | None:
        """The next one to start."""
        if not self._begun:
            if time.monotonic() >= self._until:
                self.left_out, self._pieces = self.left_out + len(self._pieces), []
            if not self._pieces:
                return None
            self._begun = self._pieces.pop(0)
        return self._begun.pop(0)


def plan(pieces: Sequence[Sequence[tuple[str, ...]]], jobs: int) -> float:
    """Print what would run; the seconds it would take when nothing is in its way."""
    total = 0.0
    print(f"{'row':16} {'runs':>5} {'s of a run':>10} {'s of a seed':>12} {'s':>7}")
    for name, row in ROWS.items():
        mine = [piece for piece in pieces if piece and piece[0][0] == name]
        if not mine:
            continue
        runs = sum(map(len, mine))
        print(f"{name:16} {runs:5} {row.seconds:10.1f} {row.seconds * len(mine[0]):12.0f} {row.seconds * runs:7.0f}")
        total += row.seconds * runs
    print(
        f"{total:.0f} s of one pair of workers on two cores of its own; {jobs} pairs side by side: {total / jobs:.0f} s"
    )
    return total / jobs


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", default=os.environ.get("NUGNN_DATA"), help="default: NUGNN_DATA")
    parser.add_argument("--only", action="append", choices=list(ROWS), help="a row; may be repeated")
    parser.add_argument("--column", action="append", choices=list(COLUMNS), help="beside fp32; may be repeated")
    parser.add_argument("--seeds", type=int, help="of each row, instead of its own number")
    parser.add_argument("--epochs", type=int, help="fewer than the row has; such runs are kept apart")
    parser.add_argument("--jobs", type=int, help="runs side by side; default: cores by two")
    parser.add_argument("--seconds", type=float, help="after these no further seed is begun")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "compression_accuracy.jsonl")
    parser.add_argument("--plan", action="store_true", help="say what would run, and end")
    parser.add_argument("--report", action="store_true", help="print the tables of what has run, and end")
    parser.add_argument("--keep", type=Path, help="write there what the tables are made of, and end")
    args = parser.parse_args(given)
    path = args.json if args.epochs is None else args.json.with_suffix(".short.jsonl")
    jobs = args.jobs or max(1, len(os.sched_getaffinity(0)) // WORKERS)
    if args.keep is not None:
        text = "".join(json.dumps(line) + "\n" for line in kept_lines(read_runs(path, None)))
        args.keep.parent.mkdir(parents=True, exist_ok=True)
        args.keep.write_text(text, encoding="utf-8")
        return 0
    if args.report:
        show(read_runs(path, None))
        return 0
    if not args.data_dir:
        parser.error("name the folder of the data sets with --data-dir, or in NUGNN_DATA")
    code = code_version()
    runs = read_runs(path, code)
    names = [name for name in ROWS if not args.only or name in args.only]
    data_dir = str(Path(args.data_dir).resolve())
    pieces = [[each for each in piece if each not in runs] for piece in in_order(names, args.column, args.seeds)]
    plan(pieces, jobs)
    if args.plan:
        return 0
    queue = Queue([[Case(*each, data_dir, args.epochs) for each in piece] for piece in pieces], args.seconds)
    failures = 0

    def on_end(case: Case, outcome: list[Any] | WorkFailed) -> None:
        nonlocal failures
        key = case.row, case.column, case.seed
        try:
            if isinstance(outcome, WorkFailed):
                raise outcome
            found = merged(case, outcome)
        except WorkFailed as error:
            failures += 1
            print(f"{' '.join(map(str, key))}: {error}", file=sys.stderr, flush=True)
            return
        runs[key] = dict(zip(("row", "column", "seed"), key, strict=True)) | {
            "code": code,
            "epochs": case.epochs,
            "settings": json.loads(json.dumps(case.settings)),
            "jobs": jobs,
            **found,
        }
        append(path, runs[key])
        print(
            f"{case.row}, {case.column}, seed {case.seed}: {100 * found['test']:.1f} %, {found['seconds']:.1f} s",
            flush=True,
        )

    run_in_groups(train, queue.next, on_end, groups=jobs, size=WORKERS)
    show(runs)
    if queue.left_out:
        print(f"{queue.left_out} seeds of a row were not begun within {args.seconds:g} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
