"""Learnable rows for nodes without features, kept by the rank that owns the node."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from nugnn._counted import counted
from nugnn.kernels.philox import RandomKey, random_words
from nugnn.kernels.rows import tag
from nugnn.shard_graph import ShardGraph

_STREAM = 0x454D4245  # "EMBE": a random stream of its own


class NodeEmbedding(nn.Module):
    """One learnable row for each node.

    The initial value of a row depends on the seed and the node's global id alone, so any number of parts starts, and
    stays, the same. Rows and their optimizer state live with their owner; gradients from other ranks come home through
    the halo exchange, so they take no part in the gradient sum.

    Args:
        num_nodes: Nodes of the whole graph.
        dim: Width of a row.
        std: Standard deviation of the initial values; ``dim ** -0.5`` when None.
        seed: Of the initial values.
    """

    def __init__(self, num_nodes: int, dim: int, *, std: float | None = None, seed: int = 0) -> None:
        super().__init__()
        if num_nodes < 1 or dim < 1:
            raise ValueError(f"NodeEmbedding needs at least one node and one column, got {num_nodes} and {dim}")
        self.num_nodes, self.dim, self.seed = num_nodes, dim, seed
        self.std = dim**-0.5 if std is None else std
        self.weight = nn.Parameter(self._initial(torch.arange(num_nodes)))
        self.is_sharded = False
        """Whether ``weight`` holds the rows of this rank's nodes alone."""

    def _initial(self, global_ids: Tensor) -> Tensor:
        """Normal values by Box-Muller from two 32-bit words each."""
        words = random_words(RandomKey(self.seed, 0, _STREAM), global_ids, 2 * self.dim).double()
        first, second = (words[:, : self.dim] + 1) / 2**32, words[:, self.dim :] / 2**32
        normal = torch.sqrt(-2 * torch.log(first)) * torch.cos(2 * math.pi * second)
        return (normal * self.std).float()

    def shard(self, graph: ShardGraph) -> None:
        """Keep only the rows of this rank's inner nodes; values learned so far stay with their node."""
        if self.is_sharded:
            return
        if graph.num_nodes_global() != self.num_nodes:
            raise ValueError(
                f"NodeEmbedding was made for {counted(self.num_nodes, 'node')}, the graph has "
                f"{graph.num_nodes_global()}"
            )
        with torch.no_grad():
            self.weight = nn.Parameter(self.weight[graph.global_node_ids].clone())
        self.is_sharded = True

    def gather(self, graph: ShardGraph) -> Tensor:
        """``(num_nodes, dim)`` rows of all nodes, in global order, on every rank; without gradient."""
        ids = torch.cat(graph.ranks.gather_rows(graph.global_node_ids))
        rows = torch.cat(graph.ranks.gather_rows(self.weight.detach()))
        return torch.empty_like(rows).index_copy_(0, ids, rows)

    def forward(self, graph: ShardGraph) -> Tensor:
        """``(N, dim)`` rows of the graph's inner nodes."""
        if isinstance(graph, ShardGraph):
            if not self.is_sharded and graph.is_split:
                raise RuntimeError("NodeEmbedding on a split graph: call embedding.shard(graph) before the first step")
            rows = self.weight if self.is_sharded else self.weight[graph.global_node_ids]
            return tag(rows.view_as(rows), graph.index.node_rows)
        return self.weight


def shard_embeddings(model: nn.Module, graph: ShardGraph) -> None:
    """Call `NodeEmbedding.shard` for every embedding in ``model``."""
    for module in model.modules():
        if isinstance(module, NodeEmbedding):
            module.shard(graph)
