"""A rank's shard after nodes have moved between ranks, made of what the ranks hold: nobody needs the whole graph.

Every rank knows where its own nodes go, and asks the owners where its halo nodes go. Edges go with their destinations
and bring the global id and the new rank of their source along. What the halo of a rank is then follows from its edges;
which row of its owner each halo node is, the owner says. The laws are those of `nugnn.partition.check`.

Shape suffixes: N inner nodes, H halo nodes, L = N + H local rows, E edges of this rank before; M, G, F after.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nugnn.comm.groups import Ranks, stacked
from nugnn.comm.row_move import RowMove, exchanged, starts_of, sums_of
from nugnn.kernels.rows import IdRuns
from nugnn.partition.shard import Shard
from nugnn.shard_graph import ShardGraph

SPLITS = ("train", "val", "test")


def take_shard(graph: ShardGraph, rows: dict[str, Tensor]) -> Shard:
    """What ``graph`` holds, as a shard again; a collective call.

    The columns of its nodes and edges leave the graph, so that none is held twice for long: it is of no use afterwards.
    They stay on their device; all else comes to the CPU.

    Args:
        graph: As it was made of a shard, on ranks that take part.
        rows: Its rows of the splits; none where a split is missing.

    Raises:
        ValueError: The graph was derived from another one: reversed, or with other edges.
    """
    index, plan, edge_places = graph.index, graph.index.plan, graph.index.edge_rows.source
    if index.is_reversed or not isinstance(edge_places, IdRuns):
        raise ValueError(
            "nodes move on the graph that nugnn.shard gave, not on one that was derived from it: reversed, or with "
            "self-loops added or removed. Move on that one, and derive from what comes out"
        )
    node_ids, send_rows = graph.global_node_ids.cpu(), plan.send_rows.cpu()
    no_rows = torch.zeros(0, dtype=torch.int64)
    splits: dict[str, Any] = {
        f"{name}_rows": rows[name].cpu().sort().values if name in rows else no_rows for name in SPLITS
    }
    return Shard(
        rank=graph.ranks.rank,
        global_node_ids=node_ids,
        global_edge_ids=no_rows if graph._edge_ids is None else graph._edge_ids.cpu(),
        edge_starts=edge_places.starts.cpu(),
        indptr=index.structure.indptr.cpu(),
        indices=index.structure.indices.cpu(),
        halo_global_ids=_fetched(node_ids, send_rows, plan.send_splits, plan.recv_splits, graph.ranks),
        recv_splits=tuple(plan.recv_splits),
        send_rows=send_rows,
        send_splits=tuple(plan.send_splits),
        out_degrees=graph._out_degrees.cpu(),
        node_data=_taken(graph._node_frames[0]),
        edge_data=_taken(graph._edge_frames[0]),
        **splits,
        **graph.of_the_whole,
    )


def _taken(frame: object) -> dict[str, Tensor]:
    names = list(frame.keys())  # type: ignore[attr-defined]
    return {name: frame.pop(name) for name in names}  # type: ignore[attr-defined]


def _fetched(
    rows_N: Tensor, send_rows: Tensor, send_splits: tuple[int, ...], recv_splits: tuple[int, ...], ranks: Ranks
) -> Tensor:
    """``(H, ...)`` from the owners."""
    return exchanged(rows_N.index_select(0, send_rows), send_splits, recv_splits, ranks, "what becomes of halo rows")


def moved_shard(
    shard: Shard, destination_N: Tensor, move: RowMove, *, has_edge_ids: bool = True, through_host: bool = False
) -> Shard:
    """The shard of this rank after ``move``; a collective call.

    Args:
        shard: From `take_shard`; its columns are taken out, one after the other.
        destination_N: ``(N,)`` int64 rank of each of its nodes afterwards.
        move: Of its nodes.
        has_edge_ids: Whether ids of edges are kept; the same on all ranks.
        through_host: Have the columns of a GPU travel and stay in the host's memory.

    Raises:
        ValueError: Some rank would have no node left; the same error on all.
    """
    for rank, came in enumerate(zip(*move.counts, strict=True)):
        if not sum(came):
            raise ValueError(f"rank {rank} would be left without a node; every rank needs one")
    ranks = move.ranks
    starts_M = starts_of(move.rows(shard.in_degrees))
    indices_F, halo = _moved_edges(shard, destination_N, move, starts_M)
    columns: dict[str, dict[str, Tensor]] = {"node_data": {}, "edge_data": {}}
    for kind, into in columns.items():
        held: dict[str, Tensor] = getattr(shard, kind)
        for name in list(held):
            column = held.pop(name)
            column = column.cpu() if through_host else column
            into[name] = move.rows(column) if kind == "node_data" else move.runs(column, shard.indptr, starts_M)
            ranks.pulse.beat()
    edge_ids = shard.global_edge_ids
    train_rows, val_rows, test_rows = _moved_splits(shard, move)
    return replace(
        shard,
        global_node_ids=move.new_ids,
        global_edge_ids=move.runs(edge_ids, shard.indptr, starts_M) if has_edge_ids else edge_ids,
        edge_starts=move.rows(shard.edge_starts),
        indptr=starts_M,
        indices=indices_F,
        halo_global_ids=halo.ids,
        recv_splits=halo.recv_splits,
        send_rows=halo.send_rows,
        send_splits=halo.send_splits,
        out_degrees=move.rows(shard.out_degrees),
        node_data=columns["node_data"],
        edge_data=columns["edge_data"],
        train_rows=train_rows,
        val_rows=val_rows,
        test_rows=test_rows,
    )


class _Halo(NamedTuple):
    """Who the ``G`` halo rows are, and who gets which rows of ours."""

    ids: Tensor
    recv_splits: tuple[int, ...]
    send_rows: Tensor
    send_splits: tuple[int, ...]


def _moved_edges(shard: Shard, destination_N: Tensor, move: RowMove, starts_M: Tensor) -> tuple[Tensor, _Halo]:
    """``(F,)`` source rows of the edges, and the halo that follows from them."""
    from nugnn.partition import run_kernels as kernels

    ranks, starts_N, sources_E = move.ranks, shard.indptr.numpy(), shard.indices.numpy()
    ids_L = torch.cat([shard.global_node_ids, shard.halo_global_ids])
    destination_H = _fetched(destination_N, shard.send_rows, shard.send_splits, shard.recv_splits, ranks)
    part_L = torch.cat([destination_N, destination_H])
    came = _exchanged_edges(shard, move, starts_M, ids_L, part_L)

    stay, stay_to = move.stay
    is_read_L = torch.zeros(len(ids_L), dtype=torch.bool)
    kernels.mark_sources(starts_N, stay.numpy(), sources_E, is_read_L.numpy())
    read = is_read_L.nonzero().flatten()
    ids, parts = torch.cat([ids_L[read], came.ids]), torch.cat([part_L[read], came.parts])
    halo = _halo_of(ids, parts, move.new_ids, ranks)

    num_local = len(move.new_ids) + len(halo.ids)
    indices_F = torch.empty(int(starts_M[-1]), dtype=torch.int32 if num_local < 2**31 else torch.int64)
    rows = _Rows(torch.cat([move.new_ids, halo.ids]))(ids).to(indices_F.dtype)
    rows_L = torch.zeros(len(ids_L), dtype=indices_F.dtype).index_copy_(0, read, rows[: len(read)])
    out, ends = indices_F.numpy(), starts_M.numpy()
    kernels.copy_runs(starts_N, stay.numpy(), sources_E, rows_L.numpy(), ends, stay_to.numpy(), out)
    come_to, _ = move.came
    every, starts = torch.arange(len(come_to)).numpy(), starts_of(starts_M.diff()[come_to]).numpy()
    kernels.copy_runs(starts, every, came.sources.numpy(), rows[len(read) :].numpy(), ends, come_to.numpy(), out)
    return indices_F, halo


class _Came(NamedTuple):
    """Edges of the rows that come: their sources as numbers of a list that tells ids and new ranks of these."""

    sources: Tensor
    ids: Tensor
    parts: Tensor


def _exchanged_edges(shard: Shard, move: RowMove, starts_M: Tensor, ids_L: Tensor, part_L: Tensor) -> _Came:
    """Edges go with their rows: 4 bytes for each, beside a list of the distinct sources."""
    from nugnn.partition import run_kernels as kernels

    ranks, starts_N, sources_E = move.ranks, shard.indptr.numpy(), shard.indices.numpy()
    sent, sent_splits = move.sent
    listed, numbers = [], []
    for rows in sent.split(list(sent_splits)):
        is_read_L = torch.zeros(len(ids_L), dtype=torch.bool)
        kernels.mark_sources(starts_N, rows.numpy(), sources_E, is_read_L.numpy())
        listed.append(is_read_L.nonzero().flatten())
        number_L = torch.zeros(len(ids_L), dtype=torch.int32)
        number_L[listed[-1]] = torch.arange(len(listed[-1]), dtype=torch.int32)
        starts = starts_of(shard.in_degrees[rows])
        numbers.append(torch.empty(int(starts[-1]), dtype=torch.int32))
        every = torch.arange(len(rows)).numpy()
        out = numbers[-1].numpy()
        kernels.copy_runs(starts_N, rows.numpy(), sources_E, number_L.numpy(), starts.numpy(), every, out)
    counts = stacked(ranks, torch.tensor([len(each) for each in listed]))
    splits, came_splits = tuple(counts[ranks.rank].tolist()), tuple(counts[:, ranks.rank].tolist())
    where = torch.cat(listed)
    ids, parts = (
        exchanged(of_L[where], splits, came_splits, ranks, "sources of edges that move") for of_L in (ids_L, part_L)
    )
    come_to, come_splits = move.came
    came_sizes = sums_of(starts_M.diff()[come_to], come_splits)
    sizes = tuple(map(len, numbers))
    sources = exchanged(torch.cat(numbers), sizes, came_sizes, ranks, "edges that move")
    for first, part in zip(_firsts(came_splits), sources.split(list(came_sizes)), strict=True):
        part.add_(first)
    return _Came(sources, ids, parts)


def _halo_of(ids: Tensor, parts: Tensor, new_ids: Tensor, ranks: Ranks) -> _Halo:
    """From the sources of this rank's edges and where they are: those of other ranks, by (owner, the owner's row)."""
    elsewhere = parts != ranks.rank
    halo_ids, inverse = torch.unique(ids[elsewhere], return_inverse=True)
    owner = torch.empty_like(halo_ids).index_copy_(0, inverse, parts[elsewhere])
    by_owner = torch.argsort(owner, stable=True)
    halo_ids, owner = halo_ids[by_owner], owner[by_owner]
    counts = stacked(ranks, torch.bincount(owner, minlength=ranks.world_size))
    recv_splits, send_splits = tuple(counts[ranks.rank].tolist()), tuple(counts[:, ranks.rank].tolist())
    asked = exchanged(halo_ids, recv_splits, send_splits, ranks, "who reads which rows")
    send_rows = _Rows(new_ids)(asked)
    told = exchanged(send_rows, send_splits, recv_splits, ranks, "which rows halo nodes are")
    by_row = torch.cat(
        [first + run.argsort() for first, run in zip(_firsts(recv_splits), told.split(list(recv_splits)), strict=True)]
    )
    send_rows = torch.cat([run.sort().values for run in send_rows.split(list(send_splits))])
    return _Halo(halo_ids[by_row], recv_splits, send_rows, send_splits)


def _firsts(splits: tuple[int, ...]) -> list[int]:
    return starts_of(torch.tensor(splits))[:-1].tolist()  # type: ignore[no-any-return]


class _Rows:
    """Finds the row of a global id.

    Args:
        ids: Of the rows, in their order, each once.
    """

    def __init__(self, ids: Tensor) -> None:
        self._sorted, self._order = ids.sort()

    def __call__(self, wanted: Tensor) -> Tensor:
        place = torch.searchsorted(self._sorted, wanted)
        found = self._sorted[place.clamp(max=max(len(self._sorted) - 1, 0))] if len(self._sorted) else wanted[:0]
        assert torch.equal(found, wanted), "a node is not where its rank was told to be"
        return self._order[place]


def _moved_splits(shard: Shard, move: RowMove) -> list[Tensor]:
    """Ascending rows of each split."""
    belongs_N = torch.zeros(shard.num_inner, len(SPLITS), dtype=torch.bool)
    for column, name in enumerate(SPLITS):
        belongs_N[getattr(shard, f"{name}_rows"), column] = True
    return [belongs.nonzero().flatten() for belongs in move.rows(belongs_N).unbind(1)]
