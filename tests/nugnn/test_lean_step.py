"""What a step leaves out changes nothing: the kept first aggregation, means and SAGE layers in fewer passes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from dgl import nn as dgl_nn
from torch import nn

import nugnn
from exactness import NUM_CLASSES, NUM_FEATURES, make_graph
from nugnn import fused_convolutions, recognition
from nugnn.comm import halo_exchange
from nugnn.comm.gradients import sum_gradients
from nugnn.comm.groups import Ranks
from nugnn.graph_index import ShardIndex
from nugnn.kernels import interceptor, products
from nugnn.kernels.padded import is_padded
from nugnn.kernels.reuse import ReuseHandler
from nugnn.kernels.rows import rows_of
from nugnn.model_on_shard import ModelOnShard
from nugnn.models import GNN
from nugnn.partition.assign import partition_nodes
from nugnn.partition.shard import build_shard
from nugnn.shard_graph import ShardGraph
from trainers import fit_rank, graph_trainer


def _train(**options: Any) -> nugnn.FitResult:
    torch.manual_seed(0)
    model = GNN("sage", NUM_FEATURES, NUM_CLASSES, hidden=8).double()
    return nugnn.fit(model, make_graph(), epochs=5, check=False, device="cpu", **options)


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_kept_aggregation_has_the_bits_of_one_made_anew(workers: int) -> None:
    kept, anew = _train(workers=workers), _train(workers=workers, recompute_inputs=True)
    assert torch.equal(kept.logits, anew.logits)
    assert [epoch.loss for epoch in kept.history] == [epoch.loss for epoch in anew.history]


def test_the_kept_aggregation_has_the_bits_of_one_made_anew_on_two_ranks(ranks: Any) -> None:
    torch.manual_seed(0)
    model = GNN("sage", NUM_FEATURES, NUM_CLASSES, hidden=8).double()
    kept, anew = (
        ranks.run(2, fit_rank, model, make_graph(), [1.0, 1.0], epochs=5, recompute_inputs=again)[0]
        for again in (False, True)
    )
    assert torch.equal(kept["logits"], anew["logits"])
    assert [epoch["loss"] for epoch in kept["epochs"]] == [epoch["loss"] for epoch in anew["epochs"]]


def test_only_an_aggregation_of_the_constant_alone_is_kept() -> None:
    graph = nugnn.shard(make_graph())
    x = graph.ndata["feat"]
    model = dgl_nn.SAGEConv(NUM_FEATURES, NUM_FEATURES, "mean").double()
    interceptor = nugnn.intercept(model, graph, constant=x)
    handler = interceptor.find(ReuseHandler)
    outs = []
    for step in range(3):
        with interceptor.step(step):
            outs.append(model(graph, x).detach())
    assert handler.num_reused == 2 and torch.equal(outs[0], outs[2])
    with interceptor.step(3):
        other = model(graph, x + 1).detach()
    assert handler.num_reused == 2 and not torch.equal(other, outs[0])
    with interceptor.step(4):
        x.add_(1)  # changed in place: what was kept is no longer true
        assert torch.allclose(model(graph, x), other)
    assert handler.num_reused == 2


def test_a_constant_with_a_gradient_is_refused() -> None:
    with pytest.raises(ValueError, match="requires a gradient"):
        ReuseHandler(torch.zeros(2, 2, requires_grad=True))


def _fused_and_plain(ranks: Ranks, layer: nn.Module, width: int, pads: bool) -> list[list[torch.Tensor]]:
    """Output and gradients of this rank's rows, by DGL's forward and by ours, in padded rows or not.

    The last of several parts has no edge: its rows are sources alone.
    """
    data = make_graph()
    parts = torch.arange(data.num_nodes) % ranks.world_size
    if ranks.world_size > 1:
        into_last = parts[data.dst] == ranks.world_size - 1
        data = replace(data, src=data.src[~into_last], dst=data.dst[~into_last], edge_data={})
    given = partition_nodes(data.num_nodes, data.src, data.dst, [1.0] * ranks.world_size, method="given", parts=parts)
    graph = ShardGraph(build_shard(data, given, ranks.rank), ranks)
    x = torch.randn(data.num_nodes, width, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    results = []
    plain_pays, products.pays = products.pays, lambda dtype: pads
    halo_exchange.PADDED_DEVICES = {"cpu"} if pads else {"cuda"}
    for devices in (set(), {"cpu"}):
        recognition.FUSED_DEVICES = devices
        leaf = nugnn.as_node_rows(x[graph.global_node_ids].requires_grad_(), graph)
        layer.zero_grad()
        with nugnn.intercept(layer, graph, seed=3).step(1):
            out = layer(graph, leaf)
            out.square().sum().backward()
        sum_gradients(layer.parameters(), ranks)
        grads = [p.grad.clone() for p in layer.parameters() if p.grad is not None]
        results.append([out.detach(), leaf.grad, *grads])
    recognition.FUSED_DEVICES, products.pays = {"cuda"}, plain_pays
    halo_exchange.PADDED_DEVICES = {"cuda"}
    return results


_LAYERS = {
    "sage 5 to 7": (5, lambda: dgl_nn.SAGEConv(5, 7, "mean", feat_drop=0.4, activation=torch.relu)),
    "sage 7 to 5": (7, lambda: dgl_nn.SAGEConv(7, 5, "mean")),
    "sage 9 to 3, one product": (9, lambda: dgl_nn.SAGEConv(9, 3, "mean", bias=False)),
    "sage 6 to 6": (6, lambda: dgl_nn.SAGEConv(6, 6, "mean", feat_drop=0.4, activation=torch.relu_)),
    **{
        f"gcn {norm} {a} to {b}": (a, lambda a=a, b=b, norm=norm: _gcn(a, b, norm))
        for norm in ("both", "left", "right", "none")
        for a, b in ((5, 7), (7, 5))
    },
}


def _gcn(a: int, b: int, norm: str) -> nn.Module:
    return dgl_nn.GraphConv(a, b, norm=norm, activation=torch.tanh, allow_zero_in_degree=True)


@pytest.mark.parametrize("pads", [False, True], ids=["plain rows", "padded rows"])
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", list(_LAYERS))
def test_a_layer_in_fewer_passes_is_the_same_layer(ranks: Any, name: str, size: int, pads: bool) -> None:
    torch.manual_seed(0)
    width, make = _LAYERS[name]
    layer = make().double()
    for p in layer.parameters():
        nn.init.normal_(p)  # no bias stays 0
    # sums of at most 61 terms in another order, products of two factors rounded once less: 1e-13 relative
    for plain, fused in ranks.run(size, _fused_and_plain, layer, width, pads):
        for a, b in zip(plain, fused, strict=True):
            assert a.numel() == 0 or float((a - b).abs().max()) <= 1e-12 * max(float(a.abs().max()), 1e-3)


def test_gcn_leaves_its_factors_to_the_aggregation(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    plain = ShardIndex.scaled_sum
    monkeypatch.setattr(
        ShardIndex, "scaled_sum", lambda self, *args, **factors: seen.append(1) or plain(self, *args, **factors)
    )
    monkeypatch.setattr(recognition, "FUSED_DEVICES", {"cpu"})
    graph = nugnn.shard(make_graph())
    _gcn(NUM_FEATURES, 4, "both").double()(graph, graph.ndata["feat"])
    assert len(seen) == 1


def test_ranks_of_two_kinds_send_the_same_rows(ranks: Any) -> None:
    """A rank on the CPU beside one on a GPU: neither takes a way that sends other rows."""
    assert ranks.run(2, _takes_the_short_way, True) == [True, True]
    assert ranks.run(2, _takes_the_short_way, False) == [False, False]


def _takes_the_short_way(ranks: Ranks, is_uniform: bool) -> bool:
    graph = nugnn.shard(make_graph(), replace(ranks, is_uniform=is_uniform))
    recognition.FUSED_DEVICES = {"cpu"}
    try:
        return fused_convolutions._is_known_place(graph, graph.ndata["feat"])
    finally:
        recognition.FUSED_DEVICES = {"cuda"}


def test_layers_that_are_not_recognised_run_dgl_s_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recognition, "FUSED_DEVICES", {"cpu"})
    calls = []
    plain = torch.addmm
    monkeypatch.setattr(torch, "addmm", lambda *args: calls.append(1) or plain(*args))
    graph = nugnn.shard(make_graph())
    x = graph.ndata["feat"]

    class Own(dgl_nn.SAGEConv):
        pass

    weights = torch.ones(graph.num_edges(), dtype=torch.float64)
    hooked = dgl_nn.SAGEConv(NUM_FEATURES, 8, "mean").double()
    hooked.fc_neigh.register_forward_hook(lambda *_: None)
    hooked_self = dgl_nn.SAGEConv(NUM_FEATURES, 8, "mean").double()
    hooked_self.fc_self.register_forward_pre_hook(lambda *_: None)
    dgl_nn.SAGEConv(NUM_FEATURES, 8, "gcn").double()(graph, x)
    Own(NUM_FEATURES, 8, "mean").double()(graph, x)
    hooked(graph, x)
    hooked_self(graph, x)
    dgl_nn.SAGEConv(NUM_FEATURES, 8, "mean").double()(graph, x, edge_weight=weights)
    assert not calls
    dgl_nn.SAGEConv(NUM_FEATURES, 8, "mean").double()(graph, x)
    assert len(calls) == 1


def test_the_installed_dgl_is_one_whose_layers_are_recognised() -> None:
    for name, known in fused_convolutions.KNOWN_FORWARDS.items():
        assert recognition.fingerprint(getattr(dgl_nn, name).forward.__wrapped__) == known


def test_equal_widths_multiply_first_but_for_features_whose_aggregate_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recognition, "FUSED_DEVICES", {"cpu"})
    graph = nugnn.shard(make_graph())
    x = graph.ndata["feat"]
    model = dgl_nn.SAGEConv(NUM_FEATURES, NUM_FEATURES, "mean").double()
    aggregated = []
    plain = ShardIndex.scaled_sum
    monkeypatch.setattr(ShardIndex, "scaled_sum", lambda self, u, **how: aggregated.append(u) or plain(self, u, **how))
    for constant, is_kept in ((x, True), (None, False)):
        interceptor = nugnn.intercept(model, graph, constant=constant)
        with interceptor.step(0), torch.no_grad():
            model(graph, x)
        assert (aggregated.pop() is x) == is_kept
        names = {name for name, kind in interceptor._counters.calls if kind == "linear"}
        assert names == {"fc_self", "fc_neigh"}


def test_features_are_kept_once_in_the_type_they_are_stored_in() -> None:
    graph = nugnn.shard(make_graph())
    graph.ndata["feat"] = nugnn.as_node_rows(graph.ndata["feat"].float(), graph)
    net = ModelOnShard(GNN("gcn", NUM_FEATURES, NUM_CLASSES, hidden=4), graph, precision="bf16")
    assert graph.ndata["feat"] is net.features_ND and net.features_ND.dtype is torch.bfloat16
    assert net.features_ND.is_contiguous()  # DGL's CPU kernels read them so


@pytest.mark.parametrize(("precision", "pads"), [("fp32", False), ("tf32", True), ("bf16", True), ("fp16", True)])
def test_where_layers_are_fused_features_are_kept_once_in_padded_rows(
    monkeypatch: pytest.MonkeyPatch, precision: str, pads: bool
) -> None:
    monkeypatch.setattr(recognition, "FUSED_DEVICES", {"cpu"})
    graph = nugnn.shard(make_graph())
    given = nugnn.as_node_rows(graph.ndata["feat"][:, :5].float(), graph)
    graph.ndata["feat"] = given
    nets = [ModelOnShard(GNN("gcn", 5, NUM_CLASSES, hidden=4), graph, precision=precision) for _ in range(2)]
    kept = graph.ndata["feat"]
    assert is_padded(kept) == pads and rows_of(kept) is graph.index.node_rows
    assert all(net.features_ND is kept for net in nets) and torch.equal(kept, given.to(kept.dtype))
    whole = graph.ndata["feat"] = nugnn.as_node_rows(torch.ones(graph.num_nodes(), 16), graph)
    net = ModelOnShard(GNN("gcn", 16, NUM_CLASSES, hidden=4), graph, precision=precision)
    assert (net.features_ND is whole) == (precision in ("fp32", "tf32")) and not is_padded(net.features_ND)


def test_operators_are_looked_at_from_outside_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mode that sees what operators do inside takes more of the host's time in a step than the model."""
    monkeypatch.setattr(recognition, "FUSED_DEVICES", {"cpu"})
    seen: list[str] = []
    plain = interceptor.Interceptor.__torch_function__

    def counted(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen.append(getattr(func, "__qualname__", str(func)))
        return plain(self, func, types, args, kwargs)

    monkeypatch.setattr(interceptor.Interceptor, "__torch_function__", counted)
    torch.manual_seed(0)
    graph = nugnn.shard(make_graph())
    model = GNN("sage", NUM_FEATURES, NUM_CLASSES, layers=3, hidden=8, aggregator="mean", dropout=0.5).double()
    rows = torch.arange(graph.num_nodes())
    trainer = graph_trainer(model, graph, {"train": rows, "val": rows[:0], "test": rows[:0]})
    trainer.train_epoch()
    seen.clear()
    trainer.train_epoch()
    # twice as many when products, sums and losses were seen inside; most are questions about operands, answered at once
    assert len(seen) <= 330, Counter(seen).most_common(8)
