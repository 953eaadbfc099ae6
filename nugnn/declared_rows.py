"""Whose rows a tensor holds, said by the user where functions of torch cannot tell."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from nugnn._counted import counted
from nugnn.kernels.rows import REPLICATED, Rows, identity_of, tag

if TYPE_CHECKING:
    from nugnn.shard_graph import ShardGraph


def as_node_rows(x: Tensor, graph: ShardGraph) -> Tensor:
    """Declare that row ``i`` of ``x`` belongs to inner node ``i`` of ``graph``.

    Raises:
        ValueError: ``x`` has another number of rows.
    """
    return _tagged(x, graph.index.node_rows, "as_node_rows", counted(graph.num_nodes(), "inner node"))


def as_edge_rows(x: Tensor, graph: ShardGraph) -> Tensor:
    """Declare that row ``e`` of ``x`` belongs to local edge ``e`` of ``graph``.

    Raises:
        ValueError: ``x`` has another number of rows.
    """
    return _tagged(x, graph.index.edge_rows, "as_edge_rows", counted(graph.num_edges(), "local edge"))


def _tagged(x: Tensor, rows: Rows, name: str, whose: str) -> Tensor:
    if len(x) != rows.num_rows:
        raise ValueError(f"{name}: {counted(len(x), 'row')} for {whose}")
    return tag(x, rows)


def as_rows_of(x: Tensor, like: Tensor) -> Tensor:
    """Declare that row ``i`` of ``x`` belongs to the same sample, node or edge as row ``i`` of ``like``.

    For results of functions that are not known to keep rows apart: `torch.fft`, TorchScript, a way through NumPy. A
    wrong declaration makes dropout depend on the split.

    Args:
        x: ``(n, ...)``, any dtype; returned.
        like: ``(n, ...)`` whose rows are known, such as the model's input. Where they are not, as outside of training,
            ``x`` stays as it is.

    Raises:
        ValueError: ``x`` has another number of rows than ``like``, or those of ``like`` lie along another axis than 0,
            or are the same on every rank.
    """
    if not x.dim() or not like.dim() or len(x) != len(like):
        raise ValueError(
            f"as_rows_of: x has the shape {tuple(x.shape)} and like {tuple(like.shape)}: give one row for one"
        )
    rows = identity_of(like)
    if rows is not None and rows.axis:
        raise ValueError(
            f"as_rows_of: the {rows.kind}s of like lie along axis {rows.axis} of its shape {tuple(like.shape)}; give a "
            f"tensor that has them along axis 0, such as like.movedim({rows.axis}, 0)"
        )
    if rows is REPLICATED:
        raise ValueError("as_rows_of: like is the same on every rank; if x is so too, nugnn.as_replicated(x) says it")
    return tag(x, rows)


def as_replicated(x: Tensor) -> Tensor:
    """Declare that ``x`` is the same on every rank."""
    return tag(x, REPLICATED)
