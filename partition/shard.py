"""What one rank needs of the graph: its nodes, all their in-edges, the halo, and the rows its peers will ask for.

Shape suffixes: N inner nodes, H halo nodes, L = N + H local rows, E edges of this rank, S rows sent, P parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from nugnn._counted import counted
from nugnn.datasets.sparse import select_rows
from nugnn.partition.assign import Assignment
from nugnn.partition.book import PartitionBook
from nugnn.partition.clusters import grouped, rows_in_order
from nugnn.partition.order import (
    BY_ID,
    OrderChoice,
    OrderReport,
    check_order_choice,
    find_order,
    neighbour_lists,
    rows_in_cache,
    why_not_worth_it,
)

if TYPE_CHECKING:
    from nugnn.datasets.graph_data import GraphData


OF_THE_WHOLE = (
    *("num_parts", "num_nodes_global", "num_edges_global", "num_train_global", "num_val_global", "num_test_global"),
    *("num_classes", "multilabel", "metric", "name", "order"),
)
"""Fields of a shard that are the same in all shards of a graph, and stay when nodes move."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Shard:
    """One rank's part of the graph.

    Edges are numbered in CSC order: by destination row, and by global edge id within a destination, so every edge
    tensor is in the order of ``indices`` and a sum over in-edges has one order whatever the number of parts. All
    tensors lie on the CPU.

    Args:
        rank: This part, in ``[0, num_parts)``.
        num_parts: P.
        num_nodes_global: Nodes of the whole graph.
        num_edges_global: Edges of the whole graph.
        global_node_ids: ``(N,)`` int64, global id of each inner row; ascending where ``order.method`` is "none".
        global_edge_ids: ``(E,)`` int64, global id of each edge; ``(0,)`` after a move where nobody keeps them.
        edge_starts: ``(N,)`` int64, position of each inner row's first in-edge in the CSC order of the whole graph.
            With ``indptr`` it gives each edge an identity that no partition changes, without a number per edge.
        indptr: ``(N + 1,)`` int64, offsets into ``indices``.
        indices: ``(E,)`` int32, or int64 if L reaches 2**31: source row in ``[0, L)``, inner rows first, then halo.
        halo_global_ids: ``(H,)`` int64, global id of each halo row, ordered by (owner part, the owner's row).
        recv_splits: Length P: halo rows that come from each peer.
        send_rows: ``(S,)`` int64, inner rows to send, peer after peer, each in that peer's halo order.
        send_splits: Length P: rows that go to each peer.
        out_degrees: ``(N,)`` int64, out-degree in the whole graph, parallel edges and self-loops included. The
            in-degree needs no field: all in-edges are here.
        node_data: Rows of the inner nodes by name: "feat" (dense or ``torch.sparse_csr``), "label" and extras.
        edge_data: Rows of the edges by name.
        train_rows: int64, ascending inner rows of the training nodes; likewise ``val_rows`` and ``test_rows``.
        num_train_global: Training nodes of the whole graph; likewise for the other two.
        num_classes: Width of the output layer.
        multilabel: Whether a label is a row of ``num_classes`` zeros and ones.
        metric: Name of the metric the data set is judged by.
        name: Name of the data set.
        order: How the rows are ordered.
    """

    rank: int
    num_parts: int
    num_nodes_global: int
    num_edges_global: int
    global_node_ids: Tensor
    global_edge_ids: Tensor
    edge_starts: Tensor
    indptr: Tensor
    indices: Tensor
    halo_global_ids: Tensor
    recv_splits: tuple[int, ...]
    send_rows: Tensor
    send_splits: tuple[int, ...]
    out_degrees: Tensor
    node_data: dict[str, Tensor] = field(default_factory=dict)
    edge_data: dict[str, Tensor] = field(default_factory=dict)
    train_rows: Tensor
    val_rows: Tensor
    test_rows: Tensor
    num_train_global: int
    num_val_global: int
    num_test_global: int
    num_classes: int
    multilabel: bool
    metric: str
    name: str
    order: OrderReport = BY_ID

    @property
    def num_inner(self) -> int:
        """N."""
        return len(self.global_node_ids)

    @property
    def num_halo(self) -> int:
        """H."""
        return len(self.halo_global_ids)

    @property
    def num_local(self) -> int:
        """L = N + H."""
        return self.num_inner + self.num_halo

    @property
    def num_edges(self) -> int:
        """E."""
        return len(self.indices)

    @property
    def in_degrees(self) -> Tensor:
        """``(N,)`` int64, in-degree in the whole graph."""
        return self.indptr.diff()


