"""Does a model give the same answer on one part and on three? Names the first module that does not."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nugnn.comm.gradients import sum_gradients
from nugnn.comm.groups import Ranks
from nugnn.comm.local_ranks import run_local_ranks
from nugnn.datasets.graph_data import GraphData
from nugnn.embedding import NodeEmbedding, shard_embeddings, sharded_parameters
from nugnn.kernels.interceptor import current_interceptor
from nugnn.kernels.rows import rows_of
from nugnn.loss import GlobalMean, binary_cross_entropy, cross_entropy
from nugnn.partition.assign import partition_nodes
from nugnn.partition.shard import build_shard
from nugnn.seam import install
from nugnn.session import intercept
from nugnn.shard_graph import ShardGraph

_TOLERANCE = 1e-8
"""Relative, in float64: sums over a few hundred nodes in another order differ by about 1e-14, amplified by a few layers
and a batch norm by at most a few orders of magnitude; a wrong count or mask differs by more than 1e-3."""


class ModelDiffers(ValueError):  # noqa: N818 - a finding about the model
    """A model depends on how the graph is split."""


@dataclass(frozen=True)
class CheckReport:
    """What a check compared.

    Args:
        num_nodes: Nodes of the graph it ran on.
        num_parts: Parts compared with one.
        num_modules: Module calls compared.
        largest_difference: Over logits and gradients, relative to the largest value.
    """

    num_nodes: int
    num_parts: int
    num_modules: int
    largest_difference: float


@dataclass
class _Trace:
    """Outputs of module calls in the order they finished, and the gradients; rows under their global ids."""

    calls: list[tuple[str, str, Tensor]] = field(default_factory=list)
    ids: list[Tensor | None] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)


def check_model(model: nn.Module, data: GraphData, *, num_parts: int = 3, max_nodes: int = 240) -> CheckReport:
    """Compare one part with several on a small piece of a graph, in float64 and training mode.

    Args:
        model: Not modified.
        data: Where the piece is taken from.
        num_parts: Unequal parts to compare with.
        max_nodes: Size of the piece.

    Returns:
        What was compared.

    Raises:
        ModelDiffers: Naming the first module whose output differs, or a gradient that does.
    """
    install()
    piece = small_piece(data, max_nodes)
    model = copy.deepcopy(model).double()
    _shrink_embeddings(model, piece.num_nodes)
    shares = [2.0 ** (num_parts - part) for part in range(num_parts)]
    alone = _trace(model, piece, [1.0])
    try:
        split = _trace(model, piece, shares)
    except Exception as error:
        raise ModelDiffers(f"the model runs on one part but not on {num_parts}: {error}") from error
    return _compare(alone, split, piece.num_nodes, num_parts)


def small_piece(data: GraphData, max_nodes: int) -> GraphData:
    """A connected piece of ``data`` around a training node, with all nodes in the training split and float64 data."""
    keep = _ball(data, max_nodes)
    number = torch.full((data.num_nodes,), -1)
    number[keep] = torch.arange(len(keep))
    src, dst = number[data.src.long()], number[data.dst.long()]
    inside = (src >= 0) & (dst >= 0)
    generator = torch.Generator().manual_seed(0)
    labels = None if data.labels is None else data.labels[keep]
    if labels is None:
        labels = torch.randint(0, max(data.num_classes, 2), (len(keep),), generator=generator)
    elif labels.dim() == 1:
        unknown = labels < 0
        labels = torch.where(unknown, torch.randint(0, data.num_classes, labels.shape, generator=generator), labels)
    features = data.features
    if features is not None:
        if features.layout is not torch.strided:
            from nugnn.partition.shard import select_rows

            features = select_rows(features, keep).to_dense()
        else:
            features = features[keep]
        features = features.double()
    return GraphData(
        name=f"{data.name} (piece)",
        num_nodes=len(keep),
        src=src[inside],
        dst=dst[inside],
        features=features,
        labels=labels,
        num_classes=data.num_classes,
        train_nodes=torch.arange(len(keep)),
        node_data={key: _double(value[keep]) for key, value in data.node_data.items()},
        edge_data={key: _double(value[inside]) for key, value in data.edge_data.items()},
    )


def _double(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


def _ball(data: GraphData, max_nodes: int) -> Tensor:
    """Ids of about ``max_nodes`` nodes, breadth first; hubs' neighbours are taken in order of id."""
    if data.num_nodes <= max_nodes:
        return torch.arange(data.num_nodes)
    seed = int(data.train_nodes[0]) if len(data.train_nodes) else 0
    chosen = torch.zeros(data.num_nodes, dtype=torch.bool)
    chosen[seed] = True
    while int(chosen.sum()) < max_nodes:
        frontier = torch.zeros_like(chosen)
        frontier[data.dst.long()[chosen[data.src.long()]]] = True
        frontier[data.src.long()[chosen[data.dst.long()]]] = True
        fresh = (frontier & ~chosen).nonzero().view(-1)
        if len(fresh) == 0:
            fresh = (~chosen).nonzero().view(-1)[:1]
        chosen[fresh[: max_nodes - int(chosen.sum())]] = True
    return chosen.nonzero().view(-1)


