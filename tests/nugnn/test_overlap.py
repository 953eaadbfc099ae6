"""Sums that begin while halo rows travel: the same results, the same exchanges, one rounding."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from dgl import function as fn
from torch import Tensor, nn

import nugnn
from exactness import NUM_CLASSES, NUM_FEATURES, Run, largest_difference, make_graph, make_parts, run_steps
from nugnn.comm import early_rows
from nugnn.comm.groups import Ranks
from nugnn.comm.halo_exchange import fetch_halo
from nugnn.comm.halo_handler import HaloHandler
from nugnn.comm.halo_transfer import HaloPlan
from nugnn.comm.overlap import Fetch, Passes, overlapped_sum, overlapping_passes, repeated_sum, rows_begun_early
from nugnn.kernels.spmm import spmm_sum
from nugnn.kernels.structure import Structure
from nugnn.models import GNN
from shard_calls import make_data, shard_of
from trainers import graph_trainer

# see test_exactness.py: the same sums, in two parts
FLOAT64_BOUND = 1e-10


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.02, eps=1e-5)


class Readers(nn.Module):
    """Each layer reads one tensor by a sum, a mean, a maximum and on edges."""

    def __init__(self, *, sum_first: bool = True, num_features: int = NUM_FEATURES) -> None:
        super().__init__()
        self.sum_first = sum_first
        self.first, self.second = nn.Linear(num_features, 6), nn.Linear(24, NUM_CLASSES)
        self.drop = nn.Dropout(0.3)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        with graph.local_scope():
            graph.ndata["h"] = self.drop(self.first(x)).relu()
            reducers = [fn.sum("m", "a"), fn.mean("m", "b"), fn.max("m", "c")]
            for reducer in reducers if self.sum_first else reversed(reducers):
                graph.update_all(fn.copy_u("h", "m"), reducer)
            graph.apply_edges(fn.u_add_v("h", "h", "e"))
            graph.update_all(fn.copy_e("e", "m"), fn.sum("m", "d"))
            return self.second(torch.cat([graph.ndata[name] for name in "abcd"], 1))


def _model(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name.startswith("readers"):
        return Readers(sum_first=name == "readers").double()
    options: dict[str, Any] = {"norm": "batch", "dropout": 0.4} if name != "gat" else {"heads": 2, "dropout": 0.4}
    return GNN(name, NUM_FEATURES, NUM_CLASSES, hidden=5, layers=3, **options).double()


@pytest.mark.parametrize(
    ("name", "split", "overlap"),
    [
        pytest.param(
            *(name, split, overlap),
            # five parts: one model of each kind of sum
            marks=pytest.mark.slow if split == "5-random" and name in ("sage", "gin", "readers-sum-last") else (),
        )
        for name in ("gcn", "sage", "gin", "gat", "readers", "readers-sum-last")
        for split, overlap in (
            *(("2-no_train", "on"), ("3-metis_unequal", "on")),
            *(("3-metis_unequal", "backward"), ("5-random", "on")),
        )
    ],
)
def test_parts_equal_one_device(ranks: Any, name: str, split: str, overlap: str) -> None:
    num_parts, how = int(split[0]), split[2:]
    data = make_graph(directed=how == "random", self_loops=how != "metis_unequal")
    model = _model(name)
    alone = run_steps(Ranks(), data, make_parts(data, 1, "random"), model, _adam)
    runs: list[Run] = ranks.run(
        num_parts, run_steps, data, make_parts(data, num_parts, how), model, _adam, overlap=overlap,
        recompute_inputs=True,
    )  # fmt: skip
    for run in runs:
        worst, where = largest_difference(alone, run)
        assert worst <= FLOAT64_BOUND, where
        assert run.metrics == alone.metrics
        assert all(torch.equal(value, run.parameters[key]) for key, value in runs[0].parameters.items())


def _exchanges(ranks: Ranks, name: str, overlap: str) -> tuple[int, int, int]:
    data = make_graph()
    graph = shard_of(ranks, data)
    rows = torch.isin(graph.global_node_ids, data.train_nodes).nonzero().flatten()
    trainer = graph_trainer(_model(name), graph, {"train": rows, "val": rows[:0], "test": rows[:0]}, overlap=overlap)
    rounds = ranks.clock.halo_rounds
    trainer.train_epoch()
    handler = trainer.family.net.interceptor.find(HaloHandler)
    return handler.num_exchanges, handler.num_overlapped, ranks.clock.halo_rounds - rounds


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # layers of width 5 aggregate before their product, the first one features: forward 3, backward 2
        ("gin", (3, 3, 5)),
        # one tensor, four readers: it travels once, and its gradient returns once
        ("readers", (1, 1, 2)),
        # rows fetched for another reader serve the sums too
        ("readers-sum-last", (1, 0, 2)),
    ],
)
def test_a_tensor_still_travels_once(ranks: Any, name: str, expected: tuple[int, int, int]) -> None:
    runs = [ranks.run(3, _exchanges, name, overlap) for overlap in ("on", "backward", "off")]
    for mine, in_backward, usual in zip(*runs, strict=True):
        assert mine == in_backward == expected
        assert usual == (expected[0], 0, expected[2])


@contextmanager
def _close_together(plan: HaloPlan) -> Iterator[HaloPlan]:
    """``plan`` as between GPUs that read each other's memory: some of the rows of a sum begin early."""
    with mock.patch.multiple(early_rows, LEAST_BYTES=0, EDGES_PER_ROW=1):
        yield replace(plan, ranks=replace(plan.ranks, reads_peers=True))


