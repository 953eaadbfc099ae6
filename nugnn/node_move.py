"""Nodes of a split graph go to other ranks while a run goes on; whoever holds rows for them lets these follow."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from nugnn._counted import counted
from nugnn.comm.halo_stale import arrived
from nugnn.comm.row_move import RowMove
from nugnn.held_rows import move_parameters
from nugnn.kernels.rows import tag
from nugnn.partition.shard import Shard
from nugnn.shard_graph import ShardGraph
from nugnn.shard_move import SPLITS, moved_shard, take_shard

_ROOM = 2.2
"""Times the largest column that has to be free on each GPU for columns to be moved there; in the host's memory else."""


class NodeMove:
    """A move that has been made; from `move_nodes`, the same on every rank.

    Every method is a collective call: all ranks make it, in the same order.

    Args:
        graph: This rank's part now.
        splits: Its rows of the splits now.
        rows: The move of its nodes.
        starts: Where the in-edges of each of its nodes began, and where they begin now.
        num_halo: Halo rows of all ranks before and now.
        seconds: It took.
    """

    def __init__(
        self,
        graph: ShardGraph,
        splits: dict[str, Tensor],
        rows: RowMove,
        starts: tuple[Tensor, Tensor],
        num_halo: tuple[int, int],
        seconds: float,
    ) -> None:
        self.graph, self.splits, self.num_halo, self.seconds = graph, splits, num_halo, seconds
        self._rows, self._starts = rows, starts

    @property
    def old_ids(self) -> Tensor:
        """``(N,)`` int64 on the CPU: global id of each of this rank's rows before."""
        return self._rows.old_ids

    @property
    def new_ids(self) -> Tensor:
        """``(M,)`` the same now: ``graph.global_node_ids``."""
        return self._rows.new_ids

    @property
    def counts(self) -> tuple[tuple[int, ...], ...]:
        """Nodes that went from each rank (first) to each one, those that stayed among them."""
        return self._rows.counts

    @property
    def num_moved(self) -> int:
        """Nodes that are on another rank now."""
        return self._rows.num_moved

    def came_from(self) -> Tensor:
        """``(M,)`` int32 on the CPU: the rank that each of this rank's nodes was on before.

        With ``arranged_as=old_ids``, `move_nodes` takes the move back by it.
        """
        ranks = self.graph.ranks
        return self._rows.rows(torch.full((len(self.old_ids),), ranks.rank, dtype=torch.int32))

    def rows(self, x: Tensor) -> Tensor:
        """``(M, ...)`` rows of this rank's nodes now, of ``x (N, ...)`` with a row for each of its nodes before.

        Dense or ``torch.sparse_csr``, any type, on the device of ``x``; without gradient.

        Raises:
            ValueError: ``x`` has another number of rows.
        """
        return tag(self._rows.rows(x), self.graph.index.node_rows)

    def edge_rows(self, x: Tensor) -> Tensor:
        """The same for in-edges: a row for each row of ``graph.edata``.

        Raises:
            ValueError: ``x`` has another number of rows than there were edges.
        """
        if len(x) != int(self._starts[0][-1]):
            raise ValueError(
                f"expected {counted(int(self._starts[0][-1]), 'row')}, one for each edge of this rank, got {len(x)}"
            )
        return tag(self._rows.runs(x, *self._starts), self.graph.index.edge_rows)

    def parameters(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Rows of every `nugnn.NodeEmbedding` in ``model`` that is split, with what ``optimizer`` keeps for them.

        Parameters stay the same objects, so the optimizer goes on; their gradients are dropped.
        """
        move_parameters(model, optimizer, self._rows.rows)


def move_nodes(
    graph: ShardGraph,
    destination: Tensor,
    splits: Mapping[str, Tensor] | None = None,
    *,
    arranged_as: Tensor | None = None,
) -> NodeMove:
    """Give nodes of a split graph to other ranks, with their in-edges and data; a collective call.

    The mathematics stays the same: see ``docs/rebalance.md``. The data leaves ``graph``, which is of no use afterwards;
    `NodeMove.graph` takes its place, and a new `nugnn.intercept` goes with it.

    Args:
        graph: From `nugnn.shard`, on every rank; not one that was derived from it.
        destination: ``(N,)`` integers, for each row of ``graph.ndata`` the rank that it goes to; its own where it
            stays.
        splits: Rows of ``train``, ``val`` and ``test``, to be followed.
        arranged_as: ``(M,)`` global ids in the order of this rank's rows afterwards, on all ranks or none. Rows stand
            in the order of ids, or, where they stood in an order for locality, with those that came behind the others.

    Raises:
        ValueError: A destination is no rank, a rank would be left without a node, or the graph is a derived one.
    """
    began = time.perf_counter()
    ranks, has_edge_ids, halo_before = graph.ranks, graph._edge_ids is not None, graph.index.plan.num_halo
    arrived(graph.index.plan)
    through_host = _through_host(graph)
    where = destination.cpu().long()
    is_by_id = graph.of_the_whole["order"].method == "none"
    move = RowMove(graph.global_node_ids, where, ranks, by_id=is_by_id, arranged_as=arranged_as)
    shard = take_shard(graph, dict(splits or {}))
    made = moved_shard(shard, where, move, has_edge_ids=has_edge_ids, through_host=through_host)
    new_graph = ShardGraph(made, ranks, keep_edge_ids=has_edge_ids)
    num_halo = ranks.sum_(torch.tensor([halo_before, made.num_halo])).tolist()
    own = {name: _rows_of(made, name).to(ranks.device) for name in SPLITS if splits is None or name in splits}
    seconds = ranks.max_(torch.tensor([time.perf_counter() - began], dtype=torch.float64))
    return NodeMove(new_graph, own, move, (shard.indptr, made.indptr), tuple(num_halo), float(seconds))


def _rows_of(shard: Shard, split: str) -> Tensor:
    rows: Tensor = getattr(shard, f"{split}_rows")
    return rows


def _through_host(graph: ShardGraph) -> bool:
    """Whether some GPU has no room to hold a column twice; the same answer everywhere."""
    lacks = False
    if graph.device.type == "cuda":
        columns = (frame[key] for frame in (*graph._node_frames, *graph._edge_frames) for key in frame)
        largest = max((_num_bytes(column) for column in columns), default=0)
        free, _ = torch.cuda.mem_get_info(graph.device)
        unused = torch.cuda.memory_reserved(graph.device) - torch.cuda.memory_allocated(graph.device)
        lacks = _ROOM * largest > free + unused
    return bool(graph.ranks.max_(torch.tensor([float(lacks)])))


def _num_bytes(x: Tensor) -> int:
    if x.layout is torch.sparse_csr:
        return sum(map(_num_bytes, (x.crow_indices(), x.col_indices(), x.values())))
    return x.numel() * x.element_size()