def _shrink_embeddings(model: nn.Module, num_nodes: int) -> None:
    for module in model.modules():
        if isinstance(module, NodeEmbedding):
            module.num_nodes = num_nodes
            module.weight = nn.Parameter(module.weight.detach()[:num_nodes].clone())


def _trace(model: nn.Module, data: GraphData, shares: list[float]) -> _Trace:
    """One training step over ``len(shares)`` parts, rows brought into global order."""
    assignment = partition_nodes(data.num_nodes, data.src, data.dst, shares, method="random", seed=1)

    def step(ranks: Ranks) -> _Trace:
        own = copy.deepcopy(model).train()
        return _traced_step(own, ShardGraph(build_shard(data, assignment, ranks.rank), ranks))

    return _merged(run_local_ranks(len(shares), step))


def _traced_step(model: nn.Module, graph: ShardGraph) -> _Trace:
    trace = _Trace()
    shard_embeddings(model, graph)
    interceptor = intercept(model, graph)
    paths = {id(module): path for path, module in model.named_modules()}

    def note(module: nn.Module, args: Any, output: Any) -> None:
        if current_interceptor() is not interceptor or id(module) not in paths or interceptor.in_scope:
            return
        for x in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(x, Tensor) and x.dim() and x.layout is torch.strided:
                trace.calls.append((paths[id(module)], type(module).__name__, x.detach().clone()))
                trace.ids.append(_global_ids(x, graph))

    hook = nn.modules.module.register_module_forward_hook(note)
    try:
        with interceptor.step(0):
            inputs = (graph, graph.ndata["feat"]) if "feat" in graph.ndata else (graph,)
            logits = model(*inputs)
            if not isinstance(logits, Tensor) or len(logits) != graph.num_nodes():
                raise ValueError("the model has to return one row of logits for each node")
            labels = graph.ndata["label"]
            default = binary_cross_entropy if labels.dim() == 2 else cross_entropy
            GlobalMean(default, labels, graph.ranks)(logits).backward()
    finally:
        hook.remove()
    own = {id(p) for p in sharded_parameters(model)}
    sum_gradients([p for p in model.parameters() if id(p) not in own], graph.ranks)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            trace.gradients[name] = parameter.grad
            if id(parameter) in own:
                trace.calls.append((name, "gradient of a NodeEmbedding", parameter.grad))
                trace.ids.append(graph.global_node_ids)
                del trace.gradients[name]
    return trace


def _global_ids(x: Tensor, graph: ShardGraph) -> Tensor | None:
    """Global ids of rows that are nodes or edges, by provenance; inner nodes where only the count speaks for it."""
    rows = rows_of(x)
    if rows is not None and rows.ids is not None and rows.num_rows == len(x):
        offset = 0 if rows.kind == "node" else graph.num_nodes_global()
        return rows.row_ids(len(x)) + offset
    if rows is not None and rows.kind == "replicated":
        return None
    if len(x) == graph.num_nodes():
        return graph.global_node_ids
    if len(x) == graph.num_edges():
        return graph.global_edge_ids + graph.num_nodes_global()
    return None


