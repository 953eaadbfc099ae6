"""What a step leaves out changes nothing: the kept first aggregation, means and SAGE layers in fewer passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dgl import nn as dgl_nn

import nugnn
from exactness import NUM_CLASSES, NUM_FEATURES, make_graph
from nugnn import fused_attention, fused_sage
from nugnn.kernels.reuse import ReuseHandler
from nugnn.models import GNN


def _train(**options: Any) -> nugnn.FitResult:
    torch.manual_seed(0)
    model = GNN("sage", NUM_FEATURES, NUM_CLASSES, hidden=8).double()
    return nugnn.fit(model, make_graph(), epochs=5, check=False, device="cpu", **options)


@pytest.mark.parametrize("workers", [1, 2])
def test_the_kept_aggregation_has_the_bits_of_one_made_anew(workers: int) -> None:
    kept, anew = _train(workers=workers), _train(workers=workers, recompute_inputs=True)
    assert torch.equal(kept.logits, anew.logits)
    assert [epoch.loss for epoch in kept.history] == [epoch.loss for epoch in anew.history]


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


@pytest.mark.parametrize("widths", [(5, 7), (7, 5)])
def test_a_sage_layer_in_fewer_passes_is_the_same_layer(
    monkeypatch: pytest.MonkeyPatch, widths: tuple[int, int]
) -> None:
    graph = nugnn.shard(make_graph())
    torch.manual_seed(0)
    layer = dgl_nn.SAGEConv(*widths, "mean", feat_drop=0.4, activation=torch.relu).double()
    x = nugnn.as_node_rows(torch.randn(graph.num_nodes(), widths[0], dtype=torch.float64), graph)
    results = []
    for devices in (set(), {"cpu"}):
        monkeypatch.setattr(fused_sage, "FUSED_DEVICES", devices)
        leaf = nugnn.as_node_rows(x.detach().clone().requires_grad_(), graph)
        layer.zero_grad()
        with nugnn.intercept(layer, graph, seed=3).step(1):
            out = layer(graph, leaf)
            out.square().sum().backward()
        results.append([out.detach(), leaf.grad, *(p.grad.clone() for p in layer.parameters())])
    # one product more or less per entry of at most 7 + 7 terms and a hub's mean
    for plain, fused in zip(*results, strict=True):
        assert float((plain - fused).abs().max()) <= 1e-12 * float(plain.abs().max())


def test_layers_that_are_not_recognised_run_dgl_s_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_sage, "FUSED_DEVICES", {"cpu"})
    calls = []
    monkeypatch.setattr(fused_sage, "_mean_forward", lambda *args: calls.append(args) or args[2])
    graph = nugnn.shard(make_graph())
    x = graph.ndata["feat"]

    class Own(dgl_nn.SAGEConv):
        pass

    weights = torch.ones(graph.num_edges(), dtype=torch.float64)
    hooked = dgl_nn.SAGEConv(NUM_FEATURES, 8, "mean").double()
    hooked.fc_neigh.register_forward_hook(lambda *_: None)
    dgl_nn.SAGEConv(NUM_FEATURES, 8, "gcn").double()(graph, x)
    Own(NUM_FEATURES, 8, "mean").double()(graph, x)
    hooked(graph, x)
    dgl_nn.SAGEConv(NUM_FEATURES, 8, "mean").double()(graph, x, edge_weight=weights)
    assert not calls
    dgl_nn.SAGEConv(NUM_FEATURES, 8, "mean").double()(graph, x)
    assert len(calls) == 1


def test_the_installed_dgl_is_one_whose_layers_are_recognised() -> None:
    assert fused_attention.fingerprint(dgl_nn.SAGEConv.forward.__wrapped__) == fused_sage.KNOWN_FORWARD
