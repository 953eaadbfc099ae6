"""One worker of nuGNN against plain DGL: seconds of an epoch and peak memory, same model, same graph.

    python benchmarks/epoch.py                     # 300,000 nodes / 12 M arcs, 2 layers, hidden 64
    python benchmarks/epoch.py --layers 3 --model sage
    python benchmarks/epoch.py --graph cora        # needs NUGNN_DATA or --data-dir

On a graph that is large enough nuGNN runs twice: with its rows in the order it finds, and in the given order, as DGL.

Each measurement is a process of its own, the two in turn; a row is the median over processes of the median epoch, with
the smallest and largest process. DGL runs at its best known use: CSC and CSR only, both made before the clock starts,
int32 or int64 ids, whichever is faster; memory is compared with whichever is leaner. Before any timing, the losses of
both without dropout have to agree.

nuGNN's processes ask for huge pages, as the workers that it launches do. What the same setting of torch does for DGL is
in the rows "huge"; a user's script has not got it, so they are no baseline.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

MODELS = ("sage", "gcn")
PLAIN = ("dgl-int64", "dgl-int32")


def load_graph(name: str, data_dir: str | None, num_nodes: int, num_arcs: int) -> Any:
    from nugnn.datasets import load
    from nugnn.datasets.transforms import normalize_features, self_loops

    if name == "products-like":
        return load(f"products-like:{num_nodes}:{num_arcs}:0")
    return normalize_features(self_loops(load(name, data_dir), "add"), "row")


def settings_of(name: str) -> dict[str, Any]:
    """Hidden 64 and dropout between layers; Cora as published: hidden 16 and dropout of the input as well."""
    if name == "products-like":
        return {"hidden": 64, "dropout": 0.5, "input_dropout": 0.0}
    return {"hidden": 16, "dropout": 0.5, "input_dropout": 0.5}


def begin_peak() -> None:
    """Forget the peak of reading and preparing the graph; Linux only, elsewhere the whole process counts."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def peak_bytes() -> int:
    """Largest resident set since `begin_peak`."""
    with contextlib.suppress(OSError), open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run_nugnn(holder: list[Any], model_name: str, epochs: int, order: Any, **settings: Any) -> dict[str, Any]:
    import torch

    import nugnn
    from nugnn.partition import assign, shard

    torch.manual_seed(0)
    data = holder.pop()
    width = data.features.shape[1]
    model = nugnn.GNN(model_name, width, data.num_classes, **settings)
    assignment = assign.partition_nodes(data.num_nodes, data.src, data.dst, [1.0])
    part = shard.build_shard(data, assignment, 0, order=order)
    from nugnn.seam import install

    install()
    graph = nugnn.ShardGraph(part, keep_edge_ids=False)  # as nugnn.fit does
    rows = {"train": part.train_rows, "val": part.val_rows, "test": part.test_rows}
    said = part.order.sentence
    del data, assignment, part
    gc.collect()
    begin_peak()
    trainer = nugnn.Trainer(nugnn.GraphFamily(model, graph, rows))
    seconds, losses = [], []
    for _ in range(epochs):
        begin = time.perf_counter()
        losses.append(trainer.train_epoch())
        seconds.append(time.perf_counter() - begin)
    return {"seconds": seconds, "losses": losses, "peak_bytes": peak_bytes(), "order": said}


def run_dgl(
    holder: list[Any], model_name: str, epochs: int, idtype: str, layers: int, **settings: Any
) -> dict[str, Any]:
    import dgl
    import torch
    from dgl import nn as dgl_nn
    from torch import nn
    from torch.nn import functional as F  # noqa: N812

    class Plain(nn.Module):
        """The same layers in plain DGL and torch."""

        def __init__(self, width: int, num_classes: int, hidden: int, dropout: float, input_dropout: float) -> None:
            super().__init__()
            kind = {
                "gcn": lambda i, o: dgl_nn.GraphConv(i, o, allow_zero_in_degree=True),
                "sage": lambda i, o: dgl_nn.SAGEConv(i, o, "mean"),
            }[model_name]
            widths = [width, *[hidden] * (layers - 1), num_classes]
            self.layers = nn.ModuleList([kind(*pair) for pair in itertools.pairwise(widths)])
            self.dropout, self.input_dropout = dropout, input_dropout

        def forward(self, graph: Any, x: Any) -> Any:
            h = F.dropout(x, self.input_dropout, self.training) if self.input_dropout else x
            for layer in self.layers[:-1]:
                h = F.dropout(F.relu(layer(graph, h)), self.dropout, self.training)
            return self.layers[-1](graph, h)

    torch.manual_seed(0)
    data = holder.pop()
    ids = torch.int32 if idtype == "int32" else torch.int64
    graph = dgl.graph((data.src.to(ids), data.dst.to(ids)), num_nodes=data.num_nodes).formats(["csr", "csc"])
    graph.create_formats_()
    dense = data.features if data.features.layout is torch.strided else data.features.to_dense()
    features, labels, train, classes = dense, data.labels, data.train_nodes, data.num_classes
    del data, dense
    gc.collect()
    begin_peak()
    model = Plain(features.shape[1], classes, **settings)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    seconds, losses = [], []
    for _ in range(epochs):
        begin = time.perf_counter()
        loss = F.cross_entropy(model(graph, features)[train], labels[train])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - begin)
    return {"seconds": seconds, "losses": losses, "peak_bytes": peak_bytes()}


