"""Moved shards are those that a fresh cut of the whole graph gives."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from exactness import make_graph
from nugnn.comm.groups import Ranks
from nugnn.comm.local_ranks import run_local_ranks
from nugnn.comm.row_move import RowMove
from nugnn.datasets.graph_data import GraphData
from nugnn.partition.assign import partition_nodes
from nugnn.partition.check import check_shards
from nugnn.partition.order import OrderChoice
from nugnn.partition.shard import Shard, build_shard
from nugnn.shard_graph import ShardGraph
from nugnn.shard_move import moved_shard, take_shard


def cut(data: GraphData, parts: Tensor, rank: int, order: OrderChoice = "none") -> Shard:
    size = int(parts.max()) + 1
    given = partition_nodes(data.num_nodes, data.src, data.dst, [1.0] * size, method="given", parts=parts)
    return build_shard(data, given, rank, order=order)


def graph_of(shard: Shard, ranks: Ranks) -> tuple[ShardGraph, dict[str, Tensor]]:
    rows = {"train": shard.train_rows, "val": shard.val_rows, "test": shard.test_rows}
    return ShardGraph(shard, ranks), rows


def moved(ranks: Ranks, graph: ShardGraph, rows: dict[str, Tensor], parts: Tensor, *, by_id: bool = True) -> Shard:
    destination = parts[graph.global_node_ids]
    move = RowMove(graph.global_node_ids, destination, ranks, by_id=by_id)
    return moved_shard(take_shard(graph, rows), destination, move, has_edge_ids=graph._edge_ids is not None)


def assert_same(one: Shard, other: Shard) -> None:
    for field in fields(Shard):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(a, Tensor):
            assert a.dtype == b.dtype and torch.equal(a, b), field.name
        elif isinstance(a, dict):
            assert a.keys() == b.keys()
            for name in a:
                assert a[name].layout == b[name].layout
                assert torch.equal(a[name].to_dense(), b[name].to_dense()), name
        else:
            assert a == b, field.name


def parts_of(num_nodes: int, num_parts: int, seed: int) -> Tensor:
    """Random ones, each with a node."""
    rng = np.random.default_rng(seed)
    parts = rng.integers(0, num_parts, num_nodes)
    parts[rng.permutation(num_nodes)[:num_parts]] = np.arange(num_parts)
    return torch.from_numpy(parts)


@given(seed=st.integers(0, 2**31), num_parts=st.integers(2, 4), num_nodes=st.integers(24, 50), share=st.floats(0, 1))
@settings(max_examples=25)
def test_a_moved_shard_is_a_fresh_one(seed: int, num_parts: int, num_nodes: int, share: float) -> None:
    data = make_graph(seed % 1000, num_nodes=num_nodes, directed=seed % 2 == 0, multilabel=seed % 3 == 0)
    if seed % 5 == 0:
        data = replace(data, features=data.features.to_sparse_csr())  # type: ignore[union-attr]
    before, other = parts_of(num_nodes, num_parts, seed), parts_of(num_nodes, num_parts, seed + 1)
    goes = torch.from_numpy(np.random.default_rng(seed + 2).random(num_nodes) < share)
    after = torch.where(goes, other, before)
    if len(after.unique()) < num_parts:
        after = other

    def check(ranks: Ranks) -> None:
        graph, rows = graph_of(cut(data, before, ranks.rank), ranks)
        there = moved(ranks, graph, rows, after)
        assert_same(there, cut(data, after, ranks.rank))
        graph, rows = graph_of(there, ranks)
        assert_same(moved(ranks, graph, rows, before), cut(data, before, ranks.rank))

    run_local_ranks(num_parts, check)


@pytest.mark.parametrize("order", ["none", "clusters"])
def test_rows_in_any_order_keep_the_laws(order: OrderChoice) -> None:
    data = make_graph(num_nodes=80)
    splits = [parts_of(80, 3, seed) for seed in range(4)]

    def shards(ranks: Ranks) -> Shard:
        shard = cut(data, splits[0], ranks.rank, order)
        for parts in splits[1:]:
            graph, rows = graph_of(shard, ranks)
            shard = moved(ranks, graph, rows, parts, by_id=shard.order.method == "none")
        return shard

    found = run_local_ranks(3, shards)
    check_shards(found)
    for shard in found:
        assert torch.equal(shard.global_node_ids.sort().values, (splits[-1] == shard.rank).nonzero().flatten())
        assert torch.equal(shard.node_data["label"], data.labels[shard.global_node_ids])  # type: ignore[index]
        assert torch.equal(shard.edge_data["weight"], data.edge_data["weight"][shard.global_edge_ids])  # type: ignore[index]


def test_edge_ids_that_nobody_keeps_do_not_travel() -> None:
    data, before, after = make_graph(), parts_of(61, 2, 0), parts_of(61, 2, 1)

    def check(ranks: Ranks) -> None:
        shard = cut(data, before, ranks.rank)
        rows = {"train": shard.train_rows}
        made = moved(ranks, ShardGraph(shard, ranks, keep_edge_ids=False), rows, after)
        fresh = cut(data, after, ranks.rank)
        assert not len(made.global_edge_ids) and made.num_edges == fresh.num_edges
        assert torch.equal(made.indices, fresh.indices) and not len(made.val_rows)

    run_local_ranks(2, check)


def _derived(graph: ShardGraph, how: str) -> ShardGraph:
    return graph.reverse() if how == "reversed" else graph.add_self_loop()


@pytest.mark.parametrize("how", ["reversed", "with self-loops"])
def test_derived_graphs_are_refused(how: str) -> None:
    graph, rows = graph_of(cut(make_graph(), torch.zeros(61, dtype=torch.int64), 0), Ranks())
    with pytest.raises(ValueError, match=r"nodes move on the graph that nugnn\.shard gave"):
        take_shard(_derived(graph, how), rows)


def test_a_rank_left_without_nodes_is_refused_on_all() -> None:
    data = make_graph()

    def check(ranks: Ranks) -> None:
        graph, rows = graph_of(cut(data, torch.arange(61) % 2, ranks.rank), ranks)
        with pytest.raises(ValueError, match="rank 1 would be left without a node"):
            moved(ranks, graph, rows, torch.zeros(61, dtype=torch.int64))

    run_local_ranks(2, check)
