"""Training epochs of 3-layer SAGE, GCN and GAT on the GPU: plain torch on cuSPARSE, PyG, and nuGNN.

    python benchmarks/gpu_epoch.py --out rows                       # full size, all models, systems and precisions
    python benchmarks/gpu_epoch.py --kernels 20 --out rows           # and the kernels that take most of an epoch
    python benchmarks/gpu_epoch.py --curves --out rows              # accuracy over 80 epochs and 3 seeds, smaller
    python benchmarks/gpu_epoch.py --device cpu --nodes 2000 --arcs 20000 --epochs 3

An epoch is forward, loss over all nodes, backward and Adam (fused), with dropout 0.5 between the layers: SAGE-mean and
GCN 100-256-256-47, GAT with 4 heads of 64 and one head of 47. No step waits for the device. Before anything is timed,
each system's losses without dropout, in float32, on a small graph and from the same weights, have to be those of the
plain model; a system that fails has no times. A model that does not fit is tried again on a graph of half the size.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import itertools
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from baselines import Csr
from harness import (
    Recorder,
    brief,
    free_memory,
    kernels_of,
    largest_difference,
    milliseconds,
    moment,
    synchronize,
    timing_of,
)
from plain_models import Adjacency, PlainModel, TunedModel, padded
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from nugnn.datasets.synthetic_device import FAMILIES, DeviceGraph, device_graph
from nugnn.datasets.synthetic_recipe import FULL_ARCS, FULL_NODES

MODELS: dict[str, dict[str, Any]] = {
    "sage": {"hidden": 256, "heads": 1},
    "gcn": {"hidden": 256, "heads": 1},
    "gat": {"hidden": 64, "heads": 4},
}
PRECISIONS = ("fp32", "tf32", "bf16")
LEARNING_RATE = 0.003
"""At 0.01 one seed of three stays at 57 % in most systems and precisions."""
_LOSS_RTOL = 1e-3
"""Between two systems after three steps without dropout: float32 sums in another order, grown by Adam."""
_CHECK_NODES, _CHECK_ARCS = 3_000, 40_000

Step = Callable[[], Tensor]


@dataclasses.dataclass
class Run:
    """A system ready to train.

    Args:
        step: Does one epoch and returns its loss as a tensor.
        logits: Evaluates.
        is_recorded: Whether its steps run as CUDA graphs by now.
    """

    step: Step
    logits: Callable[[], Tensor]
    is_recorded: Callable[[], bool] = lambda: False


class Case:
    """A benchmark graph in the form that a system asks for: on the device, or as nuGNN's shard graph, never both.

    So that no system's peak memory holds what another needs. Labels and splits are small and always there.

    Args:
        family: Of the generator, as the next three.
        num_nodes: N.
        num_arcs: E.
        seed: Of the graph.
        device: Where it is trained.
    """

    def __init__(self, family: str, num_nodes: int, num_arcs: int, seed: int, device: torch.device) -> None:
        self.device, self.name = device, family
        self._arguments = (family, num_nodes, num_arcs, seed)
        self._graph: DeviceGraph | None = None
        self._shard_graph: Any = None
        self._data: Any = None
        graph = self.graph()
        self.num_nodes, self.num_edges = graph.num_nodes, graph.num_edges
        self.num_features, self.num_classes = graph.features.shape[1], graph.num_classes
        self.labels, self.train_nodes = graph.labels, graph.train_nodes
        self.val_nodes, self.test_nodes = graph.val_nodes, graph.test_nodes

    def graph(self, dtype: torch.dtype = torch.float32) -> DeviceGraph:
        """On the device with features of one type; made again where another form had taken its place."""
        self._shard_graph = None
        if self._graph is None or self._graph.features.dtype not in (torch.float32, dtype):
            self._graph = None
            free_memory()
            self._graph = device_graph(*self._arguments, device=self.device)
        self._graph = dataclasses.replace(self._graph, features=self._graph.features.to(dtype))
        return self._graph

    def release(self) -> None:
        """Hold the graph in no form: who trains on it does."""
        self._graph = self._shard_graph = self._data = None

    def shard_graph(self, order: str) -> Any:
        """NuGNN's, of one part on the device, rows in the order of their ids (``none``) or one it finds (``auto``).

        Raises:
            NotImplementedError: This version of nuGNN has no CUDA, or finds no order.
        """
        import nugnn

        options: dict[str, Any] = supported(
            nugnn.shard, "CUDA", {"device": self.device.type} if self.device.type == "cuda" else {}
        )
        options |= supported(nugnn.shard, "order of its own", {} if order == "none" else {"order": order})
        if self._shard_graph is None or self._shard_graph[0] != order:
            self._data = self._data or self.graph().to_host()
            self._graph = self._shard_graph = None
            free_memory()
            self._shard_graph = (order, nugnn.shard(self._data, **options))
        graph = self._shard_graph[1]
        if graph.ndata["feat"].dtype != torch.float32:  # a run in 16 bits keeps the rounded features alone
            own = self._data.features[graph.global_node_ids.cpu()].to(self.device)
            graph.ndata["feat"] = nugnn.as_node_rows(own, graph)
        return graph


def precision_scope(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """What plain torch runs forward and loss in: autocast for bf16."""
    return torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else nullcontext()


def storage_of(precision: str) -> torch.dtype:
    """In which features and activations are kept."""
    return torch.bfloat16 if precision == "bf16" else torch.float32


def set_tf32(precision: str) -> None:
    """Products of float32 matrices in TF32 or in float32."""
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"


def adam(parameters: Any, device: torch.device) -> torch.optim.Optimizer:
    """Adam as it is fastest: one kernel for all parameters."""
    return torch.optim.Adam(parameters, lr=LEARNING_RATE, fused=device.type == "cuda")


def trained(model: nn.Module, forward: Callable[[], Tensor], case: Case, rows: Tensor | None, precision: str) -> Run:
    """The plain loop around a model."""
    device = case.device
    optimizer = adam(model.parameters(), device)
    labels = case.labels if rows is None else case.labels[rows]

    def step() -> Tensor:
        model.train()
        with precision_scope(precision, device):
            logits = forward()
            loss = F.cross_entropy(logits if rows is None else logits[rows], labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def logits() -> Tensor:
        model.eval()
        with torch.no_grad(), precision_scope(precision, device):
            return forward()

    return Run(step, logits)


def plain(
    kind: str,
    case: Case,
    precision: str,
    dropout: float,
    rows: Tensor | None,
    state: dict[str, Tensor],
    *,
    make: type[PlainModel] = PlainModel,
) -> Run:
    """Plain torch on cuSPARSE; see `plain_models`."""
    if make is TunedModel and kind == "gat":
        raise NotImplementedError("nothing to tune: every sum has weights of its own in every epoch")
    graph = case.graph(storage_of(precision))
    model = make(kind, case.num_features, **MODELS[kind], num_classes=case.num_classes, dropout=dropout)
    model.load_state_dict(state)
    model.to(case.device)
    adjacency = Adjacency(Csr(graph.indptr.int(), graph.indices))
    if kind == "gat":
        adjacency.prepare_weighted(storage_of(precision), [padded(layer.shape[1]) for layer in model.layers])
    else:
        adjacency.prepare({"sage": "mean", "gcn": "both"}[kind], storage_of(precision), model.summed_widths)
    x = graph.features
    return trained(model, lambda: model(adjacency, x), case, rows, precision)


def pyg(kind: str, case: Case, precision: str, dropout: float, rows: Tensor | None, state: dict[str, Tensor]) -> Run:
    """PyG's own layers in the form that is fastest without its compiled extensions.

    SAGE and GCN get a ``torch.sparse_csr`` matrix, the one input with which they aggregate without a tensor of
    messages (``EdgeIndex`` scatters), GCN's normalisation in its values; GAT gets int64 pairs, as its scatter asks.
    """
    from torch_geometric import nn as pyg_nn

    graph, device, settings = case.graph(storage_of(precision)), case.device, MODELS[kind]
    x = graph.features
    csr = Csr(graph.indptr.int(), graph.indices)
    adjacency = Adjacency(csr)
    edges: Tensor
    if kind == "sage":
        edges = adjacency.with_values(torch.ones(csr.num_edges, dtype=x.dtype, device=device))
    elif kind == "gcn":
        edges = adjacency.matrix("both", x.dtype, False)
    else:
        edges = torch.stack([csr.indices, adjacency.destinations]).long()
    del adjacency
    layers, width = nn.ModuleList(), graph.features.shape[1]
    for number in range(3):
        out, heads = (graph.num_classes, 1) if number == 2 else (settings["hidden"], settings["heads"])
        layers.append(
            {
                "sage": lambda i, o, h: pyg_nn.SAGEConv(i, o, aggr="mean"),
                "gcn": lambda i, o, h: pyg_nn.GCNConv(i, o, normalize=False),
                "gat": lambda i, o, h: pyg_nn.GATConv(i, o, h, add_self_loops=False),
            }[kind](width, out, heads)
        )
        width = out * heads
    load_into_pyg(kind, layers, state)
    layers.to(device)

    def forward() -> Tensor:
        h = x
        for layer in layers[:-1]:
            h = F.dropout(F.relu(layer(h, edges)), dropout, layers.training)
        logits: Tensor = layers[-1](h, edges)
        return logits

    return trained(layers, forward, case, rows, precision)


def load_into_pyg(kind: str, layers: nn.ModuleList, state: dict[str, Tensor]) -> None:
    """Put the weights of a plain model into PyG's layers."""
    names = {
        "sage": {"lin_l.weight": "fc_neigh.weight", "lin_l.bias": "fc_self.bias", "lin_r.weight": "fc_self.weight"},
        "gcn": {"lin.weight": "weight", "bias": "bias"},
        "gat": {"lin.weight": "fc.weight", "att_src": "attn_l", "att_dst": "attn_r", "bias": "bias"},
    }[kind]
    for number, layer in enumerate(layers):
        own = {theirs: state[f"layers.{number}.{mine}"] for theirs, mine in names.items()}
        if kind == "gcn":
            own["lin.weight"] = own["lin.weight"].t().contiguous()
        layer.load_state_dict(own)


