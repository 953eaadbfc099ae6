"""Accuracy of compressed communication beside fp32, seed by seed: the 95 % interval of the paired difference.

    python benchmarks/compression_accuracy.py --data-dir DATA --plan             # what would run, and how long
    python benchmarks/compression_accuracy.py --data-dir DATA --jobs 16 --seconds 330
    python benchmarks/compression_accuracy.py --report                           # the tables of what has run
    python benchmarks/compression_accuracy.py --keep rows.jsonl                  # what they are made of, without curves

Runs of one seed have the same split, parts, initial weights, dropout masks and order of samples, on two worker
processes of unequal shares, and differ in what travels alone; what can be compared of that is (`check_pairs`). Test
accuracy at the epoch of the best validation accuracy, as everywhere. Beside it the epochs until validation accuracy
reaches 99 % of what the same seed's fp32 run ended with, and the bytes that both workers handed over.

Each run becomes a line of a JSON-lines file at once; a benchmark that was interrupted, or that ``--seconds`` ended,
goes on where it stopped, as long as code and settings are the same. Seeds are started whole: every column of one runs.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from unittest import mock

from rich import box
from rich.console import Console
from rich.table import Table
from worker_groups import WorkFailed, run_in_groups

ROOT = Path(__file__).resolve().parent.parent
WORKERS, SHARES = 2, (0.6, 0.4)
BATCH_SPLIT = (38, 26)
"""Samples of each worker in a batch of 64."""
BASELINE = "fp32"
GOAL = 0.5
"""Points that 4-bit gradients and int4 halo rows may differ from fp32."""
PART_OF_BASELINE = 0.99

Column = Mapping[str, Any]
"""Options of `nugnn.fit` that differ from the baseline's; ``rounding`` is ours, see `rounding`."""

GRADIENTS: dict[str, Column] = {
    BASELINE: {},
    "4bit gradients": {"grad_sync": "4bit"},
    "2bit gradients": {"grad_sync": "2bit"},
}
BOTH = "int4 halo, 4bit gradients"
HALO: dict[str, Column] = {
    "int4 halo": {"halo_wire": "int4"},
    BOTH: {"halo_wire": "int4", "grad_sync": "4bit"},
    "int2 halo": {"halo_wire": "int2"},
    "int4 halo, to nearest": {"halo_wire": "int4", "rounding": "nearest"},
    "int2 halo, to nearest": {"halo_wire": "int2", "rounding": "nearest"},
    "int2 halo, feedback": {"halo_wire": "int2", "halo_feedback": True},
    "stale": {"halo_mode": "stale"},
    "sampled:0.1": {"halo_mode": "sampled:0.1"},
}
COLUMNS = GRADIENTS | HALO
TARGETS = ("4bit gradients", "int4 halo")


@dataclass(frozen=True)
class Row:
    """Data and model.

    Args:
        title: In the tables.
        settings: Of ``nugnn train``; ``recipe`` names further ones.
        seeds: From 0 up.
        seconds: Of one run on two cores, by which the plan is made.
        columns: What runs.
    """

    title: str
    settings: Mapping[str, Any]
    seeds: int
    seconds: float
    columns: Mapping[str, Column]


CORA = {"recipe": "cora-gcn", "evaluate_every": 2}
ROWS = {
    "cora": Row("Cora, GCN", CORA, 30, 7, {name: COLUMNS[name] for name in (BASELINE, *TARGETS, BOTH)}),
    "cora-random": Row("Cora, GCN, random parts", {**CORA, "partitioner": "random"}, 30, 7, COLUMNS),
    "computers": Row("Amazon Computers, GCN", {"recipe": "amazon-computers-gcn"}, 5, 25, COLUMNS),
    "cornell5-gcn": Row(
        "Cornell5, GCN",
        {"recipe": "fb100-cornell5-sage", "model": "gcn", "aggregator": None, "self_loops": "add", "epochs": 150},
        5,
        22,
        COLUMNS,
    ),
    "cornell5-sage": Row("Cornell5, SAGE", {"recipe": "fb100-cornell5-sage", "epochs": 150}, 5, 22, COLUMNS),
    "fashion": Row("Fashion-MNIST, CNN", {"dataset": "fashion-mnist", "hidden": 16, "epochs": 5}, 5, 35, GRADIENTS),
    "trec6": Row("TREC-6, transformer", {"dataset": "text:trec6", "hidden": 64, "epochs": 6}, 5, 30, GRADIENTS),
}