def _both_ways(ranks: Ranks, dtype: torch.dtype, passes: Passes, some: bool = False) -> list[tuple[Tensor, Tensor]]:
    """Sums, halo rows, gradients and gradients of gradients: beside the exchange, and over all edges at once."""
    index = shard_of(ranks, make_data()).index
    if not some:
        return _pairs(ranks, index.structure, index.plan, dtype, passes)
    with _close_together(index.plan) as plan:
        num_early = rows_begun_early(index.structure, torch.zeros(plan.num_inner, 1), plan)
        assert 0 < num_early < plan.num_inner or plan.num_halo == 0  # a part without edges
        return _pairs(ranks, index.structure, plan, dtype, passes)


def _pairs(
    ranks: Ranks, structure: Structure, plan: HaloPlan, dtype: torch.dtype, passes: Passes
) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(ranks.rank)
    src = fetch_halo(torch.rand(plan.num_inner, generator=generator) + 0.5, plan)
    dst = torch.rand(plan.num_inner, generator=generator) + 0.5
    x = torch.randn(plan.num_inner, 2, 3, generator=generator).to(dtype).requires_grad_()
    summed = functools.partial(overlapped_sum, passes=passes)
    out, halo = summed(structure, x, plan, src, dst)
    local = fetch_halo(x, plan)
    usual = spmm_sum(structure, local, src_scale=src, dst_scale=dst)
    pairs = [(out, usual), (halo, local[plan.num_inner :])]
    base = torch.randn(out.shape, generator=generator).to(dtype).requires_grad_()
    added, _ = summed(structure, x, plan, src, dst, base)
    expected = spmm_sum(structure, local.double(), src_scale=src.double(), dst_scale=dst.double()) + base.double()
    pairs.append((added, expected.to(dtype)))
    pairs.append((repeated_sum(structure, x, halo, plan, src, dst, base, passes=passes), added))
    if dtype == torch.float64:
        weights, halo_weights = torch.randn_like(out), torch.randn_like(halo)
        mine = torch.autograd.grad((out * weights).tanh().sum() + (halo * halo_weights).sum(), x, create_graph=True)[0]
        theirs = torch.autograd.grad(
            (usual * weights).tanh().sum() + (local[plan.num_inner :] * halo_weights).sum(), x, create_graph=True
        )[0]
        pairs.append((mine, theirs))
        pairs.append((torch.autograd.grad(mine.sin().sum(), x)[0], torch.autograd.grad(theirs.sin().sum(), x)[0]))
        out, halo = summed(structure, x, plan, src, dst)
        once = torch.autograd.grad((out * weights).tanh().sum() + (halo * halo_weights).sum(), x)[0]
        pairs.append((once, theirs))
        out, halo = summed(structure, x, plan, src, dst)
        added, _ = summed(structure, x, plan, src, dst, base)
        pairs += list(zip(torch.autograd.grad((added * weights).sum(), [x, base]), [None, weights], strict=True))[1:]
        of_halo = torch.autograd.grad(halo.sin().sum(), x)[0]
        pairs.append((of_halo, torch.autograd.grad(fetch_halo(x, plan)[plan.num_inner :].sin().sum(), x)[0]))
    return [(a.detach(), b.detach()) for a, b in pairs]