def build_shards(data: GraphData, assignment: Assignment, *, order: OrderChoice = "none") -> list[Shard]:
    """One shard per part; see ``iter_shards`` to hold only one at a time."""
    return list(iter_shards(data, assignment, order=order))


def iter_shards(data: GraphData, assignment: Assignment, *, order: OrderChoice = "none") -> Iterator[Shard]:
    """The shards in the order of ranks, each made when it is asked for; the edges are sorted once for all.

    Args:
        data: The graph.
        assignment: A part for each of its nodes.
        order: Of the rows inside a part. "none": by global id. "clusters": for locality. "auto": for locality where
            the graph is large enough for that to matter and it is found to help. No result depends on it but for
            rounding, and ``Shard.global_node_ids`` says which node a row is. Every rank finds the same order.

    Raises:
        ValueError: the assignment does not fit the graph, or the data is inconsistent.
    """
    layout = _Layout(data, assignment, order)
    for rank in range(assignment.num_parts):
        yield layout.shard(rank)


def build_shard(data: GraphData, assignment: Assignment, rank: int, *, order: OrderChoice = "none") -> Shard:
    """The shard of one rank; ``order`` as for ``iter_shards``.

    Raises:
        ValueError: as ``iter_shards``, or there is no such rank.
    """
    if not 0 <= rank < assignment.num_parts:
        raise ValueError(
            f"rank {rank} does not exist; the assignment has {counted(assignment.num_parts, 'part')}, from 0"
        )
    return _Layout(data, assignment, order).shard(rank)


