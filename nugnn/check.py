"""Does a model give the same answer on one part and on three? Names the first module that does not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nugnn._counted import counted
from nugnn.call_inputs import checked_inputs
from nugnn.check_graphs import random_graph, small_piece
from nugnn.comm.groups import Ranks
from nugnn.comm.local_ranks import run_local_ranks
from nugnn.datasets.graph_data import GraphData
from nugnn.embedding import NodeEmbedding, shard_embeddings
from nugnn.kernels.handlers import DRAW_BEFORE
from nugnn.kernels.rows import rows_of
from nugnn.loss import GlobalMean, RowLoss, binary_cross_entropy, cross_entropy
from nugnn.model_on_shard import refuse_empty_features
from nugnn.module_traces import CheckReport, ModelDiffers, ModelFails, Trace, Wording, compared, merged, watched
from nugnn.partition.assign import partition_nodes
from nugnn.partition.shard import build_shard
from nugnn.seam import install
from nugnn.session import intercept
from nugnn.shard_graph import ShardGraph
from nugnn.task import is_samples
from nugnn.user_code import describe_error

if TYPE_CHECKING:
    import dgl
    from torch.utils.data import Dataset

    from nugnn.datasets.samples.sample_data import SampleData

__all__ = ["CheckReport", "ModelDiffers", "ModelFails", "check", "check_model", "run_check"]

_EMBEDDING_WIDTH = 16
_MAX_NODES, _MAX_SAMPLES = 240, 12


def check(
    model: nn.Module,
    data: GraphData | dgl.DGLGraph | SampleData | Dataset[Any] | str,
    *,
    loss: RowLoss | None = None,
    regularizer: Callable[[nn.Module], Tensor] | None = None,
    num_parts: int = 3,
    max_nodes: int = _MAX_NODES,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    max_samples: int = _MAX_SAMPLES,
) -> CheckReport:
    """Whether a model gives the same result however a graph or a batch is split: ``nugnn check`` from a script.

    `nugnn.fit` does the same before it trains over several workers, on few samples. Nothing is trained, and no process
    is started.

    Args:
        model: As for `nugnn.fit`. Not modified.
        data: As for `nugnn.fit`; a small piece of a graph is used, or the first samples.
        loss: As for `nugnn.fit`.
        regularizer: As for `nugnn.fit`; for graphs alone, as is ``max_nodes``.
        num_parts: Unequal parts to compare with, at least 2.
        max_nodes: Size of the piece, at least one node for each part.
        collate_fn: As for `nugnn.fit`; for samples alone, as is ``max_samples``.
        max_samples: Samples of the batch, at least 4 and one more than parts.

    Returns:
        What was compared.

    Raises:
        TypeError: ``model`` or ``data`` is something else; says what was meant.
        ValueError: The features have no columns, there are fewer nodes or samples than parts need, or an option belongs
            to the other family.
        ModelFails: The model raises on one part.
        ModelDiffers: Naming the first module whose output differs, or a gradient that does.
    """
    if isinstance(model, nn.Module) and is_samples(data):
        if regularizer is not None or max_nodes != _MAX_NODES:
            raise ValueError("nugnn.check: regularizer and max_nodes belong to graphs, not to samples; leave them out")
        from nugnn.check_samples import check_samples  # graphs train without it

        how: dict[str, Any] = {"collate_fn": collate_fn, "num_parts": num_parts, "max_samples": max_samples}
        return check_samples(model, data, loss=loss, **how)  # type: ignore[arg-type]
    if collate_fn is not None or max_samples != _MAX_SAMPLES:
        raise ValueError("nugnn.check: collate_fn and max_samples belong to samples, not to graphs; leave them out")
    data = checked_inputs("nugnn.check", model, data)
    if num_parts < 2:
        raise ValueError(f"nugnn.check: num_parts is {num_parts}; one part is compared with at least 2")
    if min(max_nodes, data.num_nodes) < num_parts:
        raise ValueError(
            f"nugnn.check: max_nodes is {max_nodes} and the graph has {counted(data.num_nodes, 'node')}; "
            f"{counted(num_parts, 'part')} need "
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
    max_nodes: int = _MAX_NODES,
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

    def run(shares: list[float]) -> Trace:
        return _trace(model, piece, shares, loss, regularizer)

    num_modules, largest = compared(lambda: run([1.0]), lambda: run(shares), _wording(num_parts))
    return CheckReport(piece.num_nodes, num_parts, num_modules, largest)


def _wording(num_parts: int) -> Wording:
    return Wording(
        rows="nodes",
        whole="one",
        parts=counted(num_parts, "part"),
        instead="Use nugnn.global_mean(x, graph) or nugnn.global_sum(x, graph) for values over all nodes, "
        "torch.nn.Dropout for random masks.",
        draw=DRAW_BEFORE,
    )


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
) -> Trace:
    """What the model does over ``len(shares)`` parts, rows brought into global order."""
    assignment = partition_nodes(data.num_nodes, data.src, data.dst, shares, method="random", seed=1)

    def step(ranks: Ranks) -> Trace:
        own = copy.deepcopy(model).train()
        graph = ShardGraph(build_shard(data, assignment, ranks.rank), ranks)
        return _traced(own, graph, loss, regularizer)

    return merged(run_local_ranks(len(shares), step))


def _traced(
    model: nn.Module,
    graph: ShardGraph,
    loss: RowLoss | None,
    regularizer: Callable[[nn.Module], Tensor] | None,
) -> Trace:
    shard_embeddings(model, graph)
    interceptor = intercept(model, graph)
    interceptor.notes_losses = True
    with watched(model, interceptor, lambda x: (x.detach().clone(), _global_ids(x, graph))) as trace:
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
    trace.keep_state(model, graph.ranks, graph.global_node_ids)
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
