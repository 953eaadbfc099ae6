"""Accuracy of ``nugnn train`` on samples over three seeds, beside bags of words with logistic regression for the texts.

    python benchmarks/dnn_accuracy.py --data-dir DATA                    # CPU, two uneven workers: hours of one core
    python benchmarks/dnn_accuracy.py --data-dir DATA --device cuda      # one GPU, one process a run, all runs at once
    python benchmarks/dnn_accuracy.py --data-dir DATA --only digits --seeds 1

Each run is one command that a user could type; the best epoch by validation accuracy gives the test accuracy. Runs are
kept in a JSON file, from which ``docs/dnn.md`` is written when every row has all its seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
UNEVEN = ("--workers", "2", "--batch-split", "43,21")


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Args:
        title: In the table.
        split: Where samples of train, validation and test are from.
        goal: Percent to reach; None where the logistic regression is.
        options: Of ``nugnn train``.
    """

    title: str
    split: str
    goal: float | None
    options: str


# longest runs first, so that none of them begins when the others are through
ROWS = {
    "sst2": Row(
        "SST-2, transformer",
        "published parts",
        None,
        "--dataset text:sst2 --epochs 6",
    ),
    "fashion": Row(
        "Fashion-MNIST part, CNN",
        "the first 6,000 training and 2,000 test images; val from the former",
        86,
        "--dataset fashion-mnist --layers 3 --epochs 15 --shift 2 --label-smoothing 0.1",
    ),
    "mnist": Row(
        "part of MNIST's test set, CNN",
        "the first 8,000 of the 10,000 test images train, val from them; the last 2,000 are test",
        97,
        "--dataset mnist --layers 3 --epochs 10 --shift 2 --label-smoothing 0.1",
    ),
    "trec6": Row(
        "TREC-6, transformer",
        "published parts; val from train",
        None,
        "--dataset text:trec6 --epochs 12",
    ),
    "digits": Row("digits 8 x 8, CNN", "1,797 images, a fifth of them test", 97, "--dataset digits-images --epochs 20"),
}


