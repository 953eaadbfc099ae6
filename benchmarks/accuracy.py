"""Accuracy of nuGNN on three unequal workers beside plain DGL: same data, settings, seeds and best-validation rule.

    python benchmarks/accuracy.py --data-dir DATA                    # all rows, 10 seeds: an hour or two on 2 cores
    python benchmarks/accuracy.py --data-dir DATA --only cora-gcn --seeds 2 --epochs 20

A row is a recipe of ``nugnn train``; nuGNN runs it through `nugnn.fit` with ``workers=3, check=False``, plain DGL in a
process of its own (``plain_dgl.py``). Each run is kept in a JSON file at once, so an interrupted benchmark goes on
where it stopped, as long as neither the code nor the settings have changed. A complete file becomes
``docs/accuracy.md``.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from nugnn import fit
from nugnn.config import TrainConfig
from nugnn.graph_run import build_model, prepare
from nugnn.settings_file import read_recipe

REPOSITORY = Path(__file__).resolve().parent.parent
CODE = ("nugnn", "kernels", "comm", "partition", "precision", "datasets")
SCRIPTS = ("accuracy.py", "plain_dgl.py")
SHARES = (0.6, 0.3, 0.1)
PUBLISHED_BAND = 1.0
"""Points below a published mean that still count as reproducing it: papers differ by as much among themselves."""
FAMILY_ERROR = 0.05
"""Chance that any of the rows is called different from plain DGL although none is."""


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Args:
        recipe: Name of the recipe.
        title: Name in the table.
        figure: What to reach, in percent; None when only plain DGL is there to compare with.
        kind: ``published`` (a mean, reached within `PUBLISHED_BAND`) or ``floor`` (a value to exceed).
        source: Where the figure is from.
        value: Key of a run that holds the metric: ``test``, or ``top_k`` (see `top_k_micro_f1`).
    """

    recipe: str
    title: str
    figure: float | None
    kind: str
    source: str
    value: str = "test"


_SMOOTHED = "logistic regression after two steps of smoothing, README of the data"
ROWS = (
    Row("cora-gcn", "Cora GCN", 81.5, "published", "Kipf and Welling 2017, 81.5"),
    Row("cora-gat", "Cora GAT", 83.0, "published", "Velickovic et al. 2018, 83.0 ± 0.7"),
    Row("citeseer-gcn", "CiteSeer GCN", 70.3, "published", "Kipf and Welling 2017, 70.3"),
    Row("cora-sage", "Cora SAGE", 80.0, "floor", "asked for: at least 80"),
    Row("amazon-photo-gcn", "Amazon Photo GCN", 91.0, "floor", _SMOOTHED),
    Row("amazon-computers-gcn", "Amazon Comp. GCN", 78.2, "floor", _SMOOTHED),
    Row("coauthor-physics-gcn", "Physics GCN", 94.3, "floor", _SMOOTHED),
    Row("fb100-cornell5-sage", "Cornell5 SAGE", 85.3, "floor", _SMOOTHED),
    Row("tolokers-sage", "Tolokers SAGE, AUC", 74.1, "floor", _SMOOTHED + ", ROC-AUC"),
    Row("blogcatalog-multilabel-sage", "BlogCatalog, F1@k", None, "none", "", "top_k"),
    Row("wordnet-sage", "WordNet SAGE", 62.2, "floor", _SMOOTHED),
)


def top_k_micro_f1(scores: Any, labels: Any) -> float:
    """Micro-F1 when each node gets as many labels as it truly has, the best-scored ones: the protocol of DeepWalk.

    Args:
        scores: ``(n, C)``.
        labels: ``(n, C)`` zeros and ones.
    """
    hits = 0
    for row, truth in zip(scores, labels, strict=True):
        hits += int(truth[row.topk(int(truth.sum())).indices].sum())
    return hits / int(labels.sum())  # as many predicted as true: precision, recall and F1 are one number