def ours(
    kind: str,
    case: Case,
    precision: str,
    dropout: float,
    rows: Tensor | None,
    state: dict[str, Tensor],
    *,
    order: str = "auto",
    keeps_first_sum: bool = True,
) -> Run:
    """NuGNN through its public API: the built-in model on a shard graph of one part, trained by `nugnn.Trainer`.

    Raises:
        NotImplementedError: This version of nuGNN lacks what is asked of it.
    """
    import nugnn

    settings = MODELS[kind] | ({"aggregator": "mean"} if kind == "sage" else {})
    model = nugnn.GNN(
        kind, case.num_features, case.num_classes, layers=3, dropout=dropout, input_dropout=0.0, **settings
    )
    model.load_state_dict(state)
    training = supported(
        nugnn.GraphFamily, "choice of precision", {} if precision == "fp32" else {"precision": precision}
    )
    shard_graph = case.shard_graph(order)
    model.to(case.device)
    local_rows = torch.empty(case.num_nodes, dtype=torch.int64, device=case.device)
    local_rows[shard_graph.global_node_ids.to(case.device)] = torch.arange(case.num_nodes, device=case.device)
    everywhere = torch.arange(case.num_nodes, device=case.device)
    splits = {"train": rows, "val": case.val_nodes, "test": case.test_nodes}
    local_splits = {name: everywhere if nodes is None else local_rows[nodes] for name, nodes in splits.items()}
    training |= {"seed": torch.initial_seed() % 2**31}  # of masks: that of the first weights
    family = nugnn.GraphFamily(model, shard_graph, local_splits, recompute_inputs=not keeps_first_sum, **training)
    recorded = {"cuda_graphs": "on"} if case.device.type == "cuda" else {}
    trainer = nugnn.Trainer(family, make_optimizer=lambda model: adam(model.parameters(), case.device), **recorded)
    return Run(
        lambda: torch.as_tensor(trainer.train_epoch()),
        lambda: family.predict(trainer.num_steps)[local_rows],
        lambda: trainer.num_recorded > 0,
    )