def child(arguments: argparse.Namespace) -> None:
    import nugnn  # noqa: F401  (lets DGL import)

    holder = [load_graph(arguments.graph, arguments.data_dir, arguments.nodes, arguments.arcs)]
    settings = settings_of(arguments.graph) | {"layers": arguments.layers}
    if arguments.without_dropout:
        settings |= {"dropout": 0.0, "input_dropout": 0.0}
    if not arguments.run.startswith("nugnn"):
        import pandas  # noqa: F401  (plain DGL imports it; nuGNN's import of DGL leaves it for when it is needed)
    if arguments.run.startswith("nugnn"):
        order = "none" if arguments.run == "nugnn-given" else "auto"
        answer = run_nugnn(holder, arguments.model, arguments.epochs, order, **settings)
    else:
        idtype = arguments.run.split("-")[1]
        answer = run_dgl(holder, arguments.model, arguments.epochs, idtype, **settings)
    print(json.dumps(answer))


def spawn(arguments: argparse.Namespace, run: str, model: str, *extra: str) -> dict[str, Any]:
    command = [sys.executable, os.path.abspath(__file__), "--run", run, "--graph", arguments.graph, "--model", model]
    command += ["--nodes", str(arguments.nodes), "--arcs", str(arguments.arcs), "--epochs", str(arguments.epochs)]
    command += ["--layers", str(arguments.layers)]
    command += ["--data-dir", arguments.data_dir] if arguments.data_dir else []
    from nugnn.worker_environment import grants_huge_pages

    asks = grants_huge_pages() and (run.startswith("nugnn") or run.endswith("-huge"))
    environment = os.environ | {"THP_MEM_ALLOC_ENABLE": "1" if asks else "0"}
    done = subprocess.run([*command, *extra], capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{run} failed:\n{done.stderr}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graph", default="products-like")
    parser.add_argument("--data-dir", default=os.environ.get("NUGNN_DATA"))
    parser.add_argument("--nodes", type=int, default=300_000)
    parser.add_argument("--arcs", type=int, default=12_000_000)
    parser.add_argument("--epochs", type=int, default=None, help="epochs in a process; the first 2 are not counted")
    parser.add_argument("--repeats", type=int, default=5, help="processes of each kind")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--model", choices=MODELS, help="default: both")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--without-dropout", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.epochs = arguments.epochs or (8 if arguments.graph == "products-like" else 60)
    if arguments.run:
        child(arguments)
        return
    import torch

    print(f"graph {arguments.graph}, {torch.get_num_threads()} threads, torch {torch.__version__}, no evaluation")
    print(f"{'model':6}{'':14}{'epoch ms':>10}{'min':>9}{'max':>9}{'ratio':>8}{'peak MiB':>10}{'ratio':>8}")
    for model in [arguments.model] if arguments.model else MODELS:
        report(arguments, model)


def report(arguments: argparse.Namespace, model: str) -> None:
    from harness import largest_difference

    ours, theirs = (spawn(arguments, run, model, "--without-dropout")["losses"] for run in ("nugnn", "dgl-int64"))
    # float32 sums in another order: the two losses may differ by rounding, and by its growth over a few Adam steps
    worst = largest_difference(ours[:3], theirs[:3])
    if not worst <= 1e-3:
        raise SystemExit(f"{model}: losses without dropout differ by {worst:.1e}; no timing of a wrong result")
    names = ("nugnn", "nugnn-given") if arguments.graph == "products-like" else ("nugnn",)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in (*names, *PLAIN, "dgl-int32-huge")}
    for _ in range(arguments.repeats):
        for run, rows in runs.items():
            rows.append(spawn(arguments, run, model))
    print(f"{model}: {runs['nugnn'][-1]['order']}")
    medians = {run: [statistics.median(row["seconds"][2:]) for row in rows] for run, rows in runs.items()}
    best = min(PLAIN, key=lambda run: statistics.median(medians[run]))
    baseline = statistics.median(medians[best])
    # memory beside the leaner of the two, whichever is the faster
    peaks = {run: statistics.median(row["peak_bytes"] for row in rows) for run, rows in runs.items()}
    baseline_bytes = min(peaks[run] for run in PLAIN)
    for run in runs:
        epoch, peak = statistics.median(medians[run]), peaks[run]
        print(
            f"{model:6}{run + (' (baseline)' if run == best else ''):20}"[:20]
            + f"{epoch * 1e3:10.1f}{min(medians[run]) * 1e3:9.1f}{max(medians[run]) * 1e3:9.1f}{epoch / baseline:8.2f}"
            f"{peak / 2**20:10.0f}{peak / baseline_bytes:8.2f}"
        )


if __name__ == "__main__":
    main()
