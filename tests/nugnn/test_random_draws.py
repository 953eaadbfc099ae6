"""A layer that draws random numbers by position is refused on a split graph, and left alone on one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from exactness import make_graph, make_parts
from nugnn.comm.groups import Ranks
from nugnn.partition.assign import partition_nodes
from nugnn.partition.shard import build_shard
from nugnn.session import intercept
from nugnn.shard_graph import ShardGraph


class Layer(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        return self.function(x)


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "rand_like": lambda x: x * torch.rand_like(x),
    "randn_like": lambda x: x + torch.randn_like(x * 2),
    "bernoulli": lambda x: torch.bernoulli(torch.sigmoid(x)),
    "bernoulli_": lambda x: x.clone().bernoulli_(0.5),
    "normal_": lambda x: torch.empty_like(x).normal_(),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, dim=-1),
    # among nodes; attention inside each node's own sequence is exact, see test_samples.py
    "scaled_dot_product_attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
}


def forward(ranks: Ranks, data: Any, parts: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    shares = [1.0] * ranks.world_size
    assignment = partition_nodes(data.num_nodes, data.src, data.dst, shares, method="given", parts=parts)
    graph = ShardGraph(build_shard(data, assignment, ranks.rank), ranks)
    model = Layer(function)
    with intercept(model, graph).step(0):
        return model(graph, graph.ndata["feat"])


@pytest.mark.parametrize("name", DRAWS)
def test_drawing_by_position_is_refused_when_split(ranks: Any, name: str) -> None:
    data = make_graph()
    assert len(forward(Ranks(), data, make_parts(data, 1, "random"), DRAWS[name])) == data.num_nodes
    with pytest.raises(AssertionError, match=f"NotImplementedError.*{name}.* draws random numbers by position"):
        ranks.run(2, forward, data, make_parts(data, 2, "random"), DRAWS[name])


def test_functions_that_do_not_draw_now_pass(ranks: Any) -> None:
    data = make_graph()
    parts = make_parts(data, 2, "random")
    for function in (
        lambda x: F.rrelu(x, training=False),
        lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0],
        lambda x: x + torch.rand_like(torch.ones(x.shape[1])),  # not rows of the graph
    ):
        ranks.run(2, forward, data, parts, function)