@pytest.mark.parametrize(("passes", "some"), [("both", False), ("both", True), ("backward", False)])
def test_values_and_gradients_of_all_outputs(ranks: Any, passes: Passes, some: bool) -> None:
    for pairs in ranks.run(3, _both_ways, torch.float64, passes, some):
        assert len(pairs) == 9
        for mine, usual in pairs:
            # fewer than 100 terms below 20, in another order; gradients pass through two such sums
            torch.testing.assert_close(mine, usual, rtol=0, atol=2 * 100 * 20 * 100 * torch.finfo(torch.float64).eps)


@pytest.mark.parametrize(("passes", "some"), [("both", False), ("both", True), ("backward", False)])
def test_16_bit_sums_are_rounded_once(ranks: Any, passes: Passes, some: bool) -> None:
    for pairs in ranks.run(3, _both_ways, torch.bfloat16, passes, some):
        (out, usual), (halo, expected), added, again = pairs
        assert torch.equal(halo, expected) and torch.equal(*again)
        # sums in float32 in another order round to the same number or, rarely, to its neighbour
        unit = torch.finfo(torch.bfloat16).eps
        assert ((out.double() - usual.double()).abs() <= unit * usual.double().abs() + 1e-5).all()
        assert (out == usual).double().mean() > 0.98
        assert (added[0] == added[1]).double().mean() > 0.98  # rounded twice, a quarter would differ


def _own_loop(ranks: Ranks, choice: str) -> str:
    graph = shard_of(ranks, make_data())
    return nugnn.intercept(nn.Identity(), graph, overlap=choice).find(HaloHandler).passes


def test_choices(ranks: Any) -> None:
    assert ranks.run(2, _own_loop, "on") == ["both", "both"]
    assert ranks.run(2, _own_loop, "backward") == ["backward", "backward"]
    assert ranks.run(2, _own_loop, "off") == ["none", "none"]
    assert ranks.run(2, _own_loop, "auto") == ["none", "none"]  # gloo: the transfer needs the cores that sum
    assert overlapping_passes("on", Ranks()) == overlapping_passes("backward", Ranks()) == "none"
    over_pcie, over_nvlink = (Ranks(0, 2, carries_cuda=True, reads_peers=reads) for reads in (False, True))
    assert [overlapping_passes("auto", ranks_) for ranks_ in (over_pcie, over_nvlink)] == ["both", "both"]
    assert overlapping_passes("on", over_nvlink) == "both" and overlapping_passes("off", over_pcie) == "none"
    with pytest.raises(ValueError, match="auto, on, backward or off"):
        overlapping_passes("yes", Ranks())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="auto, on, backward or off"):
        nugnn.fit(nn.Identity(), make_graph(), overlap="always")


