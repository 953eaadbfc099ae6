"""What a part gives away: as much as was asked, at little cost of the cut, from the part alone."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from exactness import make_graph
from nugnn.datasets.graph_data import GraphData
from nugnn.partition.assign import partition_nodes
from nugnn.partition.growth import nodes_to_give
from nugnn.partition.shard import Shard, build_shard
from nugnn.planning.work_model import count_sizes

_NODE_WORK = 3.0


def given_by(shard: Shard, amounts: Mapping[int, float]) -> Tensor:
    return nodes_to_give(
        shard.indptr, shard.indices, shard.recv_splits, shard.send_rows, shard.send_splits,
        own=shard.rank, amounts=amounts, node_work=_NODE_WORK,
    )  # fmt: skip


def grid(side: int) -> GraphData:
    """Nodes of a square, each joined with its up to four neighbours."""
    ids = torch.arange(side * side).view(side, side)
    pairs = [(ids[:, :-1], ids[:, 1:]), (ids[:-1], ids[1:])]
    src = torch.cat([a.flatten() for a, _ in pairs] + [b.flatten() for _, b in pairs])
    dst = torch.cat([b.flatten() for _, b in pairs] + [a.flatten() for a, _ in pairs])
    return GraphData(name="grid", num_nodes=side * side, src=src, dst=dst, features=None, labels=None, num_classes=0)


def stripes(data: GraphData, side: int, ends: list[int]) -> list[Shard]:
    """Parts of whole columns of a grid."""
    columns = torch.arange(data.num_nodes) % side
    parts = torch.bucketize(columns, torch.tensor(ends), right=True)
    given = partition_nodes(data.num_nodes, data.src, data.dst, [1.0] * (len(ends) + 1), method="given", parts=parts)
    return [build_shard(data, given, rank) for rank in range(len(ends) + 1)]


@given(seed=st.integers(0, 10_000), share=st.floats(0, 1.5), num_parts=st.integers(2, 4))
@settings(max_examples=40)
def test_as_much_goes_as_was_asked_to_half_a_node(seed: int, share: float, num_parts: int) -> None:
    data = make_graph(seed, num_nodes=60, directed=seed % 2 == 0)
    parts = torch.from_numpy(np.random.default_rng(seed).integers(0, num_parts, 60))
    parts[:num_parts] = torch.arange(num_parts)
    chosen = partition_nodes(60, data.src, data.dst, [1.0] * num_parts, method="given", parts=parts)
    shard = build_shard(data, chosen, 0)
    work_N = shard.in_degrees + _NODE_WORK
    asked = share * float(work_N.sum())
    weights = np.random.default_rng(seed + 1).dirichlet(np.ones(num_parts - 1))
    amounts = {part: asked * float(weight) for part, weight in enumerate(weights, 1)}
    goes = given_by(shard, amounts)
    assert torch.equal(goes, given_by(shard, amounts)), "equal arguments give equal nodes"
    assert (goes == 0).any(), "a node stays"
    for part, amount in amounts.items():
        came = float(work_N[goes == part].sum())
        assert came <= amount + float(work_N.max()) / 2
        if share < 0.8:
            # what is left is less than half of any node that is left
            assert amount - came <= float(work_N[goes == 0].min()) / 2 + 1e-9


def test_a_stripe_moves_on_with_its_neighbour() -> None:
    side = 24
    data = grid(side)
    shards = stripes(data, side, [8, 16])
    middle = shards[1]
    amount = 0.5 * float((middle.in_degrees + _NODE_WORK).sum())
    parts = torch.empty(data.num_nodes, dtype=torch.int64)
    for shard in shards:
        parts[shard.global_node_ids] = shard.rank
    before = sum(sizes.halo for sizes in count_sizes(data.src, data.dst, parts, 3))
    parts[middle.global_node_ids] = given_by(middle, {2: amount})
    after = sum(sizes.halo for sizes in count_sizes(data.src, data.dst, parts, 3))
    assert before == 4 * side and after <= 1.25 * before, "the boundary moves, it does not fray"
    assert int((parts == 2).sum()) == pytest.approx(12 * side, abs=side)


def test_nodes_go_to_the_neighbours_that_they_touch() -> None:
    side = 20
    data = grid(side)
    left, middle, right = stripes(data, side, [5, 15])
    amount = 0.3 * float((middle.in_degrees + _NODE_WORK).sum())
    goes = given_by(middle, {0: amount, 2: amount})
    columns = middle.global_node_ids % side
    # whole columns were 5 to 7 and 12 to 14, of means 6 and 13; any nodes 9.5
    assert columns[goes == 0].float().mean() < 8 and columns[goes == 2].float().mean() > 11
    assert left.num_inner == right.num_inner == 100


def test_to_a_part_that_it_does_not_touch_and_nothing_at_all() -> None:
    side = 20
    left, middle, _ = stripes(grid(side), side, [5, 15])
    assert torch.equal(given_by(middle, {}), torch.ones(middle.num_inner, dtype=torch.int64))
    goes = given_by(left, {2: 0.5 * float((left.in_degrees + _NODE_WORK).sum())})
    # half the work of 100 nodes, each of which counts 5 to 7 (corners to inside)
    assert 40 <= int((goes == 2).sum()) <= 60
