"""A device that becomes slow in mid-run: epochs until nodes have moved and the slowest rank is near the new optimum.

    python benchmarks/slowed_device.py --rows rows/slowed.jsonl             # two GPUs, full size, five minutes
    python benchmarks/slowed_device.py --device cpu --nodes 20000 --arcs 1000000 --epochs 60

Two ranks train on equal shares. After some epochs rank 1 gets slow: on GPUs its stream is exchanged for one with fewer
multiprocessors, on a CPU its process stands still for most of the time (`tests/support/slowed.py`). Three runs of each
model: undisturbed; disturbed, with `nugnn.RebalanceRules`; and slow from the start on the shares that its measured
speeds call for, without moves, whose median epoch is the new optimum. The first two are run in float64, too: nodes have
to move there as well, and losses have to be the same to its rounding, dropout included, or no figure is given.

Rows: how much slower rank 1 became, the epoch of each move and its seconds, epochs until the median of five is within
10 % of the optimum, milliseconds of an epoch before and after, the optimum, and the largest difference of losses, in
float32 (``loss_difference``) and in float64 (``exact_difference``; older rows lack it).
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from device_shards import by_clusters, device_shard
from gpu_epoch import MODELS, adam
from harness import Recorder, free_memory, largest_difference, synchronize
from torch import Tensor, nn
from worker_groups import Group

from nugnn.datasets.synthetic_device import FAMILIES, DeviceGraph, device_graph
from nugnn.datasets.synthetic_recipe import FULL_ARCS, FULL_NODES

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))

_NEAR = 1.1
"""Times the optimum."""
_WINDOW = 5
_NODE_WORK = 10
"""Of a node beside its in-edges, for the first shares."""
_LOSS_RTOL = 1e-12
"""In float64, where a loss is a sum in another order: some 1e-16 times the root of its terms. In float32 no limit would
do: where a hidden value lies within rounding of zero, relu decides otherwise, and Adam makes a step of full length of
the first small gradient of a unit that had none, so that losses of two splits may part by 1e-3 within some epochs.
"""


# -- in the ranks ------------------------------------------------------------------------------------------------------

_KEPT: dict[str, DeviceGraph] = {}


class Disturbed(nn.Module):
    """A model under which rank 1 gets slow.

    Args:
        model: What is trained.
        after: Epochs before; None for never.
        factor: Of the time, on a CPU.
        sms: Multiprocessors, on a GPU.
    """

    def __init__(self, model: nn.Module, after: int | None, factor: float, sms: int) -> None:
        super().__init__()
        self.model, self.after, self.factor, self.sms = model, after, factor, sms
        self.num_epochs, self.slower = 0, None

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        if self.training and graph.ranks.rank == 1 and self.num_epochs == self.after:
            self.slower = _slow_down(graph.ranks, self.factor, self.sms)
        self.num_epochs += self.training
        return self.model(graph, x)  # type: ignore[no-any-return]


def _slow_down(ranks: Any, factor: float, sms: int) -> Any:
    """Whatever ends with `_recover`."""
    from nugnn.kernels.green_context import limit_multiprocessors
    from slowed import slow_down

    if ranks.device.type == "cuda":
        synchronize(ranks.device)
        return limit_multiprocessors(ranks.device, sms)
    return slow_down(os.getpid(), factor)


def _recover(ranks: Any, slower: Any) -> None:
    synchronize(ranks.device)
    if ranks.device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.default_stream(ranks.device))
    elif slower is not None:
        slower.terminate()
        slower.wait()


def work(ranks: Any, item: dict[str, Any]) -> Any:
    """One command, on every rank."""
    arguments = {name: value for name, value in item.items() if name != "do"}
    return {"make": _make, "train": _train}[item["do"]](ranks, **arguments)


def _make(ranks: Any, family: str, nodes: int, arcs: int, seed: int) -> int:
    """The graph on this rank's device, nodes numbered by nested clusters."""
    graph = device_graph(family, nodes, arcs, seed, device=ranks.device)
    _KEPT["graph"] = by_clusters(graph, ranks)
    free_memory()
    return graph.num_edges


def _parts(graph: DeviceGraph, shares: list[float]) -> Tensor:
    """Stretches of the order whose work is in proportion to the shares."""
    done = (graph.degrees + _NODE_WORK).cumsum(0).double()
    ends = torch.tensor(shares).double().cumsum(0)[:-1].to(done.device) * done[-1]
    return torch.bucketize(done, ends).to(torch.int8)


