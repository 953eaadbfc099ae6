"""The torch twin of the synthetic generator makes the numpy generator's graphs, bit for bit, whatever its chunks."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nugnn.datasets import mixed_like, products_like, synthetic_device
from nugnn.datasets.synthetic_device import FAMILIES, device_graph

HOST = {"products-like": products_like, "mixed-like": mixed_like}


def assert_same_graph(data, expected):
    for column in dataclasses.fields(expected):
        one, other = getattr(data, column.name), getattr(expected, column.name)
        if isinstance(other, torch.Tensor):
            assert one.dtype == other.dtype, column.name
            assert torch.equal(one, other), column.name
        else:
            assert one == other, column.name


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=15)
@given(num_nodes=st.integers(64, 3000), seed=st.integers(-5, 2**65), arcs_per_node=st.integers(1, 8))
def test_twin_is_bit_equal_to_the_numpy_path(family, num_nodes, seed, arcs_per_node):
    arguments = (num_nodes, num_nodes * arcs_per_node // 8 * 2, seed)
    twin = device_graph(family, *arguments, num_features=7, num_classes=5, device="cpu")
    assert_same_graph(twin.to_host(), HOST[family](*arguments, num_features=7, num_classes=5))


@pytest.mark.parametrize("family", FAMILIES)
def test_default_counts_and_a_graph_of_more_communities_are_equal_too(family):
    twin = device_graph(family, 60_000, num_features=3, device="cpu")
    assert_same_graph(twin.to_host(), HOST[family](60_000, num_features=3))


def test_chunks_do_not_show(monkeypatch):
    expected = device_graph("mixed-like", 2_000, 20_000, 3, device="cpu").to_host()
    monkeypatch.setitem(synthetic_device._CHUNK, "cpu", 333)
    monkeypatch.setattr(synthetic_device, "_SORTED_AT_A_TIME", 777)
    assert_same_graph(device_graph("mixed-like", 2_000, 20_000, 3, device="cpu").to_host(), expected)


def test_refuses_what_the_numpy_path_refuses():
    with pytest.raises(ValueError, match="63 nodes; it takes 64 to"):
        device_graph("products-like", 63, device="cpu")
    with pytest.raises(ValueError, match="100 nodes in 16 communities cannot hold 3600 edges inside"):
        device_graph("products-like", 100, 9000, device="cpu")


def test_renumbering_moves_every_edge_row_and_split_with_its_node():
    graph = device_graph("products-like", 500, 4_000, num_features=4, device="cpu")
    new_ids = torch.randperm(500, generator=torch.Generator().manual_seed(0))
    moved = graph.renumbered(new_ids)
    before, after = graph.to_host(), moved.to_host()
    expected = (new_ids[before.src] * 500 + new_ids[before.dst]).sort().values
    assert torch.equal(after.src * 500 + after.dst, expected)
    assert torch.equal(after.features[new_ids], before.features)
    assert torch.equal(after.labels[new_ids], before.labels)
    for one, other in zip(after.split, before.split, strict=True):
        assert torch.equal(one, new_ids[other].sort().values)


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_gpu_makes_the_graph_of_the_host(family):
    assert_same_graph(HOST[family](100_000, device="cuda"), HOST[family](100_000))