def run_nugnn(config: TrainConfig, seeds: Sequence[int]) -> Iterator[dict[str, Any]]:
    """As ``nugnn train`` does it, a run a seed: new processes, new partition."""
    import torch

    data = prepare(config)
    for seed in seeds:
        begin = time.perf_counter()
        torch.manual_seed(seed)
        result = fit(
            build_model(config.replaced(seed=seed), data),
            data,
            workers=config.workers,
            shares=config.fractions,
            partitioner=config.partitioner,
            check=False,
            epochs=config.epochs,
            patience=config.patience,
            evaluate_every=config.evaluate_every,
            lr=config.lr,
            weight_decay=config.weight_decay,
            weight_decay_first_layer_only=config.weight_decay_first_layer_only,
            seed=seed,
        )
        run = {"seed": seed, "best_epoch": result.best.number, "val": result.best.val, "test": result.best.test}
        if data.is_multilabel:
            run["top_k"] = top_k_micro_f1(result.logits[data.test_nodes], data.labels[data.test_nodes])
        yield run | {"seconds": time.perf_counter() - begin, "epoch_seconds": result.epoch_seconds}


def run_plain(config: TrainConfig, seeds: Sequence[int]) -> Iterator[dict[str, Any]]:
    """All seeds in one process; it has the threads that the three workers have together, if the machine has them."""
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
        json.dump({"options": config.to_dict(), "seeds": list(seeds)}, file)
        file.flush()
        command = [sys.executable, str(REPOSITORY / "benchmarks" / "plain_dgl.py"), file.name]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            for line in process.stdout:
                yield json.loads(line)
        except BaseException:
            process.kill()
            raise
        finally:
            process.wait()
        if process.returncode:
            raise SystemExit(f"plain DGL failed on {config.dataset} with exit code {process.returncode}")


SYSTEMS = {"nugnn": run_nugnn, "plain": run_plain}


@functools.cache
def code_version() -> str:
    """Hash over the sources that decide the result, so that it needs no git and misses no uncommitted change."""
    digest = hashlib.sha256()
    modules = sorted(path for name in CODE for path in (REPOSITORY / name).rglob("*.py"))
    for path in [*modules, *(REPOSITORY / "benchmarks" / name for name in SCRIPTS)]:
        digest.update(f"{path.relative_to(REPOSITORY)}:{path.stat().st_size}:".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def versions() -> dict[str, str]:
    packages = ("torch", "dgl", "numpy", "pymetis", "numba", "scikit-learn")
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in packages}


def settings_of(row: Row, arguments: argparse.Namespace) -> dict[str, Any]:
    """Options that decide the result, as plain types."""
    shorter = {} if arguments.epochs is None else {"epochs": arguments.epochs}
    config = TrainConfig(**read_recipe(row.recipe) | shorter, workers=len(SHARES), shares=SHARES)
    return {k: v for k, v in config.to_dict().items() if k not in ("data_dir", "out", "seed", "timeout")}