def supported(function: Callable[..., Any], what: str, options: dict[str, Any]) -> dict[str, Any]:
    """``options`` if the function takes them."""
    missing = [name for name in options if name not in inspect.signature(function).parameters]
    if missing:
        raise NotImplementedError(f"this version of nuGNN has no {what}")
    return options


SYSTEMS: dict[str, Callable[..., Run]] = {
    "cusparse": plain,
    "nugnn": ours,
    "cusparse tuned": functools.partial(plain, make=TunedModel),
    "nugnn anew": functools.partial(ours, keeps_first_sum=False),
    "pyg": pyg,
    "nugnn by id": functools.partial(ours, order="none"),
}
"""By the name in the rows. ``nugnn`` looks for an order of the rows, ``nugnn by id`` leaves them as they come; these
and ``cusparse tuned``, see `TunedModel`, keep the first layer's sum of constant features over epochs, and ``nugnn
anew`` makes it in every epoch, as ``cusparse`` and ``pyg`` do."""


@functools.cache
def problem_of(system: str, kind: str, device: torch.device) -> str | None:
    """What is wrong with a system's losses without dropout on a small graph, or None."""
    case = Case("products-like", _CHECK_NODES, _CHECK_ARCS, 1, device)
    set_tf32("fp32")
    run = SYSTEMS[system](kind, case, "fp32", 0.0, None, first_weights(kind, case, seed=0))
    losses, expected = [float(run.step()) for _ in range(3)], _expected_losses(kind)
    if largest_difference(losses, expected) <= _LOSS_RTOL:
        return None
    return f"losses {losses} without dropout, expected {expected}"