def _how_many_begin_early(ranks: Ranks) -> list[int]:
    """Over a slow link; where GPUs are near; the same if that sums much faster; the same with few bytes to travel."""
    index = shard_of(ranks, make_data()).index
    structure, x = index.structure, torch.zeros(index.plan.num_inner, 3)
    wanted = max(index.plan.num_halo, len(index.plan.send_rows))
    if wanted == 0:
        return []
    early = [rows_begun_early(structure, x, index.plan)]
    with _close_together(index.plan) as plan:
        early.append(rows_begun_early(structure, x, plan))
        assert int(structure.indptr[early[-1] - 1]) < wanted <= int(structure.indptr[early[-1]])
        with mock.patch.object(early_rows, "EDGES_PER_ROW", 1000):
            early.append(rows_begun_early(structure, x, plan))
        with mock.patch.object(early_rows, "LEAST_BYTES", 12 * wanted + 1):
            early.append(rows_begun_early(structure, x, plan))
    return [*early, plan.num_inner]


def test_how_many_rows_begin_early(ranks: Any) -> None:
    found = [early for early in ranks.run(3, _how_many_begin_early) if early]
    assert len(found) == 2
    for far, near, much_faster, few_bytes, of_all in found:
        assert far == much_faster == of_all and few_bytes == 0 < near < of_all


def _fetched_early(ranks: Ranks) -> list[bool]:
    """Whether sums of rows on their way are those of rows fetched later; others are not taken for them."""
    index = shard_of(ranks, make_data()).index
    x = torch.randn(index.plan.num_inner, 3, generator=torch.Generator().manual_seed(ranks.rank))
    same = []
    for passes in ("both", "backward"):
        fetch = Fetch(x, index.plan, "early")
        early = overlapped_sum(index.structure, x, index.plan, passes=passes, fetch=fetch)
        late = overlapped_sum(index.structure, x, index.plan, passes=passes)
        same += [torch.equal(*pair) for pair in zip(early, late, strict=True)]
        same.append(fetch.is_of(x) and not fetch.is_of(x.clone()))
    return same


def test_rows_may_be_on_their_way_already(ranks: Any) -> None:
    assert all(all(same) for same in ranks.run(3, _fetched_early))


def _who_needs_what(ranks: Ranks) -> tuple[int, bool]:
    """Exchanges of a backward in which only what is added to has a gradient."""
    index = shard_of(ranks, make_data()).index
    x, base = torch.ones(index.plan.num_inner, 3), torch.ones(index.plan.num_inner, 3, requires_grad=True)
    out, _ = overlapped_sum(index.structure, x, index.plan, add_to=base, passes="backward")
    before = ranks.clock.halo_rounds
    (grad,) = torch.autograd.grad(out.sum(), base)
    return ranks.clock.halo_rounds - before, torch.equal(grad, base)


def test_rows_without_gradient_do_not_travel_back(ranks: Any) -> None:
    assert ranks.run(3, _who_needs_what) == [(0, True)] * 3


@pytest.mark.parametrize(
    ("name", "overlap"), [("gin", "on"), ("sage", "backward"), ("two-readers", "on"), ("two-readers", "backward")]
)
def test_layers_that_run_again_find_what_they_found_first(ranks: Any, name: str, overlap: str) -> None:
    data = make_graph()
    parts = make_parts(data, 3, "metis_unequal")
    torch.manual_seed(0)
    two_readers = _Twice(Readers(), Readers(num_features=NUM_CLASSES)).double()
    model = two_readers if name == "two-readers" else _model(name)
    runs = [
        ranks.run(3, run_steps, data, parts, model, _adam, overlap=overlap, activations=activations)
        for activations in ("keep", "recompute")
    ]
    for kept, repeated in zip(*runs, strict=True):
        assert kept.losses == repeated.losses
        assert all(torch.equal(value, repeated.gradients[key]) for key, value in kept.gradients.items())
        assert all(torch.equal(value, repeated.parameters[key]) for key, value in kept.parameters.items())


class _Twice(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        return self.second(graph, self.first(graph, x))
