"""One run of `compression_accuracy.py`: trained on a rank of a pair of workers, and what is kept of it."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import Any
from unittest import mock

from compression_cases import BATCH_SPLIT, SHARES, WORKERS, Case
from worker_groups import WorkFailed


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
        "gradient_bytes": report["grad_sync"]["sent_bytes"],
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
