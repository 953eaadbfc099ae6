"""Does a model give the same answer on one part and on three? Names the first module that does not."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nugnn.call_inputs import checked_inputs
from nugnn.check_graphs import random_graph, small_piece
from nugnn.comm.gradients import sum_gradients
from nugnn.comm.groups import Ranks
from nugnn.comm.local_ranks import RanksDisagree, run_local_ranks
from nugnn.datasets.graph_data import GraphData
from nugnn.embedding import NodeEmbedding, shard_embeddings
from nugnn.kernels.interceptor import current_interceptor
from nugnn.kernels.rows import rows_of
from nugnn.loss import GlobalMean, RowLoss, binary_cross_entropy, cross_entropy
from nugnn.model_on_shard import refuse_empty_features
from nugnn.models import describe_error, place_of_error
from nugnn.own_rows import sharded_parameters
from nugnn.partition.assign import partition_nodes
from nugnn.partition.shard import build_shard
from nugnn.seam import install
from nugnn.session import intercept
from nugnn.shard_graph import ShardGraph
from nugnn.worker_process import is_user_error

if TYPE_CHECKING:
    import dgl

_TOLERANCE = 1e-8
"""Relative, in float64: sums over a few hundred nodes in another order differ by about 1e-14, amplified by a few layers
and a batch norm by at most a few orders of magnitude; a wrong count or mask differs by more than 1e-3."""
_CANCELLED = 1e-6
"""Values below this part of the largest one so far are compared on that scale, not on their own."""

_EMBEDDING_WIDTH = 16
_TOP = "the model itself"
_INSTEAD = (
    "Use nugnn.global_mean(x, graph) or nugnn.global_sum(x, graph) for values over all nodes, torch.nn.Dropout for "
    "random masks."
)
_DIFFERS = {
    "output": "{module} gives another result on {num_parts} parts than on one (relative difference {difference:.2g}) "
    "although its input is the same. It mixes nodes in a way that cannot be seen from outside, such as a mean over all "
    f"rows. {_INSTEAD}",
    "input": "{caller} gives another result on {num_parts} parts than on one (relative difference {difference:.2g}) "
    "in its own code, before it calls {module}. It mixes nodes in a way that cannot be seen from outside, such as a "
    f"mean over all rows. {_INSTEAD}",
    "gradient": "the gradient of {module} gives another result on {num_parts} parts than on one (relative difference "
    "{difference:.2g}) although all outputs agree: a custom backward does not account for other ranks.",
}
_DIFFERS["buffer"] = (
    "the buffer {module} is not the same on {num_parts} parts as on one (relative difference {difference:.2g}): the "
    f"model updates it from a rank's own rows. {_INSTEAD}"
)
_RANDOM = (
    "{where} draws random numbers that nothing keeps equal: two runs on one part differ already. Use torch.nn.Dropout "
    "for random masks, or draw the numbers before training and keep them as node data."
)


class ModelFails(ValueError):  # noqa: N818 - a finding about the model
    """A model raises an error of its own, on one part."""


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


@dataclass(frozen=True)
class _Value:
    """What went into or came out of a module call.

    Args:
        module: Path and class of the module.
        caller: Path and class of the module whose forward made the call; empty for the model itself.
        role: ``input``, ``output``, or ``gradient`` of a node embedding.
        x: The tensor.
        ids: Global id of each row; None where rows are not those of nodes or edges.
    """

    module: str
    caller: str
    role: str
    x: Tensor
    ids: Tensor | None


@dataclass
class _Trace:
    """Inputs and outputs of module calls in the order they came up, the gradients, and the buffers afterwards."""

    values: list[_Value] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)

    @property
    def num_outputs(self) -> int:
        return sum(value.role == "output" for value in self.values)


def check(
    model: nn.Module,
    data: GraphData | dgl.DGLGraph,
    *,
    loss: RowLoss | None = None,
    regularizer: Callable[[nn.Module], Tensor] | None = None,
    num_parts: int = 3,
    max_nodes: int = 240,
) -> CheckReport:
    """Whether a model gives the same result however a graph is split: ``nugnn check`` from a script.

    `nugnn.fit` does the same before it trains over several workers. Nothing is trained, and no process is started.

    Args:
        model: As for `nugnn.fit`. Not modified.
        data: As for `nugnn.fit`; a small piece of it is used.
        loss: As for `nugnn.fit`.
        regularizer: As for `nugnn.fit`.
        num_parts: Unequal parts to compare with, at least 2.
        max_nodes: Size of the piece, at least one node for each part.

    Returns:
        What was compared.

    Raises:
        TypeError: ``model`` or ``data`` is something else; says what was meant.
        ValueError: The features have no columns, or there are fewer nodes than parts.
        ModelFails: The model raises on one part.
        ModelDiffers: Naming the first module whose output differs, or a gradient that does.
    """
    data = checked_inputs("nugnn.check", model, data)
    if num_parts < 2:
        raise ValueError(f"nugnn.check: num_parts is {num_parts}; one part is compared with at least 2")
    if min(max_nodes, data.num_nodes) < num_parts:
        raise ValueError(
            f"nugnn.check: max_nodes is {max_nodes} and the graph has {data.num_nodes} nodes; {num_parts} parts need "
            "at least one each"
        )
    return check_model(model, data, loss=loss, regularizer=regularizer, num_parts=num_parts, max_nodes=max_nodes)


def check_model(
    model: nn.Module,
    data: GraphData,
    *,
    loss: RowLoss | None = None,
    regularizer: Callable[[nn.Module], Tensor] | None = None,
    num_parts: int = 3,
    max_nodes: int = 240,
) -> CheckReport:
    """Compare one part with several on a small piece of a graph, in float64.

    A training step with its gradients, a second forward in training mode, one in evaluation mode, then the buffers.

    Args:
        model: Not modified.
        data: Where the piece is taken from.
        loss: The loss of the training, `nugnn.loss.RowLoss`; the usual one when None.
        regularizer: The parameter-only term of the training.
        num_parts: Unequal parts to compare with.
        max_nodes: Size of the piece.

    Returns:
        What was compared.

    Raises:
        ValueError: The features have no columns.
        ModelFails: The model raises on one part.
        ModelDiffers: Naming the first module whose output differs, or a gradient that does.
    """
    install()
    if data.features is not None:
        refuse_empty_features(data.features)
    piece = small_piece(data, max_nodes)
    try:
        model = copy.deepcopy(model).double()
    except Exception as error:
        raise ModelFails(f"the model cannot be copied, so it cannot be checked: {describe_error(error)}") from error
    _shrink_embeddings(model, piece.num_nodes)
    shares = [2.0 ** (num_parts - part) for part in range(num_parts)]
    terms = (loss, regularizer)
    try:
        alone = _trace(model, piece, [1.0], *terms)
    except Exception as error:
        raise ModelFails(f"the model fails on one part already: {describe_error(error)}") from error
    try:
        split = _trace(model, piece, shares, *terms)
    except Exception as error:
        said = f"{error}{place_of_error(error)}" if _is_sentence(error) else describe_error(error)
        raise ModelDiffers(f"the model runs on one part but not on {num_parts}: {said}") from error
    finding, largest = _first_difference(alone, split, num_parts)
    if finding is not None:
        again, _ = _first_difference(alone, _trace(model, piece, [1.0], *terms), num_parts)
        raise ModelDiffers(_RANDOM.format(where=again.split(" gives ")[0]) if again is not None else finding)
    return CheckReport(piece.num_nodes, num_parts, alone.num_outputs, largest)


def _is_sentence(error: Exception) -> bool:
    """Whether an error speaks for itself, without its kind."""
    return isinstance(error, RanksDisagree) or (is_user_error(error) and bool(str(error)))


def _shrink_embeddings(model: nn.Module, num_nodes: int) -> None:
    for module in model.modules():
        if isinstance(module, NodeEmbedding):
            module.num_nodes = num_nodes
            module.weight = nn.Parameter(module.weight.detach()[:num_nodes].clone())


def _trace(
    model: nn.Module,
    data: GraphData,
    shares: list[float],
    loss: RowLoss | None,
    regularizer: Callable[[nn.Module], Tensor] | None,
) -> _Trace:
    """What the model does over ``len(shares)`` parts, rows brought into global order."""
    assignment = partition_nodes(data.num_nodes, data.src, data.dst, shares, method="random", seed=1)

    def step(ranks: Ranks) -> _Trace:
        own = copy.deepcopy(model).train()
        graph = ShardGraph(build_shard(data, assignment, ranks.rank), ranks)
        return _traced(own, graph, loss, regularizer)

    return _merged(run_local_ranks(len(shares), step))


def _traced(
    model: nn.Module,
    graph: ShardGraph,
    loss: RowLoss | None,
    regularizer: Callable[[nn.Module], Tensor] | None,
) -> _Trace:
    trace = _Trace()
    shard_embeddings(model, graph)
    interceptor = intercept(model, graph)
    names = {id(m): f"{path} ({type(m).__name__})" if path else _TOP for path, m in model.named_modules()}
    callers: list[str] = []

    def concerns(module: nn.Module) -> bool:
        """Not another thread's module, and not inside a user's reduce function."""
        return current_interceptor() is interceptor and id(module) in names and not interceptor.in_scope

    def note(module: nn.Module, role: str, values: Any) -> None:
        for x in values if isinstance(values, (tuple, list)) else (values,):
            if isinstance(x, Tensor) and x.dim() and x.layout is torch.strided:
                caller = callers[-1] if callers else ""
                trace.values.append(_Value(names[id(module)], caller, role, x.detach().clone(), _global_ids(x, graph)))

    def enter(module: nn.Module, args: Any) -> None:
        if concerns(module):
            note(module, "input", args)
            callers.append(names[id(module)])

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if concerns(module):
            callers.pop()
            note(module, "output", output)

    hooks = (
        nn.modules.module.register_module_forward_pre_hook(enter),
        nn.modules.module.register_module_forward_hook(leave),
    )
    try:
        inputs = (graph, graph.ndata["feat"]) if "feat" in graph.ndata else (graph,)
        with interceptor.step(0):
            logits = model(*inputs)
            if not isinstance(logits, Tensor) or len(logits) != graph.num_nodes():
                raise ValueError("the model has to return one row of logits for each node")
            labels = graph.ndata["label"]
            default = binary_cross_entropy if labels.dim() == 2 else cross_entropy
            total = GlobalMean(loss or default, labels, graph.ranks)(logits)
            if regularizer is not None and graph.ranks.rank == 0:
                total = total + regularizer(model)
            total.backward()
        with torch.no_grad():
            with interceptor.step(1):
                model(*inputs)
            model.eval()
            with interceptor.step(2):
                model(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
    own = {id(p) for p in sharded_parameters(model)}
    sum_gradients([p for p in model.parameters() if id(p) not in own], graph.ranks)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and id(parameter) in own:
            trace.values.append(_Value(name, "", "gradient", parameter.grad, graph.global_node_ids))
        elif parameter.grad is not None:
            trace.gradients[name] = parameter.grad
    trace.buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    return trace


def _global_ids(x: Tensor, graph: ShardGraph) -> Tensor | None:
    """Global ids of rows that are nodes or edges, by provenance; inner nodes where only the count speaks for it."""
    rows = rows_of(x)
    if rows is not None and rows.source is not None and rows.num_rows == len(x):
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
    """All ranks' rows together, in the order of their global ids."""
    merged = _Trace(gradients=traces[0].gradients, buffers=dict(traces[0].buffers))
    for trace in traces[1:]:  # a rank that differs from rank 0 is the one to look at
        for name, buffer in trace.buffers.items():
            if not torch.equal(buffer, traces[0].buffers[name]):
                merged.buffers[name] = buffer
    if len({len(trace.values) for trace in traces}) > 1:
        raise ValueError("ranks called a different number of modules; control flow must not depend on local data")
    for first, *others in zip(*(trace.values for trace in traces), strict=True):
        parts = [first.x, *(other.x for other in others)]
        ids = [i for i in (first.ids, *(other.ids for other in others)) if i is not None]
        if len(ids) == len(parts) and len({part.shape[1:] for part in parts}) == 1:
            order = torch.argsort(torch.cat(ids))
            merged.values.append(replace(first, x=torch.cat(parts)[order], ids=torch.cat(ids)[order]))
        else:
            merged.values.append(replace(first, ids=None))
    return merged