def _merged(traces: list[_Trace]) -> _Trace:
    merged = _Trace(gradients=traces[0].gradients)
    if len({len(trace.calls) for trace in traces}) > 1:
        raise ValueError("ranks called a different number of modules; control flow must not depend on local data")
    for number, (path, kind, first) in enumerate(traces[0].calls):
        parts = [trace.calls[number][2] for trace in traces]
        ids = [trace.ids[number] for trace in traces]
        if any(i is None for i in ids):
            merged.calls.append((path, kind, first))
            merged.ids.append(None)
            continue
        order = torch.argsort(torch.cat([i for i in ids if i is not None]))
        same_width = len({part.shape[1:] for part in parts}) == 1
        merged.calls.append((path, kind, torch.cat(parts)[order] if same_width else first))
        merged.ids.append(order)
    return merged


def _difference(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return float("inf")
    if a.numel() == 0:
        return 0.0
    a, b = a.double(), b.double()
    if torch.equal(a, b):
        return 0.0
    worst = (a - b).abs().max() / torch.maximum(a.abs().max(), b.abs().max()).clamp_min(1e-30)
    return float("inf") if not torch.isfinite(worst) else float(worst)


def _compare(alone: _Trace, split: _Trace, num_nodes: int, num_parts: int) -> CheckReport:
    largest = 0.0
    for (path, kind, one), (_, _, many) in zip(alone.calls, split.calls, strict=False):
        difference = _difference(one, many)
        largest = max(largest, difference)
        if difference > _TOLERANCE:
            raise ModelDiffers(
                f"{path or 'the model itself'} ({kind}) gives another result on {num_parts} parts than on one "
                f"(relative difference {difference:.2g}). It mixes nodes in a way that cannot be seen from outside, "
                "such as a mean over all rows or a random draw. Use nugnn.global_mean(x, graph) or "
                "nugnn.global_sum(x, graph) for values over all nodes, torch.nn.Dropout for random masks."
            )
    if len(alone.calls) != len(split.calls):
        raise ModelDiffers(
            f"the model ran {len(alone.calls)} modules on one part and {len(split.calls)} on a part of it"
        )
    for name in alone.gradients.keys() | split.gradients.keys():
        alone_grad, split_grad = alone.gradients.get(name), split.gradients.get(name)
        if alone_grad is None or split_grad is None:
            difference = float("inf")
        else:
            difference = _difference(alone_grad, split_grad)
        largest = max(largest, difference)
        if difference > _TOLERANCE:
            raise ModelDiffers(
                f"the gradient of {name} differs between one part and {num_parts} (relative {difference:.2g}) although "
                "all outputs agree: a custom backward does not account for other ranks."
            )
    return CheckReport(num_nodes, num_parts, len(alone.calls), largest)


def run_check(spec: str, data: GraphData | None = None, **options: Any) -> CheckReport:
    """`check_model` for ``FILE.py:Class`` or a built-in model, on a random graph when there is no data.

    Args:
        spec: ``FILE.py:Class`` or a name of `nugnn.models.MODEL_NAMES`.
        data: Graph to take a piece of.
        **options: For the model, as far as it names them.
    """
    from nugnn.models import GNN, MODEL_NAMES, load_user_class, make_user_model

    data = data if data is not None else random_graph()
    assert data.features is not None
    width = data.features.shape[1]
    torch.manual_seed(0)
    if spec in MODEL_NAMES:
        model: nn.Module = GNN(spec, width, data.num_classes, **options)
    elif ":" in spec and Path(spec.rpartition(":")[0]).suffix == ".py":
        model = make_user_model(load_user_class(spec), width, data.num_classes, **options)
    else:
        raise ValueError(f"{spec!r} is neither FILE.py:Class nor one of {', '.join(MODEL_NAMES)}")
    return check_model(model, data)


def random_graph(num_nodes: int = 120, num_features: int = 8, num_classes: int = 4) -> GraphData:
    """A small directed graph with hubs, self-loops and parallel edges; every node has an in-edge."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.arange(num_nodes)
    hubs = (torch.rand(6 * num_nodes, generator=generator) ** 2 * num_nodes).long()
    targets = torch.randint(0, num_nodes, (6 * num_nodes,), generator=generator)
    return GraphData(
        name="random graph",
        num_nodes=num_nodes,
        src=torch.cat([(ids + 1) % num_nodes, hubs, ids]),
        dst=torch.cat([ids, targets, ids]),
        features=torch.randn(num_nodes, num_features, generator=generator),
        labels=torch.randint(0, num_classes, (num_nodes,), generator=generator),
        num_classes=num_classes,
        train_nodes=ids,
    )
