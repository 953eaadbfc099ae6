"""An epoch of half a graph on one GPU, beside the whole graph: what computing loses by a split, without a second GPU.

    python benchmarks/half_alone.py --rows rows/half_alone.jsonl
    python benchmarks/half_alone.py --device cpu --nodes 3000 --arcs 40000 --models sage --epochs 2

The other half is not there: halo rows are zeros that come at once (`nugnn.comm.lone_ranks`), so exchanges take no time,
but for filling the place of what they bring, and losses mean nothing. Everything else is a rank's own step: rows picked
and sent, sums over own and halo rows, gradients of halo rows, and additions of those that come back. ``off`` does all
of a sum after its exchange, ``backward`` sends gradients of halo rows first, and ``on N`` sums N edges early for each
row that travels (`nugnn.comm.early_rows`): what that costs where there is nothing to hide. Half of the whole graph's
time would be 2 times as fast.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from device_shards import by_clusters, device_shard
from gpu_epoch import MODELS
from harness import Recorder, free_memory, kernels_of, timing_of
from split_pool import SplitPool, keep_graph
from unequal_rank import laps_of, trainer_of

from nugnn.comm import early_rows
from nugnn.comm.groups import Ranks
from nugnn.comm.lone_ranks import LoneRanks
from nugnn.datasets.synthetic_device import FAMILIES, DeviceGraph, device_graph
from nugnn.datasets.synthetic_recipe import FULL_ARCS, FULL_NODES

_EPOCHS_BEFORE = 3
"""They compile and allocate."""


def run_case(
    shard: Any, ranks: Ranks, model: str, overlap: str, arguments: argparse.Namespace
) -> tuple[list[float], list[dict[str, Any]]]:
    """Milliseconds of each epoch, and what takes most of one."""
    how = model, arguments.precision, arguments.seed
    trainer = trainer_of(shard, ranks, how, overlap=overlap, cuda_graphs="off")
    for _ in range(_EPOCHS_BEFORE):
        trainer.train_epoch()
    laps = laps_of(trainer, ranks.device, arguments.epochs + 1)[1:]
    kernels = kernels_of(trainer.train_epoch, arguments.kernels, ranks.device) if arguments.kernels else []
    del trainer
    free_memory()
    return laps, kernels


def half_of(graph: DeviceGraph, folder: str, family: str) -> Any:
    """The first of two parts with as many nodes each."""
    keep_graph(Path(folder), family, graph.indptr.cpu().numpy(), graph.indices.cpu().numpy())
    pool = SplitPool(Path(folder), 1, os.cpu_count() or 1)
    part = np.load(pool.result(pool.by_shares(family, (1.0, 1.0))).path)
    pool.close()
    return device_shard(graph, torch.from_numpy(part).to(graph.indptr.device), 0, 2)


def measure(family: str, arguments: argparse.Namespace, recorder: Recorder) -> None:
    """The whole graph and half of it, model by model."""
    device = torch.device("cuda", 0) if arguments.device == "cuda" else torch.device("cpu")
    one = Ranks(device=device)
    near = dataclasses.replace(LoneRanks.of(2, device), reads_peers=True)  # as over NVLink
    graph = by_clusters(device_graph(family, arguments.nodes, arguments.arcs, arguments.seed, device=device), one)
    with tempfile.TemporaryDirectory() as folder:
        half = half_of(graph, folder, family)
    whole = device_shard(graph, torch.zeros(graph.num_nodes, dtype=torch.int8, device=device), 0, 1)
    counts = {"inner": half.num_inner, "edges": len(half.indices), "halo": sum(half.recv_splits)}
    counts |= {"sent": sum(half.send_splits), "halo_edges": int((half.indices >= half.num_inner).sum())}
    for model in arguments.models:
        cases = [("whole", whole, one, "off", 0), ("half, off", half, near, "off", 0)]
        if model != "gat":  # attention waits for its halo rows in any case
            cases.append(("half, backward", half, near, "backward", 0))
            cases += [(f"half, on {edges}", half, near, "on", edges) for edges in arguments.edges_per_row]
        whole_ms = 0.0
        for system, shard, ranks, overlap, edges in cases:
            with mock.patch.object(early_rows, "EDGES_PER_ROW", edges):
                laps, kernels = run_case(shard, ranks, model, overlap, arguments)
            timing = timing_of(laps)
            whole_ms = whole_ms or timing.median_ms
            row: dict[str, Any] = {"kind": "half", "system": system, "graph": family, "model": model}
            row |= {"dtype": arguments.precision, "shape": f"{model} {arguments.nodes}", "seed": arguments.seed}
            row |= {"num_nodes": arguments.nodes, "num_edges": arguments.arcs, "half": counts, "samples_ms": laps}
            recorder.add(row | {"beside_whole": whole_ms / timing.median_ms, "kernels": kernels}, timing)


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    head = f"{row['graph']} {row['model']} {row['system']}"
    return f"{head:40}{row['median_ms']:9.2f} ms {row['p20_ms']:.2f}-{row['p80_ms']:.2f}  {row['beside_whole']:.3f} x"


def parse(given: list[str] | None = None) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--nodes", type=int, default=FULL_NODES)
    parser.add_argument("--arcs", type=int, default=FULL_ARCS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=6, help="timed ones; four go before")
    parser.add_argument("--edges-per-row", nargs="+", type=int, default=[8, 24, 10**6])
    parser.add_argument("--kernels", type=int, default=0, help="so many kernels of each case, by their time")
    parser.add_argument("--rows", type=Path, help="file for the rows, a JSON line each")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> Recorder:
    """Run what the options ask for."""
    arguments = parse(given)
    recorder = Recorder(arguments.rows, torch.device("cuda:0" if arguments.device == "cuda" else "cpu"), line)
    for family in arguments.families:
        measure(family, arguments, recorder)
        free_memory()
    return recorder


if __name__ == "__main__":
    main()