def _difference(a: Tensor, b: Tensor, scale: float) -> float:
    """Largest difference of entries, relative to the largest entry or to ``scale``, whichever is larger."""
    if a.shape != b.shape:
        return float("inf")
    a, b = a.double(), b.double()
    differs = (a != b) & ~(a.isnan() & b.isnan())
    if not differs.any():
        return 0.0
    worst = float((a - b)[differs].abs().max()) / max(_size(a), _size(b), scale, 1e-300)
    return worst if math.isfinite(worst) else float("inf")


def _size(x: Tensor) -> float:
    return float(x.abs().nan_to_num(0, 0, 0).max()) if x.numel() else 0.0


def _first_difference(alone: _Trace, split: _Trace, num_parts: int) -> tuple[str | None, float]:
    """A sentence about the first value or gradient that differs, or None; and the largest difference."""
    largest = seen = 0.0
    for one, many in zip(alone.values, split.values, strict=False):
        if one.module != many.module or one.role != many.role:
            return f"{one.module} is called on one part where {many.module} is called on {num_parts}.", float("inf")
        if one.ids is None and one.x.shape != many.x.shape:
            continue  # rows that are neither nodes nor edges, such as a rank's halo: what they lead to is compared
        seen = max(seen, _size(one.x))
        # Values that cancel to nothing are rounding noise of the larger ones they came from.
        difference = _difference(one.x, many.x, _CANCELLED * seen)
        largest = max(largest, difference)
        if difference > _TOLERANCE:
            return _DIFFERS[one.role].format(
                module=one.module, caller=one.caller or "nugnn", num_parts=num_parts, difference=difference
            ), largest
    if len(alone.values) != len(split.values):
        return f"the model calls other modules on one part than on {num_parts}.", float("inf")
    scale = max((_size(gradient) for gradient in alone.gradients.values()), default=0.0)
    for name in sorted(alone.gradients.keys() | split.gradients.keys()):
        one_grad, many_grad = alone.gradients.get(name), split.gradients.get(name)
        missing = one_grad is None or many_grad is None
        difference = float("inf") if missing else _difference(alone.gradients[name], split.gradients[name], scale)
        largest = max(largest, difference)
        if difference > _TOLERANCE:
            return _DIFFERS["gradient"].format(module=name, num_parts=num_parts, difference=difference), largest
    for name, buffer in alone.buffers.items():
        difference = _difference(buffer, split.buffers[name], 0.0)
        largest = max(largest, difference)
        if difference > _TOLERANCE:
            return _DIFFERS["buffer"].format(module=name, num_parts=num_parts, difference=difference), largest
    return None, largest