def _train(
    ranks: Any,
    model: str,
    shares: list[float],
    epochs: int,
    seed: int,
    precision: str,
    moves: bool,
    is_exact: bool = False,
    **disturbance: Any,
) -> dict[str, Any]:
    """A run, in float64 if asked for; what this rank measured in each epoch, and what moved."""
    import nugnn
    from nugnn.fit_options import FitOptions
    from nugnn.graph_part import GraphPart
    from nugnn.seam import install
    from nugnn.train_rank import train_rank

    install()
    graph = _KEPT["graph"]
    torch.manual_seed(seed)
    settings = MODELS[model] | ({"aggregator": "mean"} if model == "sage" else {})
    width, classes = graph.features.shape[1], graph.num_classes
    network = nugnn.GNN(model, width, classes, layers=3, dropout=0.5, input_dropout=0.0, **settings)
    dtype = torch.float64 if is_exact else torch.float32
    disturbed = Disturbed(network, **disturbance).to(ranks.device, dtype)
    options = FitOptions(
        epochs=epochs, evaluate_every=epochs, seed=seed, precision=precision,
        rebalance=nugnn.RebalanceRules(least_gain_seconds=0.0) if moves else "off",
        make_optimizer=lambda model: adam(model.parameters(), ranks.device),
    )  # fmt: skip
    said: list[str] = []

    def make_shard(_: Any) -> Any:
        shard = device_shard(graph, _parts(graph, shares), ranks.rank, ranks.world_size)
        return dataclasses.replace(shard, node_data=shard.node_data | {"feat": shard.node_data["feat"].to(dtype)})

    outcome = train_rank(GraphPart(make_shard), ranks, disturbed, options, on_note=said.append)
    _recover(ranks, disturbed.slower)
    found = {
        "losses": [epoch["loss"] for epoch in outcome["epochs"]],
        **{name: [epoch["seconds"][name] for epoch in outcome["epochs"]] for name in ("epoch", "compute")},
        **{name: outcome["report"][name] for name in ("nodes", "edges", "halo_rows")},
        "moves": outcome["moves"],
        "said": said,
    }
    del outcome, disturbed
    free_memory()
    return found


# -- what follows from measurements ------------------------------------------------------------------------------------


def epochs_until(seconds: list[float], after: int, optimum: float) -> int | None:
    """Epochs after number ``after`` until the median of `_WINDOW` of them is near the optimum, those not counted.

    >>> epochs_until([1, 1, 3, 3, 3, 1.5, 1.6, 1.5, 1.5, 1.6], 2, 1.5)
    3
    """
    for begin in range(after, len(seconds) - _WINDOW + 1):
        window = seconds[begin : begin + _WINDOW]
        if statistics.median(window) <= _NEAR * optimum and window[0] <= _NEAR**2 * optimum:
            return begin - after
    return None


def speeds(ranks: list[dict[str, Any]], first: int, last: int) -> list[float]:
    """Work of each rank in a second of computing, in epochs ``first`` to ``last`` (from 0), before anything moved."""
    return [
        (rank["edges_then"] + _NODE_WORK * rank["nodes_then"]) / statistics.median(rank["compute"][first:last])
        for rank in ranks
    ]


def figures(steady: list[Any], moved: list[Any], ideal: list[Any], after: int) -> dict[str, Any]:
    """What a row says of three runs."""
    walls = [max(rank["epoch"][epoch] for rank in moved) for epoch in range(len(moved[0]["epoch"]))]
    optimum = statistics.median(max(each) for each in zip(*(rank["epoch"] for rank in ideal), strict=True))
    moves = moved[0]["moves"]
    first = moves[0]["after_epoch"] if moves else len(walls)
    slower = statistics.median(moved[1]["compute"][after + 1 : first]) / statistics.median(moved[1]["compute"][2:after])
    return {
        "slower": slower,
        "before_ms": 1e3 * statistics.median(walls[2:after]),
        "slow_ms": 1e3 * statistics.median(walls[after + 1 : first]),
        "after_ms": 1e3 * statistics.median(walls[-_WINDOW:]),
        "optimum_ms": 1e3 * optimum,
        "steady_ms": 1e3 * statistics.median(steady[0]["epoch"][2:]),
        "epochs_until_near": epochs_until(walls, after, optimum),
        "moves": moves,
        "halo_rows_of_ideal": sum(rank["halo_rows"] for rank in ideal),
        "loss_difference": largest_difference(moved[0]["losses"], steady[0]["losses"]),
        "walls_ms": [1e3 * wall for wall in walls],
    }


# -- the benchmark -----------------------------------------------------------------------------------------------------


