"""Each DGL module that takes a graph, in train mode: three unequal parts, one part and plain DGL say the same."""

from __future__ import annotations

import inspect
from typing import Any

import dgl.nn.pytorch as dglnn
import pytest
import torch
from dgl.nn.pytorch import conv, glob
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from conformance import (
    BOUND,
    DROP,
    NUM_FEATURES,
    Case,
    Job,
    Run,
    compare,
    cut,
    difference,
    merge,
    run_shard,
    run_shards,
    shard_inputs,
)
from conformance_cases import REASONS, all_cases
from nugnn.comm.gradients import sum_gradients
from nugnn.comm.groups import Ranks
from nugnn.session import intercept

CASES = all_cases()
NAMES = sorted({case.name for case in CASES})


@pytest.mark.filterwarnings("ignore::UserWarning")  # DGL's own, about defaults
@pytest.mark.parametrize("name", NAMES)
def test_parts_equal_one_part_and_dgl(ranks: Any, name: str) -> None:
    cases = [case for case in CASES if case.name == name]
    for outcome in compare(cases, lambda jobs: ranks.run(3, run_shards, jobs)):
        job = outcome.job
        where = f"{name} ({job.case.options}) on {job.graph_name} with dropout {job.drop}"
        assert not outcome.error, f"{where}: {outcome.error}"
        assert outcome.to_one[0] <= job.case.bound, f"{where}: {outcome.to_one}"
        if outcome.to_dgl is not None:
            assert outcome.to_dgl[0] <= job.case.bound, f"{where}: {outcome.to_dgl}"
        if outcome.effect is not None:
            assert outcome.effect > 1e-2, f"{where}: dropout changed nothing"


def _public_classes() -> set[str]:
    classes = {name: value for name, value in vars(dglnn).items() if inspect.isclass(value) and name[0] != "_"}
    return {name for name, cls in classes.items() if cls.__module__.startswith("dgl.nn")}


def test_every_public_module_has_cases_or_a_reason() -> None:
    assert len(conv.__all__) == 37
    public = {*conv.__all__, *glob.__all__, *_public_classes(), "edge_softmax"}
    assert public == {*NAMES} | REASONS.keys()
    assert not REASONS.keys() & set(NAMES)


def test_no_convolution_is_left_out_that_takes_a_graph() -> None:
    for name, reason in REASONS.items():
        forward = getattr(getattr(dglnn, name), "forward", lambda: None)
        takes = inspect.signature(forward).parameters.keys() & {"graph", "g"}
        assert not takes or "CUDA" in reason or "explains" in reason, name
        if name in conv.__all__:
            assert name.startswith(("Dense", "CuGraph"))


def test_the_last_part_of_sources_has_no_edges(ranks: Any) -> None:
    edges = ranks.run(3, lambda r: [cut(r, name).num_edges() for name in ("loops", "sources")])
    assert all(count > 0 for count in edges[0] + edges[1])
    assert edges[2][0] > 0 and edges[2][1] == 0


class _CentresLocally(nn.Module):
    def forward(self, graph: Any, x: Tensor) -> Tensor:
        return x - x.mean(0)


def test_the_comparison_sees_a_mean_over_local_rows(ranks: Any) -> None:
    case = Case("centring", "", lambda p: _CentresLocally())
    outcomes = list(compare([case], lambda jobs: ranks.run(3, run_shards, jobs)))
    assert all(outcome.to_one[0] > 1e-2 for outcome in outcomes)


# -- activation checkpointing --------------------------------------------------------------------------------------


class _Layer(nn.Module):
    num_calls = 0
    """Of all layers in this process."""

    def __init__(self, layer: nn.Module, width: int, drop: float) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = layer, nn.LayerNorm(width), nn.Dropout(drop)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        _Layer.num_calls += 1
        h = self.drop(F.relu(self.norm(self.conv(graph, x).flatten(1))))
        return F.dropout(h, 0.2, training=self.training)


class _Network(nn.Module):
    """Two layers, each of which may run a second time in backward."""

    def __init__(self, layers: list[nn.Module], *, again: bool, reentrant: bool = False) -> None:
        super().__init__()
        self.layers, self.again, self.reentrant = nn.ModuleList(layers), again, reentrant

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, graph, x, use_reentrant=self.reentrant) if self.again else layer(graph, x)
        return x


