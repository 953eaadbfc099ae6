"""A shard cut where the graph lies is the shard that the host cuts."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from device_shards import device_shard

from nugnn.datasets.synthetic_device import device_graph
from nugnn.partition.assign import partition_nodes
from nugnn.partition.shard import build_shard

NODES, ARCS = 600, 6000
LEFT_OUT = ("global_edge_ids", "order")


@pytest.mark.parametrize("num_parts", [1, 2, 3])
def test_it_is_the_shard_of_the_host(num_parts: int) -> None:
    graph = device_graph("products-like", NODES, ARCS, 3, device="cpu")
    data = graph.to_host()
    part = torch.randint(num_parts, (NODES,), generator=torch.Generator().manual_seed(1))
    part[:num_parts] = torch.arange(num_parts)
    given = partition_nodes(NODES, data.src, data.dst, [1.0] * num_parts, method="given", parts=part)
    for rank in range(num_parts):
        ours, theirs = device_shard(graph, part, rank, num_parts), build_shard(data, given, rank)
        for field in dataclasses.fields(theirs):
            if field.name in LEFT_OUT:
                continue
            one, other = getattr(ours, field.name), getattr(theirs, field.name)
            if isinstance(other, torch.Tensor):
                assert torch.equal(one, other), field.name
            elif field.name == "node_data":
                assert all(torch.equal(one[name], other[name]) for name in other) and one.keys() == other.keys()
            else:
                assert one == other, field.name
