"""CPU workers with unequal threads: planned shares beside even, FLOP/s and bandwidth shares, all by `nugnn.fit`.

    python benchmarks/unequal_cpus.py --limits "threads=3;threads=1" --rows rows/unequal_cpus.jsonl
    python benchmarks/unequal_cpus.py --limits "threads=8;threads=2" --nodes 100000 --models sage gcn gat

Each worker has as many cores to itself as threads, so the host needs as many cores as there are threads in all. The
whole graph is trained by each worker alone, T_i seconds an epoch: without a halo no split would end before
1 / sum(1 / T_i). Then runs with ``--shares`` even, flops, bandwidth and auto take turns, without re-balancing. Their
losses have to agree, or no time is given. Nothing is set that a user's run would not have; ``auto`` times its operators
before its first run, and finds them kept in its others.

Rows: median, p20 and p80 of an epoch's seconds on rank 0, shares of the nodes, halo rows, the share of an epoch in
which each rank waits (exchanges included), the forecast, alone_ms, bound_ms, and how much of the way from even shares
to the bound a split has come.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
from gpu_epoch import MODELS
from harness import Recorder, largest_difference, timing_of
from unequal_figures import Alone, figures, verdict

_SPLITS = ("even", "flops", "bandwidth", "auto")
_WARM_UP = 3
"""Epochs of a run that do not count: kernels are compiled and memory is touched for the first time."""
_LOSS_RTOL = 1e-3
"""As in ``unequal_gpus.py``: float32 sums in another order, grown by Adam over the epochs of a run."""


def _trained(graph: Any, model: str, given: argparse.Namespace, **how: Any) -> Any:
    """A run as a user starts it; what `nugnn.fit` returns."""
    import nugnn

    torch.manual_seed(given.seed)
    settings = MODELS[model] | ({"aggregator": "mean"} if model == "sage" else {})
    width = int(graph.features.shape[1])
    network = nugnn.GNN(model, width, graph.num_classes, layers=3, dropout=0.5, input_dropout=0.0, **settings)
    epochs = _WARM_UP + given.epochs
    options = {"epochs": epochs, "evaluate_every": epochs, "seed": given.seed, "check": False}
    return nugnn.fit(network, graph, device="cpu", **options, **how)


def _laps(result: Any) -> list[float]:
    """Milliseconds of the epochs that count."""
    return [1e3 * epoch.seconds["epoch"] for epoch in result.history[_WARM_UP:]]


def _alone(graph: Any, model: str, given: argparse.Namespace) -> list[Alone]:
    """The whole graph within each worker's limit."""
    limits = given.limits.split(";")
    runs = [_laps(_trained(graph, model, given, workers=1, limits=limit)) for limit in limits]
    return [Alone(timing_of(laps).median_ms) for laps in runs]


def compare(graph: Any, model: str, given: argparse.Namespace, recorder: Recorder) -> list[dict[str, Any]]:
    """All splits in turns; a row of each."""
    alone = _alone(graph, model, given)
    runs: dict[str, list[Any]] = {name: [] for name in _SPLITS}
    for name in _SPLITS * given.rounds:
        how = {"workers": len(alone), "limits": given.limits, "shares": name, "rebalance": "off"}
        runs[name].append(_trained(graph, model, given, **how))
    found = {name: {"samples_ms": [lap for run in each for lap in _laps(run)]} for name, each in runs.items()}
    timings = {name: timing_of(each["samples_ms"]) for name, each in found.items()}
    first = [epoch.loss for epoch in runs["even"][0].history]
    rows = []
    for name, (run, *_) in runs.items():
        row: dict[str, Any] = {
            "kind": "unequal cpus", "system": name, "graph": given.family, "model": model, "dtype": "fp32",
            "limits": given.limits, "shape": f"{model} {given.limits}", "seed": given.seed,
            "num_nodes": graph.num_nodes, "num_edges": graph.num_edges, "rounds": given.rounds,
            "shares": [report["nodes"] / graph.num_nodes for report in run.rank_reports],
            "halo_rows": [report["halo_rows"] for report in run.rank_reports],
            "waits": [_waits(report) for report in run.rank_reports],
            "forecast_ms": None if run.plan is None else 1e3 * run.plan.epoch_seconds,
        }  # fmt: skip
        losses = [epoch.loss for epoch in run.history]
        difference = largest_difference(losses, first)
        if not difference <= _LOSS_RTOL:
            rows.append(recorder.add(row | {"error": f"losses differ by {difference:.1e}"}))
        else:
            rows.append(recorder.add(row | figures(timings, name, alone), timings[name]))
    if not any("error" in row for row in rows):
        print(verdict(found, timings), flush=True)
    return rows


def _waits(report: dict[str, Any]) -> float:
    return float((report["halo_seconds"] + report["sync_seconds"]) / report["epoch_seconds"])


def line_of(row: dict[str, Any]) -> str:
    """A row for people."""
    head = f"{row['model']} {row['system']}"
    if "error" in row:
        return f"{head:16}{row['error']}"
    shares, waits = ("/".join(f"{value:.2f}" for value in row[name]) for name in ("shares", "waits"))
    forecast = "" if row["forecast_ms"] is None else f" ({row['forecast_ms']:.1f})"
    return (
        f"{head:16}{row['median_ms']:8.1f}{forecast} ms {row['p20_ms']:.1f}-{row['p80_ms']:.1f}, shares {shares}\n"
        f"{'':16}waits {waits}, bound x {row['over_bound']:.2f}"
    )


def parse(given: list[str] | None = None) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limits", default="threads=3;threads=1", help="of the workers, as of nugnn train")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--family", choices=("products-like", "mixed-like"), default="products-like")
    parser.add_argument("--nodes", type=int, default=30_000)
    parser.add_argument("--epochs", type=int, default=10, help="that count, of each run")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each split")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=Path, help="file for the rows, a JSON line each")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> list[dict[str, Any]]:
    """Run what the options ask for; all rows."""
    from nugnn.datasets import synthetic

    arguments = parse(given)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    make = synthetic.products_like if arguments.family == "products-like" else synthetic.mixed_like
    graph = make(arguments.nodes, seed=arguments.seed)
    recorder = Recorder(arguments.rows, torch.device("cpu"), line_of)
    return [row for model in arguments.models for row in compare(graph, model, arguments, recorder)]


if __name__ == "__main__":
    main(sys.argv[1:])