class _Layout:
    """The whole graph renumbered by book position: edges sorted by (part, destination, edge id), and every halo."""

    def __init__(self, data: GraphData, assignment: Assignment, order: OrderChoice) -> None:
        check_order_choice(order)
        num_nodes, num_parts = int(data.num_nodes), assignment.num_parts
        if assignment.num_nodes != num_nodes:
            raise ValueError(
                f"the assignment covers {counted(assignment.num_nodes, 'node')}, the graph {data.name!r} has "
                f"{num_nodes}; "
                "partition this graph again"
            )
        src, dst = data.src.numpy(), data.dst.numpy()
        self.data = data
        self.book = PartitionBook.from_parts(assignment.part, num_parts)
        self.out_degrees = torch.from_numpy(np.bincount(src, minlength=num_nodes).astype(np.int64))
        edge_order, indptr = grouped(dst, num_nodes)  # by (destination, edge id)
        self.edge_starts = torch.from_numpy(indptr[:-1])
        self.order = OrderReport(method="none", reason="" if order == "none" else self._why_not_auto(order))
        if order != "none" and not self.order.reason:
            sources = src[edge_order].astype(np.int32)
            parts = assignment.part.numpy() if num_parts > 1 else None
            found, self.order = find_order(
                neighbour_lists(indptr, sources, src, dst, parts),
                self.book.order.numpy(),
                rows_in_cache(_row_bytes(data)),
                start=None if assignment.clusters is None else assignment.clusters.numpy(),
                only_if_better=order == "auto",
            )
            del sources
            self.book = PartitionBook.from_parts(assignment.part, num_parts, torch.from_numpy(found))
        self.edge_order, self.indptr = rows_in_order(edge_order, indptr, self.book.order.numpy())
        del edge_order
        position = self.book.position.numpy().astype(np.int32 if num_nodes < 2**31 else np.int64)
        self.src_position = position[src[self.edge_order]]
        self.node_offsets: list[int] = self.book.offsets.tolist()
        self.halos = [self._halo(part) for part in range(num_parts)]
        """Per part, book positions of its halo nodes, ascending: that is by (owner, the owner's row)."""
        self.halo_splits = [np.searchsorted(halo, self.book.offsets.numpy()) for halo in self.halos]
        """``halo_splits[p][q] : halo_splits[p][q + 1]`` is the run that q owns in the halo of p."""

    def _why_not_auto(self, order: OrderChoice) -> str:
        if order != "auto":
            return ""
        return why_not_worth_it(max(self.book.node_counts), len(self.data.src), _row_bytes(self.data))

    def _sources(self, part: int) -> np.ndarray:
        first, last = self.node_offsets[part : part + 2]
        return self.src_position[self.indptr[first] : self.indptr[last]]

    def _halo(self, part: int) -> np.ndarray:
        needed = np.zeros(self.book.num_nodes, np.bool_)
        needed[self._sources(part)] = True
        first, last = self.node_offsets[part : part + 2]
        needed[first:last] = False
        return np.flatnonzero(needed)

    def _send_rows(self, rank: int) -> tuple[Tensor, tuple[int, ...]]:
        runs = [
            halo[splits[rank] : splits[rank + 1]] for halo, splits in zip(self.halos, self.halo_splits, strict=True)
        ]
        rows = np.concatenate(runs) - self.node_offsets[rank]
        return torch.from_numpy(rows), tuple(len(run) for run in runs)

    def _split_rows(self, node_ids: Tensor | None, which: str, rank: int) -> tuple[Tensor, int]:
        """Ascending local rows of a split on this rank, and the size of the whole split."""
        if node_ids is None or node_ids.numel() == 0:
            return torch.zeros(0, dtype=torch.int64), 0
        first, last = self.node_offsets[rank : rank + 2]
        positions = self.book.positions(node_ids).sort().values
        if (positions.diff() == 0).any():
            raise ValueError(f"{which}_nodes lists a node twice; it would count twice in the loss and the metrics")
        return positions[(positions >= first) & (positions < last)] - first, len(node_ids)

    def shard(self, rank: int) -> Shard:
        data, halo = self.data, self.halos[rank]
        first, last = self.node_offsets[rank : rank + 2]
        num_inner = last - first
        row_of_position = np.zeros(self.book.num_nodes, np.int64)
        row_of_position[first:last] = np.arange(num_inner)
        row_of_position[halo] = num_inner + np.arange(len(halo))
        index_type = np.int32 if num_inner + len(halo) < 2**31 else np.int64
        node_ids = self.book.global_ids(rank).clone()
        edge_ids = torch.from_numpy(self.edge_order[self.indptr[first] : self.indptr[last]].astype(np.int64))
        send_rows, send_splits = self._send_rows(rank)
        train_rows, num_train = self._split_rows(data.train_nodes, "train", rank)
        val_rows, num_val = self._split_rows(data.val_nodes, "val", rank)
        test_rows, num_test = self._split_rows(data.test_nodes, "test", rank)
        return Shard(
            rank=rank,
            num_parts=self.book.num_parts,
            num_nodes_global=self.book.num_nodes,
            num_edges_global=len(self.edge_order),
            global_node_ids=node_ids,
            global_edge_ids=edge_ids,
            edge_starts=self.edge_starts[node_ids],
            indptr=torch.from_numpy(self.indptr[first : last + 1].astype(np.int64) - int(self.indptr[first])),
            indices=torch.from_numpy(row_of_position.astype(index_type)[self._sources(rank)]),
            halo_global_ids=self.book.order[torch.from_numpy(halo)],
            recv_splits=tuple(np.diff(self.halo_splits[rank]).tolist()),
            send_rows=send_rows,
            send_splits=send_splits,
            out_degrees=self.out_degrees[node_ids],
            node_data={name: select_rows(rows, node_ids) for name, rows in _node_data(data).items()},
            edge_data={name: select_rows(rows, edge_ids) for name, rows in (data.edge_data or {}).items()},
            train_rows=train_rows,
            val_rows=val_rows,
            test_rows=test_rows,
            num_train_global=num_train,
            num_val_global=num_val,
            num_test_global=num_test,
            num_classes=int(data.num_classes),
            multilabel=bool(data.is_multilabel),
            metric=data.metric,
            name=data.name,
            order=self.order,
        )


def may_be_reordered(data: GraphData) -> bool:
    """Whether ``order="auto"`` would look for an order of this graph in one part."""
    return not why_not_worth_it(int(data.num_nodes), len(data.src), _row_bytes(data))


_NARROWEST_ROW = 64
"""Columns: what a model computes of a node is seldom narrower, whatever the features are."""


def _row_bytes(data: GraphData) -> int:
    """Of a node's row as aggregation reads it, in float32. Sparse features are never aggregated as they are."""
    is_dense = data.features is not None and data.features.layout is torch.strided
    columns = data.features.shape[1] if is_dense and data.features is not None else 0
    return 4 * max(columns, _NARROWEST_ROW)


def _node_data(data: GraphData) -> dict[str, Tensor]:
    named = {"feat": data.features, "label": data.labels}
    extras = dict(data.node_data or {})
    clash = named.keys() & extras.keys()
    if clash:
        raise ValueError(f"node_data holds {sorted(clash)[0]!r}, a name kept for features and labels; rename it")
    return {name: rows for name, rows in named.items() if rows is not None} | extras
