"""Splits judged by a replayed step of all devices: METIS, equal ends, the product's plan, and nodes moved after it.

    python benchmarks/partition_steps.py --data-dir DATA                        # Cora and Computers, minutes on a core
    python benchmarks/partition_steps.py --nodes 50000 --parts 2 --models sage  # products-like, no files needed

`METIS` is one shot by shares of the work, what all others start from. `equal ends` looks for parts that end together,
each for itself, single nodes moved included. `plan` is what `nugnn plan` makes, which looks for a faster step of all;
`plan, moves` has single nodes moved from there so that parts end together. All are judged by the same replayed step,
and seconds are those of one core, from arrays of edges to parts. Devices are CPUs with made-up rates, 1 to 10 times as
slow by a seed, which says nothing of real ones; 100 features, 64 hidden values, 10 classes.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import Recorder
from partition_fit import Graph, load, products_like

import nugnn  # noqa: F401
from nugnn.datasets.synthetic import FULL_NODES
from nugnn.models import GNN
from nugnn.planning.cluster import Cluster, ClusterDevice
from nugnn.planning.draft_cut import draft_with_cut
from nugnn.planning.expected_halo import ExpectedHalo
from nugnn.planning.links import Links
from nugnn.planning.partition_loop import partition_to_fit
from nugnn.planning.predictor import predictor_for
from nugnn.planning.profiles import DeviceProfile
from nugnn.planning.single_moves import SingleMoves
from nugnn.planning.trace import StepTrace
from nugnn.planning.work_model import count_sizes
from nugnn.traced_step import trace_graph_step

MODELS = ("gcn", "sage", "gat")
SYSTEMS = ("METIS", "equal ends", "plan", "plan, moves")
HEAD = f"{'graph':18}{'P':>3} {'model':6}{'system':12}{'step, ms':>10}{'/METIS':>8}{'least share':>13}{'s':>8}"
_FEATURES, _CLASSES = 100, 10
_LINK = (1e9, 5e-5)
"""Bytes a second and seconds of an exchange without bytes."""
Row = dict[str, Any]


def devices(num_parts: int, seed: int) -> Cluster:
    """CPUs of one host; each has all of its made-up rates divided by a slowdown that the seed draws."""
    slowdowns = 10 ** np.random.default_rng([seed, num_parts]).random(num_parts)
    found = []
    for number, slowdown in enumerate(slowdowns.tolist()):
        profile = DeviceProfile(
            name=f"CPU {number}",
            kind="cpu",
            source="sheet",
            memory_bytes=1 << 40,
            cache_bytes=1 << 25,
            gemm_flops={"fp32": 8e11 / slowdown},
            stream_bytes=1e11 / slowdown,
            gather_bytes=4e10 / slowdown**1.3,  # so that devices differ in what they are slow at
            cached_gather_bytes=2e11 / slowdown,
            pack_bytes=5e10 / slowdown,
            launch_seconds=4e-6,
            multiprocessors=16,
        )
        found.append(ClusterDevice(host="made up", profile=profile))
    return Cluster(devices=tuple(found), links=Links.equal(num_parts, *_LINK))


@functools.cache
def trace(model: str) -> StepTrace:
    torch.manual_seed(0)
    how = {"aggregator": "mean"} if model == "sage" else {}
    network = GNN(model, _FEATURES, _CLASSES, layers=2, hidden=64, **how)
    return trace_graph_step(network, in_features=_FEATURES, num_classes=_CLASSES)


def splits(graph: Graph, model: str, num_parts: int, seed: int) -> list[Row]:
    """A row of each system."""
    num_nodes, src, dst, train = graph
    no_limits, rows = [math.inf] * num_parts, []
    took = 0.0
    for name in SYSTEMS:
        began = time.process_time()
        if name != "plan, moves":  # anew, as it remembers what it was asked
            cluster, took = devices(num_parts, seed), 0.0
            steps = predictor_for({"cpu": trace(model)}, cluster)
        if name == "plan":
            plan = draft_with_cut(steps, num_nodes, src, dst, train, cluster, seed=seed, halo=ExpectedHalo())
            part = plan.part
        elif name == "plan, moves":
            part = plan.part.astype(np.int64)
            degrees = np.bincount(dst, minlength=num_nodes)
            SingleMoves(src, dst, train, degrees, steps.work, no_limits).balance(part, plan.sizes)
        else:
            how: dict[str, Any] = {"rounds": 0, "only_work": True, "moves": False} if name == "METIS" else {}
            how |= {"train_nodes": train, "seed": seed, "halo_fraction": ExpectedHalo()}  # as plans have it
            fitted = partition_to_fit(num_nodes, src, dst, steps.work, no_limits, **how)
            part = fitted.assignment.part.numpy()
        took += time.process_time() - began
        sizes = count_sizes(src, dst, part, num_parts, train)
        reached = steps.forecast(sizes).step_seconds
        least = min(size.inner for size in sizes) / num_nodes
        rows.append({"system": name, "step_seconds": reached, "least_share": least, "cpu_seconds": took})
    return rows


def line(row: Row) -> str:
    """80 columns of a row."""
    head = f"{row['graph'][:18]:18}{row['parts']:3} {row['model']:6}{row['system']:12}"
    beside = row["step_seconds"] / row["metis_seconds"]
    return f"{head}{1e3 * row['step_seconds']:10.3f}{beside:8.4f}{row['least_share']:13.2%}{row['cpu_seconds']:8.2f}"


def compared(rows: list[Row], system: str, other: str) -> str:
    """How steps of a system are beside those of another, case by case; what differs by less than 0.01 % is the same."""
    of = {(row["graph"], row["parts"], row["model"], row["system"]): row["step_seconds"] for row in rows}
    ratios = [of[*case, system] / of[*case, other] for *case, name in of if name == system]
    slower, faster = sum(each > 1.0001 for each in ratios), sum(each < 0.9999 for each in ratios)
    return (
        f"{system} beside {other}: slower in {slower} of {len(ratios)}, by {max(0, max(ratios) - 1):.1%} at most; "
        f"faster in {faster}, by {max(0, 1 - min(ratios)):.1%} at most; median {statistics.median(ratios):.4f}"
    )


def main(given: list[str] | None = None) -> list[Row]:
    """Run what the options ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, help="folder of NAME/NAME.npz")
    parser.add_argument("--graphs", nargs="*", help="of the folder; cora and amazon_computers where it is given")
    parser.add_argument("--nodes", nargs="*", type=int, default=[], help="products-like of so many nodes")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--parts", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=Path, help="file for the rows, a JSON line each")
    arguments = parser.parse_args(given)
    usual = ["cora", "amazon_computers"] if arguments.data_dir is not None else []
    names = usual if arguments.graphs is None else arguments.graphs
    if names and arguments.data_dir is None:
        parser.error("--data-dir is needed for --graphs")
    if not names and not arguments.nodes:
        parser.error("say which graphs: --data-dir, or --nodes")
    torch.set_num_threads(1)
    graphs = [(name, functools.partial(load, arguments.data_dir, name)) for name in names]
    graphs += [(f"products-like:{n}", functools.partial(products_like, n / FULL_NODES)) for n in arguments.nodes]
    ring = np.arange(64)  # kernels are compiled before a clock starts
    for model in arguments.models:
        splits((64, ring, (ring + 1) % 64, ring[:1]), model, 2, 0)
    recorder = Recorder(arguments.rows, torch.device("cpu"), line)
    print(HEAD)
    for name, make in graphs:
        graph = make()
        for parts in arguments.parts:
            for model in arguments.models:
                facts = {"kind": "partition_steps", "graph": name, "num_nodes": graph[0], "num_edges": len(graph[1])}
                facts |= {"parts": parts, "model": model, "seed": arguments.seed}
                found = splits(graph, model, parts, arguments.seed)
                for row in found:
                    recorder.add(facts | row | {"metis_seconds": found[0]["step_seconds"]})
    for system, other in (("plan", "METIS"), ("plan", "equal ends"), ("plan, moves", "plan")):
        print(compared(recorder.rows, system, other))
    return recorder.rows


if __name__ == "__main__":
    main()