def run(arguments: argparse.Namespace, recorder: Recorder) -> None:
    """All models."""
    group = Group(work, 2, arguments.device, threads=arguments.threads)
    try:
        counts = {name: getattr(arguments, name) for name in ("family", "nodes", "arcs", "seed")}
        num_edges = group.run({"do": "make", **counts})[0]
        for model in arguments.models:
            recorder.add(_compare(group, arguments, model, num_edges))
    finally:
        group.stop()


def _compare(group: Group, given: argparse.Namespace, model: str, num_edges: int) -> dict[str, Any]:
    how: dict[str, Any] = {
        "do": "train", "model": model, "seed": given.seed, "precision": given.precision,
        "factor": given.factor, "sms": given.sms,
    }  # fmt: skip
    even = {"shares": [0.5, 0.5], "epochs": given.epochs}
    undisturbed: dict[str, Any] = {"moves": False, "after": None}
    disturbed = {"moves": True, "after": given.after}
    steady, moved = (group.run(how | even | run) for run in (undisturbed, disturbed))
    for rank, own in enumerate(moved):
        own["edges_then"], own["nodes_then"] = steady[rank]["edges"], steady[rank]["nodes"]
    moves = moved[0]["moves"]
    until = moves[0]["after_epoch"] if moves else given.epochs
    found = speeds(moved, given.after + 1, until)
    shares = [speed / sum(found) for speed in found]
    ideal = group.run(how | {"shares": shares, "epochs": 2 + given.ideal_epochs, "moves": False, "after": 0})
    for own in ideal:
        own["epoch"] = own["epoch"][2:]
    row = {
        "kind": "slowed device", "system": "rebalance", "graph": given.family, "model": model, "dtype": given.precision,
        "shape": f"{model} {given.nodes} nodes", "seed": given.seed, "num_nodes": given.nodes, "num_edges": num_edges,
        "after": given.after, "shares": shares, "said": moved[0]["said"],
    }  # fmt: skip
    row |= figures(steady, moved, ideal, given.after)
    exact = [group.run(how | even | run | {"is_exact": True})[0] for run in (undisturbed, disturbed)]
    row |= {"exact_difference": largest_difference(exact[1]["losses"], exact[0]["losses"])}
    row["exact_moves"] = len(exact[1]["moves"])
    problem = None
    if not row["exact_difference"] <= _LOSS_RTOL:
        problem = f"losses differ in float64: {row['exact_difference']:.1e}"
    elif moves and not row["exact_moves"]:
        problem = "nodes moved in float32 alone"
    if problem is not None:
        return {name: row[name] for name in row if not name.endswith("_ms")} | {"error": problem}
    return row


def line_of(row: dict[str, Any]) -> str:
    """A row for people."""
    head = f"{row['graph'].removesuffix('-like')} {row['model']}"
    if "error" in row:
        return f"{head:16}{row['error']}"
    near = "not" if row["epochs_until_near"] is None else f"after {row['epochs_until_near']}"
    times = " ".join(f"{row[name]:.1f}" for name in ("before_ms", "slow_ms", "after_ms", "optimum_ms"))
    moved = ", ".join(f"{m['after_epoch']} ({m['share']:.0%}, {m['seconds']:.2f} s)" for m in row["moves"])
    return (
        f"{head:16}{row['slower']:.2f}x slower; ms before, slow, after, optimum: {times}\n"
        f"{'':16}near the optimum {near} epochs; moves after {moved or 'none'}; losses {row['loss_difference']:.1e}"
        f" ({row['exact_difference']:.0e} in float64)"
    )


def parse(given: list[str] | None = None) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--family", choices=list(FAMILIES), default="products-like")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--factor", type=float, default=3.0, help="by which rank 1 gets slower, on a CPU")
    parser.add_argument("--sms", type=int, default=32, help="multiprocessors that rank 1 has left, on a GPU")
    parser.add_argument("--nodes", type=int, default=FULL_NODES)
    parser.add_argument("--arcs", type=int, default=FULL_ARCS)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--after", type=int, default=30, help="epochs before rank 1 gets slow")
    parser.add_argument("--ideal-epochs", type=int, default=12, help="of the run whose median is the optimum")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--rows", type=Path, help="file for the rows, a JSON line each")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> Recorder:
    """Run what the options ask for."""
    arguments = parse(given)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    recorder = Recorder(arguments.rows, torch.device("cuda:0" if arguments.device == "cuda" else "cpu"), line_of)
    run(arguments, recorder)
    return recorder


if __name__ == "__main__":
    main()