@dataclass(frozen=True)
class Case:
    """One run: names in `ROWS` and its columns."""

    row: str
    column: str
    seed: int
    data_dir: str
    epochs: int | None = None

    @property
    def run_settings(self) -> dict[str, Any]:
        """Of ``nugnn train`` without data folder, workers and seed; what a recipe says written out. Nodes stay where
        they are: runs of a seed have to have the same parts.
        """
        from nugnn.config import read_recipe
        from nugnn.sample_sets import names_samples

        chosen = dict(ROWS[self.row].settings)
        chosen = (read_recipe(chosen.pop("recipe")) if "recipe" in chosen else {}) | chosen
        if not names_samples(chosen["dataset"]):
            chosen["rebalance"] = "off"
        return chosen | ({} if self.epochs is None else {"epochs": self.epochs})

    @property
    def options(self) -> dict[str, Any]:
        """What the column says."""
        return dict(ROWS[self.row].columns[self.column])

    @property
    def settings(self) -> dict[str, Any]:
        """All that decides the result beside the seed and the code, as plain values."""
        return self.run_settings | {"shares": list(SHARES), "batch_split": list(BATCH_SPLIT), "column": self.options}


# -- one run -----------------------------------------------------------------------------------------------------------


def rounding(how: str | None) -> AbstractContextManager[Any]:
    """``nearest``: halo rows of few bits are rounded to nearest, and nothing is fed back, there and back."""
    from nugnn.comm.halo_wire import HaloWire

    if how is None:
        return nullcontext()
    assert how == "nearest", how
    at_random = HaloWire.encode
    return mock.patch.object(HaloWire, "encode", lambda wire, x, key, row_ids: at_random(wire, x, None, None))


@dataclass(frozen=True)
class Prepared:
    """What all columns of a seed share; ``given`` and ``options`` as `nugnn.task.task_of` takes them."""

    config: Any
    data: Any
    build_model: Callable[[Any, Any], Any]
    given: dict[str, Any]
    options: dict[str, Any]
    shares: Sequence[float] | None


@functools.lru_cache(maxsize=8)
def graph_of(settings: str, data_dir: str) -> tuple[Any, Any]:
    """The settings, given as JSON to be remembered by, and the graph."""
    from nugnn import graph_run
    from nugnn.config import TrainConfig

    config = TrainConfig(**json.loads(settings), workers=WORKERS, shares=SHARES, data_dir=data_dir)
    return config, graph_run.prepare(config)


def prepared(case: Case) -> Prepared:
    """As ``nugnn train`` does it. Validation samples are drawn with the seed; a graph's parts are always the same."""
    from nugnn import graph_run, sample_run
    from nugnn.fit_options import FitOptions
    from nugnn.sample_config import SampleConfig
    from nugnn.sample_options import SampleOptions
    from nugnn.sample_sets import names_samples
    from nugnn.task import OF_ONE_FAMILY

    def among(kind: type, arguments: Mapping[str, Any]) -> dict[str, Any]:
        return {entry.name: arguments[entry.name] for entry in fields(kind) if entry.name in arguments}

    settings = case.run_settings
    if names_samples(settings["dataset"]):
        how = {"workers": WORKERS, "batch_split": BATCH_SPLIT, "data_dir": case.data_dir, "seed": case.seed}
        samples = SampleConfig(**settings, **how)
        options = among(SampleOptions, sample_run.fit_arguments(samples))
        return Prepared(
            samples, sample_run.prepare(samples), sample_run.build_model, dict(OF_ONE_FAMILY), options, None
        )
    unseeded, data = graph_of(json.dumps(settings), case.data_dir)
    config = unseeded.replaced(seed=case.seed)
    given = dict(OF_ONE_FAMILY) | {"partitioner": config.partitioner, "order": "none", "check": False}
    return Prepared(
        config, data, graph_run.build_model, given, among(FitOptions, graph_run.fit_arguments(config)), SHARES
    )


