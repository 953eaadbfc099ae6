"""The runs of `compression_accuracy.py`: data with its model, what travels how, and the order in which they run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WORKERS, SHARES = 2, (0.6, 0.4)
BATCH_SPLIT = (38, 26)
"""Samples of each worker in a batch of 64."""
BASELINE = "fp32"

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
        from nugnn.sample_sets import names_samples
        from nugnn.settings_file import read_recipe

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