def _layers(kind: str, drop: float) -> list[nn.Module]:
    if kind == "gat":
        convs = [dglnn.GATConv(NUM_FEATURES, 3, 2, drop, drop), dglnn.GATConv(6, 2, 2, drop, drop)]
        return [_Layer(convs[0], 6, drop), _Layer(convs[1], 4, drop)]
    if kind == "gcn":
        return [_Layer(dglnn.GraphConv(NUM_FEATURES, 5), 5, drop), _Layer(dglnn.GraphConv(5, 4), 4, drop)]
    convs = [dglnn.SAGEConv(NUM_FEATURES, 5, "lstm", drop), dglnn.SAGEConv(5, 4, "pool", drop)]
    return [_Layer(convs[0], 5, drop), _Layer(convs[1], 4, drop)]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", ["gcn", "gat", "sage"])
def test_layers_that_run_again_in_backward_drop_the_same(ranks: Any, kind: str, reentrant: bool) -> None:
    once = Case(kind, "", lambda p: _Network(_layers(kind, p), again=False))
    twice = Case(kind, "", lambda p: _Network(_layers(kind, p), again=True, reentrant=reentrant))
    for graph_name in ("loops", "sources"):
        expected = merge([run_shard(Ranks(), Job.of(once, graph_name, DROP))])
        job = Job.of(twice, graph_name, DROP)
        _Layer.num_calls = 0
        alone = merge([run_shard(Ranks(), job)])
        assert _Layer.num_calls == 4  # two layers, forward and again in backward
        split = merge(ranks.run(3, run_shard, job))
        for run in (alone, split):
            worst, where = difference(expected, run)
            assert worst <= BOUND, f"{graph_name}: {where}"


def test_a_checkpointed_function_that_drops_is_refused() -> None:
    class Model(nn.Module):
        def forward(self, graph: Any, x: Tensor) -> Tensor:
            return checkpoint(lambda h: F.dropout(h.tanh(), 0.5), x, use_reentrant=False)  # type: ignore[no-any-return]

    with pytest.raises(RuntimeError, match="a module whose forward does this"):
        run_shard(Ranks(), Job.of(Case("function", "", lambda p: Model()), "loops", DROP))


# -- autocast ------------------------------------------------------------------------------------------------------


def _run_autocast(ranks: Ranks, module: nn.Module, seed: int) -> Run:
    graph = cut(ranks, "loops")
    x = shard_inputs(graph).x
    h = x.detach().float()
    run = Run()
    with intercept(module, graph, seed=seed).step(0), torch.autocast("cpu", torch.bfloat16):
        graph.ndata["h"] = h
        out = module(graph, graph.ndata["h"])
        run.put("output", out.float(), graph.global_node_ids)
        weights = torch.cos(graph.global_node_ids[:, None] + torch.arange(out[0].numel()))
        (out.float().flatten(1) * weights).sum().backward()
    sum_gradients(module.parameters(), ranks)
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None and parameter.grad.dtype is torch.float32
        run.put(f"gradient of {name}", parameter.grad)
    return run


@pytest.mark.parametrize(
    "build",
    [
        lambda: dglnn.GraphConv(NUM_FEATURES, 5, activation=F.relu),
        lambda: dglnn.GATConv(NUM_FEATURES, 3, 2, 0.3, 0.3),
        lambda: dglnn.SAGEConv(NUM_FEATURES, 5, "mean", 0.3),
        lambda: dglnn.SAGEConv(NUM_FEATURES, 5, "pool", 0.3),
    ],
    ids=["GraphConv", "GATConv", "SAGEConv mean", "SAGEConv pool"],
)
def test_autocast_to_bfloat16(ranks: Any, build: Any) -> None:
    torch.manual_seed(0)
    module = build()
    exact = _run_autocast(Ranks(), module, 1)
    module.zero_grad()
    # At most four operators with an operand of other parts lie on a path from output to parameter; each rounds partial
    # sums of up to three ranks to bfloat16, where one part rounds once: 4 * 3 * eps / 2, relative to the largest entry.
    bound = 6 * torch.finfo(torch.bfloat16).eps
    worst, where = difference(merge([exact]), merge(ranks.run(3, _run_autocast, module, 1)))
    assert worst <= bound, where
