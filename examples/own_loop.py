"""A training loop of one's own: alone, or on several ranks.

Run ``python examples/own_loop.py``, or the same file on unequal parts, with the same losses:
``torchrun --nproc_per_node 2 examples/own_loop.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import nugnn  # before dgl: makes it work with newer versions of torch
from dgl.nn import SAGEConv
from nugnn.comm.gradients import sum_gradients
from nugnn.datasets.registry import load


class Model(nn.Module):
    """An ordinary DGL model."""

    def __init__(self, in_feats: int, num_classes: int) -> None:
        super().__init__()
        self.first, self.second = SAGEConv(in_feats, 16, "mean"), SAGEConv(16, num_classes, "mean")
        self.norm, self.drop = nn.BatchNorm1d(16), nn.Dropout(0.3)

    def forward(self, graph: nugnn.ShardGraph, x: Tensor) -> Tensor:
        """``(N, num_classes)`` logits of this rank's nodes."""
        return self.second(graph, self.drop(self.norm(self.first(graph, x)).relu()))


def main(num_epochs: int = 5) -> None:
    """Print the loss of each epoch, over all nodes of all ranks."""
    torch.manual_seed(0)  # the same weights everywhere
    data = load("digits")
    ranks = nugnn.init()
    shares = [2.0**-rank for rank in range(ranks.world_size)]  # a fast device first
    graph = nugnn.shard(data, ranks, shares=shares)
    model = Model(data.features.shape[1], data.num_classes).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    interceptor = nugnn.intercept(model, graph, seed=1)

    x, labels = graph.ndata["feat"].double(), graph.ndata["label"]
    x = nugnn.as_node_rows(x, graph)
    here = torch.isin(graph.global_node_ids, data.train_nodes)
    for epoch in range(num_epochs):
        with interceptor.step(epoch):
            logits = model(graph, x)
            # this rank's share of the mean: divided by the count of all ranks, so that shares and gradients add up
            loss = F.cross_entropy(logits[here], labels[here], reduction="sum") / len(data.train_nodes)
            optimizer.zero_grad()
            loss.backward()
        sum_gradients(model.parameters(), ranks)
        optimizer.step()
        total = ranks.sum_(loss.detach().clone())
        if ranks.rank == 0:
            print(f"epoch {epoch}: loss {total.item():.12f}")


if __name__ == "__main__":
    main()
