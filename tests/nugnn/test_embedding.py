"""Rows of a node embedding depend on the node alone, live with its owner, and come back in order."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nugnn.comm.groups import Ranks
from nugnn.comm.local_ranks import run_local_ranks
from nugnn.embedding import NodeEmbedding, shard_embeddings
from nugnn.kernels.rows import rows_of
from nugnn.own_rows import sharded_parameters
from shard_calls import NUM_NODES, make_data, shard_of


def _rows(ranks: Ranks, dim: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    graph = shard_of(ranks, make_data())
    embedding = NodeEmbedding(NUM_NODES, dim, seed=seed)
    shard_embeddings(embedding, graph)
    shard_embeddings(embedding, graph)  # a second time changes nothing
    rows = embedding(graph)
    assert rows_of(rows) is graph.index.node_rows and sharded_parameters(embedding) == [embedding.weight]
    return graph.global_node_ids, rows.detach().clone(), embedding.gather(graph)


@pytest.mark.parametrize("dim", [1, 5])
@pytest.mark.parametrize("num_parts", [1, 2, 3, 5])
def test_initial_rows_do_not_depend_on_the_parts(ranks: Any, dim: int, num_parts: int) -> None:
    whole = NodeEmbedding(NUM_NODES, dim, seed=3).weight.detach()
    for ids, rows, gathered in ranks.run(num_parts, _rows, dim, 3):
        assert torch.equal(rows, whole[ids]) and torch.equal(gathered, whole)


def test_seeds_and_sizes_give_other_rows_of_the_right_spread() -> None:
    first, second = (NodeEmbedding(5000, 8, std=0.5, seed=seed).weight for seed in (0, 1))
    assert not torch.equal(first, second)
    # the mean of n normal values has deviation std / sqrt(n), the deviation itself std / sqrt(2 n): five of them
    count = first.numel()
    assert abs(float(first.mean())) < 5 * 0.5 / count**0.5
    assert abs(float(first.std()) - 0.5) < 5 * 0.5 / (2 * count) ** 0.5
    assert torch.equal(NodeEmbedding(10, 8, std=0.5).weight, NodeEmbedding(5000, 8, std=0.5).weight[:10])


def test_learned_values_stay_with_their_node() -> None:
    learned = NodeEmbedding(NUM_NODES, 2)
    with torch.no_grad():
        learned.weight.copy_(torch.arange(2.0 * NUM_NODES).view(NUM_NODES, 2))

    def rows(ranks: Ranks) -> bool:
        graph = shard_of(ranks, make_data())
        mine = copy.deepcopy(learned)
        mine.shard(graph)
        return torch.equal(mine.weight[:, 0], graph.global_node_ids * 2.0)

    assert all(run_local_ranks(3, rows))


def test_misuse_is_said_in_words() -> None:
    graph = shard_of(Ranks(), make_data())
    with pytest.raises(ValueError, match="at least one node and one column, got 0 and 4"):
        NodeEmbedding(0, 4)
    with pytest.raises(ValueError, match="made for 7 nodes, the graph has 23"):
        NodeEmbedding(7, 4).shard(graph)

    def unsharded(ranks: Ranks) -> str:
        with pytest.raises(RuntimeError) as raised:
            NodeEmbedding(NUM_NODES, 2)(shard_of(ranks, make_data()))
        return str(raised.value)

    assert all("embedding.shard(graph)" in text for text in run_local_ranks(2, unsharded))


def test_models_without_embeddings_have_no_sharded_parameters() -> None:
    assert sharded_parameters(nn.Linear(2, 2)) == []
