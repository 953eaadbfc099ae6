"""A piece of a part is a part: it obeys the laws of shards, and its rows have the in-edges that they had."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nugnn.datasets.graph_data import GraphData
from nugnn.partition.assign import partition_nodes
from nugnn.partition.check import check_shard
from nugnn.partition.pieces import piece_of
from nugnn.partition.shard import Shard, build_shards


def _shards(num_parts: int, order: str) -> list[Shard]:
    draw = np.random.default_rng(0)
    src, dst = (torch.from_numpy(x) for x in draw.integers(0, 300, (2, 3000)))
    data = GraphData(
        name="made",
        num_nodes=300,
        src=src,
        dst=dst,
        labels=torch.from_numpy(draw.integers(0, 3, 300)),
        num_classes=3,
        features=torch.arange(600.0).view(300, 2),
        train_nodes=torch.from_numpy(draw.permutation(300)[:100]),
    )
    assignment = partition_nodes(300, src, dst, [1 / num_parts] * num_parts)
    return build_shards(data, assignment, order=order)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_parts", [1, 2, 3])
@pytest.mark.parametrize("order", ["none", "clusters"])
@pytest.mark.parametrize("share", [0.01, 0.5, 0.9, 1.0])
def test_a_piece_is_a_part_with_the_same_in_edges(num_parts, order, share):
    for shard in _shards(num_parts, order):
        piece = piece_of(shard, share)
        rows = max(1, round(share * shard.num_inner))
        check_shard(piece)
        assert piece.num_inner == rows
        assert torch.equal(piece.node_data["feat"], shard.node_data["feat"][:rows])
        assert torch.equal(piece.train_rows, shard.train_rows[shard.train_rows < rows])
        before, after = _sources(shard), _sources(piece)
        inside = set(shard.global_node_ids[:rows].tolist())
        for row in range(rows):
            kept = before[row] if num_parts > 1 else [source for source in before[row] if source in inside]
            assert after[row] == kept


def _sources(shard: Shard) -> list[list[int]]:
    ids = torch.cat([shard.global_node_ids, shard.halo_global_ids])[shard.indices.long()]
    return [run.tolist() for run in ids.split(shard.in_degrees.tolist())]


def test_a_share_that_is_none_is_refused():
    (shard,) = _shards(1, "none")
    for share in (0.0, -1.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match="the share of a part is"):
            piece_of(shard, share)