def train(name: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """One ``nugnn train``: what it found, and the seconds it took with its start."""
    with tempfile.TemporaryDirectory() as folder:
        options = [*ROWS[name].options.split(), f"--seed={seed}", f"--device={args.device}"]
        options += [f"--data-dir={args.data_dir}", f"--out={folder}/run", "--json"]
        options += UNEVEN if args.workers == 2 else ()
        options += [f"--epochs={args.epochs}"] if args.epochs else []
        begin = time.perf_counter()
        # -P: the folders of this repository are not importable by their bare names
        command = [sys.executable, "-P", "-m", "nugnn", "train", *options]
        environment = {"OMP_NUM_THREADS": "1"} | os.environ
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
        found = json.loads(done.stdout)
    kept = ("test", "last_test", "val", "best_epoch", "batch_split", "num_samples", "epoch_seconds")
    return {name: found[name] for name in kept} | {"seconds": time.perf_counter() - begin}


def logistic_regressions(folder: Path) -> dict[str, float]:
    """Test accuracy on bags of words, and of words and pairs of words, trained on all of train.tsv."""
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.linear_model import LogisticRegression

    def read(part: str) -> tuple[list[str], list[str]]:
        lines = (folder / f"{part}.tsv").read_text().splitlines()
        text = lines[0].split("\t").index("text")
        cells = [line.split("\t") for line in lines[1:]]
        return [cell[text] for cell in cells], [cell[1 - text] for cell in cells]

    (texts, labels), (others, truth) = read("train"), read("test")
    scores = {}
    for title, options in (("words", {}), ("words and pairs", {"ngram_range": (1, 2), "token_pattern": r"\S+"})):
        bag = CountVectorizer(**options)
        model = LogisticRegression(max_iter=2000).fit(bag.fit_transform(texts), labels)
        scores[title] = float(model.score(bag.transform(others), truth))
    return scores


def page(runs: dict[str, Any], seeds: int) -> str:
    """docs/dnn.md."""
    first = runs[f"{next(iter(ROWS))} 0"]
    split = first["batch_split"]
    divided = f"two workers with {split[0]} and {split[1]} samples of each batch" if len(split) > 1 else "one process"
    lines = [
        "# Accuracy on samples",
        "",
        f"Written by `benchmarks/dnn_accuracy.py`: {seeds} seeds of each command, {divided}, on {first['machine']}.",
        "Test accuracy at the best epoch by validation accuracy, in percent: mean and standard deviation over seeds.",
        "The seed is that of weights, order, dropout, augmentation and of the parts that are drawn. Seconds are those",
        f"of a run, start included, with {first['jobs']} runs at a time.",
        "",
        "| data and model | train / val / test | test | to reach | reached | seconds |",
        "|---|---|---|---|---|---|",
    ]
    for name in sorted(ROWS):
        row, found = ROWS[name], [runs[f"{name} {seed}"] for seed in range(seeds)]
        tests = [100 * run["test"] for run in found]
        spread = statistics.stdev(tests) if seeds > 1 else 0.0
        goal, reason = row.goal, f"{row.goal} %"
        if goal is None:
            bags = runs[f"{name} logistic regression"]
            goal = 100 * max(bags.values())
            reason = "logistic regression: " + ", ".join(f"{100 * v:.1f} ({k})" for k, v in bags.items())
        reached = "yes" if statistics.mean(tests) >= goal else f"no, {goal - statistics.mean(tests):.1f} points short"
        seconds = statistics.median(run["seconds"] for run in found)
        mean = f"{statistics.mean(tests):.1f} ± {spread:.1f}"
        counts = " / ".join(f"{found[0]['num_samples'][part]:,}" for part in ("train", "val", "test"))
        lines.append(f"| {row.title} | {counts}: {row.split} | {mean} | {reason} | {reached} | {seconds:.0f} |")
    lines += ["", "The commands, each with `--seed 0`, `1`, …:", ""]
    lines += [f"    nugnn train --data-dir DATA {ROWS[name].options}" for name in sorted(ROWS)]
    lines += [
        "",
        "What a command does not say is a default. Defaults and options were chosen on a fifth of the training",
        "samples, held out, of Fashion-MNIST, MNIST, TREC-6 and SST-2; test samples were not looked at. The",
        "transformer learns its tokens from the training sentences alone. The logistic regressions are scikit-learn's",
        "with its defaults, on counts of words, and of words and pairs of words, of the whole training file, made in",
        "the same run.",
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("NUGNN_DATA"), help="default: $NUGNN_DATA")
    parser.add_argument("--only", action="append", choices=sorted(ROWS), help="one row; may be repeated")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, help="fewer than the row's; such runs are not kept")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--workers", type=int, choices=(1, 2), help="of each run; default 2 on the CPU, 1 on a GPU")
    parser.add_argument("--jobs", type=int, help="runs at a time; default: cores by workers")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "dnn_accuracy.json")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "dnn.md")
    args = parser.parse_args()
    if args.data_dir is None:
        parser.error("give --data-dir, or set NUGNN_DATA")
    args.data_dir = Path(args.data_dir).resolve()
    args.workers = args.workers or (2 if args.device == "cpu" else 1)
    args.jobs = args.jobs or max(1, len(os.sched_getaffinity(0)) // args.workers)
    runs: dict[str, Any] = json.loads(args.json.read_text()) if args.json.exists() else {}
    names = [name for name in ROWS if not args.only or name in args.only]
    machine = {"machine": machine_of(args.device), "jobs": args.jobs}

    def case(name: str, seed: int | None) -> None:
        if seed is None:
            key, run = f"{name} logistic regression", logistic_regressions(args.data_dir / name)
            said = ", ".join(f"{title} {100 * value:.1f} %" for title, value in run.items())
        else:
            key, run = f"{name} {seed}", train(name, seed, args)
            run |= machine | {"options": ROWS[name].options}
            said = (
                f"test {100 * run['test']:.1f} %, val {100 * run['val']:.1f} %, epoch {run['best_epoch']}, "
                f"{run['seconds']:.0f} s"
            )
        print(f"{key}: {said}", flush=True)
        if seed is None or not args.epochs:
            runs[key] = run

    wanted = [(name, seed) for name in names for seed in range(args.seeds)]
    wanted += [(name, None) for name in names if ROWS[name].goal is None]
    wanted = [each for each in wanted if args.epochs or not _is_kept(runs, *each)]
    with ThreadPoolExecutor(args.jobs) as pool:
        waiting = [pool.submit(case, *each) for each in wanted]
        problems = []
        for each in waiting:
            problem = each.exception()
            if problem is None:
                _write(args.json, json.dumps(runs, indent=1) + "\n")
            else:
                problems.append(problem)
                print(problem, file=sys.stderr, flush=True)
    if not args.epochs and all(_is_kept(runs, name, seed) for name in ROWS for seed in range(args.seeds)):
        _write(args.page, page(runs, args.seeds))
        print(f"wrote {args.page}")
    return 1 if problems else 0


def _is_kept(runs: dict[str, Any], name: str, seed: int | None) -> bool:
    if seed is None:
        return f"{name} logistic regression" in runs
    return runs.get(f"{name} {seed}", {}).get("options") == ROWS[name].options


def machine_of(device: str) -> str:
    """In the page."""
    if device == "cuda":
        import torch

        return f"one {torch.cuda.get_device_name()}"
    return f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}"


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


if __name__ == "__main__":
    sys.exit(main())