def first_weights(kind: str, case: Case, seed: int) -> dict[str, Tensor]:
    """Weights that every system starts with, so that a difference between two runs is not one of luck."""
    torch.manual_seed(seed)
    return PlainModel(kind, case.num_features, **MODELS[kind], num_classes=case.num_classes).state_dict()


@functools.cache
def _expected_losses(kind: str) -> list[float]:
    """Of the plain model in float64 on the CPU, the yardstick."""
    case = Case("products-like", _CHECK_NODES, _CHECK_ARCS, 1, torch.device("cpu"))
    graph = case.graph()
    model = PlainModel(kind, case.num_features, **MODELS[kind], num_classes=case.num_classes, dropout=0.0)
    model.load_state_dict(first_weights(kind, case, seed=0))
    model.double()
    adjacency, x = Adjacency(Csr(graph.indptr.int(), graph.indices)), graph.features.double()
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE), []
    for _ in range(3):
        loss = F.cross_entropy(model(adjacency, x), graph.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def time_epochs(run: Run, epochs: int, device: torch.device) -> tuple[list[float], list[float], int | None]:
    """Milliseconds and losses of ``epochs`` epochs after five that do not count, and the peak over all of them.

    Of nuGNN's, the fourth is recorded as a CUDA graph.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    losses = [run.step()]
    synchronize(device)  # what the first epoch compiles must not queue up before the second
    losses += [run.step() for _ in range(4)]
    ends = [moment(device)]
    for _ in range(epochs):
        losses.append(run.step())
        ends.append(moment(device))
    synchronize(device)
    samples = [milliseconds(*pair) for pair in itertools.pairwise(ends)]
    most = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return samples, [float(loss) for loss in losses], most


def described(kind: str, case: Case, system: str, model: str, precision: str) -> dict[str, Any]:
    """The columns of a row that both kinds of rows have."""
    row = {"kind": kind, "system": system, "model": model, "graph": case.name, "dtype": precision, "dropout": 0.5}
    return row | {"shape": f"{model} {case.num_nodes}", "num_nodes": case.num_nodes, "num_edges": case.num_edges}


def measure(recorder: Recorder, case: Case, system: str, model: str, precision: str, arguments: Any) -> bool:
    """One row of times; whether there was memory enough."""
    row = described("epoch", case, system, model, precision) | {"seed": arguments.seed, "loss_over": "all nodes"}
    problem, timing, run = None, None, None
    try:
        problem = problem_of(system, model, case.device)
        if problem is not None:
            problem = f"wrong result: {problem}"
        else:
            free_memory()
            state = first_weights(model, case, arguments.seed)
            set_tf32(precision)
            begin = time.perf_counter()
            run = SYSTEMS[system](model, case, precision, 0.5, None, state)
            row |= {"setup_seconds": time.perf_counter() - begin}
            free_memory()
            samples, losses, most = time_epochs(run, arguments.epochs, case.device)
            timing = timing_of(samples)
            row |= {"losses": losses, "peak_bytes": most, "samples_ms": samples, "cuda_graphs": run.is_recorded()}
            if arguments.kernels:
                row |= {"kernels": kernels_of(run.step, arguments.kernels, case.device)}
    except Exception as error:
        problem, timing = brief(error), None
    finally:
        set_tf32("fp32")
    del run
    free_memory()
    recorder.add(row if problem is None else row | {"error": problem}, timing)
    return problem != "out of memory"


def measure_all(recorder: Recorder, arguments: argparse.Namespace, device: torch.device) -> None:
    """Rows of all epochs; where a system's memory does not do, it and nuGNN are tried on smaller graphs."""
    for family in arguments.families:
        todo = [(s, m, p) for s in arguments.systems for m in arguments.models for p in arguments.precisions]
        for halvings in range(4):
            if not todo:
                break
            sizes = (arguments.nodes >> halvings, (arguments.arcs >> halvings) & -2)
            case = Case(family, *sizes, arguments.seed, device)
            fits = {each: measure(recorder, case, *each, arguments) for each in todo}
            too_large = {each[1:] for each, did_fit in fits.items() if not did_fit}
            # nuGNN has a row beside each system's that had to be made smaller
            todo = [each for each in todo if each[1:] in too_large and (not fits[each] or each[0].startswith("nugnn"))]
            del case
            free_memory()


def measure_curves(recorder: Recorder, arguments: argparse.Namespace, device: torch.device) -> None:
    """Loss and validation accuracy over epochs, and test accuracy at the best of them: training nodes alone."""
    for family in arguments.families:
        case = Case(family, arguments.curve_nodes, arguments.curve_arcs, arguments.seed, device)
        for system in arguments.systems:
            for model in arguments.models:
                for precision in arguments.precisions:
                    for seed in range(arguments.seeds):
                        row = described("curve", case, system, model, precision)
                        row |= {"seed": seed, "loss_over": "train nodes", "epochs": arguments.curve_epochs}
                        try:
                            row |= curve(case, system, model, precision, seed, arguments.curve_epochs)
                        except Exception as error:
                            row |= {"error": brief(error)}
                        set_tf32("fp32")
                        free_memory()
                        recorder.add(row)
        del case
        free_memory()


def curve(case: Case, system: str, model: str, precision: str, seed: int, epochs: int) -> dict[str, Any]:
    """The columns of one training run."""
    state = first_weights(model, case, seed)
    set_tf32(precision)
    run = SYSTEMS[system](model, case, precision, 0.5, case.train_nodes, state)
    losses, accuracies, best = [], [], (-1.0, -1.0)
    for epoch in range(1, epochs + 1):
        losses.append(run.step())
        if epoch % 5 and epoch != epochs:
            continue
        is_right = run.logits().argmax(1) == case.labels
        val, test = (float(is_right[nodes].double().mean()) for nodes in (case.val_nodes, case.test_nodes))
        accuracies.append([epoch, val])
        best = max(best, (val, test))
    return {
        "losses": [float(loss) for loss in losses],
        "val_accuracy": accuracies,
        "value": best[1],
        "unit": "test accuracy",
    }


def parse(given: list[str] | None = None) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=["products-like"])
    parser.add_argument("--nodes", type=int, default=FULL_NODES)
    parser.add_argument("--arcs", type=int, default=FULL_ARCS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--systems", "--system", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=["fp32", "bf16"])
    parser.add_argument("--epochs", type=int, default=10, help="timed ones; five go before")
    parser.add_argument("--kernels", type=int, default=0, help="so many kernels of one more epoch, by their time")
    parser.add_argument("--curves", action="store_true", help="accuracy over epochs instead of times")
    parser.add_argument("--curve-nodes", type=int, default=FULL_NODES // 10)
    parser.add_argument("--curve-arcs", type=int, default=FULL_ARCS // 20 * 2)
    parser.add_argument("--curve-epochs", type=int, default=80)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each curve")
    parser.add_argument("--out", type=Path, help="folder for epoch.jsonl or curve.jsonl")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> Recorder:
    """Run what the options ask for."""
    arguments = parse(given)
    device = torch.device(arguments.device)
    name = "curve.jsonl" if arguments.curves else "epoch.jsonl"
    recorder = Recorder(None if arguments.out is None else arguments.out / name, device)
    (measure_curves if arguments.curves else measure_all)(recorder, arguments, device)
    return recorder


if __name__ == "__main__":
    main()