def run_check(spec: str, data: GraphData | None = None, **options: Any) -> CheckReport:
    """`check_model` for ``FILE.py:Class`` or a built-in model, on a random graph when there is no data.

    Args:
        spec: ``FILE.py:Class`` or a name of `nugnn.models.MODEL_NAMES`.
        data: Graph to take a piece of; learnable rows stand in for missing features.
        **options: For the model, as far as it names them.
    """
    from nugnn.models import GNN, MODEL_NAMES, WithNodeEmbedding, load_user_class, make_user_model

    data = data if data is not None else random_graph()
    if data.features is not None:
        refuse_empty_features(data.features)
    width = _EMBEDDING_WIDTH if data.features is None else data.features.shape[1]
    torch.manual_seed(0)
    if spec in MODEL_NAMES:
        model: nn.Module = GNN(spec, width, data.num_classes, **options)
    elif ":" in spec and Path(spec.rpartition(":")[0]).suffix == ".py":
        model = make_user_model(load_user_class(spec), width, data.num_classes, **options)
    else:
        raise ValueError(f"{spec!r} is neither FILE.py:Class nor one of {', '.join(MODEL_NAMES)}")
    if data.features is None:
        model = WithNodeEmbedding(data.num_nodes, width, model)
    return check_model(model, data)
