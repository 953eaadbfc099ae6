"""Sizes of parts are those of their shards; moves keep count; costs are what they say."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from nugnn.datasets.graph_data import GraphData
from nugnn.partition import move_kernels as kernels
from nugnn.partition.assign import partition_nodes
from nugnn.partition.shard import build_shards
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.work_model import LinearCost, LinearWork, count_sizes, sizes_of, sizes_table, table_of

CASES = [  # nodes, edges, parts, what the ids are divided by: parallel edges and isolated nodes
    (1, 0, 1, 1),
    (5, 0, 3, 1),
    (6, 40, 6, 1),
    (25, 80, 4, 1),
    (25, 80, 5, 3),
    (40, 300, 7, 2),
    (150, 600, 70, 1),
    (300, 3000, 130, 2),
]


def a_graph(num_nodes: int, num_edges: int, num_parts: int, divisor: int = 1, seed: int = 0):
    """Sources, destinations, parts that are all used, and training nodes; self-loops and parallel edges among them."""
    rng = np.random.default_rng(seed)
    src, dst = rng.integers(0, num_nodes, (2, num_edges)) // divisor
    part = np.concatenate([np.arange(num_parts), rng.integers(0, num_parts, num_nodes - num_parts)])
    return src, dst, rng.permutation(part), rng.permutation(num_nodes)[: num_nodes // 3]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [np.int64, np.int32])
def test_sizes_are_those_of_the_shards(case: tuple[int, ...], seed: int, dtype: type) -> None:
    num_nodes, _, num_parts, _ = case
    src, dst, part, train = a_graph(*case, seed=seed)
    data = GraphData(
        name="made",
        num_nodes=num_nodes,
        src=torch.from_numpy(src),
        dst=torch.from_numpy(dst),
        labels=torch.zeros(num_nodes, dtype=torch.int64),
        num_classes=1,
        train_nodes=torch.from_numpy(train),
    )
    assigned = partition_nodes(num_nodes, src, dst, [1] * num_parts, method="given", parts=part)
    expected = tuple(
        PartSizes(s.num_inner, s.num_edges, s.num_halo, len(s.send_rows), len(s.train_rows))
        for s in build_shards(data, assigned)
    )
    assert count_sizes(src.astype(dtype), dst.astype(dtype), part.astype(dtype), num_parts, train) == expected
    assert count_sizes(torch.from_numpy(src), torch.from_numpy(dst), assigned.part, num_parts, train) == expected


@pytest.mark.parametrize("case", [case for case in CASES if case[2] > 1], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_moves_lower_what_they_minimise_and_keep_exact_count(case: tuple[int, ...], seed: int) -> None:
    num_nodes, _, num_parts, _ = case
    src, dst, part, train = a_graph(*case, seed=seed)
    rng = np.random.default_rng(seed)
    work = LinearWork(
        tuple(LinearCost(**dict(zip(("inner", "edges", "halo", "sent", "train"), row, strict=True)))
              for row in rng.random((num_parts, 5)))
    )  # fmt: skip
    ends = sorted({(v, u) for u, v in zip(src.tolist(), dst.tolist(), strict=True) if u != v})
    sources = np.array([u for _, u in ends], np.int32)
    counts = np.bincount([v for v, _ in ends], minlength=num_nodes) if ends else np.zeros(num_nodes, np.int64)
    indptr = np.concatenate([[0], np.cumsum(counts)])
    readers = np.zeros((num_nodes, num_parts), np.int32)
    present = np.zeros((num_nodes, (num_parts + 63) // 64), np.uint64)
    kernels.count_readers(indptr, sources, part, readers, present)
    sizes = sizes_table(src, dst, part, num_parts, train).astype(np.float64)
    per_size = np.array([dataclasses.astuple(cost)[1:] for cost in work.seconds_of])
    limits = np.full(num_parts, 1e300)
    costs = (per_size, np.zeros(num_parts), np.zeros((num_parts, 5)), np.zeros(num_parts), limits)
    degrees = np.bincount(dst, minlength=num_nodes)
    is_train = np.zeros(num_nodes, np.int64)
    is_train[train] = 1

    def strain() -> float:
        table = sizes_of(sizes_table(src, dst, part, num_parts, train))
        return sum((work.seconds(p, size) * scale) ** 8 for p, size in enumerate(table))

    scale = 1.0
    scale = 1 / strain() ** (1 / 8) if strain() else 1.0
    before, part_before = strain(), part.copy()
    arrays = ((indptr, sources, degrees, is_train), part, readers, present, sizes, costs, (scale, 8.0, 1.0))
    nodes = rng.permutation(num_nodes)
    gains = np.zeros(num_nodes)
    kernels.weigh_moves(np.array([0, num_nodes // 3, num_nodes]), nodes, *arrays, gains)
    assert np.array_equal(part, part_before)
    assert kernels.make_moves(nodes, *arrays, True) == 0  # no part lacks memory
    assert np.array_equal(part, part_before)
    moved = kernels.make_moves(nodes, *arrays, False)
    assert bool(moved) == bool(gains.any())
    assert np.array_equal(sizes, sizes_table(src, dst, part, num_parts, train))
    fresh, bits = np.zeros_like(readers), np.zeros_like(present)
    kernels.count_readers(indptr, sources, part, fresh, bits)
    assert np.array_equal(readers, fresh) and np.array_equal(present, bits)
    assert (strain() < before) if moved else (strain() == before)
    assert len(set(part.tolist())) == num_parts  # no part is emptied


def test_a_linear_cost_is_the_sum_of_its_terms() -> None:
    cost = LinearCost(fixed=1, inner=2, edges=3, halo=5, sent=7, train=11)
    assert cost.of(PartSizes(1, 10, 100, 1000, 10000)) == 1 + 2 + 30 + 500 + 7000 + 110000
    assert cost.times(2).of(PartSizes(0, 0, 1, 0, 0)) == 12
    work = LinearWork((cost, cost.times(3)), (LinearCost(), LinearCost(inner=0.5)))
    assert work.seconds(1, PartSizes(0, 1, 0, 0, 0)) == 12
    assert [work.bytes(part, PartSizes(3, 0, 0, 0, 0)) for part in (0, 1)] == [0, 2]  # a byte begun is a byte
    assert LinearWork((cost,)).bytes(0, PartSizes(9, 9, 9, 9, 9)) == 0


def test_sizes_go_to_a_table_and_back() -> None:
    sizes = (PartSizes(1, 2, 3, 4, 5), PartSizes(6, 7, 8, 9, 10))
    assert sizes_of(table_of(sizes)) == sizes


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_costs_are_checked(value: float) -> None:
    with pytest.raises(ValueError, match=r"the cost halo is .*; costs must be finite and not negative"):
        LinearCost(halo=value)


def test_malformed_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="seconds_of is empty"):
        LinearWork(())
    with pytest.raises(ValueError, match="bytes_of has 2 devices and seconds_of 1"):
        LinearWork((LinearCost(),), (LinearCost(), LinearCost()))
    with pytest.raises(ValueError, match="entry 1 of src is 2; it must be at least 0 and below 2"):
        count_sizes([0, 2], [1, 1], [0, 1], 2)
    with pytest.raises(ValueError, match="entry 0 of part is -1"):
        count_sizes([], [], [-1, 0], 2)
    with pytest.raises(ValueError, match="src has 1 entry and dst 2"):
        count_sizes([0], [1, 1], [0, 1], 2)
    with pytest.raises(ValueError, match=r"dst must be one-dimensional integers, got shape \(1,\) of float64"):
        count_sizes([0], [0.5], [0, 1], 2)