def complete_row(row: Row, known: dict[str, Any], arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run what is missing; yields the record of the row after every run."""
    settings, code = settings_of(row, arguments), code_version()
    record = known if known.get("settings") == settings and known.get("code") == code else {}
    record = record or {"settings": settings, "code": code, "versions": versions(), "nugnn": {}, "plain": {}}
    config = TrainConfig(**settings, data_dir=arguments.data_dir)
    for system, run in SYSTEMS.items():
        missing = [seed for seed in range(arguments.seeds) if str(seed) not in record[system]]
        for outcome in run(config, missing) if missing else ():
            record[system][str(outcome["seed"])] = outcome
            yield record


@dataclass(frozen=True)
class Verdict:
    """A row's numbers, in percent."""

    ours: tuple[float, float]
    plain: tuple[float, float]
    difference: float
    interval: tuple[float, float]
    is_equal_to_plain: bool
    reaches_figure: bool


def judge(row: Row, ours: Sequence[float], plain: Sequence[float]) -> Verdict:
    """Compare two samples of at least 2 values in percent.

    The interval is Welch's, 95 % for this row alone. A row counts as worse than plain DGL when the one-sided test says
    so at `FAMILY_ERROR` over the number of rows.
    """
    from scipy import stats

    pairs = (ours, plain)
    mean_sd = [(statistics.fmean(x), statistics.stdev(x)) for x in pairs]
    difference = mean_sd[0][0] - mean_sd[1][0]
    interval, is_equal = (difference, difference), difference >= 0
    if any(sd > 0 for _, sd in mean_sd):
        test = stats.ttest_ind(ours, plain, equal_var=False)
        bounds = test.confidence_interval(0.95)
        interval = (float(bounds.low), float(bounds.high))
        less = stats.ttest_ind(ours, plain, equal_var=False, alternative="less")
        is_equal = bool(less.pvalue >= FAMILY_ERROR / len(ROWS))
    slack = PUBLISHED_BAND if row.kind == "published" else 0.0
    reaches = row.figure is None or mean_sd[0][0] >= row.figure - slack
    return Verdict(mean_sd[0], mean_sd[1], difference, interval, is_equal, reaches)


def verdict_of(row: Row, record: dict[str, Any], num_seeds: int) -> Verdict | None:
    """None while fewer than two seeds have run in both systems."""
    values = [
        [100 * record[system][str(seed)][row.value] for seed in range(num_seeds) if str(seed) in record[system]]
        for system in SYSTEMS
    ]
    return judge(row, *values) if min(map(len, values)) >= 2 else None


def cells(row: Row, verdict: Verdict) -> list[str]:
    figure = {"published": "{:.1f} pub.", "floor": "≥ {:.1f}"}.get(row.kind, "-").format(row.figure)
    passed = "pass" if verdict.is_equal_to_plain and verdict.reaches_figure else "FAIL"
    low, high = verdict.interval
    digits = 1 if max(abs(low), abs(high)) < 10 else 0
    return [
        row.title,
        "{:.1f} ± {:.1f}".format(*verdict.ours),
        "{:.1f} ± {:.1f}".format(*verdict.plain),
        f"{verdict.difference:+.1f} [{low:+.{digits}f}, {high:+.{digits}f}]",
        figure,
        passed,
    ]


HEADER = ("row", "nuGNN", "plain DGL", "diff. [95 %]", "figure", "")


def print_table(rows: Sequence[Row], results: dict[str, Any], num_seeds: int) -> None:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in HEADER:
        table.add_column(name, no_wrap=True)
    for row in rows:
        verdict = verdict_of(row, results[row.recipe], num_seeds) if row.recipe in results else None
        table.add_row(*(cells(row, verdict) if verdict else [row.title, "fewer than 2 seeds"]))
    Console(width=80).print(table)


def page(results: dict[str, Any], num_seeds: int) -> str:
    """``docs/accuracy.md``."""
    records = [results[row.recipe] for row in ROWS]
    codes = sorted({record["code"] for record in records})
    shares = ", ".join(map(str, SHARES))
    lines = [
        "# Accuracy",
        "",
        "Written by `python benchmarks/accuracy.py --data-dir DATA`; do not edit. Code (hash of sources): "
        + ", ".join(codes)
        + "; "
        + ", ".join(f"{name} {number}" for name, number in records[0]["versions"].items())
        + ".",
        "",
        f"Test metric in percent, mean ± standard deviation over seeds 0 to {num_seeds - 1}, of the epoch with the "
        f"best validation metric. nuGNN: `nugnn.fit` on {len(SHARES)} worker processes with shares {shares} of the "
        "nodes (METIS), `check=False`. Plain DGL: `benchmarks/plain_dgl.py`, one process, same settings, same seeds "
        "and so same initial weights (node embeddings: same distribution); dropout masks differ. Difference: with "
        "Welch's 95 % interval. A row passes when it reaches its figure (published means: within "
        f"{PUBLISHED_BAND:g} point) and is not worse than plain DGL by Welch's one-sided test at "
        f"{FAMILY_ERROR} / {len(ROWS)} rows.",
        "",
        "| row | nuGNN | plain DGL | difference [95 %] | figure | |",
        "|---|---|---|---|---|---|",
    ]
    for row, record in zip(ROWS, records, strict=True):
        verdict = verdict_of(row, record, num_seeds)
        assert verdict is not None
        lines.append("| " + " | ".join(cells(row, verdict)) + " |")
    lines += ["", "## Settings and sources", ""]
    for row, record in zip(ROWS, records, strict=True):
        minutes = {s: sum(run["seconds"] for run in record[s].values()) / 60 for s in SYSTEMS}
        figure = "no published or floor figure" if row.figure is None else f"figure: {row.source}"
        lines.append(
            f"- **{row.title}**, `nugnn train --recipe {row.recipe}`: {figure}. "
            f"{minutes['nugnn']:.1f} min with nuGNN (start of processes included), {minutes['plain']:.1f} min with "
            "plain DGL."
        )
    lines += ["", *NOTES]
    return "\n".join(lines) + "\n"


NOTES = (
    "Published settings are those of the papers and of the PyG and DGL examples named in the recipes. The others were "
    "found by hand with a few trials on the first seeds, seeing test figures as well as validation figures, and are "
    "the same for both systems.",
    "",
    "Floors are on the stored split and come from at most 8,000 training and test nodes, untuned; they tell whether "
    "data and training are right, not how good a model can be. Splits of Amazon, Physics, Cornell5, BlogCatalog and "
    "WordNet were made for this copy of the data, so these rows cannot be compared with papers. Tolokers: split 0 of "
    "ten.",
    "",
    "BlogCatalog has no features: the model learns a row for each node (`NodeEmbedding`). F1@k gives each test node as "
    "many labels as it truly has, as DeepWalk and its successors do; they publish about 40 to 42.",
    "",
    "Times are of processes that shared their machine with other work, and tell nothing about speed: see "
    "`benchmarks/epoch.py`.",
)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", default=os.environ.get("NUGNN_DATA"), help="default: NUGNN_DATA")
    parser.add_argument("--only", action="append", choices=[row.recipe for row in ROWS], help="a row; may be repeated")
    parser.add_argument("--seeds", type=int, default=10, help="number of seeds, from 0 (default 10)")
    parser.add_argument("--epochs", type=int, help="fewer epochs than the recipe, to try things out")
    parser.add_argument("--json", type=Path, default=REPOSITORY / "benchmarks" / "results" / "accuracy.json")
    parser.add_argument("--page", type=Path, default=REPOSITORY / "docs" / "accuracy.md")
    arguments = parser.parse_args()
    if not arguments.data_dir:
        parser.error("name the folder of the data sets with --data-dir, or in NUGNN_DATA")
    if arguments.seeds < 1:
        parser.error(f"--seeds {arguments.seeds}: at least 1")
    return arguments


def main() -> None:
    arguments = parsed()
    rows = [row for row in ROWS if arguments.only is None or row.recipe in arguments.only]
    path = arguments.json if arguments.epochs is None else arguments.json.with_suffix(".short.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for row in rows:
        print(f"{row.title} ...", flush=True)
        for record in complete_row(row, results.get(row.recipe, {}), arguments):
            results[row.recipe] = record
            draft = path.with_name(path.name + ".new")
            draft.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
            draft.replace(path)
        print_table([row], results, arguments.seeds)
    print_table(rows, results, arguments.seeds)
    lacking = [row.recipe for row in ROWS if row.recipe not in results]
    if arguments.epochs is not None or lacking or arguments.seeds < 10:
        why = "shortened" if arguments.epochs is not None or arguments.seeds < 10 else f"without {', '.join(lacking)}"
        print(f"{arguments.page} not written: this run is {why}")
        return
    arguments.page.write_text(page(results, arguments.seeds), encoding="utf-8")
    print(f"written: {path}, {arguments.page}")


if __name__ == "__main__":
    main()
