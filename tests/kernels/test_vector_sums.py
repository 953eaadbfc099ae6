"""The CPU's kernel for large sums: every width bit for bit, weights, scales, both directions, any number of threads."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nugnn.kernels.arrays import empty_rows
from nugnn.kernels.spmm import spmm, spmm_sum, sums
from nugnn.kernels.spmm.vector_sums import MOST_LANES
from nugnn.kernels.structure import Structure

from .conftest import MakeStructure

WIDTHS = [*range(1, 35), 47, 63, 64, 65, 100, 127, 128, 129, 130, 200, 257, 1024]


@pytest.fixture(autouse=True, scope="module")
def always() -> Iterator[None]:
    """Small sums take the kernel for large ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sums, "FEWEST_BYTES", 0)
        patch.setattr(sums, "_CACHED_BYTES", 0)
        yield


def in_order(structure: Structure, x: Tensor, weights: Tensor | None = None) -> Tensor:
    """One addition after the other in the type of ``x``, in CSC order."""
    out = np.zeros((structure.num_dst, *x.shape[1:]), x.numpy().dtype)
    dst = structure.dst.tolist()
    for edge, source in enumerate(structure.indices.tolist()):
        row = x[source].numpy()
        out[dst[edge]] += row if weights is None else weights[edge].numpy() * row
    return torch.from_numpy(out)


@pytest.mark.parametrize("pass_bytes", [256, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_every_width_is_added_edge_by_edge(
    make_structure: MakeStructure, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, pass_bytes: int
) -> None:
    monkeypatch.setattr(sums, "_pass_bytes", lambda: pass_bytes)
    structure = make_structure(5, num_dst=40, num_halo=10)
    generator = torch.Generator().manual_seed(1)
    for width in WIDTHS:
        x = torch.randn(structure.num_src, width, generator=generator, dtype=dtype)
        w = torch.randn(structure.num_edges, 1, generator=generator, dtype=dtype)
        assert torch.equal(spmm(structure, "copy_lhs", "sum", x, None), in_order(structure, x)), width
        assert torch.equal(spmm(structure, "mul", "sum", x, w), in_order(structure, x, w)), width


@pytest.mark.parametrize("heads", [1, 3])
def test_a_weight_for_each_head(make_structure: MakeStructure, heads: int) -> None:
    structure = make_structure(6, num_dst=20)
    for width in (1, 8, 17, 130):
        x = torch.randn(structure.num_src, heads, width)
        w = torch.randn(structure.num_edges, heads, 1)
        assert torch.equal(spmm(structure, "mul", "sum", x, w), in_order(structure, x, w))


def test_rows_that_do_not_begin_with_a_cache_line(make_structure: MakeStructure) -> None:
    structure = make_structure(7)
    x = torch.randn(structure.num_src * 16 + 1)[1:].view(structure.num_src, 16)
    assert torch.equal(spmm(structure, "copy_lhs", "sum", x, None), in_order(structure, x))


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("has_scales", [False, True])
@pytest.mark.parametrize("weight_shape", [None, (1, 1), (2, 1)], ids=str)
def test_first_and_second_gradients(
    make_structure: MakeStructure, weight_shape: tuple[int, ...] | None, has_scales: bool, index_dtype: torch.dtype
) -> None:
    structure = make_structure(11, num_dst=4, num_halo=2, max_degree=2, dtype=index_dtype)
    generator = torch.Generator().manual_seed(2)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    scales = (random(structure.num_src), random(structure.num_dst)) if has_scales else (None, None)
    operands = [random(structure.num_src, 2, 3).requires_grad_()]
    if weight_shape is not None:
        operands.append(random(structure.num_edges, *weight_shape).requires_grad_())

    def function(x: Tensor, w: Tensor | None = None) -> Tensor:
        return spmm_sum(structure, x, w, *scales)

    assert torch.autograd.gradcheck(function, operands)
    assert torch.autograd.gradgradcheck(function, operands)


@pytest.mark.parametrize("weighted", [False, True])
def test_scales_are_applied_as_products_before_and_after(make_structure: MakeStructure, weighted: bool) -> None:
    structure = make_structure(8, num_dst=30)
    x, w = torch.randn(structure.num_src, 7), torch.rand(structure.num_edges, 1) if weighted else None
    src, dst = torch.rand(structure.num_src), torch.rand(structure.num_dst)
    expected = in_order(structure, x * src[:, None], w) * dst[:, None]
    assert torch.equal(spmm_sum(structure, x, w, src, dst), expected)
    assert torch.equal(spmm_sum(structure, x, w, None, dst), in_order(structure, x, w) * dst[:, None])


def test_the_number_of_threads_changes_no_bit(make_structure: MakeStructure) -> None:
    structure = make_structure(9, num_dst=300, max_degree=20)
    x = torch.randn(structure.num_src, 70, requires_grad=True)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            out = spmm(structure, "copy_lhs", "sum", x, None)
            results.append((out, *torch.autograd.grad(out.square().sum(), x)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_out_lists_are_made_once_and_leave_with_the_structure(make_structure: MakeStructure) -> None:
    structure = make_structure(10)
    x = torch.randn(structure.num_src, 4, requires_grad=True)
    w = torch.randn(structure.num_edges, 1)
    count = len(sums._lists)
    for weights in (None, w, None):  # in either order: the numbers of the edges come with the first weights
        spmm_sum(structure, x, weights).sum().backward()
    assert set(sums._lists[structure]) == {(False, False), (True, True)}
    lists, expected = sums._lists[structure][True, True], structure.transposed
    assert lists.entries is not None
    for mine, theirs in (
        (lists.indptr, expected.indptr), (lists.indices, expected.dst), (lists.entries, expected.edges)
    ):  # fmt: skip
        assert np.array_equal(mine, theirs.numpy())
    x.grad = None
    del structure
    gc.collect()
    assert len(sums._lists) == count


@settings(max_examples=100, deadline=None)
@given(
    num_heads=st.integers(1, 5),
    head_columns=st.integers(1, 1100),
    itemsize=st.sampled_from([4, 8]),
    pass_bytes=st.sampled_from([256, 512]),
    ahead_bytes=st.sampled_from([0, 16 << 10]),
)
def test_blocks_cover_each_column_of_each_head(
    num_heads: int, head_columns: int, itemsize: int, pass_bytes: int, ahead_bytes: int
) -> None:
    covered = np.zeros(num_heads * head_columns, bool)
    blocks = sums.blocks_of(num_heads, head_columns, itemsize, pass_bytes, ahead_bytes)
    for lanes, first, second, head, ahead in blocks.tolist():
        assert lanes in (1, 2, 4, 8, 16, 32, 64) and 2 * lanes * itemsize <= pass_bytes
        assert (ahead > 0) == (ahead_bytes > 0)
        assert lanes <= MOST_LANES[itemsize]
        for begin in (first, second):
            assert head * head_columns <= begin and begin + lanes <= (head + 1) * head_columns
            covered[begin : begin + lanes] = True
    assert covered.all()


def test_results_on_huge_pages_are_ordinary_tensors() -> None:
    for shape in ((0, 3), (5,), (5 << 20, 1)):
        out = empty_rows(shape, torch.float32)
        assert out.shape == shape and out.fill_(1.5).eq(1.5).all()
