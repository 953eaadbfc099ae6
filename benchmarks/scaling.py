"""Epochs of nuGNN on one GPU and on several of one host: the same training, split; a JSON row for each number of ranks.

    python benchmarks/scaling.py --ranks 1 2 --out rows
    python benchmarks/scaling.py --device cpu --ranks 1 2 --nodes 2000 --arcs 20000 --hidden 16 --epochs 3

A 3-layer SAGE-mean as in `gpu_epoch.py`. Dropout masks belong to global node ids, so the losses of all numbers of
ranks have to agree, with dropout on, or no time is given. Graph, partition and shards are made before the clock starts.
Epochs follow each other as `Trainer.train_epoch` runs them, timed from the end of one to the end of the next on the
first rank's GPU; the wait for halo rows is the mean over them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from gpu_epoch import adam, supported
from harness import Recorder, kernels_of, largest_difference, milliseconds, moment, synchronize, timing_of

from nugnn.datasets.synthetic_recipe import FULL_ARCS, FULL_NODES

_EPOCHS_BEFORE = 5
"""They compile, allocate, and are recorded where steps are CUDA graphs."""
_LOSS_RTOL = {"fp32": 1e-3, "bf16": 1e-2}
"""Sums over parts in another order; in bf16 a sum that rounds to the other neighbour changes a node by 2^-8."""


def worker(arguments: argparse.Namespace) -> None:
    """One rank: trains and writes what it saw to a file of its own."""
    import nugnn
    from nugnn.datasets import synthetic

    is_gpu = torch.device(arguments.device).type == "cuda"
    ranks = nugnn.init(**supported(nugnn.init, "CUDA", {"device": "cuda"} if is_gpu else {}))
    device = ranks.device if is_gpu else torch.device("cpu")
    if is_gpu:
        torch.cuda.set_device(device)
    begin = time.perf_counter()
    make = {"products-like": synthetic.products_like, "mixed-like": synthetic.mixed_like}[arguments.family]
    data = make(arguments.nodes, arguments.arcs, arguments.seed, device=device)
    generated = time.perf_counter()
    order = supported(nugnn.shard, "order of its own", {} if arguments.order == "none" else {"order": arguments.order})
    graph = nugnn.shard(data, ranks, method=arguments.method, **order)
    sharded = time.perf_counter()
    torch.manual_seed(arguments.seed)
    model = nugnn.GNN(
        "sage", data.num_features, data.num_classes, layers=3, hidden=arguments.hidden, aggregator="mean", dropout=0.5
    ).to(device)
    del data
    rows = torch.arange(graph.num_nodes(), device=device)
    options = {} if arguments.precision == "fp32" else {"precision": arguments.precision}
    options |= {} if arguments.overlap == "auto" else {"overlap": arguments.overlap}
    trained = {} if arguments.recorded == "auto" else {"cuda_graphs": arguments.recorded}
    family = nugnn.GraphFamily(
        model,
        graph,
        {"train": rows, "val": rows[:0], "test": rows[:0]},
        **supported(nugnn.GraphFamily, "choice of precision and overlap", options),
    )
    trainer = nugnn.Trainer(family, make_optimizer=lambda model: adam(model.parameters(), device), **trained)
    if is_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    losses = [trainer.train_epoch() for _ in range(_EPOCHS_BEFORE)]
    synchronize(device)
    ranks.clock.take()
    ends = [moment(device)]
    for _ in range(arguments.epochs):
        losses.append(trainer.train_epoch())
        ends.append(moment(device))  # of the device: the host may be at the next epoch by then
    synchronize(device)
    answer = {
        "samples_ms": [milliseconds(*pair) for pair in itertools.pairwise(ends)],
        "losses": losses,
        "halo_ms": ranks.clock.take()[0] / arguments.epochs * 1e3,
        "peak_bytes": torch.cuda.max_memory_allocated(device) if is_gpu else None,
        "num_inner": graph.num_nodes(),
        "generate_seconds": generated - begin,
        "shard_seconds": sharded - generated,
        "nccl_ms": None,
    }
    if is_gpu:
        kernels = kernels_of(trainer.train_epoch, 1000, device)
        # all of it is exposed where nothing runs beside it
        answer["nccl_ms"] = sum(kernel["ms"] for kernel in kernels if "nccl" in kernel["name"].lower())
        answer["busy_ms"] = sum(kernel["ms"] for kernel in kernels) - answer["nccl_ms"]
        answer["kernels"] = kernels[: arguments.kernels]
    (arguments.results / f"{ranks.rank}.json").write_text(json.dumps(answer), encoding="utf-8")


def run(num_ranks: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """What each of ``num_ranks`` ranks saw.

    Raises:
        RuntimeError: The ranks failed; with the end of what they wrote.
    """
    with tempfile.TemporaryDirectory() as results:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
        command += [__file__, "--worker", "--results", results]
        for name in (
            "device",
            "family",
            "nodes",
            "arcs",
            "seed",
            "hidden",
            "precision",
            "method",
            "order",
            "overlap",
            "recorded",
            "epochs",
            "kernels",
        ):
            command += [f"--{name}", str(getattr(arguments, name))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        paths = [Path(results) / f"{rank}.json" for rank in range(num_ranks)]
        if done.returncode or not all(path.exists() for path in paths):
            # the first exception of a rank; torchrun's own comes after them
            errors = re.findall(r"^(?:\[rank\d+\]: )?([\w.]*(?:Error|Exception): .+)$", done.stderr, re.MULTILINE)
            raise RuntimeError(errors[0] if errors else done.stderr[-300:])
        return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def measure(recorder: Recorder, arguments: argparse.Namespace) -> None:
    """A row for each number of ranks, the losses of the first as the yardstick of the others."""
    expected: list[float] | None = None
    cases = [
        (num_ranks, overlap, recorded)
        for recorded in arguments.cuda_graphs or ["on" if arguments.device == "cuda" else "off"]
        for num_ranks in arguments.ranks
        for overlap in (arguments.overlaps if num_ranks > 1 else ["auto"])
    ]
    for num_ranks, arguments.overlap, recorded in cases:
        arguments.recorded = recorded
        system = f"nugnn {num_ranks} ranks" + (f", overlap {arguments.overlap}" if num_ranks > 1 else "")
        system += ", recorded" if recorded == "on" else ""
        row: dict[str, Any] = {"kind": "scaling", "system": system, "num_ranks": num_ranks}
        row |= {"graph": arguments.family, "dtype": arguments.precision, "shape": f"sage {arguments.nodes}"}
        row |= {"num_nodes": arguments.nodes, "num_edges": arguments.arcs, "hidden": arguments.hidden}
        row |= {"seed": arguments.seed, "method": arguments.method, "order": arguments.order}
        row |= {"overlap": arguments.overlap, "cuda_graphs": recorded}
        timing = None
        try:
            answers = run(num_ranks, arguments)
            losses = answers[0]["losses"]
            expected = expected or losses
            worst = largest_difference(losses[:3], expected[:3])
            row |= {"losses": losses, "ranks": answers}
            if worst <= _LOSS_RTOL[arguments.precision]:
                timing = timing_of(answers[0]["samples_ms"])
                peaks = [answer["peak_bytes"] for answer in answers if answer["peak_bytes"] is not None]
                row |= {"peak_bytes": max(peaks, default=None)}
            else:
                row |= {"error": f"wrong result: losses {losses[:3]}, of {arguments.ranks[0]} ranks {expected[:3]}"}
        except Exception as error:
            row |= {"error": f"{type(error).__name__}: {error}"}
        recorder.add(row, timing)


def parse(given: list[str] | None = None) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--family", choices=("products-like", "mixed-like"), default="products-like")
    parser.add_argument("--nodes", type=int, default=FULL_NODES)
    parser.add_argument("--arcs", type=int, default=FULL_ARCS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--precision", choices=list(_LOSS_RTOL), default="fp32")
    parser.add_argument("--method", default="metis", help="partitioner, as nugnn.shard takes it")
    parser.add_argument("--order", default="none", help="of the rows, as nugnn.shard takes it")
    parser.add_argument("--overlaps", nargs="+", choices=["auto", "on", "backward", "off"], default=["auto", "off"])
    parser.add_argument("--epochs", type=int, default=10, help="timed ones; five go before")
    parser.add_argument("--cuda-graphs", nargs="+", choices=["on", "off"], help="on on GPUs, off elsewhere")
    parser.add_argument("--kernels", type=int, default=0, help="so many kernels of each rank, by their time")
    parser.add_argument("--out", type=Path, help="folder for scaling.jsonl")
    parser.add_argument("--overlap", default="auto", help=argparse.SUPPRESS)
    parser.add_argument("--recorded", default="auto", help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> Recorder:
    """Launch the ranks, or be one."""
    arguments = parse(given)
    if arguments.worker:
        worker(arguments)
        sys.stdout.flush()
        sys.stderr.flush()
        # as nuGNN's own workers leave: threads of gloo may abort the interpreter's teardown
        os._exit(0)
    path = None if arguments.out is None else arguments.out / "scaling.jsonl"
    recorder = Recorder(path, torch.device("cuda:0" if arguments.device == "cuda" else arguments.device))
    measure(recorder, arguments)
    return recorder


if __name__ == "__main__":
    main()