def train(ranks: Any, case: Case) -> dict[str, Any]:
    """What one rank has to say of a run."""
    import torch

    from nugnn.seam import install
    from nugnn.task import task_of
    from nugnn.train_rank import train_rank

    begin, processor = time.perf_counter(), time.process_time()
    install()
    ready, column = prepared(case), case.options
    how = rounding(column.pop("rounding", None))
    torch.manual_seed(case.seed)
    model = ready.build_model(ready.config, ready.data)
    initial, num_values = digest(model.state_dict()), sum(p.numel() for p in model.parameters())
    task = task_of(
        model, ready.data, workers=WORKERS, shares=ready.shares, given=ready.given, options=ready.options | column
    )
    part, _ = task.joined(ranks, lambda _: None)
    with how:
        outcome = train_rank(part, ranks, model, task.options)
    return summary(outcome, num_values) | {
        "initial": initial,
        "seconds": round(time.perf_counter() - begin, 3),
        "processor_seconds": round(time.process_time() - processor, 3),
    }


def summary(outcome: Mapping[str, Any], num_values: int) -> dict[str, Any]:
    """What is kept of `nugnn.train_rank.train_rank`'s outcome, for a model of ``num_values`` parameters."""
    epochs, report = outcome["epochs"], outcome["report"]
    evaluated = [epoch for epoch in epochs if not math.isnan(epoch["val"])]
    spent = list(itertools.accumulate(epoch["seconds"]["epoch"] for epoch in epochs))
    steps_per_epoch = -(-report["samples"] // sum(BATCH_SPLIT)) if "samples" in report else 1
    steps = steps_per_epoch * len(epochs)
    ring = 2 * (WORKERS - 1) / WORKERS * 4 * num_values * steps  # bytes of a rank in a ring of all-reduce
    halo = report.get("halo", {})
    return {
        "test": outcome["best"]["test"],
        "best_epoch": outcome["best"]["number"],
        "last_test": evaluated[-1]["test"],
        "at": [epoch["number"] for epoch in evaluated],
        "val": [round(epoch["val"], 5) for epoch in evaluated],
        "train_seconds": [round(spent[epoch["number"] - 1], 3) for epoch in evaluated],
        "first_loss": epochs[0]["loss"],
        "part": {name: report[name] for name in ("nodes", "edges", "halo_rows", "batch_samples") if name in report},
        "parameters": num_values,
        "steps": steps,
        "gradient_bytes": report["grad_sync"]["sent_bytes"] if "grad_sync" in report else ring,
        "halo_bytes": halo.get("forward_bytes", 0) + halo.get("gradient_bytes", 0),
    }


def digest(state: Mapping[str, Any]) -> str:
    """Of all bits of a model."""
    found = hashlib.sha256()
    for name, value in state.items():
        found.update(f"{name}{tuple(value.shape)}".encode() + value.contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def merged(case: Case, ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The line of a run: what is equal everywhere once, bytes of all ranks together."""
    first = dict(ranks[0])
    if any(other[name] != first[name] for other in ranks[1:] for name in ("test", "val", "initial", "first_loss")):
        raise WorkFailed(f"{case}: ranks do not agree on what they have trained")
    first["part"] = [each["part"] for each in ranks]
    for name in ("gradient_bytes", "halo_bytes", "processor_seconds"):
        first[name] = sum(each[name] for each in ranks)
    return first


# -- what runs, in which order -----------------------------------------------------------------------------------------


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
    found.update(Path(__file__).read_bytes())
    return found.hexdigest()[:12]


def in_order(rows: Sequence[str], columns: Sequence[str] | None, num_seeds: int | None) -> list[list[tuple[str, ...]]]:
    """``(row, column, seed)`` of what is to run, in pieces that are started whole: all columns of a seed.

    After any time every row has had about the same part of its seeds, those that take long first.
    """
    pieces = []
    for name in rows:
        row = ROWS[name]
        chosen = [column for column in row.columns if columns is None or column in columns or column == BASELINE]
        count = row.seeds if num_seeds is None else num_seeds
        for seed in range(count):
            key = (seed + 1) / count, -row.seconds
            pieces.append((key, [(name, column, seed) for column in chosen]))
    return [piece for _, piece in sorted(pieces, key=lambda each: each[0])]


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


# -- the file ----------------------------------------------------------------------------------------------------------

Runs = dict[tuple[str, str, int], dict[str, Any]]
"""By row, column and seed."""


def read_runs(path: Path, code: str | None) -> Runs:
    """Runs in the file with the settings of today; of ``code`` alone, or of the last line's when None.

    A line that was cut off when the machine went away is passed over; how many are of other code or settings is told.
    """
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            print(f"{path}: passed over a line that is no JSON: {text[:40]!r}", file=sys.stderr)
    code = code or (lines[-1]["code"] if lines else None)
    runs: Runs = {}
    num_others = 0
    for line in lines:
        row = ROWS.get(line["row"])
        is_ours = line["code"] == code and row is not None and line["column"] in row.columns
        if is_ours:
            now = Case(line["row"], line["column"], line["seed"], "", line["epochs"]).settings
            is_ours = line["settings"] == json.loads(json.dumps(now))
        if is_ours:
            runs[line["row"], line["column"], line["seed"]] = line
        else:
            num_others += 1
    if num_others:
        print(f"{path}: left out {num_others} runs of other code than {code}, or of other settings", file=sys.stderr)
    return runs


def append(path: Path, line: Mapping[str, Any]) -> None:
    """One line more, on the disk when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    is_cut_off = path.exists() and path.stat().st_size > 0 and not path.read_bytes()[-1:] == b"\n"
    with path.open("a", encoding="utf-8") as file:
        file.write(("\n" if is_cut_off else "") + json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())


# -- what came out -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Interval:
    """Mean of paired differences with its 95 % interval by Student's t, in points; NaN bounds for fewer than two."""

    mean: float
    low: float
    high: float
    num_pairs: int

    def __str__(self) -> str:
        bounds = "" if math.isnan(self.low) else f" [{self.low:+.2f}, {self.high:+.2f}]"
        return f"{self.mean:+.2f}{bounds}"

    @property
    def verdict(self) -> str:
        """Whether the mean over all seeds there could be lies within `GOAL` of zero, as far as these tell."""
        if self.low >= -GOAL and self.high <= GOAL:
            return "within"
        return "beyond" if self.low > GOAL or self.high < -GOAL else "open"


def paired_interval(differences: Sequence[float]) -> Interval:
    """Of at least one difference."""
    from scipy import stats

    mean, count = statistics.fmean(differences), len(differences)
    if count < 2:
        return Interval(mean, math.nan, math.nan, count)
    half = float(stats.t.ppf(0.975, count - 1)) * statistics.stdev(differences) / math.sqrt(count)
    return Interval(mean, mean - half, mean + half, count)


def pairs_of(runs: Runs, row: str, column: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """``(fp32, column)`` of each seed that has both."""
    seeds = sorted(seed for name, has, seed in runs if name == row and has == column)
    return [(runs[row, BASELINE, seed], runs[row, column, seed]) for seed in seeds if (row, BASELINE, seed) in runs]


def check_pairs(runs: Runs) -> None:
    """Runs of a seed began with the same weights, on the same parts.

    Raises:
        ValueError: They did not, so that their difference means nothing.
    """
    for row, column, seed in runs:
        for plain, other in pairs_of(runs, row, column):
            for what in ("initial", "part", "steps"):
                if plain["seed"] == seed and plain[what] != other[what]:
                    raise ValueError(f"{row}, {column}, seed {seed}: {what} differs from {BASELINE}'s; no pair")


Reached = tuple[int, float] | None
"""Epoch and seconds of training, or never."""


def reached(run: Mapping[str, Any], level: float) -> Reached:
    """When validation accuracy first is ``level``."""
    place = next((place for place, val in enumerate(run["val"]) if val >= level), None)
    return None if place is None else (run["at"][place], run["train_seconds"][place])


def when_reached(plain: Mapping[str, Any], run: Mapping[str, Any]) -> Reached:
    """When ``run`` has 99 % of the validation accuracy that its fp32 run ended with; kept lines say it themselves."""
    if "reached" in run:
        kept: list[Any] | None = run["reached"]
        return None if kept is None else (kept[0], kept[1])
    return reached(run, PART_OF_BASELINE * plain["val"][-1])


_Pair = tuple[Mapping[str, Any], Mapping[str, Any]]
"""The fp32 run of a seed, and another one of it."""


def time_to_accuracy(pairs: Sequence[_Pair]) -> tuple[float, float, int]:
    """Medians of epochs and seconds until a run has 99 % of the validation accuracy its fp32 run ended with.

    Runs that never have it count as later than all others, and are counted: the third value.
    """
    whens = [when_reached(plain, run) for plain, run in pairs]
    epochs, seconds = ([math.inf if when is None else when[place] for when in whens] for place in (0, 1))
    return statistics.median(epochs), statistics.median(seconds), whens.count(None)


def beside_baseline(pairs: Sequence[_Pair]) -> tuple[float, float]:
    """Medians over seeds of epochs and seconds until then, in those of the same seed's fp32 run; inf for never."""
    ratios: list[list[float]] = [[], []]
    for plain, run in pairs:
        goal, when = when_reached(plain, plain), when_reached(plain, run)
        assert goal is not None, "fp32 has what it ended with"
        for place in (0, 1):
            ratios[place].append(math.inf if when is None else when[place] / goal[place])
    return statistics.median(ratios[0]), statistics.median(ratios[1])


def timed_alike(pairs: Sequence[_Pair]) -> list[_Pair]:
    """Those that were run one at a time, or several, as the first seed was: others took other seconds."""
    is_alone = [plain.get("jobs") == 1 for plain, _ in pairs]
    return [pair for pair, alone in zip(pairs, is_alone, strict=True) if alone is is_alone[0]]


CURVES = ("at", "val", "train_seconds")


def kept_lines(runs: Runs) -> Iterator[dict[str, Any]]:
    """Every run that has its pair, with what the tables need in place of its curves."""
    for row, column, seed in sorted(runs):
        if (plain := runs.get((row, BASELINE, seed))) is not None:
            run = runs[row, column, seed]
            line = {name: value for name, value in run.items() if name not in CURVES}
            yield line | {"num_epochs": run["at"][-1], "reached": when_reached(plain, run)}


def runs_of(lines: Sequence[Mapping[str, Any]]) -> Runs:
    """Kept lines as runs, checked."""
    runs = {(line["row"], line["column"], line["seed"]): dict(line) for line in lines}
    check_pairs(runs)
    return runs


TRAVELLED = ("halo_bytes", "gradient_bytes")
HEADER = ("", "seeds", "test %", "difference [95 %]", f"±{GOAL:g}", "epochs", "s", "halo MB", "grad. MB")


def cells(runs: Runs, row: str, column: str) -> list[str] | None:
    """A line of a row's table."""
    pairs = pairs_of(runs, row, column)
    if not pairs:
        return None
    tests = [100 * run["test"] for _, run in pairs]
    spread = f" ± {statistics.stdev(tests):.1f}" if len(tests) > 1 else ""
    interval = paired_interval([100 * (run["test"] - plain["test"]) for plain, run in pairs])
    epochs, seconds, never = time_to_accuracy(pairs)
    megabytes = [statistics.fmean(run[name] for _, run in pairs) / 1e6 for name in TRAVELLED]
    is_plain = column == BASELINE
    return [
        column,
        str(len(pairs)),
        f"{statistics.fmean(tests):.1f}{spread}",
        "" if is_plain else str(interval),
        "" if is_plain else interval.verdict,
        ("never" if epochs == math.inf else f"{epochs:g}")
        + (f" ({never} never)" if 0 < never and epochs < math.inf else ""),
        _or_dash(seconds, ".2g"),
        _megabytes(megabytes[0]) or "-",
        _megabytes(megabytes[1]),
    ]


def about(runs: Runs, row: str) -> str:
    """The title of a row's table."""
    first = next(run for (name, _, _), run in runs.items() if name == row)
    parts = first["part"]
    if "nodes" in parts[0]:
        nodes = [part["nodes"] for part in parts]
        halo = sum(part["halo_rows"] for part in parts) / sum(nodes)
        how = f"{' + '.join(f'{n:,}' for n in nodes)} nodes, halo rows {100 * halo:.0f} % of them"
    else:
        how = f"{' + '.join(str(part['batch_samples']) for part in parts)} samples of a batch"
    return f"{ROWS[row].title}: {how}; {_num_epochs(first)} epochs"


def _num_epochs(run: Mapping[str, Any]) -> int:
    return int(run["num_epochs"] if "num_epochs" in run else run["at"][-1])


def tables(runs: Runs) -> Iterator[tuple[str, list[list[str]]]]:
    """Title and lines of each row that has some."""
    for name, row in ROWS.items():
        lines = [line for column in row.columns if (line := cells(runs, name, column)) is not None]
        if lines:
            yield about(runs, name), lines


def difference_table(runs: Runs) -> list[list[str]]:
    """A head, then a line for each data set and column: seeds, accuracy, and its paired difference."""
    lines = [["", "", "seeds", "test, %", "difference in points (95 %)", f"within {GOAL:g}"]]
    for name, row in ROWS.items():
        for column in row.columns:
            pairs = pairs_of(runs, name, column)
            if not pairs:
                continue
            title = row.title if column == BASELINE else ""
            mean = f"{statistics.fmean(100 * run['test'] for _, run in pairs):.1f}"
            interval = paired_interval([100 * (run["test"] - plain["test"]) for plain, run in pairs])
            verdict = {"within": "yes", "beyond": "**no**", "open": "not shown"}[interval.verdict]
            said = ["", ""] if column == BASELINE else [_in_markdown(interval), verdict]
            lines.append([title, column, str(len(pairs)), mean, *said])
    return lines


def _in_markdown(interval: Interval) -> str:
    return str(interval).replace("[", "(").replace("]", ")").replace(", ", " to ")


def cost_table(runs: Runs) -> list[list[str]]:
    """A head, then a line for each data set and column: time to an accuracy, and what travelled in a run."""
    beside = f"of {BASELINE}'s"
    epochs_to = f"epochs to {PART_OF_BASELINE:.0%}"
    lines = [["", "", "seeds", epochs_to, beside, "never", "seconds", beside, "halo rows, MB", "gradients, MB"]]
    for name, row in ROWS.items():
        for column in row.columns:
            if (pairs := pairs_of(runs, name, column)) == []:
                continue
            epochs, _, never = time_to_accuracy(pairs)
            timed = timed_alike(pairs)
            _, seconds, _ = time_to_accuracy(timed)
            both = beside_baseline(pairs)[0], beside_baseline(timed)[1]
            ratios = ["" if column == BASELINE else _or_dash(ratio, ".2f") for ratio in both]
            megabytes = [statistics.fmean(run[what] for _, run in pairs) / 1e6 for what in TRAVELLED]
            title = about(runs, name) if column == BASELINE else ""
            line = [title, column, str(len(pairs)), _or_dash(epochs, "g"), ratios[0], str(never or "")]
            lines.append([*line, _or_dash(seconds, ".2g"), ratios[1], *map(_megabytes, megabytes)])
    return lines


def _or_dash(value: float, how: str) -> str:
    return "-" if value == math.inf else format(value, how)


def _megabytes(value: float) -> str:
    """To three digits, or whole; nothing where nothing travelled."""
    return "" if value == 0 else format(value, ",.0f" if value >= 100 else ".3g")


def targets(runs: Runs) -> list[str]:
    """A sentence for each target and row."""
    said = []
    for column in TARGETS:
        for name, row in ROWS.items():
            if column not in row.columns or not (pairs := pairs_of(runs, name, column)):
                continue
            found = paired_interval([100 * (run["test"] - plain["test"]) for plain, run in pairs])
            said.append(
                f"{column}, {row.title}: {found} points over {found.num_pairs} seeds, {found.verdict} ±{GOAL:g}"
            )
    return said


NOTE = f"""\
Test accuracy at the best validation epoch. Epochs, and seconds of training in them: medians until
{PART_OF_BASELINE:.0%} of the validation accuracy that the same seed's fp32 run ended with. MB: of a run, both workers
together. Seconds are of processes that share a machine with many others, and talk through its loopback interface; of
seeds that were run as the first one was, one at a time or several."""


def show(runs: Runs) -> None:
    """Print all tables."""
    check_pairs(runs)
    console = Console(width=120, highlight=False)
    for title, lines in tables(runs):
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        for place, name in enumerate(HEADER):
            table.add_column(name, no_wrap=True, justify="left" if place == 0 else "right")
        for line in lines:
            table.add_row(*line)
        console.print(table)
    console.print(NOTE)
    for line in targets(runs):
        console.print(line)


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
